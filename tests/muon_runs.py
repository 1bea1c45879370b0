"""Parameters, gradients and steps of 1-bit Muon, for its tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import OneBitMuon

SHAPES = ((20,), (40, 20), (7, 6), (50, 10), (6,), (16, 16), (20, 40), (40, 20))
REST = (0, 3, 4)
MATRICES = tuple(i for i in range(len(SHAPES)) if i not in REST)
LR, DECAY = 1e-2, 0.1
SEED = 200


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [Parameter((0.3 * torch.randn(shape, generator=draw)).to(dtype)) for shape in SHAPES]


def gradients(rank: int, step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(SEED + 1000 * step + rank)
    return [torch.randn(shape, generator=draw) + 0.3 for shape in SHAPES]


def made(params: list[Parameter], transport: Any = None, **options: Any) -> OneBitMuon:
    rest = {"params": [params[i] for i in REST], "algorithm": "adamw", "lr": 3e-3, "weight_decay": 0.01}
    groups = [rest, {"params": [params[i] for i in MATRICES]}]
    return OneBitMuon(groups, LR, DECAY, process_group=transport, **options)


def train(optimizer: OneBitMuon, params: list[Parameter], rank: int, steps: range) -> None:
    for step in steps:
        for p, g in zip(params, gradients(rank, step), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()


def values(params: list[Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]
