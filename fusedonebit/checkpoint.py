"""``state_dict`` and ``load_state_dict``: exact, free of padding, tensors and plain values only.

In the warm-up the ``state`` is AdamW's own (``step``, ``exp_avg``, ``exp_avg_sq`` per parameter),
equal on all ranks. In the compression stage each rank saves its own file; per parameter:

    step               float32 []
    exp_avg_sq         float32, the parameter's shape: the frozen variance
    exp_avg_bits       uint8 [ceil(n / 8)]: signs of the momentum, in memory order
    exp_avg_scale      float32 [blocks]: its magnitudes
    worker_error       float32, the parameter's shape: this rank's residual
    server_error       float32 [k]: residual of the k elements of it that this rank serves, from
    server_error_start int, in memory order

Like torch's, the tensors are references to live state where they can be: copy or save them before
the next step. Saving settles the deferred residuals, which changes no later step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .comm import Word, agree, checksum
from .errors import warn
from .hyperparameters import check_group

if TYPE_CHECKING:
    from .optimizer import OneBitOptimizer

KEY = "fusedonebit"
FORMAT = 1
_NUMERICS = ("scale_norm", "scale_scope", "bias_correction", "eps_inside_sqrt")
_REPLICATED = ("step", "exp_avg", "exp_avg_sq", "exp_avg_bits", "exp_avg_scale")


def save(optimizer: OneBitOptimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Completes torch's own ``state_dict``."""
    optimizer._outcomes.catch_up()
    if optimizer.phase == "compression":
        optimizer._reduce.settle()
        bits = optimizer._reduce.gathered.bits.reshape(-1)
        for i, index in enumerate(optimizer._list.index_of):
            packed["state"][index] = packed["state"][index] | _compressed_state(optimizer, i, bits)
    for state in packed["state"].values():
        # A tensor of its own for each: AdamW counts each up, and a shared one many times.
        state["step"] = state["step"].clone()
    packed[KEY] = _header(optimizer)
    return packed


def _compressed_state(optimizer: OneBitOptimizer, i: int, bits: Tensor) -> dict[str, Any]:
    layout, reduce = optimizer.layout, optimizer._reduce
    offset, size = layout.offset(i), layout.sizes[i]
    first, end = layout.first_block[i : i + 2]
    start, stop = _served(optimizer, i)
    own = optimizer._transport.rank * layout.chunk_numel
    return {
        "exp_avg_bits": bits[offset // 8 : offset // 8 + -(-size // 8)].clone(),
        "exp_avg_scale": reduce.scale[first:end].clone(),
        "worker_error": optimizer._list.shaped(reduce.worker.compensated, i, offset),
        "server_error": reduce.server.compensated[offset + start - own : offset + stop - own],
        "server_error_start": start,
    }


def _served(optimizer: OneBitOptimizer, i: int) -> tuple[int, int]:
    """The range of parameter ``i``'s elements that this rank serves, maybe empty."""
    layout = optimizer.layout
    lo = optimizer._transport.rank * layout.chunk_numel - layout.offset(i)
    start = min(max(lo, 0), layout.sizes[i])
    stop = min(max(lo + layout.chunk_numel, 0), layout.sizes[i])
    return start, stop


def _header(optimizer: OneBitOptimizer) -> dict[str, Any]:
    reduce = optimizer._reduce
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
        "options": {name: getattr(optimizer.options, name) for name in _NUMERICS},
        "bytes_total": optimizer._transport.traffic.bytes_total,
        "synchronisations": reduce.synchronisations,
        "digest": int(reduce.served.words[0, Word.DIGEST]),
        "variance_step": None if optimizer._variance_step is None else int(optimizer._variance_step),
        "freeze_step": optimizer._freeze_at,
        "dead_tensors": list(optimizer.dead_tensors),
        "dead_coordinates": optimizer.dead_coordinates,
        "auto": None if optimizer._auto is None else optimizer._auto.state_dict(),
        "own": optimizer._own_state(),
    }


def _masks(optimizer: OneBitOptimizer) -> dict[int, int]:
    """Checksums of the masks by parameter."""
    params = enumerate(optimizer._list.params)
    return {i: checksum(optimizer._masks[p].contiguous()) for i, p in params if p in optimizer._masks}


def load(
    optimizer: OneBitOptimizer,
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
    load_groups({"state": {}, "param_groups": list(state_dict["param_groups"])})
    optimizer._build()
    with torch.no_grad():
        _fill(optimizer, state_dict["state"], header)


def _check(optimizer: OneBitOptimizer, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the header; makes one up for a checkpoint of AdamW."""
    _check_groups(optimizer, state_dict)
    header = state_dict.get(KEY)
    if header is None:
        header = {
            "phase": "warmup",
            "updates": _adamw_updates(state_dict),
            "skipped": 0,
            "synchronisations": 0,
        }
    elif header["format"] != FORMAT:
        raise ValueError(f"checkpoint format must be {FORMAT}, got {header['format']}; use the version that wrote it")
    compressed = header["phase"] == "compression"
    if compressed:
        _check_compressed(optimizer, header)
    for i, index in enumerate(optimizer._list.index_of):
        state = state_dict["state"].get(index, {})
        if not state and not compressed:
            continue  # AdamW has none for a parameter that never had a gradient
        for key, expected in _shapes(optimizer, i, compressed).items():
            if not isinstance(state[key], Tensor):
                raise TypeError(f"{key} in the checkpoint must be a tensor, got {type(state[key]).__name__}")
            if tuple(state[key].shape) != expected:
                raise ValueError(
                    f"checkpoint of another model: {key} of {optimizer._list.names[i]} must have shape "
                    f"{expected}, got {tuple(state[key].shape)}"
                )
    if optimizer._auto is not None and header.get("auto") is not None:
        optimizer._auto.check(header["auto"])
    return header


def _shapes(optimizer: OneBitOptimizer, i: int, compressed: bool) -> dict[str, tuple[int, ...]]:
    layout, shape = optimizer.layout, tuple(optimizer._list.params[i].shape)
    if not compressed:
        return {"exp_avg": shape, "exp_avg_sq": shape}
    first, end = layout.first_block[i : i + 2]
    start, stop = _served(optimizer, i)
    return {
        "exp_avg_sq": shape,
        "worker_error": shape,
        "exp_avg_bits": (-(-layout.sizes[i] // 8),),
        "exp_avg_scale": (end - first,),
        "server_error": (stop - start,),
    }


def _check_groups(optimizer: OneBitOptimizer, state_dict: Mapping[str, Any]) -> None:
    saved, own = state_dict["param_groups"], optimizer.param_groups
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in own]:
        raise ValueError(
            f"checkpoint of another model: its groups have {[len(g['params']) for g in saved]} parameters, "
            f"this optimizer's {[len(g['params']) for g in own]}"
        )
    for number, group in enumerate(saved):
        check_group(group, f"group {number} of the checkpoint")
        if group.get("amsgrad"):
            raise ValueError("checkpoint of AdamW with amsgrad=True can't be continued; there is no amsgrad here")
        if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
            raise ValueError("checkpoint of Adam with L2 weight decay can't be continued; decay is decoupled here")


def _check_compressed(optimizer: OneBitOptimizer, header: Mapping[str, Any]) -> None:
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
        now = getattr(optimizer.options, name)
        if now != was:
            warn(f"the checkpoint was written with {name}={was!r}; training goes on with {name}={now!r}")


def _adamw_updates(state_dict: Mapping[str, Any]) -> int:
    return max((int(state["step"]) for state in state_dict["state"].values()), default=0)


def _facts(
    optimizer: OneBitOptimizer, state_dict: Mapping[str, Any], header: Mapping[str, Any]
) -> list[tuple[str, str]]:
    facts = [(f"the checkpoint's {key}", str(header[key])) for key in ("phase", "updates", "synchronisations")]
    for index, name in zip(optimizer._list.index_of, optimizer._list.names, strict=True):
        state = state_dict["state"].get(index, {})
        for key in _REPLICATED:
            if isinstance(state.get(key), Tensor):
                facts.append((f"the checksum of {key} of {name}", str(checksum(state[key].contiguous()))))
    return facts


def _fill(optimizer: OneBitOptimizer, states: Mapping[int, Mapping[str, Any]], header: Mapping[str, Any]) -> None:
    optimizer._outcomes.resume(header["updates"], header["skipped"])
    optimizer._step.fill_(header["updates"])
    optimizer._load_own_state(header.get("own", {}))
    optimizer._transport.traffic.bytes_total = header.get("bytes_total", 0)
    if optimizer._auto is not None and header.get("auto") is not None:
        optimizer._auto.load_state_dict(header["auto"])
    if header["phase"] == "compression":
        _fill_compressed(optimizer, header)
    bits = torch.zeros(optimizer.layout.numel // 8, dtype=torch.uint8, device=optimizer.device)
    for i, index in enumerate(optimizer._list.index_of):
        if index in states:
            _fill_parameter(optimizer, i, states[index], bits)
    gathered = optimizer._reduce.gathered.bits
    gathered.copy_(bits.view(gathered.shape))
    optimizer._publish_state()


def _fill_parameter(optimizer: OneBitOptimizer, i: int, state: Mapping[str, Any], bits: Tensor) -> None:
    layout, reduce, offset = optimizer.layout, optimizer._reduce, optimizer.layout.offset(i)
    optimizer._list.shaped(optimizer._exp_avg_sq, i, offset).copy_(state["exp_avg_sq"])
    momentum = state["exp_avg"] if optimizer.phase == "warmup" else state["worker_error"]
    optimizer._list.shaped(optimizer._exp_avg, i, offset).copy_(momentum)
    if optimizer.phase == "compression":
        first, end = layout.first_block[i : i + 2]
        reduce.scale[first:end] = state["exp_avg_scale"].to(optimizer.device)
        packed = state["exp_avg_bits"].to(optimizer.device)
        bits[offset // 8 : offset // 8 + len(packed)] = packed
        start, stop = _served(optimizer, i)
        own = optimizer._transport.rank * layout.chunk_numel
        reduce.server.compensated[offset + start - own : offset + stop - own] = state["server_error"].to(
            optimizer.device
        )


def _fill_compressed(optimizer: OneBitOptimizer, header: Mapping[str, Any]) -> None:
    reduce = optimizer._reduce
    optimizer._phase = "compression"
    optimizer._freeze_at = header["freeze_step"]
    optimizer._variance_step = torch.tensor(float(header["variance_step"]), device=optimizer.device)
    optimizer.dead_tensors = list(header["dead_tensors"])
    optimizer.dead_coordinates = header["dead_coordinates"]
    optimizer._set_live(excluded=optimizer.dead_tensors)
    reduce.synchronisations = header["synchronisations"]
    reduce.served.words[:, Word.DIGEST] = header["digest"]
