"""Gives optimizers random gradients, and reads their state from outside, by what is public."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedonebit import OneBitAdam, OneBitLamb
from fusedonebit.checkpoint import KEY, header_of
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.sharding import local
from fusedonebit.core.state.integrity import sealed

LINES = ["worker_error", "server_error", "rank"]
LINES += [f"exp_avg{last}_{kind}" for last in ("", "_last") for kind in ("bits", "nonzero", "scale")]


def change_header(saved: dict, change: Callable[[dict], object]) -> None:
    """Lets ``change`` change what a checkpoint says of itself, with the checksum that belongs to it."""
    header = header_of(saved)
    change(header)
    saved["param_groups"][0][KEY] = sealed(header)


def flat(tensors: Sequence[Tensor]) -> np.ndarray:
    """Of DTensors what this rank holds."""
    return torch.cat([local(t).detach().float().reshape(-1) for t in tensors]).numpy().copy()


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Set gradients that no other rank or step has."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for p in parameters(optimizer):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int]) -> None:
    for step in steps:
        give_gradients(optimizer, rank, step)
        optimizer.step()


def variances(optimizer: DistributedOptimizer) -> list[torch.Tensor]:
    """v of each parameter, in whatever form it is kept."""
    return [optimizer.algorithm.value_of("exp_avg_sq", i) for i in range(len(parameters(optimizer)))]


def observe(optimizer: DistributedOptimizer) -> dict[str, np.ndarray]:
    """All of the state, momentum and residuals in momentum units.

    Parameters x, momentum m, variance v, this rank's residual and its part of the servers'; of LAMB
    also its layers (c_avg, r, c), and of what rebuilds the gradients: the momentum applied last and
    the fresh variance. Saving may renew a living variance, which puts the momentum into the residual: here it is still
    what the step has made, and the residual what that has left.
    """
    params = parameters(optimizer)
    momentum = flat([optimizer.momentum(p) for p in params])
    saved = optimizer.state_dict()
    states = per_tensor(optimizer, saved)
    compressed = optimizer.phase == "compression"
    state = {
        "x": flat(params),
        "m": momentum,
        "v": flat(variances(optimizer)),
        "worker_error": np.zeros(0, dtype=np.float32),
        "server_error": np.zeros(0, dtype=np.float32),
    }
    if isinstance(optimizer, (OneBitAdam, OneBitLamb)):
        beta1s = [group["betas"][0] for group in optimizer.param_groups for _ in group["params"]]
        moved = [b * torch.ones_like(p) for b, p in zip(beta1s, params, strict=True)]
        moved = flat(moved) * (momentum - flat([optimizer.momentum(p) for p in params]))
        state["worker_error"] = flat([optimizer.worker_error(p) for p in params]) - moved
    if compressed:
        state["server_error"] = flat([s["server_error"] / s.get("unit", 1.0) for s in states])
    for key in ("exp_avg_sq_fresh", "exp_avg_last_bits", "exp_avg_last_scale", "layer", "unit", "update_squares"):
        state[key] = flat([s[key] for s in states]) if key in states[0] else np.zeros(0, dtype=np.float32)
    state["started"] = np.array([header_of(saved).get("started", False)])
    return state


def per_tensor(optimizer: DistributedOptimizer, saved: dict) -> list[dict]:
    """A rank's own ``state_dict()`` of parameters that all train, its lines cut at tensors: bits and scales of each.

    ``server_error`` is of the elements of the tensor that this rank serves, from ``server_error_start`` in memory
    order.
    """
    states = [dict(saved["state"].get(i, {})) for i in range(len(parameters(optimizer)))]
    if optimizer.phase != "compression":
        return states
    header, layout, names = header_of(saved), optimizer.frame.layout, [n for n in states[0] if n in LINES]
    lines = {name: local(states[0].pop(name)).reshape(-1) for name in names}
    own = int(lines["rank"]) // header["shards"] * layout.chunk_numel
    served = lines.get("server_error", torch.zeros(layout.chunk_numel))  # there may be no server
    for i, state in enumerate(states):
        size, offset, (first, end) = layout.sizes[i], layout.offset(i), layout.first_block[i : i + 2]
        for name in names:
            if name.endswith("_scale"):
                state[name] = lines[name][first:end]
            elif lines[name].dtype == torch.uint8:
                state[name] = lines[name][offset // 8 : offset // 8 + -(-size // 8)]
        part, v = lines["worker_error"][offset : offset + size], local(state["exp_avg_sq"])
        strides = header["strides"][i] if header["shards"] == 1 else v.stride()
        state["worker_error"] = part.as_strided(v.shape, strides, part.storage_offset())
        start, stop = (min(max(edge - offset, 0), size) for edge in (own, own + layout.chunk_numel))
        state["server_error"] = served[offset + start - own : offset + stop - own]
        state["server_error_start"] = start
    return states


def served(optimizer: DistributedOptimizer) -> np.ndarray:
    """Indices, in the flat vector, of the elements that this rank serves; only in the compression stage."""
    saved, at, indices = per_tensor(optimizer, optimizer.state_dict()), 0, []
    for i, p in enumerate(parameters(optimizer)):
        start = at + saved[i]["server_error_start"]
        indices.append(np.arange(start, start + len(saved[i]["server_error"])))
        at += local(p).numel()
    return np.concatenate(indices)


def whole_server_error(states: Sequence[dict], parts: Sequence[np.ndarray]) -> np.ndarray:
    """The residual of all servers from each rank's state and ``served``; zero before the freeze."""
    error = np.zeros(states[0]["x"].size)
    for state, indices in zip(states, parts, strict=True):
        if state["server_error"].size:
            error[indices] = state["server_error"]
    return error


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """Equal only for equal bits."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(local(t).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def caught(call: Callable[[], object]) -> tuple[type | None, str]:
    """The type and text of what ``call`` raises."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None, ""


def named(call: Callable[[], object]) -> tuple[str, str]:
    """The type's name and the text of what ``call`` raises; "" if nothing."""
    kind, text = caught(call)
    return "" if kind is None else kind.__name__, text


def through_a_file(thing: Any) -> Any:
    """``thing`` after ``torch.save`` and ``torch.load``."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(optimizer: Any, fresh: Any) -> Any:
    """Return ``fresh``, which now has the parameters of ``optimizer`` and what that has saved in a file."""
    with torch.no_grad():
        for p, q in zip(parameters(fresh), parameters(optimizer), strict=True):
            p.copy_(q)
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    return fresh
