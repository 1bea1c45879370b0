"""Shares what tests of after a load and others set up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from optimizers import by_name
from torch import nn

from fusedonebit import Lamb, MarsitAdam, MarsitSGD, OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam
from fusedonebit.optim.policies import DoublingRounds

MAKE: dict[str, Callable[..., Any]] = {
    "onebit-adam": by_name(OneBitAdam, freeze_step=2, guard="off"),
    "onebit-adam, masters": by_name(OneBitAdam, freeze_step=2, guard="off", master_weights=True),
    "onebit-lamb": by_name(OneBitLamb, freeze_step=2, guard="off"),
    "lamb": by_name(Lamb),
    "zero-one-adam": by_name(ZeroOneAdam, sync_policy=DoublingRounds(after=2, scaler=2, most=2)),
    "marsit-sgd": by_name(MarsitSGD, full_precision_every=3),
    "marsit-adam": by_name(MarsitAdam, local_steps=2),
    "lion": by_name(OneBitLion),
}


def make(name: str, **more: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False), nn.Linear(3, 1))
    if "masters" in name:
        model = model.bfloat16()
    return model, MAKE[name](list(model.named_parameters()), **more)
