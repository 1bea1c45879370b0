"""Shares what tests of adamw and others set up."""

from __future__ import annotations

import torch
from torch import nn


def gradients(params: list[nn.Parameter], step: int, rank: int = 0) -> None:
    draw = torch.Generator().manual_seed(1 + step + 1000 * rank)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=draw).to(p.dtype) * 10.0 ** (min(i, 5) - 2)
        p.grad = None if step % 5 == 4 and i == 1 else g
