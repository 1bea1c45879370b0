"""Shares what tests of guard and others set up."""

from __future__ import annotations

import torch
from freeze_runs import gradient
from observe import parameters
from torch.nn import Parameter

from fusedonebit.core.optimizer import DistributedOptimizer


def make(*shapes: tuple[int, ...]) -> list[Parameter]:
    """The same on all ranks, also where these are threads, which share the global generator."""
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train(optimizer: DistributedOptimizer, rank: int, start: int, steps: int, factor: float = 1.0) -> list[str]:
    """Takes steps with gradients of one size; returns the stage of each."""
    phases = []
    for step in range(start, start + steps):
        for i, p in enumerate(parameters(optimizer)):
            p.grad = factor * gradient(rank, step, p, i)
        optimizer.step()
        phases.append(optimizer.phase)
    return phases
