"""Shares what tests of frozen dtype and others set up."""

from __future__ import annotations

import torch
from torch import Tensor


def params(n: int = 3) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(40, 33)) for _ in range(n)]


def train(optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
