"""An optimizer that nobody holds any more is gone at once, with its state: no cycle waits for the collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import MAKE, ONEBIT
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


def large_tensors(at_least: int) -> set[int]:
    """Return where all memory begins that anybody holds as a tensor, and that has so many bytes."""
    gc.collect()
    dense = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided]
    storages = [each.untyped_storage() for each in dense]
    return {each.data_ptr() for each in storages if each.nbytes() >= at_least}


@pytest.mark.parametrize("name", [*ONEBIT, "AdamW, ours", "Lamb", "MarsitSGD", "MarsitAdam", "ZeroOneAdam"])
def test_a_closed_algorithm_frees_all_but_what_its_reducer_owes(name):
    p = nn.Parameter(torch.zeros(50_000))
    before = large_tensors(2 * p.numel())
    optimizer = MAKE[name]([p]) if name in MAKE else ONEBIT[name]([p], freeze_step=2, guard="off")
    for _ in range(5):
        p.grad = torch.randn(p.shape)
        optimizer.step()
    p.grad = None
    held = large_tensors(2 * p.numel()) - before
    optimizer.state.clear()
    optimizer.algorithm.close()
    left = large_tensors(2 * p.numel()) - before
    print(f"{name}: {len(held)} of the model's size before, {len(left)} afterwards")
    of_reducer = 0 if optimizer.algorithm.exchange is None else 2 if "living" in name else 1  # of squares another
    assert len(left) == of_reducer < len(held)
