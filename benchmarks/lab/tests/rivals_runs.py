"""The runs in which the lab's rivals are compared with ``rivals_by_the_book``: what ours and the transcription take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rivals_by_the_book import Run
from torch import Tensor
from torch.nn import Parameter

from benchmarks.lab.alike import AlikeTransport
from benchmarks.lab.rivals.demo import DeMo
from benchmarks.lab.rivals.diloco import AVERAGE, SHORT, DiLoCo
from benchmarks.lab.rivals.ef_sgdm import ErrorFeedbackSGDM
from benchmarks.lab.rivals.frame import Rival
from benchmarks.lab.rivals.lion import DistributedLion
from benchmarks.lab.rivals.loco import LoCo
from benchmarks.lab.rivals.onebit_loco import OneBitLoCo
from benchmarks.lab.rivals.powersgd import PowerSGD
from benchmarks.lab.rivals.quantised import BFloat16, Quantised
from benchmarks.lab.rivals.sparseloco import SparseLoCo
from benchmarks.lab.setting import Setting

WORKERS, STEPS = 4, 25
SHAPES = [(24, 20), (20,), (6, 3, 2, 2), (40, 60), (20,), (61, 70), (100,)]
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES)


def a_run(steps: int = STEPS) -> Run:
    """Gradients that workers share in part, of tensors of different magnitude."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    magnitudes = [torch.full(shape, 10.0 ** (-i)).flatten() for i, shape in enumerate(SHAPES)]
    gradients = torch.cat(magnitudes) * (normal(1, 1, NUMEL) + normal(steps, 1, NUMEL) + normal(steps, WORKERS, NUMEL))
    lrs = [1e-2 * (1 - t / (2 * steps)) for t in range(steps)]
    return Run(normal(NUMEL), SHAPES, gradients, lrs, weight_decay=0.1)


def rival_of(make: Callable[..., Rival], run: Run, workers: int = WORKERS, dtype: torch.dtype = torch.float64) -> Rival:
    params = [
        Parameter(run.x[part].view(shape).to(dtype, copy=True))
        for part, shape in zip(run.tensors(), SHAPES, strict=True)
    ]
    rival = make(params, Setting(run.lrs[0], run.steps, run.weight_decay, 0, AlikeTransport(0, workers)))
    if rival.x.dim() == 2:  # workers have their own
        rival.stand_for([[p.detach().clone() for p in params] for _ in range(1, workers)])
    return rival


def ours(make: Callable[..., Rival], run: Run) -> Iterator[Tensor]:
    rival = rival_of(make, run)
    for gs, lr in zip(run.gradients, run.lrs, strict=True):
        rival.param_groups[0]["lr"] = lr
        rival.give([dict(enumerate(rival.cut(g))) for g in gs])
        rival.step()
        rows = [torch.cat([p.detach().flatten() for p in params]) for params in rival._models]
        yield torch.stack(rows).squeeze(0)


def _diloco(length: int, outer: tuple[float, float] = (0.7, 0.9), bits: int | None = None) -> tuple[Any, str, dict]:
    made = partial(DiLoCo, length=length, outer=outer, bits=bits)
    return made, "diloco", {"length": length, "outer": outer, "bits": bits}


def _powersgd(start: int, **how: Any) -> tuple[Any, str, dict]:
    return partial(PowerSGD, **how), "powersgd", {"rank": how["rank"], "seed": 0, "start": start}


def _with(make: Callable[..., Rival], name: str, **how: Any) -> tuple[Any, str, dict]:
    return partial(make, **how), name, how


BOOK: dict[str, tuple[Callable[..., Rival], str, dict[str, Any]]] = {
    "bf16": _with(BFloat16, "bf16"),
    **{f"int{bits}": _with(Quantised, "quantised", bits=bits) for bits in (8, 4)},
    **{f"powersgd-{rank}": _powersgd(10, rank=rank) for rank in (1, 4)},
    "powersgd-4-late": _powersgd(2, rank=4, late=True),
    "diloco": _diloco(4),
    "diloco-int8": _diloco(3, bits=8),
    **{f"diloco-{name}": _diloco(4, outer) for name, outer in SHORT.items()},
    "local-adamw": _diloco(4, AVERAGE),
    "sparseloco": _with(SparseLoCo, "sparseloco", length=3, k=400),
    "sparseloco-few": _with(SparseLoCo, "sparseloco", length=5, k=20),
    "loco": (partial(LoCo, down="parameters"), "loco", {"down": "parameters", "reset": 128}),
    "loco-gradients": (partial(LoCo, down="gradients"), "loco", {"down": "gradients", "reset": 128}),
    **{
        f"dlion-{votes}": _with(DistributedLion, "distributed_lion", aggregation=votes)
        for votes in ("mavo", "mavo-1", "avg")
    },
    "demo": _with(DeMo, "demo", k=100),
    "demo-few": _with(DeMo, "demo", k=2),
    "ef-sgdm": _with(ErrorFeedbackSGDM, "ef_sgdm"),
    "onebit-loco": _with(OneBitLoCo, "onebit_loco", length=3),
}
"""Ours, and the transcription's name and arguments."""
