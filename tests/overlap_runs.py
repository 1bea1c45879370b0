"""Shares what tests of overlap and others set up."""

from __future__ import annotations

from typing import Any

import torch
from optimizers import objects
from torch import Tensor, nn

from fusedonebit import OneBitAdam

FREEZE, STEPS = 4, 12
OPTIONS: dict[str, Any] = {"lr": 1e-2, "freeze_step": FREEZE, "guard": "off", "block_size": 128, "buckets": 3}


def pulled(params: list[Tensor], gradients: list[Tensor]) -> None:
    """A backward pass that leaves exactly these gradients."""
    sum((p * g).sum() for p, g in zip(params, gradients, strict=True)).backward()


def values(params: list[Tensor]) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in params])


def some_gradients(params: list[Tensor], rank: int, step: int) -> list[Tensor]:
    return [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(rank + 10 * step + i))
        for i, p in enumerate(params)
    ]


def free(rank: int, **options: Any) -> tuple[list[nn.Parameter], OneBitAdam]:
    """Parameters without a model; the last bucket has the last two of them."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((900,), (40,), (350, 2), (1,))]
    return params, OneBitAdam(params, **objects(**OPTIONS | {"overlap": True, "precondition": False} | options))


def step_on(params: list[nn.Parameter], optimizer: OneBitAdam, gradients: list[Tensor]) -> None:
    pulled(params, gradients)
    optimizer.step()
    optimizer.zero_grad()
