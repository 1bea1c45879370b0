"""Small models and gradients for tests of the freeze, of the guard and of re-warm-ups."""

from __future__ import annotations

from typing import Any

import torch
from observe import parameters
from torch import nn
from torch.nn import Parameter

from fusedonebit.core.optimizer import DistributedOptimizer


def gradient(rank: int, step: int, p: Parameter, i: int) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + rank + 10 * step + 100_000 * i))


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


def step_once(optimizer: DistributedOptimizer, rank: int, step: int, bad: bool = False) -> None:
    for i, p in enumerate(parameters(optimizer)):
        p.grad = gradient(rank, step, p, i)
    if bad:
        p.grad.view(-1)[0] = float("nan")
    optimizer.step()


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def take_steps(model: nn.Module, optimizer: Any, steps: range, growth: float = 1.0) -> None:
    """Steps on noise, which is ``growth`` times as large in each."""
    for step in steps:
        x, noise = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (growth**step * model(x) * noise[:, :4]).mean().backward()
        optimizer.step()
