"""``load_state_dict``: checks everything on every rank, and only then changes anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ...comm import CollectiveError
from ...comm.agreement import Fact
from ...errors import warn
from ..consensus import failure
from ..header import BASE, KEY, check_each, damaged, is_compressed
from ..options import OF_GROUPS, numbers
from ..sharding import local
from . import entries, integrity
from .owner import Owner
from .saving import FORMAT, State, by_parameter, call_hooks, header_of, masks, numerics

ADAMW = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def load(optimizer: Owner, state_dict: Mapping[str, Any]) -> None:
    """Load a checkpoint; every rank calls it, and hooks run before and after.

    A hook that raises on one rank is an error on all: none goes on as if it had loaded what that one has not.
    """
    frame = optimizer.frame
    header: State = {}
    states: Sequence[State] = []
    facts: list[Fact] = []
    error: Exception | None = None
    try:
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        verified = _verified_before_hooks(optimizer, state_dict)
        state_dict = call_hooks(optimizer, "load_state_dict_pre", dict(state_dict))
        header, states, facts = _examined(optimizer, state_dict, verified)
    except CollectiveError:
        raise
    except Exception as caught:
        error = caught
    frame.ranks.agree(facts, _moment(header), error, "load, on every rank, the checkpoint of the same moment")
    try:
        with frame.steps.whole("load_state_dict()"):
            _take_up(optimizer, state_dict, header, states)
    except Exception as caught:
        error = caught
    if error is None:
        error = failure(lambda: call_hooks(optimizer, "load_state_dict_post"))
    elif isinstance(error, CollectiveError):
        raise error
    frame.ranks.agree([], [], error, "load_state_dict() did not end well there: load on all ranks anew")


def take_state(optimizer: Owner, state_dict: Mapping[str, Any]) -> None:
    """Fill a new optimizer, laid out as the one that was saved, without asking the other ranks."""
    header, states, _ = _examined(optimizer, state_dict)
    _restore(optimizer, state_dict, header, states)


def check_header(optimizer: Owner, header: State) -> None:
    """Raise ValueError if this optimizer can't go on from a checkpoint with this header."""
    frame = optimizer.frame
    if header.get("format", FORMAT) != FORMAT:
        raise ValueError(f"checkpoint format must be {FORMAT}, got {header['format']}; use the version that wrote it")
    _check_fields(optimizer, header)
    writer = header.get("algorithm", "one of torch.optim")
    if writer != frame.name and not optimizer.algorithm.continues:
        raise ValueError(f"the checkpoint must be of {frame.name}, got {writer}")
    optimizer.algorithm.check_values(header)
    if not is_compressed(header):
        return
    own = {
        "algorithm": frame.name,
        "shards": frame.ranks.shards.count,
        "block_size": frame.options.block_size or header["block_size"],
        "strides": frame.parameters.strides(),
    }
    way_out = {
        "shards": "a checkpoint of the compression stage needs as many shards; one of the warm-up does not",
        "block_size": "pass that as Wire(block_size=...), or none",
    }
    for key, value in own.items():
        if header[key] != value:
            hint = way_out.get(key, "construct the model and the optimizer as they were")
            raise ValueError(f"the checkpoint's {key} is {header[key]}, but here it is {value}; {hint}")
    if other := _masked_otherwise(optimizer, header):
        raise ValueError(
            f"the checkpoint was written with another mask for {', '.join(other)}, which can only be changed in the "
            "warm-up: there is no variance, and no sign, of what a mask has kept still. Construct the optimizer with "
            "the same Numerics(mask=...), or begin anew from the model alone (OneBitAdam and OneBitLamb: with the "
            "checkpoint as Freeze(step=0, warm_start=...))"
        )


# ---------------------------------------------------------------- checks


def _check_fields(optimizer: Owner, header: State) -> None:
    """Raise ValueError for the first thing that a header can't say, of any optimizer of this package."""
    must, own = ["phase", "updates", "skipped"], optimizer.frame.wrote(header)  # then all must be there that it reads
    if own and (is_compressed(header) or not any(optimizer.algorithm.phases.values())):
        must += [key for key, field in optimizer.algorithm.fields().items() if field.required]
    for key in must:
        if key not in header:
            raise ValueError(f"the checkpoint's header is damaged: it lacks {key}; load another checkpoint")
    check_each(header, BASE | {key: field.rule for key, field in optimizer.algorithm.fields().items()}, "")
    if own:
        _check_own(optimizer, header)


def _check_own(optimizer: Owner, header: State) -> None:
    if header.get("trained") and "step" not in header.get("names", ["step"]):
        damaged("names", "have step", header["names"])
    tensors, groups = len(optimizer.frame.parameters), len(optimizer.param_groups)
    for key, field in optimizer.algorithm.fields().items():
        told = header.get(key)
        if not field.one_per or not isinstance(told, list):
            continue
        if field.one_per == "index" and any(index >= tensors for index in told):
            damaged(key, f"be below {tensors}", told)
        if field.one_per != "index" and len(told) != (expected := groups if field.one_per == "group" else tensors):
            damaged(key, f"have {expected} values", told)
    phases = optimizer.algorithm.phases
    compressed = tensors > 0 and phases.get(header["phase"], False)  # where nothing trains there are none
    if header["phase"] not in phases or header.get("lines", compressed) != compressed:
        got = f"{header['phase']!r} with lines={header.get('lines')}"
        damaged("phase", f"be one of {', '.join(phases)}", got)


def _verified_before_hooks(optimizer: Owner, state_dict: Mapping[str, Any]) -> bool:
    """Return whether tensors are as they were saved, where hooks are about to change them on purpose.

    What only a hook makes a checkpoint of ours is looked at after it.
    """
    if (
        not vars(optimizer)["_optimizer_load_state_dict_pre_hooks"]
        or not {"state", "param_groups"} <= state_dict.keys()
    ):
        return False
    header = header_of(state_dict)
    if header is None or integrity.CHECKSUMS not in header:
        return False
    try:
        states = integrity.of_names(by_parameter(optimizer.frame, state_dict), header["names"])
    except (KeyError, IndexError, TypeError, AttributeError):
        return False
    groups = state_dict["param_groups"], optimizer.param_groups
    saved, here = ([len(group["params"]) for group in several] for several in groups)
    if saved != here:
        return False  # of another model, which a hook may fit to this one
    integrity.verify(optimizer.algorithm, states, header)
    return True


def _examined(
    optimizer: Owner, state_dict: Mapping[str, Any], verified: bool = False
) -> tuple[State, Sequence[State], list[Fact]]:
    """Return the header, each parameter's state, and what must be equal on all ranks; raise for bad ones."""
    told: State | None = None
    states: Sequence[State] = ()
    try:
        told = header_of(state_dict)
        _check_groups(optimizer, state_dict, of_adamw=told is None and "betas" in optimizer.frame.hyper.names)
        states = by_parameter(optimizer.frame, state_dict)
        header = _check(optimizer, told, states, verified)
        return header, states, _facts(optimizer, states, header)
    except KeyError as caught:
        raise ValueError(f"state_dict lacks the key {caught}; {_why_lacking(optimizer, told, states)}") from caught
    except (TypeError, ValueError):
        raise
    except Exception as caught:
        raise ValueError(
            f"the checkpoint is damaged: {type(caught).__name__}: {caught}; load another checkpoint"
        ) from caught


def _why_lacking(optimizer: Owner, header: State | None, states: Sequence[State]) -> str:
    frame = optimizer.frame
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


def _check(optimizer: Owner, header: State | None, states: Sequence[State], verified: bool) -> State:
    """Return the header, made up for a checkpoint of AdamW. Sum tensors up unless that was done."""
    frame = optimizer.frame
    if header is None:
        updates = max((int(state["step"]) for state in states if state), default=0)
        header = {"phase": "warmup", "updates": updates, "skipped": 0, "names": list(ADAMW)}
    if "names" not in header:  # before it named them, only the optimizer's own were saved
        header = {**header, "names": sorted({name for state in states for name in state})}
    check_header(optimizer, header)
    compressed = is_compressed(header)
    if compressed:
        _warn_of_options(optimizer, header)
    elif "masks" in header and (other := _masked_otherwise(optimizer, header)):
        warn(
            f"the checkpoint was written with another mask for {', '.join(other)}: what is masked now loses its "
            "momentum and its variance, what was masked begins with none"
        )
    trained = header["trained"] if frame.wrote(header) and "trained" in header else ()
    # AdamW has none for a parameter that never had a gradient, nor have we for one that was frozen.
    places = zip(states, frame.parameters.index_of, strict=True)
    required = {i for i, (state, index) in enumerate(places) if state or compressed or index in trained}
    entries.check(optimizer.algorithm, states, header, required)
    ours = integrity.of_names(states, header["names"])
    if not verified:
        integrity.verify(optimizer.algorithm, ours, header)
    integrity.check_values(optimizer.algorithm, ours, header)
    return header


def _check_groups(optimizer: Owner, state_dict: Mapping[str, Any], of_adamw: bool) -> None:
    saved, own = state_dict["param_groups"], optimizer.param_groups
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in own]:
        raise ValueError(
            f"checkpoint of another model: its groups have {[len(g['params']) for g in saved]} parameters, "
            f"this optimizer's {[len(g['params']) for g in own]}"
        )
    for number, group in enumerate(saved):
        if of_adamw and "betas" not in group:
            keys = ", ".join(key for key in group if key != "params")
            raise ValueError(
                f"state_dict must be of fusedonebit or torch.optim.AdamW, but group {number} has no betas, only {keys}"
            )
    for number, group in enumerate(_merged_groups(optimizer, saved)):
        optimizer.check_group(numbers(group), f"group {number} of the checkpoint")
        if group.get("amsgrad"):
            raise ValueError("checkpoint of AdamW with amsgrad=True can't be continued; there is no amsgrad here")
        if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
            raise ValueError("checkpoint of Adam with L2 weight decay can't be continued; decay is decoupled here")


def _merged_groups(optimizer: Owner, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups; what they lack is as it is here, what only another optimizer has is dropped."""
    foreign = {*OF_GROUPS, KEY, "added_at"} - set(optimizer.frame.hyper.names)
    own = [{k: v for k, v in group.items() if k not in ("params", KEY)} for group in optimizer.param_groups]
    kept = [{key: value for key, value in group.items() if key not in foreign} for group in saved]
    return [mine | theirs for mine, theirs in zip(own, kept, strict=True)]


def _masked_otherwise(optimizer: Owner, header: State) -> list[str]:
    """Return the parameters of which a checkpoint had another mask; of shards nothing is known."""
    frame = optimizer.frame
    if frame.ranks.shards.count > 1:
        return []
    was, now = header.get("masks", {}), masks(optimizer.frame)
    return [name for i, name in enumerate(frame.parameters.names) if was.get(str(i)) != now.get(str(i))]


def _warn_of_options(optimizer: Owner, header: State) -> None:
    here = numerics(optimizer.frame)
    for name, was in header["options"].items():
        now = here.get(name)
        if now != was:
            warn(f"the checkpoint was written with {name}={was!r}; training goes on with {name}={now!r}")


def _moment(header: State) -> list[Fact]:
    keys = ("phase", "updates", "steps", "started", "local", "done")
    return [(f"the checkpoint's {key}", str(header.get(key))) for key in keys]


def _facts(optimizer: Owner, states: Sequence[State], header: State) -> list[Fact]:
    facts, specs = _moment(header), entries.declared(optimizer.algorithm)
    own = {name for name, spec in specs.items() if entries.has_row_of_each(optimizer.algorithm, spec, header)}
    for state, name in zip(states, optimizer.frame.parameters.names, strict=True):
        for key, value in state.items():
            if isinstance(value, Tensor) and key in header["names"] and key not in own:
                facts.append((f"the checksum of {key} of {name}", f"{integrity.crc32(local(value)):08x}"))
    return facts


# ---------------------------------------------------------------- taking up


def _take_up(optimizer: Owner, state_dict: Mapping[str, Any], header: State, states: Sequence[State]) -> None:
    # Groups of another optimizer, such as AdamW, lack some of this one's hyper-parameters.
    _take_groups(optimizer, _merged_groups(optimizer, state_dict["param_groups"]))
    optimizer.param_groups[0][KEY] = ""  # of groups, torch's unflattening takes up only what is there
    optimizer.frame.given_block_size = header.get("block_size") if is_compressed(header) else None
    optimizer.state.clear()
    optimizer.build()
    _restore(optimizer, state_dict, header, states)


def _take_groups(optimizer: Owner, saved: Sequence[Mapping[str, Any]]) -> None:
    """Replace ``param_groups`` by a copy of saved ones, but for their parameters."""
    groups = []
    for own, theirs in zip(optimizer.param_groups, saved, strict=True):
        group = {**deepcopy({key: value for key, value in theirs.items() if key != "params"}), "params": own["params"]}
        if "param_names" in own:
            group.setdefault("param_names", own["param_names"])
        groups.append(group)
    optimizer.param_groups = groups


def _restore_others(optimizer: Owner, state_dict: Mapping[str, Any], known: Collection[str]) -> None:
    """Put into ``state`` what a checkpoint has of no parameter, and what of parameters is not ``known``."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    owner = dict(zip(names, params, strict=True))
    for key, value in state_dict["state"].items():
        if key not in owner:
            optimizer.state[key] = value
        elif isinstance(value, Mapping):
            p = owner[key]
            others = {name: _moved(entry, p) for name, entry in value.items() if name not in known}
            if others:
                optimizer.state[p] = {**optimizer.state.get(p, {}), **others}


def _moved(value: Any, param: Tensor) -> Any:
    # To the parameter's device as torch does, but of its own dtype.
    return value.to(param.device) if isinstance(value, Tensor) else deepcopy(value)


def _restore(optimizer: Owner, state_dict: Mapping[str, Any], header: State, states: Sequence[State]) -> None:
    with torch.no_grad():
        _fill(optimizer, states, header, state_dict["param_groups"])
    _restore_others(optimizer, state_dict, header["names"])


def _fill(optimizer: Owner, states: Sequence[State], header: State, saved_groups: Sequence[Mapping[str, Any]]) -> None:
    frame = optimizer.frame
    frame.steps.outcomes.resume(header["updates"], header["skipped"])
    frame.steps.count.resume(header.get("steps", header["updates"] + header["skipped"]))
    frame.steps.just_loaded = True
    frame.steps.updates.fill_(header["updates"])
    # Before each parameter had counts of its own, a group that was added later shared the others', less this.
    added = [saved_groups[group].get("added_at", 0) for group in frame.parameters.group_of]
    steps = [_steps(state) - before for state, before in zip(states, added, strict=True)]
    frame.steps.of_each.copy_(torch.tensor(steps, dtype=torch.float64))
    if any(added):
        shared = header.keys() & {
            key for key, field in optimizer.algorithm.fields().items() if field.one_per == "updates"
        }
        header = {**header, **{key: [header[key] - before for before in added] for key in shared}}
    frame.ranks.transport.traffic.bytes_total = header.get("bytes_total", 0)
    optimizer.algorithm.load(header)
    compressed = is_compressed(header)
    for spec, i in entries.of(optimizer.algorithm, compressed, header["names"]):
        entries.take(optimizer.algorithm, spec, i, states[i], header)
    if not compressed and "masks" in header and _masked_otherwise(optimizer, header):
        _forget_masked(optimizer)
    optimizer.algorithm.loaded(header)
    optimizer.publish_state()


def _steps(state: State) -> float:
    """Return the updates of one parameter; AdamW has no state of one that never had a gradient."""
    return float(local(torch.as_tensor(state["step"]))) if "step" in state else 0.0


def _forget_masked(optimizer: Owner) -> None:
    """Clear the moments of what a mask keeps still now: sums over a whole buffer must not find them."""
    live = optimizer.frame.live.mask()
    for kept in optimizer.algorithm.kept(False):
        if kept.wanted and kept.per == "element" and not kept.holds_parameters:
            kept.tensor.masked_fill_(~live, 0.0)
