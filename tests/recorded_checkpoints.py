"""Checkpoints of each kind and stage, as a version of this repository writes them, and how its runs went on.

What ``data/checkpoints_<commit>.pt.xz`` has, the version at that commit wrote, from a checkout of it in ``folder``::

    PYTHONPATH=folder python tests/recorded_checkpoints.py data/checkpoints_<commit>.pt.xz

Initial values and gradients are small multiples of powers of two, the same on every machine.
"""

from __future__ import annotations

import copy
import io
import lzma
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import fusedonebit
from fusedonebit import OneBitAdam, OneBitLamb, ZeroOneAdam, policies
from fusedonebit.comm import SimulatedGroup, Transport

SHAPES = ((6, 13), (7,), (140,))
AFTER = 4
"""Steps that a run goes on for after its checkpoint."""

Make = Callable[..., Any]


def called(name: str, **settings: Any) -> Make:
    """The optimizer of this name, with settings that were keywords of their own up to 5b66f63."""

    def make(params: list[Parameter], transport: Transport) -> Any:
        if not hasattr(fusedonebit, "Numerics"):
            return getattr(fusedonebit, name)(params, **settings, process_group=transport)
        from optimizers import by_name

        more = {"adaptive": False} if settings.get("layerwise") == "frozen" else {}
        flat = {key: value for key, value in settings.items() if key != "layerwise"}
        return by_name(getattr(fusedonebit, name))(params, **flat | more, process_group=transport)

    return make


def like_deepspeed(kind: Any, **config: Any) -> Make:
    return lambda params, transport: kind.from_deepspeed(params, {"lr": 1e-2, **config}, process_group=transport)


def cases() -> Iterator[tuple[str, Make, int, torch.dtype]]:
    """Of each its name, how it is made, the steps before its checkpoint, and the parameters' type."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    adam = {"name": "OneBitAdam", "freeze_step": 3}
    lamb = {"name": "OneBitLamb", "freeze_step": 3}
    yield "Adam, warm-up", called("OneBitAdam", freeze_step=9), 5, float32
    yield "Adam, compressed", called(**adam), 5, float32
    yield "Adam, whose freeze_step is auto", called("OneBitAdam", freeze_step="auto", betas=(0.9, 0.8)), 12, float32
    yield "Adam, as in the paper", called(**adam, precondition=False, scale_norm="l2", scale_scope="global"), 5, float32
    yield "Adam, two buckets", called(**adam, buckets=2), 5, float32
    yield "Adam, ternary, bfloat16 variance", called(**adam, ternary=True, frozen_dtype=bfloat16), 5, float32
    yield "Adam, float32 copies of parameters", called(**adam, master_weights=True), 5, bfloat16
    yield "Adam, stochastic rounding", called(**adam, stochastic_rounding=True), 5, bfloat16
    yield "Adam, warming up again", called(**adam, rewarm_steps=10), 15, float32
    yield "Adam, like DeepSpeed's", like_deepspeed(OneBitAdam, freeze_step=3), 5, float32
    yield "LAMB", called("Lamb"), 5, float32
    yield "1-bit LAMB, a step after the freeze", called(**lamb), 4, float32
    yield "1-bit LAMB, ternary", called(**lamb, ternary=True), 6, float32
    yield "1-bit LAMB, ratios frozen", called(**lamb, layerwise="frozen"), 6, float32
    yield "1-bit LAMB, like DeepSpeed's", like_deepspeed(OneBitLamb, freeze_step=3), 5, float32
    for steps in (1, 4, 5, 6, 7):
        rounds = policies.DoublingRounds(after=3, scaler=2, most=4)
        zero_one = called("ZeroOneAdam", sync_policy=rounds, variance_policy=policies.DoublingVariance(2))
        yield f"0/1 Adam, step {steps}", zero_one, steps, float32
    yield "0/1 Adam, like DeepSpeed's", like_deepspeed(ZeroOneAdam, var_freeze_step=4), 5, float32
    yield "Marsit's SGD", called("MarsitSGD", momentum=0.9, full_precision_every=3), 5, float32
    yield "Marsit's Adam, between local steps", called("MarsitAdam", local_steps=3), 5, float32
    yield "Lion, by majority", called("OneBitLion"), 5, float32
    yield "Lion, mean", called("OneBitLion", aggregation="mean"), 5, float32


def parameters(dtype: torch.dtype) -> list[Parameter]:
    sizes = (torch.arange(torch.Size(shape).numel()).reshape(shape) for shape in SHAPES)
    return [Parameter(((i * 37 % 101 - 50) / 64).to(dtype)) for i in sizes]


def step(optimizer: Any, params: list[Parameter], rank: int, number: int) -> None:
    for which, p in enumerate(params):
        i = torch.arange(p.numel()).reshape(p.shape)
        p.grad = (((i * 61 + (number + 1) * (17 + 5 * which) + 29 * rank) % 127 - 60) / 128).to(p.dtype)
    optimizer.step()


def values(params: list[Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def write(make: Make, steps: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Of each of two ranks the ``state_dict()``, the parameters with it, and those ``AFTER`` steps later."""

    def run(rank: int, transport: Transport) -> dict[str, Any]:
        params = parameters(dtype)
        optimizer = make(params, transport)
        for number in range(steps):
            step(optimizer, params, rank, number)
        saved = {"optimizer": copy.deepcopy(optimizer.state_dict()), "params": values(params)}
        for number in range(steps, steps + AFTER):
            step(optimizer, params, rank, number)
        return saved | {"end": values(params)}

    return SimulatedGroup(2).run(run)


def record(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints = {name: write(make, steps, dtype) for name, make, steps, dtype in cases()}
    buffer = io.BytesIO()
    torch.save(checkpoints, buffer)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=9))


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    return torch.load(io.BytesIO(lzma.decompress(path.read_bytes())))


if __name__ == "__main__":
    record(Path(sys.argv[1]))
