"""``state_dict`` and ``load_state_dict``: exact, tensors and plain values only.

In the warm-up the ``state`` is AdamW's own (``step``, ``exp_avg``, ``exp_avg_sq`` per parameter),
equal on all ranks. In the compression stage per parameter:

    step               float64 []: updates in which some rank had a gradient of it
    exp_avg_sq         float32, the parameter's shape: the frozen variance

and with the first parameter, along the whole line of elements (P, padding included; ``FlatLayout``), as
rows of each of the W replicas, or S shards (``rows.Rows``):

    exp_avg_bits       uint8 [S, P / 8]: signs of the momentum
    exp_avg_nonzero    uint8 [S, P / 8]: where it is not zero; only with ``ternary=True``
    exp_avg_scale      float32 [S, blocks]: its magnitudes
    worker_error       float32 [W, S, P]: each rank's residual
    server_error       float32 [W, S, P / W]: residual of the elements that each rank serves
    rank               int64 [W, S, 1]: whose row it is

Of rows a rank has its own alone; they are DTensors, so that ``torch.distributed.checkpoint`` saves all of
them (``fusedonebit.dcp``). ``torch.save`` works as well: then each rank saves, and loads, its own file.

With ``master_weights=True`` each parameter of 16 bits has in both stages, equal on all ranks:

    master             float32, the parameter's shape: what it is the rounded value of

Loading takes that up exactly, whether the model is loaded before or after; where by the next step a
parameter is not the rounded value of its master, the parameter counts. Where the checkpoint has none
(of AdamW, or of ``master_weights=False``) masters begin as their parameters; ``master_weights=False``
ignores what it has, which leaves the rounded values.

And what else an optimizer keeps per element (``_buffers``), as bits (``_momenta``) or, in all stages,
per tensor (``_tables``): 1-bit LAMB adds the fresh variance, the last momentum, ``layer`` and ``unit``.
Momentum and residuals are in the unit in which they are compressed. The header, all that is no tensor,
is JSON in the first of the ``param_groups``; it has a checksum of each tensor, and of itself (``integrity``),
which takes one pass over the state on the host, and from a GPU the copy. Like torch's, the tensors are
references to live state where they can be: copy or save them before the next step. Saving settles the
deferred residuals, which changes no later step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..comm import CollectiveError, agree, checksum
from ..comm.agreement import Fact
from ..core.consensus import failure
from ..core.options import LAMB_KEYS, numbers
from ..core.sharding import local
from ..errors import warn
from ..optim.policies import stated
from ..triton_kernels import unpack
from . import header as header_rules
from . import integrity, packing
from . import reshard as lines
from .integrity import read_header

if TYPE_CHECKING:
    from ..core.optimizer import DistributedOptimizer
    from ..optim.two_stage import OneBitOptimizer

KEY = "fusedonebit"
FORMAT = 2
ADAMW = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_SETTLED = (
    "precondition",
    "ternary",
    "frozen_dtype",
    "layerwise",
    "momentum_scaling",
)  # compared as ``_settled`` says, and refused
_STAGES = ("freeze_step", "lr_warmup_steps", "warm_started", "rewarm_every", "rewarm_steps", "guard")
_RUNNING = ("max_grad_norm", "master_weights", "capturable", "overlap", "buckets", "hierarchy_dtype")
_NOT_NUMERICS = (*_SETTLED, *_STAGES, "dead_coordinates", "nonfinite", "block_size", *_RUNNING)

State = Mapping[str, Any]


def save(optimizer: DistributedOptimizer) -> dict[str, Any]:
    """What torch's own ``state_dict`` would be, completed."""
    optimizer._catch_up()
    packed = packing.packed(optimizer)
    # Copies: torch's are the live ones.
    states = {key: dict(state) if isinstance(state, dict) else state for key, state in packed["state"].items()}
    others = _names(states, optimizer) - optimizer._published
    for i, index in enumerate(optimizer._list.index_of):
        states[index] |= _state_of(optimizer, i, states[index])
    if _keeps_lines(optimizer):
        onebit = cast("OneBitOptimizer", optimizer)
        onebit._reduce.settle()
        states[optimizer._list.index_of[0]] |= lines.save(onebit)
    elif optimizer._of_one_rank and optimizer._list.owners:
        states[optimizer._list.index_of[0]]["rank"] = optimizer._rows.of_each(optimizer._rows.rank())
    header = _header(optimizer)
    own = [states[index] for index in optimizer._list.index_of]
    for state in own:
        for name in optimizer._not_kept(header):
            state.pop(name, None)
    header["names"] = sorted(_names(states, optimizer) - others)
    packed["state"] = states
    _seal(optimizer, packed, header, own)
    return packed


def _seal(optimizer: DistributedOptimizer, packed: Mapping[str, Any], header: State, own: Sequence[State]) -> None:
    """Writes the header, with the checksums of what parameters have of the optimizer's own."""
    if optimizer._sums_up:
        summed = integrity.of_names(own, header["names"])
        header = {
            **header,
            integrity.CHECKSUMS: integrity.checksums(optimizer, summed),
            integrity.BETWEEN: integrity.between(summed),
        }
    packed["param_groups"][0][KEY] = integrity.sealed(header)


def seal_again(optimizer: DistributedOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Sums up what hooks have made of a ``state_dict``, unless that is none of ours any more."""
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
        return saved
    header = header_of(saved)
    if header is not None and integrity.CHECKSUMS in header:
        _seal(optimizer, saved, header, by_parameter(optimizer, saved))
    return saved


def forget_checksums(state_dict: Mapping[str, Any]) -> None:
    """Removes a checkpoint's checksums, in place, so that tensors that were changed on purpose can be loaded."""
    header = header_of(state_dict)
    if header is not None and KEY not in state_dict:
        for key in (integrity.CHECKSUMS, integrity.BETWEEN):
            header.pop(key, None)
        state_dict["param_groups"][0][KEY] = integrity.sealed(header)


def _names(states: Mapping[Any, State], optimizer: DistributedOptimizer) -> set[str]:
    """Of all entries that parameters have."""
    return {name for index in optimizer._list.index_of for name in states[index]}


def _keeps_lines(optimizer: DistributedOptimizer) -> bool:
    """Whether it has lines to save: not while nothing trains."""
    return optimizer._keeps_lines and bool(optimizer._list.owners)


def _state_of(optimizer: DistributedOptimizer, i: int, state: State) -> dict[str, Any]:
    """What parameter ``i`` has beyond what is published, and what is not as published."""
    # A tensor of its own for each: AdamW counts each up, and a shared one many times.
    kept: dict[str, Any] = {"step": state["step"].clone()}
    if optimizer._keeps_lines:
        for name, flat in cast("OneBitOptimizer", optimizer)._buffers().items():
            part = optimizer._list.shaped(flat, i, optimizer.layout.offset(i))
            kept[name] = optimizer._list.published(part, i)
    own = [name for name in optimizer._of_one_rank if name in kept or name in state]
    kept |= {name: optimizer._rows.of_each(kept[name] if name in kept else state[name]) for name in own}
    return kept | {name: table[..., i].clone() for name, table in optimizer._tables().items()}


def header_of(state_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a checkpoint says of itself; None if it is not of this package."""
    if KEY in state_dict:  # beside the groups, as format 1 had it
        return dict(state_dict[KEY])
    text = state_dict["param_groups"][0].get(KEY) if state_dict["param_groups"] else None
    return None if text is None else read_header(text)


def has_lines(header: State) -> bool:
    """Whether a checkpoint has lines; before it said so, those of the compression stage had."""
    return bool(header.get("lines", header["phase"] == "compression"))


def own_names(optimizer: DistributedOptimizer, header: State) -> tuple[str, ...]:
    """What each rank has of its own in a checkpoint; of another algorithm, or another library, nothing."""
    return optimizer._of_one_rank if _is_own(optimizer, header) else ()


def _is_own(optimizer: DistributedOptimizer, header: State) -> bool:
    """Whether an optimizer of the same class has written it; ``migrate`` leaves out how many ranks there were."""
    return header.get("algorithm") == type(optimizer).__name__ and "world_size" in header


def _header(optimizer: DistributedOptimizer) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "algorithm": type(optimizer).__name__,
        "trained": list(optimizer._list.index_of),
        "phase": optimizer.phase,
        "lines": _keeps_lines(optimizer),
        "updates": optimizer._outcomes.updates,
        "steps": optimizer._steps.total,
        "skipped": optimizer._outcomes.skipped,
        "world_size": optimizer._transport.world_size,
        "rank": int(optimizer._rows.rank()),
        "shards": optimizer._shards.count,
        "block_size": optimizer.layout.block_size,
        "line": optimizer.layout.numel,
        "strides": optimizer._list.strides(),
        "masks": _masks(optimizer),
        "options": _numerics(optimizer),
        "bytes_total": optimizer._transport.traffic.bytes_total,
        **optimizer._header(),
    }


def _numerics(optimizer: DistributedOptimizer) -> dict[str, Any]:
    names = [field.name for field in fields(optimizer.options) if field.name not in _NOT_NUMERICS]
    return {name: _plain(getattr(optimizer.options, name)) for name in names}


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (bool, int, float, str)) else stated(value)


def _masks(optimizer: DistributedOptimizer) -> dict[str, int]:
    """Checksums of the masks by parameter; of shards, which differ, none."""
    masks, owners = optimizer._masks, enumerate(optimizer._list.owners)
    whole = optimizer._shards.count == 1
    return {str(i): checksum(masks[p].contiguous()) for i, p in owners if p in masks and whole}


def template(optimizer: DistributedOptimizer, header: State | None) -> dict[str, Any]:
    """Room for a checkpoint with this header, for ``torch.distributed.checkpoint`` to fill.

    Args:
        optimizer: Whose checkpoint it is to be.
        header: What ``header_of`` says; None is AdamW's.
    """
    packed = packing.packed(optimizer)
    compressed = header is not None and has_lines(header)
    replicas = optimizer._rows.shape[0] if header is None else header["world_size"]
    states: dict[int, dict[str, Any]] = {}
    for i, index in enumerate(optimizer._list.index_of):
        of_parameter = tuple(optimizer._list.params[i].shape)
        states[index] = state = {"step": torch.zeros((), dtype=torch.float64)}
        for name, shape in _shapes(optimizer, i, compressed).items():
            part = torch.zeros(shape, device=optimizer.device)
            if name in optimizer._of_one_rank:
                state[name] = optimizer._rows.spread(replicas, part)
            else:
                state[name] = optimizer._list.published(part, i) if shape == of_parameter else part
    if compressed:
        states[optimizer._list.index_of[0]] |= lines.template(cast("OneBitOptimizer", optimizer), header or {})
    elif optimizer._of_one_rank and optimizer._list.owners:
        rank = torch.zeros_like(optimizer._rows.rank())
        states[optimizer._list.index_of[0]]["rank"] = optimizer._rows.spread(replicas, rank)
    packed["state"] = states
    packed["param_groups"][0][KEY] = ""
    return packed


def load(optimizer: DistributedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Checks everything on every rank, and only then changes anything; hooks run before and after.

    A hook that raises on one rank is an error on all: none goes on as if it had loaded what that one has not.
    """
    header: State = {}
    states: Sequence[State] = []
    facts: list[tuple[str, str]] = []
    error: Exception | None = None
    try:
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        verified = _verified_before_hooks(optimizer, state_dict)
        state_dict = packing.before_loading(optimizer, state_dict)
        header, states, facts = _examined(optimizer, state_dict, verified)
    except CollectiveError:
        raise
    except Exception as caught:
        error = caught
    _agree(optimizer, facts, _moment(header), error, "load, on every rank, the checkpoint of the same moment")
    try:
        _take_up(optimizer, state_dict, header, states)
    except Exception as caught:
        optimizer._broken = f"load_state_dict failed half-way: {caught}"
        error = caught
    if error is None:
        error = failure(lambda: packing.after_loading(optimizer))
    elif isinstance(error, CollectiveError):
        raise error
    _agree(optimizer, [], [], error, "load_state_dict() did not end well there: load on all ranks anew")


def _agree(
    optimizer: DistributedOptimizer, facts: list[Fact], of_shards: list[Fact], error: Exception | None, hint: str
) -> None:
    """Returns on all ranks, or raises on all."""
    of_replicas = failure(lambda: agree(optimizer._transport, facts, optimizer.device, error, hint))
    optimizer._shards.agree(of_shards, optimizer.device, of_replicas, hint)


def _verified_before_hooks(optimizer: DistributedOptimizer, state_dict: Mapping[str, Any]) -> bool:
    """Whether tensors are as they were saved, where hooks are about to change them on purpose.

    What only a hook makes a checkpoint of ours is looked at after it.
    """
    if not optimizer._optimizer_load_state_dict_pre_hooks or not {"state", "param_groups"} <= state_dict.keys():
        return False
    header = header_of(state_dict)
    if header is None or integrity.CHECKSUMS not in header:
        return False
    try:
        states = integrity.of_names(by_parameter(optimizer, state_dict), header["names"])
    except (KeyError, IndexError, TypeError, AttributeError):
        return False
    groups = state_dict["param_groups"], optimizer.param_groups
    saved, here = ([len(group["params"]) for group in several] for several in groups)
    if saved != here:
        return False  # of another model, which a hook may fit to this one
    integrity.verify(optimizer, states, header)
    return True


def _examined(
    optimizer: DistributedOptimizer, state_dict: Mapping[str, Any], verified: bool = False
) -> tuple[State, Sequence[State], list[Fact]]:
    """The header, each parameter's state, and what must be equal on all ranks; ValueError, TypeError for bad ones."""
    try:
        _check_groups(optimizer, state_dict)
        states = by_parameter(optimizer, state_dict)
        header = _check(optimizer, header_of(state_dict), states, verified)
        return header, states, _facts(optimizer, states, header)
    except Exception as caught:
        raise _explained(caught) from caught


def _take_up(
    optimizer: DistributedOptimizer, state_dict: Mapping[str, Any], header: State, states: Sequence[State]
) -> None:
    # Groups of another optimizer, such as AdamW, lack some of this one's hyper-parameters.
    packing.take_groups(optimizer, _merged_groups(optimizer, state_dict["param_groups"]))
    optimizer.param_groups[0][KEY] = ""  # as ``DistributedOptimizer`` has it
    optimizer._block_size = header.get("block_size") if has_lines(header) else None
    optimizer.state.clear()
    optimizer._build()
    _restore(optimizer, state_dict, header, states)


def _restore(
    optimizer: DistributedOptimizer, state_dict: Mapping[str, Any], header: State, states: Sequence[State]
) -> None:
    with torch.no_grad():
        _fill(optimizer, states, header, state_dict["param_groups"])
    packing.restore_others(optimizer, state_dict, header["names"])


def take_state(optimizer: DistributedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Fills a new optimizer, laid out as the one that was saved, without asking the other ranks."""
    header, states, _ = _examined(optimizer, state_dict)
    _restore(optimizer, state_dict, header, states)


def by_parameter(optimizer: DistributedOptimizer, state_dict: Mapping[str, Any]) -> list[State]:
    """The state of each trainable parameter, which its group names by number, or by name."""
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    return [state_dict["state"].get(names[index], {}) for index in optimizer._list.index_of]


def _check(
    optimizer: DistributedOptimizer, header: State | None, states: Sequence[State], verified: bool = False
) -> State:
    """Returns the header; makes one up for a checkpoint of AdamW. Sums tensors up unless that was done."""
    if header is None:
        header = {"phase": "warmup", "updates": _adamw_updates(states), "skipped": 0, "names": list(ADAMW)}
    if "names" not in header:  # before it named them, only the optimizer's own were saved
        header = {**header, "names": sorted({name for state in states for name in state})}
    check_header(optimizer, header)
    compressed, own = has_lines(header), own_names(optimizer, header)
    if compressed:
        _warn_of_options(optimizer, header)
    elif "masks" in header and (other := _masked_otherwise(optimizer, header)):
        warn(
            f"the checkpoint was written with another mask for {', '.join(other)}: what is masked now loses its "
            "momentum and its variance, what was masked begins with none"
        )
    for i, state in enumerate(states):
        trained = header["trained"] if _is_own(optimizer, header) and "trained" in header else ()
        if not state and not compressed and optimizer._list.index_of[i] not in trained:
            continue  # AdamW has none for a parameter that never had a gradient, nor have we for one that was frozen
        for key, expected in _shapes(optimizer, i, compressed).items():
            if key not in state and _may_lack(optimizer, key, header):
                continue
            _check_shape(optimizer, i, key, state[key], expected, key in own)
            if key in own:
                optimizer._rows.check(state[key], states[0]["rank"], header["world_size"])
    if compressed:
        lines.check(cast("OneBitOptimizer", optimizer), states[0], header)
    ours = integrity.of_names(states, header["names"])
    if not verified:
        integrity.verify(optimizer, ours, header)
    integrity.check_values(optimizer, ours, header)
    return header


def _may_lack(optimizer: DistributedOptimizer, key: str, header: State) -> bool:
    """Whether a checkpoint may be without an entry: AdamW's has nothing of LAMB's per tensor, or of rounds."""
    if _is_own(optimizer, header):
        return key == "master" or key in optimizer._not_kept(header)
    return key in optimizer._optional or (key in optimizer._tables() and not has_lines(header))


def _explained(error: Exception) -> Exception:
    """The error with which loading fails, as users can understand it."""
    if isinstance(error, KeyError):
        return ValueError(
            f"state_dict lacks the key {error}; torch's flatten_optimizer_state_dict=True drops what a new optimizer "
            "does not have: leave it out"
        )
    if isinstance(error, (TypeError, ValueError)):
        return error
    return ValueError(f"the checkpoint is damaged: {type(error).__name__}: {error}; load another checkpoint")


def _check_shape(
    optimizer: DistributedOptimizer, i: int, key: str, value: Any, expected: tuple[int, ...], in_rows: bool
) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{key} in the checkpoint must be a tensor, got {type(value).__name__}")
    shape = tuple(local(value).shape)[2 * in_rows :]
    if shape != expected:
        raise ValueError(
            f"checkpoint of another model: {key} of {optimizer._list.names[i]} must have shape {expected}, got {shape}"
        )


def _shapes(optimizer: DistributedOptimizer, i: int, compressed: bool) -> dict[str, tuple[int, ...]]:
    """What a checkpoint has of parameter ``i`` here, besides ``step`` and lines."""
    shape = tuple(optimizer._list.params[i].shape)
    tables = {name: tuple(table.shape[:-1]) for name, table in optimizer._tables().items()}
    masters = {"master": shape} if i in optimizer._list.masters else {}
    kept = cast("OneBitOptimizer", optimizer)._buffers() if compressed else optimizer._moments()
    return {**dict.fromkeys(kept, shape), **tables, **masters}


def _check_groups(optimizer: DistributedOptimizer, state_dict: Mapping[str, Any]) -> None:
    saved, own = state_dict["param_groups"], optimizer.param_groups
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in own]:
        raise ValueError(
            f"checkpoint of another model: its groups have {[len(g['params']) for g in saved]} parameters, "
            f"this optimizer's {[len(g['params']) for g in own]}"
        )
    for number, group in enumerate(_merged_groups(optimizer, saved)):
        optimizer._check_group(numbers(group), f"group {number} of the checkpoint")
        if group.get("amsgrad"):
            raise ValueError("checkpoint of AdamW with amsgrad=True can't be continued; there is no amsgrad here")
        if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
            raise ValueError("checkpoint of Adam with L2 weight decay can't be continued; decay is decoupled here")


def _merged_groups(optimizer: DistributedOptimizer, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups; what a checkpoint of another optimizer lacks is as it is, what only that has is dropped."""
    foreign = {*LAMB_KEYS, KEY, "added_at"} - set(optimizer._hyper_parameters)
    own = [{k: v for k, v in group.items() if k not in ("params", KEY)} for group in optimizer.param_groups]
    kept = [{key: value for key, value in group.items() if key not in foreign} for group in saved]
    return [mine | theirs for mine, theirs in zip(own, kept, strict=True)]


def check_header(optimizer: DistributedOptimizer, header: State) -> None:
    """Raises ValueError if this optimizer can't go on from a checkpoint with this header."""
    if header.get("format", FORMAT) != FORMAT:
        raise ValueError(f"checkpoint format must be {FORMAT}, got {header['format']}; use the version that wrote it")
    header_rules.check(optimizer, header, _is_own(optimizer, header))
    if "rounds" in header and not optimizer._of_one_rank:
        raise ValueError(
            f"the checkpoint's algorithm is {header.get('algorithm', 'AdamW')}, which {type(optimizer).__name__} can't "
            "go on from: one averages gradients, the other agrees in rounds"
        )
    optimizer._check_header(header)
    if not has_lines(header):
        return
    own = {
        "algorithm": type(optimizer).__name__,
        "shards": optimizer._shards.count,
        "block_size": optimizer.options.block_size or header["block_size"],
        "strides": optimizer._list.strides(),
    }
    way_out = {
        "shards": "a checkpoint of the compression stage needs as many shards; one of the warm-up does not",
        "block_size": "pass that block_size, or none",
    }
    for key, value in own.items():
        if header[key] != value:
            hint = way_out.get(key, "construct the model and the optimizer as they were")
            raise ValueError(f"the checkpoint's {key} is {header[key]}, but here it is {value}; {hint}")
    if other := _masked_otherwise(optimizer, header):
        raise ValueError(
            f"the checkpoint was written with another mask for {', '.join(other)}, which can only be changed in the "
            "warm-up: there is no variance, and no sign, of what a mask has kept still. Construct the optimizer with "
            "the same mask=, or begin anew from the model alone (OneBitAdam and OneBitLamb: with the checkpoint as "
            "warm_start=)"
        )


def _masked_otherwise(optimizer: DistributedOptimizer, header: State) -> list[str]:
    """Names of parameters of which a checkpoint had another mask; AdamW has none, and of shards nothing is known."""
    if optimizer._shards.count > 1:
        return []
    was, now = header.get("masks", {}), _masks(optimizer)
    return [name for i, name in enumerate(optimizer._list.names) if was.get(str(i)) != now.get(str(i))]


def _warn_of_options(optimizer: DistributedOptimizer, header: State) -> None:
    here = _numerics(optimizer)
    for name, was in header["options"].items():
        now = here.get(name)
        if now != was:
            warn(f"the checkpoint was written with {name}={was!r}; training goes on with {name}={now!r}")


def _steps(state: State) -> float:
    """Updates of one parameter; AdamW has no state of one that never had a gradient."""
    return float(local(torch.as_tensor(state["step"]))) if "step" in state else 0.0


def one_or_each(values: Tensor) -> float | list[float]:
    """Numbers of each tensor, float64 [tensors], for a header: one where all are equal. Waits for the device."""
    listed = values.tolist()
    return listed[0] if len(set(listed)) == 1 else listed


def each(told: float | Sequence[float], like: Tensor) -> Tensor:
    """What ``one_or_each`` has told, of the shape, dtype and device of ``like``."""
    return torch.as_tensor(told, dtype=like.dtype, device=like.device).expand_as(like).clone()


def _adamw_updates(states: Sequence[State]) -> int:
    return max((int(state["step"]) for state in states if state), default=0)


def _moment(header: State) -> list[tuple[str, str]]:
    keys = ("phase", "updates", "steps", "started", "local", "done")
    return [(f"the checkpoint's {key}", str(header.get(key))) for key in keys]


def _facts(optimizer: DistributedOptimizer, states: Sequence[State], header: State) -> list[tuple[str, str]]:
    facts, own = _moment(header), own_names(optimizer, header)
    for state, name in zip(states, optimizer._list.names, strict=True):
        for key, value in state.items():
            if isinstance(value, Tensor) and key in header["names"] and key not in (*lines.OWN, *own):
                facts.append((f"the checksum of {key} of {name}", f"{integrity.crc32(local(value)):08x}"))
    return facts


def _fill(
    optimizer: DistributedOptimizer,
    states: Sequence[State],
    header: State,
    saved_groups: Sequence[Mapping[str, Any]],
) -> None:
    optimizer._outcomes.resume(header["updates"], header["skipped"])
    optimizer._steps.resume(header.get("steps", header["updates"] + header["skipped"]))
    optimizer._just_loaded = True
    optimizer._updates.fill_(header["updates"])
    # Before each parameter had counts of its own, a group that was added later shared the others', less this.
    added = [saved_groups[group].get("added_at", 0) for group in optimizer._list.group_of]
    steps = [_steps(state) - before for state, before in zip(states, added, strict=True)]
    optimizer._own_steps.copy_(torch.tensor(steps, dtype=torch.float64))
    if any(added):
        shared = header.keys() & {"variance_step", "entered"}
        header = {**header, **{key: [header[key] - before for before in added] for key in shared}}
    optimizer._transport.traffic.bytes_total = header.get("bytes_total", 0)
    optimizer._resume(header)
    compressed = has_lines(header)
    flats = cast("OneBitOptimizer", optimizer)._buffers() if compressed else optimizer._moments()
    for i, state in enumerate(states):
        for name, table in optimizer._tables().items():
            if name in state:
                table[..., i] = local(state[name]).to(optimizer.device)
        if i in optimizer._list.masters:
            optimizer._list.load_master(i, _taken(optimizer, "master", state, header))
        for name, flat in flats.items():
            if (part := _taken(optimizer, name, state, header)) is not None:
                optimizer._list.shaped(flat, i, optimizer.layout.offset(i)).copy_(part)
    if compressed:
        lines.fill(cast("OneBitOptimizer", optimizer), states[0], header)
    elif "masks" in header and _masked_otherwise(optimizer, header):
        _forget_masked(optimizer, flats)
    optimizer._resumed(header)
    optimizer._publish_state()


def _forget_masked(optimizer: DistributedOptimizer, flats: Mapping[str, Tensor]) -> None:
    """Clears the moments of what a mask keeps still now: sums over a whole buffer must not find them."""
    live = unpack(optimizer._live.bits[optimizer._live.row.long()]).view(-1) > 0
    for name, flat in flats.items():
        if name != "anchor":  # parameters, which stay
            flat.masked_fill_(~live, 0.0)


def _taken(optimizer: DistributedOptimizer, name: str, state: State, header: State) -> Tensor | None:
    """What this rank takes of an entry of a parameter's state; None if there is none."""
    if name not in state or name not in own_names(optimizer, header):
        return local(state[name]) if name in state else None
    if header["world_size"] == optimizer._rows.shape[0]:
        return optimizer._rows.own(state[name])
    return optimizer._rows.mean(state[name], header["world_size"])
