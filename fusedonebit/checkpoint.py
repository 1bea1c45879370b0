"""``state_dict`` and ``load_state_dict``: exact, free of padding, tensors and plain values only.

In the warm-up the ``state`` is AdamW's own (``step``, ``exp_avg``, ``exp_avg_sq`` per parameter),
equal on all ranks. In the compression stage each rank saves its own file; per parameter:

    step               float32 []
    exp_avg_sq         float32, the parameter's shape: the frozen variance
    exp_avg_bits       uint8 [ceil(n / 8)]: signs of the momentum, in memory order
    exp_avg_nonzero    uint8 [ceil(n / 8)]: where it is not zero; only with ``ternary=True``
    exp_avg_scale      float32 [blocks]: its magnitudes
    worker_error       float32, the parameter's shape: this rank's residual
    server_error       float32 [k]: residual of the k elements of it that this rank serves, from
    server_error_start int, in memory order

With ``master_weights=True`` each parameter of 16 bits has in both stages, equal on all ranks:

    master             float32, the parameter's shape: what it is the rounded value of

Loading takes that up exactly, whether the model is loaded before or after; where by the next step a
parameter is not the rounded value of its master, the parameter counts. Where the checkpoint has none
(of AdamW, or of ``master_weights=False``) masters begin as their parameters; ``master_weights=False``
ignores what it has, which leaves the rounded values.

And what else an optimizer keeps per element (``_buffers``), as bits (``_momenta``) or, in all stages,
per tensor (``_tables``): 1-bit LAMB adds the fresh variance, the last momentum, ``layer`` and ``unit``.
Momentum and residuals are in the unit in which they
are compressed. Like torch's, the tensors are references to live state where they can be: copy or
save them before the next step. Saving settles the deferred residuals, which changes no later step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .comm import agree, checksum
from .errors import warn
from .hyperparameters import LAMB_KEYS
from .sharding import local

if TYPE_CHECKING:
    from .distributed import DistributedOptimizer
    from .onebit import OneBitOptimizer

KEY = "fusedonebit"
FORMAT = 1
_SETTLED = ("precondition", "ternary", "layerwise", "momentum_scaling")  # compared as ``_settled`` says, and refused
_STAGES = ("freeze_step", "lr_warmup_steps", "warm_started", "rewarm_every", "rewarm_steps", "guard")
_RUNNING = ("max_grad_norm", "master_weights", "capturable")
_NOT_NUMERICS = (*_SETTLED, *_STAGES, "dead_coordinates", "nonfinite", "block_size", *_RUNNING)
_OF_ONE_RANK = ("worker_error", "server_error")


def save(optimizer: DistributedOptimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Completes torch's own ``state_dict``."""
    optimizer._outcomes.catch_up()
    packed["state"] = {index: dict(state) for index, state in packed["state"].items()}  # torch's are the live ones
    if optimizer.phase == "compression":
        onebit = cast("OneBitOptimizer", optimizer)
        onebit._reduce.settle()
        lines = {name: plane.reshape(-1) for name, plane in _planes(onebit).items()}
        for i, index in enumerate(optimizer._list.index_of):
            packed["state"][index] |= _compressed_state(onebit, i, lines)
    for i, index in enumerate(optimizer._list.index_of):
        packed["state"][index] |= {name: table[..., i].clone() for name, table in optimizer._tables().items()}
    for state in packed["state"].values():
        # A tensor of its own for each: AdamW counts each up, and a shared one many times.
        state["step"] = state["step"].clone()
    packed[KEY] = _header(optimizer)
    return packed


def _planes(optimizer: OneBitOptimizer) -> dict[str, Tensor]:
    """The planes of its momenta's bits, uint8 [W, P / 8W] each, by the names under which they are saved."""
    planes: dict[str, Tensor] = {}
    for name, (bits, _) in optimizer._momenta().items():
        if bits.dim() == 3:
            planes |= {f"{name}_bits": bits[:, 0], f"{name}_nonzero": bits[:, 1]}
        else:
            planes[f"{name}_bits"] = bits
    return planes


def _compressed_state(optimizer: OneBitOptimizer, i: int, lines: Mapping[str, Tensor]) -> dict[str, Any]:
    layout, reduce = optimizer.layout, optimizer._reduce
    offset, size = layout.offset(i), layout.sizes[i]
    first, end = layout.first_block[i : i + 2]
    start, stop = _served(optimizer, i)
    own = optimizer._transport.rank * layout.chunk_numel
    state: dict[str, Any] = {}
    for name, line in lines.items():
        state[name] = line[offset // 8 : offset // 8 + -(-size // 8)].clone()
    for name, (_, scale) in optimizer._momenta().items():
        state[f"{name}_scale"] = scale[first:end].clone()
    for name, flat in optimizer._buffers().items():
        state[name] = optimizer._list.shaped(flat, i, offset)
    return state | {
        "worker_error": optimizer._list.shaped(reduce.worker.compensated, i, offset),
        "server_error": reduce.server.compensated[offset + start - own : offset + stop - own],
        "server_error_start": start,
    }


def _served(optimizer: DistributedOptimizer, i: int) -> tuple[int, int]:
    """The range of parameter ``i``'s elements that this rank serves, maybe empty."""
    layout = optimizer.layout
    lo = optimizer._transport.rank * layout.chunk_numel - layout.offset(i)
    start = min(max(lo, 0), layout.sizes[i])
    stop = min(max(lo + layout.chunk_numel, 0), layout.sizes[i])
    return start, stop


def _header(optimizer: DistributedOptimizer) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "algorithm": type(optimizer).__name__,
        "phase": optimizer.phase,
        "updates": optimizer._outcomes.updates,
        "skipped": optimizer._outcomes.skipped,
        "world_size": optimizer._transport.world_size,
        "rank": optimizer._transport.rank,
        "block_size": optimizer.layout.block_size,
        "strides": optimizer._list.strides(),
        "masks": _masks(optimizer),
        "options": {name: value for name, value in asdict(optimizer.options).items() if name not in _NOT_NUMERICS},
        "bytes_total": optimizer._transport.traffic.bytes_total,
        **optimizer._header(),
    }


def _masks(optimizer: DistributedOptimizer) -> dict[int, int]:
    """Checksums of the masks by parameter."""
    params = enumerate(optimizer._list.owners)
    return {i: checksum(local(optimizer._masks[p]).contiguous()) for i, p in params if p in optimizer._masks}


def load(
    optimizer: DistributedOptimizer,
    state_dict: Mapping[str, Any],
    load_groups: Callable[[dict[str, Any]], None],
) -> None:
    """Checks everything on every rank, and only then changes anything."""
    header: Mapping[str, Any] = {}
    facts: list[tuple[str, str]] = []
    error: Exception | None = None
    try:
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        header = _check(optimizer, state_dict)
        facts = _facts(optimizer, state_dict, header)
    except (KeyError, TypeError, ValueError) as caught:
        error = caught if not isinstance(caught, KeyError) else ValueError(f"state_dict lacks the key {caught}")
    hint = "load, on every rank, the checkpoint of the same moment"
    agree(optimizer._transport, facts, optimizer.device, error, hint)
    # Groups of another optimizer, such as AdamW, lack some of this one's hyper-parameters.
    groups = _merged_groups(optimizer, state_dict["param_groups"])
    load_groups({"state": {}, "param_groups": groups})
    optimizer._build()
    with torch.no_grad():
        _fill(optimizer, state_dict["state"], header)


def _check(optimizer: DistributedOptimizer, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the header; makes one up for a checkpoint of AdamW."""
    _check_groups(optimizer, state_dict)
    header = state_dict.get(KEY)
    if header is None:
        header = {
            "phase": "warmup",
            "updates": _adamw_updates(state_dict),
            "skipped": 0,
        }
    elif header["format"] != FORMAT:
        raise ValueError(f"checkpoint format must be {FORMAT}, got {header['format']}; use the version that wrote it")
    compressed = header["phase"] == "compression"
    optimizer._check_header(header)
    if compressed:
        _check_compressed(optimizer, header)
    for i, index in enumerate(optimizer._list.index_of):
        state = state_dict["state"].get(index, {})
        if not state and not compressed:
            continue  # AdamW has none for a parameter that never had a gradient
        for key, expected in _shapes(optimizer, i, compressed).items():
            if key not in state and (key in optimizer._optional or (key in optimizer._tables() and not compressed)):
                continue  # nor has it what LAMB keeps per tensor, or master weights
            if not isinstance(state[key], Tensor):
                raise TypeError(f"{key} in the checkpoint must be a tensor, got {type(state[key]).__name__}")
            if tuple(state[key].shape) != expected:
                raise ValueError(
                    f"checkpoint of another model: {key} of {optimizer._list.names[i]} must have shape "
                    f"{expected}, got {tuple(state[key].shape)}"
                )
    return header


def _shapes(optimizer: DistributedOptimizer, i: int, compressed: bool) -> dict[str, tuple[int, ...]]:
    layout, shape = optimizer.layout, tuple(optimizer._list.params[i].shape)
    tables = {name: tuple(table.shape[:-1]) for name, table in optimizer._tables().items()}
    masters = {"master": shape} if i in optimizer._list.masters else {}
    if not compressed:
        return {**dict.fromkeys(optimizer._moments(), shape), **tables, **masters}
    onebit = cast("OneBitOptimizer", optimizer)
    first, end = layout.first_block[i : i + 2]
    start, stop = _served(optimizer, i)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys((*onebit._buffers(), "worker_error"), shape)
    shapes |= dict.fromkeys(_planes(onebit), (-(-layout.sizes[i] // 8),))
    shapes |= {f"{name}_scale": (end - first,) for name in onebit._momenta()}
    return {**shapes, **tables, **masters, "server_error": (stop - start,)}


def _check_groups(optimizer: DistributedOptimizer, state_dict: Mapping[str, Any]) -> None:
    saved, own = state_dict["param_groups"], optimizer.param_groups
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in own]:
        raise ValueError(
            f"checkpoint of another model: its groups have {[len(g['params']) for g in saved]} parameters, "
            f"this optimizer's {[len(g['params']) for g in own]}"
        )
    for number, group in enumerate(_merged_groups(optimizer, saved)):
        optimizer._check_group(group, f"group {number} of the checkpoint")
        if group.get("amsgrad"):
            raise ValueError("checkpoint of AdamW with amsgrad=True can't be continued; there is no amsgrad here")
        if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
            raise ValueError("checkpoint of Adam with L2 weight decay can't be continued; decay is decoupled here")


def _merged_groups(optimizer: DistributedOptimizer, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups; what a checkpoint of another optimizer lacks is as it is, what only that has is dropped."""
    foreign = set(LAMB_KEYS) - set(optimizer._hyper_parameters)
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    kept = [{key: value for key, value in group.items() if key not in foreign} for group in saved]
    return [mine | theirs for mine, theirs in zip(own, kept, strict=True)]


def _check_compressed(optimizer: DistributedOptimizer, header: Mapping[str, Any]) -> None:
    own = {
        "algorithm": type(optimizer).__name__,
        "world_size": optimizer._transport.world_size,
        "rank": optimizer._transport.rank,
        "block_size": optimizer.layout.block_size,
        "strides": optimizer._list.strides(),
        "masks": _masks(optimizer),
    }
    way_out = {
        "world_size": "resume with as many ranks as wrote it, or from a checkpoint of the warm-up",
        "rank": "each rank must load the file that it saved itself",
        "block_size": "pass that block_size",
    }
    for key, value in own.items():
        if header[key] != value:
            hint = way_out.get(key, "construct the model and the optimizer as they were")
            raise ValueError(f"the checkpoint's {key} is {header[key]}, but here it is {value}; {hint}")
    for name, was in header["options"].items():
        now = getattr(optimizer.options, name, None)
        if now != was:
            warn(f"the checkpoint was written with {name}={was!r}; training goes on with {name}={now!r}")


def _adamw_updates(state_dict: Mapping[str, Any]) -> int:
    return max((int(state["step"]) for state in state_dict["state"].values()), default=0)


def _facts(
    optimizer: DistributedOptimizer, state_dict: Mapping[str, Any], header: Mapping[str, Any]
) -> list[tuple[str, str]]:
    keys = ("phase", "updates", "synchronisations", "started")
    facts = [(f"the checkpoint's {key}", str(header.get(key))) for key in keys]
    for index, name in zip(optimizer._list.index_of, optimizer._list.names, strict=True):
        for key, value in state_dict["state"].get(index, {}).items():
            if isinstance(value, Tensor) and key not in (*_OF_ONE_RANK, *optimizer._of_one_rank):
                facts.append((f"the checksum of {key} of {name}", str(checksum(value.contiguous()))))
    return facts


def _fill(optimizer: DistributedOptimizer, states: Mapping[int, Mapping[str, Any]], header: Mapping[str, Any]) -> None:
    optimizer._outcomes.resume(header["updates"], header["skipped"])
    optimizer._step.fill_(header["updates"])
    optimizer._transport.traffic.bytes_total = header.get("bytes_total", 0)
    optimizer._resume(header)
    for i, index in enumerate(optimizer._list.index_of):
        for name, table in optimizer._tables().items():
            if name in states.get(index, {}):
                table[..., i] = states[index][name].to(optimizer.device)
    for i in optimizer._list.masters:
        optimizer._list.load_master(i, states.get(optimizer._list.index_of[i], {}).get("master"))
    if header["phase"] == "compression":
        _fill_compressed(cast("OneBitOptimizer", optimizer), states)
    else:
        for i, index in enumerate(optimizer._list.index_of):
            if index in states:
                kept = {name: flat for name, flat in optimizer._moments().items() if name in states[index]}
                _fill_flat(optimizer, i, states[index], **kept)
    optimizer._resumed(header)
    optimizer._publish_state()


def _fill_flat(optimizer: DistributedOptimizer, i: int, state: Mapping[str, Any], **flat: Tensor) -> None:
    for name, buffer in flat.items():
        optimizer._list.shaped(buffer, i, optimizer.layout.offset(i)).copy_(state[name])


def _fill_compressed(optimizer: OneBitOptimizer, states: Mapping[int, Mapping[str, Any]]) -> None:
    layout, reduce, device = optimizer.layout, optimizer._reduce, optimizer.device
    buffers = optimizer._buffers() | {"worker_error": reduce.worker.compensated}
    momenta, planes = optimizer._momenta(), _planes(optimizer)
    lines = {name: torch.zeros(layout.numel // 8, dtype=torch.uint8, device=device) for name in planes}
    for i, index in enumerate(optimizer._list.index_of):
        state, offset = states[index], layout.offset(i)
        _fill_flat(optimizer, i, state, **buffers)
        first, end = layout.first_block[i : i + 2]
        for name, (_, scale) in momenta.items():
            scale[first:end] = state[f"{name}_scale"].to(device)
        for name, line in lines.items():
            packed = state[name].to(device)
            line[offset // 8 : offset // 8 + len(packed)] = packed
        start, stop = _served(optimizer, i)
        own = optimizer._transport.rank * layout.chunk_numel
        served = reduce.server.compensated[offset + start - own : offset + stop - own]
        served.copy_(state["server_error"])
    for name, plane in planes.items():
        plane.copy_(lines[name].view(plane.shape))
