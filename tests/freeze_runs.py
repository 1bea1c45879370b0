"""Shares what tests of freeze and others set up."""

from __future__ import annotations

import torch
from observe import parameters
from torch.nn import Parameter

from fusedonebit.core.optimizer import DistributedOptimizer


def gradient(rank: int, step: int, p: Parameter, i: int) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + rank + 10 * step + 100_000 * i))


def step_once(optimizer: DistributedOptimizer, rank: int, step: int, bad: bool = False) -> None:
    for i, p in enumerate(parameters(optimizer)):
        p.grad = gradient(rank, step, p, i)
    if bad:
        p.grad.view(-1)[0] = float("nan")
    optimizer.step()
