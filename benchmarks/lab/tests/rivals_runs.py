"""The runs in which the lab's rivals are compared with ``rivals_by_the_book``: what ours and the transcription take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rivals_by_the_book import Run
from torch import Tensor
from torch.nn import Parameter

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
from benchmarks.lab.workers import AlikeTransport

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


Transcription = Callable[..., Iterator[Tensor]]
BOOK: dict[str, tuple[Callable[..., Rival], str, dict[str, Any]]] = {
    "bf16": (BFloat16, "bf16", {}),
    "int8": (partial(Quantised, bits=8), "quantised", {"bits": 8}),
    "int4": (partial(Quantised, bits=4), "quantised", {"bits": 4}),
    "powersgd-1": (partial(PowerSGD, rank=1), "powersgd", {"rank": 1, "seed": 0, "start": 10}),
    "powersgd-4": (partial(PowerSGD, rank=4), "powersgd", {"rank": 4, "seed": 0, "start": 10}),
    "powersgd-4-late": (partial(PowerSGD, rank=4, late=True), "powersgd", {"rank": 4, "seed": 0, "start": 2}),
    "diloco": (partial(DiLoCo, length=4), "diloco", {"length": 4, "outer": (0.7, 0.9), "bits": None}),
    "diloco-int8": (partial(DiLoCo, length=3, bits=8), "diloco", {"length": 3, "outer": (0.7, 0.9), "bits": 8}),
    **{
        f"diloco-{name}": (
            partial(DiLoCo, length=4, outer=outer),
            "diloco",
            {"length": 4, "outer": outer, "bits": None},
        )
        for name, outer in SHORT.items()
    },
    "local-adamw": (
        partial(DiLoCo, length=4, outer=AVERAGE),
        "diloco",
        {"length": 4, "outer": (1.0, 0.0), "bits": None},
    ),
    "sparseloco": (partial(SparseLoCo, length=3, k=400), "sparseloco", {"length": 3, "k": 400}),
    "sparseloco-few": (partial(SparseLoCo, length=5, k=20), "sparseloco", {"length": 5, "k": 20}),
    "loco": (partial(LoCo, down="parameters"), "loco", {"down": "parameters", "reset": 128}),
    "loco-gradients": (partial(LoCo, down="gradients"), "loco", {"down": "gradients", "reset": 128}),
    "dlion-mavo": (partial(DistributedLion, aggregation="mavo"), "distributed_lion", {"aggregation": "mavo"}),
    "dlion-mavo-1": (partial(DistributedLion, aggregation="mavo-1"), "distributed_lion", {"aggregation": "mavo-1"}),
    "dlion-avg": (partial(DistributedLion, aggregation="avg"), "distributed_lion", {"aggregation": "avg"}),
    "demo": (partial(DeMo, k=100), "demo", {"k": 100}),
    "demo-few": (partial(DeMo, k=2), "demo", {"k": 2}),
    "ef-sgdm": (ErrorFeedbackSGDM, "ef_sgdm", {}),
    "onebit-loco": (partial(OneBitLoCo, length=3), "onebit_loco", {"length": 3}),
}
"""Ours, and the transcription's name and arguments."""
