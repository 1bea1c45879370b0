"""Shares what tests of missing gradients and others set up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from optimizers import by_name, muon
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import MarsitAdam, MarsitSGD, OneBitLion, ZeroOneAdam
from fusedonebit.optim.policies import EveryStep

SHAPES = [(31, 17), (5,), (), (3000,), (70, 40)]

Make = Callable[..., Any]

OWN: dict[str, Make] = {
    "lion": by_name(OneBitLion, lr=1e-3),
    "lion, mean": by_name(OneBitLion, lr=1e-3, aggregation="mean"),
    "muon": by_name(muon, lr=1e-2),
    "marsit": by_name(MarsitSGD, lr=1e-2, full_precision_every=4),
    "marsit, owner": by_name(MarsitSGD, lr=1e-2, full_precision_every=4, topology="owner"),
    "marsit adam": by_name(MarsitAdam, lr=1e-2, full_precision_every=4),
    "zero-one, own": by_name(ZeroOneAdam, lr=1e-2, sync_policy=EveryStep()),
}


def parameters() -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape)) for shape in SHAPES]


def gradient(rank: int, step: int, i: int) -> Tensor:
    return torch.randn(SHAPES[i], generator=torch.Generator().manual_seed(1 + rank + 10 * step + 1000 * i))
