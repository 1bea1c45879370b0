"""Shares what tests of after a load and others set up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from observe import parameters
from optimizers import by_name, objects
from torch import nn

from fusedonebit import Lamb, MarsitAdam, MarsitSGD, OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam
from fusedonebit.optim.policies import DoublingRounds

MAKE: dict[str, Callable[..., Any]] = {
    "onebit-adam": lambda p, **more: OneBitAdam(p, **objects(freeze_step=2, guard="off", **more)),
    "onebit-adam, masters": lambda p, **more: OneBitAdam(
        p, **objects(freeze_step=2, guard="off", master_weights=True, **more)
    ),
    "onebit-lamb": lambda p, **more: OneBitLamb(p, **objects(freeze_step=2, guard="off", **more)),
    "lamb": by_name(Lamb),
    "zero-one-adam": lambda p, **more: ZeroOneAdam(
        p, sync_policy=DoublingRounds(after=2, scaler=2, most=2), **objects(**more)
    ),
    "marsit-sgd": lambda p, **more: MarsitSGD(p, **objects(full_precision_every=3, **more)),
    "marsit-adam": lambda p, **more: MarsitAdam(p, **objects(local_steps=2, **more)),
    "lion": by_name(OneBitLion),
}


def make(name: str, **more: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False), nn.Linear(3, 1))
    if "masters" in name:
        model = model.bfloat16()
    return model, MAKE[name](list(model.named_parameters()), **more)


def set_gradients(optimizer: Any, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    for p in parameters(optimizer):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer: Any, rank: int, start: int, stop: int) -> None:
    for step in range(start, stop):
        set_gradients(optimizer, rank, step)
        optimizer.step()


def caught(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
