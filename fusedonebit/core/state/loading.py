"""``load_state_dict``: checks everything on every rank, and only then changes anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm import CollectiveError
from ...comm.agreement import Fact
from ...errors import warn
from ..consensus import failure
from ..contents import Contents
from ..frame import Frame
from ..header import KEY, Fields, is_compressed
from ..options import OF_GROUPS, numbers
from ..sharding import local
from ..state_tensor import StateTensor
from . import entries, integrity
from .owner import Owner
from .saving import State, by_parameter, call_hooks, header_of, numerics

ADAMW = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")

Groups = Sequence[Mapping[str, Any]]


class Checkpoint(NamedTuple):
    """A checkpoint that was examined.

    Attributes:
        header: What it says of itself; of AdamW's made up.
        states: What it has of each parameter.
        facts: What must be equal on all ranks.
    """

    header: State
    states: Sequence[State]
    facts: list[Fact]


def load(optimizer: Owner, state_dict: Mapping[str, Any]) -> None:
    """Load a checkpoint; every rank calls it, and hooks run before and after.

    A hook that raises on one rank is an error on all: none goes on as if it had loaded what that one has not.
    """
    frame, contents = optimizer.frame, optimizer.contents
    checkpoint = Checkpoint({}, [], [])
    error: Exception | None = None
    try:
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        # Hooks are about to change tensors on purpose.
        hooked = bool(vars(optimizer)["_optimizer_load_state_dict_pre_hooks"])
        verified = hooked and _verified(frame, contents.declared(), state_dict)
        state_dict = call_hooks(optimizer, "load_state_dict_pre", dict(state_dict))
        checkpoint = examine(contents, optimizer.check_group, state_dict, verified)
    except CollectiveError:
        raise
    except Exception as caught:
        error = caught
    header, _, facts = checkpoint
    frame.ranks.agree(facts, _moment(header), error, "load, on every rank, the checkpoint of the same moment")
    try:
        with frame.steps.whole("load_state_dict()"):
            optimizer.param_groups = _groups_like(frame, state_dict["param_groups"])
            frame.given_block_size = header.get("block_size") if is_compressed(header) else None
            optimizer.state.clear()
            optimizer.build()
            restore(optimizer, state_dict, checkpoint)
    except Exception as caught:
        error = caught
    if error is None:
        error = failure(lambda: call_hooks(optimizer, "load_state_dict_post"))
    elif isinstance(error, CollectiveError):
        raise error
    frame.ranks.agree([], [], error, "load_state_dict() did not end well there: load on all ranks anew")


# ---------------------------------------------------------------- checks


def _verified(frame: Frame, declared: integrity.Declared, state_dict: Mapping[str, Any]) -> bool:
    """Return whether tensors are as they were saved; raise ValueError if not.

    What only a hook makes a checkpoint of ours is looked at after it.
    """
    header = header_of(state_dict) if {"state", "param_groups"} <= state_dict.keys() else None
    if header is None or integrity.CHECKSUMS not in header:
        return False
    try:
        states = integrity.of_names(by_parameter(frame, state_dict), header["names"])
    except (KeyError, IndexError, TypeError, AttributeError):
        return False
    if _lengths(state_dict["param_groups"]) != _lengths(frame.groups):
        return False  # of another model, which a hook may fit to this one
    integrity.verify(frame, declared, states, header)
    return True


def _lengths(groups: Groups) -> list[int]:
    return [len(group["params"]) for group in groups]


def examine(
    contents: Contents, check_group: Callable[..., None], state_dict: Mapping[str, Any], verified: bool = False
) -> Checkpoint:
    """Return a checkpoint with which an algorithm can go on; raise TypeError or ValueError for another.

    ``check_group`` is the optimizer's; of what is ``verified`` no checksums are compared.
    """
    frame, declared = contents.frame, contents.declared()
    told: State | None = None
    states: Sequence[State] = ()
    try:
        told = header_of(state_dict)
        of_adamw = told is None and "betas" in frame.hyper.names
        groups = _checked_groups(frame, check_group, state_dict["param_groups"], of_adamw)
        contents.algorithm.check_groups(groups, " of the checkpoint")
        states = by_parameter(frame, state_dict)
        header = _completed(told, states)
        contents.check_header(header)
        _warn(frame, header)
        entries.check(frame, contents.kept(is_compressed(header)), states, header)
        ours = integrity.of_names(states, header["names"])
        if not verified:
            integrity.verify(frame, declared, ours, header)
        integrity.check_values(frame, declared, ours, header)
        return Checkpoint(header, states, _facts(frame, declared, ours, header))
    except KeyError as caught:
        raise ValueError(f"state_dict lacks the key {caught}; {_why_lacking(frame, told, states)}") from caught
    except (TypeError, ValueError):
        raise
    except Exception as caught:
        raise ValueError(
            f"the checkpoint is damaged: {type(caught).__name__}: {caught}; load another checkpoint"
        ) from caught


def _why_lacking(frame: Frame, header: State | None, states: Sequence[State]) -> str:
    name = frame.name
    if header is None:
        return f"load the state_dict() of {name}, or of an optimizer that it can go on from"
    if (writer := header.get("algorithm", name)) != name:
        return f"it is of {writer}, from which {name} can't go on"
    named = zip(frame.parameters.names, frame.parameters.owners, states, strict=False)
    if frozen := [name for name, p, state in named if not p.requires_grad and not state]:
        return (
            f"torch leaves out what requires no gradients, here {', '.join(frozen)}: load before it is frozen, or by "
            "fusedonebit.dcp.load()"
        )
    return (
        "torch's flatten_optimizer_state_dict=True drops what a new optimizer does not have, and so does "
        "broadcast_from_rank0=True on all ranks but the first: leave it out and give every rank the whole state"
    )


def _completed(header: State | None, states: Sequence[State]) -> State:
    """Return the header, made up for a checkpoint of AdamW."""
    if header is None:
        updates = max((int(state["step"]) for state in states if state), default=0)
        return {"phase": "warmup", "updates": updates, "skipped": 0, "names": list(ADAMW)}
    if "names" in header:
        return header
    # Before it named them, only the optimizer's own were saved.
    return {**header, "names": sorted({name for state in states for name in state})}


def _warn(frame: Frame, header: State) -> None:
    """Warn of what is not as it was, where training can go on."""
    if is_compressed(header):
        here = numerics(frame)
        for name, was in header["options"].items():
            if (now := here.get(name)) != was:
                warn(f"the checkpoint was written with {name}={was!r}; training goes on with {name}={now!r}")
    elif "masks" in header and (other := frame.masked_otherwise(header)):
        warn(
            f"the checkpoint was written with another mask for {', '.join(other)}: what is masked now loses its "
            "momentum and its variance, what was masked begins with none"
        )


def _checked_groups(frame: Frame, check_group: Callable[..., None], saved: Groups, of_adamw: bool) -> Groups:
    if (theirs := _lengths(saved)) != (own := _lengths(frame.groups)):
        raise ValueError(f"checkpoint of another model: its groups have {theirs} parameters, this optimizer's {own}")
    for number, group in enumerate(saved):
        if of_adamw and "betas" not in group:
            keys = ", ".join(key for key in group if key != "params")
            raise ValueError(
                f"state_dict must be of fusedonebit or torch.optim.AdamW, but group {number} has no betas, only {keys}"
            )
    merged = [numbers(group) for group in _merged(frame, saved)]
    for number, group in enumerate(merged):
        check_group(group, f"group {number} of the checkpoint")
        if group.get("amsgrad"):
            raise ValueError("checkpoint of AdamW with amsgrad=True can't be continued; there is no amsgrad here")
        if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
            raise ValueError("checkpoint of Adam with L2 weight decay can't be continued; decay is decoupled here")
    return merged


def _merged(frame: Frame, saved: Groups) -> list[dict[str, Any]]:
    """Return the saved groups; what they lack is as it is here, what only another optimizer has is dropped."""
    foreign = {*OF_GROUPS, KEY, "added_at"} - set(frame.hyper.names) | {"algorithm", "stacks"}  # the optimizer's own
    own = [{k: v for k, v in group.items() if k not in ("params", KEY)} for group in frame.groups]
    kept = [{key: value for key, value in group.items() if key not in foreign} for group in saved]
    return [mine | theirs for mine, theirs in zip(own, kept, strict=True)]


def _moment(header: State) -> list[Fact]:
    keys = ("phase", "updates", "steps", "started", "local", "done")
    return [(f"the checkpoint's {key}", str(header.get(key))) for key in keys]


def _facts(frame: Frame, declared: integrity.Declared, ours: Sequence[State], header: State) -> list[Fact]:
    facts = _moment(header)
    own = {name for name, spec in declared.items() if entries.has_row_of_each(frame, spec, header)}
    for state, name in zip(ours, frame.parameters.names, strict=True):
        for key, value in state.items():
            if isinstance(value, Tensor) and key not in own:
                facts.append((f"the checksum of {key} of {name}", f"{integrity.crc32(local(value)):08x}"))
    return facts


# ---------------------------------------------------------------- taking up


def _groups_like(frame: Frame, saved: Groups) -> list[dict[str, Any]]:
    """Return a copy of saved groups, but for their parameters, with what they lack: AdamW's lack some of ours."""
    groups = []
    for own, theirs in zip(frame.groups, _merged(frame, saved), strict=True):
        group = {**deepcopy({key: value for key, value in theirs.items() if key != "params"}), "params": own["params"]}
        if "param_names" in own:
            group.setdefault("param_names", own["param_names"])
        groups.append(group)
    groups[0][KEY] = ""  # of groups, torch's unflattening takes up only what is there
    return groups


def restore(optimizer: Owner, state_dict: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Fill an optimizer that is laid out as the one that was saved; it asks no other rank."""
    frame, contents = optimizer.frame, optimizer.contents
    states, saved = checkpoint.states, state_dict["param_groups"]
    with torch.no_grad():
        header = _take_counts(frame, contents.fields(), states, checkpoint.header, saved)
        contents.load(header)
        entries.fill(frame, contents.kept(is_compressed(header)), states, header)
        if not is_compressed(header) and "masks" in header and frame.masked_otherwise(header):
            _forget_masked(frame, contents.kept(False))
        contents.loaded(header)
        optimizer.publish_state()
    names = [name for group in saved for name in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    _restore_others(optimizer.state, state_dict["state"], dict(zip(names, params, strict=True)), header["names"])


def _restore_others(state: Any, saved: Mapping[Any, Any], params: Mapping[Any, Tensor], known: Collection[str]) -> None:
    """Put into ``state`` what a checkpoint has of none of the ``params``, and what of these is not ``known``."""
    for key, value in saved.items():
        if key not in params:
            state[key] = value
        elif isinstance(value, Mapping):
            p = params[key]
            others = [(name, entry) for name, entry in value.items() if name not in known]
            if others:  # to the parameter's device as torch does, but of their own dtypes
                moved = {name: x.to(p.device) if isinstance(x, Tensor) else deepcopy(x) for name, x in others}
                state[p] = {**state.get(p, {}), **moved}


def _take_counts(frame: Frame, fields: Fields, states: Sequence[State], header: State, saved: Groups) -> State:
    """Take up how often all, and each parameter, were updated; return the header with its own counts of each."""
    frame.steps.outcomes.resume(header["updates"], header["skipped"])
    frame.steps.count.resume(header.get("steps", header["updates"] + header["skipped"]))
    frame.steps.just_loaded = True
    frame.steps.updates.fill_(header["updates"])
    # Before each parameter had counts of its own, a group that was added later shared the others', less this.
    added = [saved[group].get("added_at", 0) for group in frame.parameters.group_of]
    steps = [_steps(state) - before for state, before in zip(states, added, strict=True)]
    frame.steps.of_each.copy_(torch.tensor(steps, dtype=torch.float64))
    frame.ranks.transport.traffic.bytes_total = header.get("bytes_total", 0)
    if not any(added):
        return header
    shared = header.keys() & {key for key, field in fields.items() if field.one_per == "updates"}
    return {**header, **{key: [header[key] - before for before in added] for key in shared}}


def _steps(state: State) -> float:
    """Return the updates of one parameter; AdamW has no state of one that never had a gradient."""
    return float(local(torch.as_tensor(state["step"]))) if "step" in state else 0.0


def _forget_masked(frame: Frame, kept: Sequence[StateTensor]) -> None:
    """Clear the moments of what a mask keeps still now: sums over a whole buffer must not find them."""
    live = frame.live.mask()
    for each in kept:
        if each.wanted and each.per == "element" and not each.holds_parameters:
            each.tensor.masked_fill_(~live, 0.0)
