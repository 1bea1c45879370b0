"""An optimizer that nobody holds any more is gone at once, with its state: no cycle waits for the collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import MAKE
from torch import Tensor, nn

from fusedonebit import Faults, MarsitAdam, Numerics, OneBitAdam, Rounds, Wire

CASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **MAKE,
    "OneBitAdam, auto": lambda params: OneBitAdam(params, freeze_step="auto"),
    "OneBitAdam, guarded": lambda params: OneBitAdam(
        params, freeze_step=2, max_grad_norm=1.0, numerics=Numerics(ternary=True)
    ),
    "OneBitAdam, overlap": lambda params: OneBitAdam(
        params, freeze_step=2, faults=Faults(guard="off"), wire=Wire(overlap=True)
    ),
    "OneBitAdam, master weights": lambda params: OneBitAdam(
        params, freeze_step=2, faults=Faults(guard="off"), numerics=Numerics(master_weights=True)
    ),
    "MarsitAdam, local steps": lambda params: MarsitAdam(params, rounds=Rounds(local_steps=2)),
    "AdamW": torch.optim.AdamW,
}


@pytest.mark.long(but=17)
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("name", CASES)
def test_state_and_parameters_are_freed_with_the_optimizer(name, steps):
    torch.manual_seed(0)  # the guard lets through what follows two steps of warm-up, or not
    model = nn.Linear(3, 3).to(torch.bfloat16 if "master" in name else torch.float32)
    optimizer = CASES[name](model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, dtype=model.weight.dtype)).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    repr(optimizer)
    held = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    gone = [weakref.ref(x) for x in (optimizer, *model.parameters(), *held)]
    gc.disable()
    try:
        del optimizer, model, held
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()
