"""Counts of updates: those of AdamW's checkpoints, and far past what float32 can hold."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from missing_gradient_runs import OWN, Make, gradient, parameters
from observe import change_header
from optimizers import by_name
from torch import Tensor
from torch.nn import Parameter
from warmup_runs import relative

from fusedonebit import Faults, Lamb, MarsitSGD, OneBitAdam
from fusedonebit.comm import SimulatedGroup

# ---------------------------------------------------------------- checkpoints


def rewrite(saved: dict, values: dict[str, Any]) -> None:
    """Gives a header other values, of keys that it has, and takes away the checksums, which would tell of it."""

    def change(header: dict) -> None:
        header.update({key: value for key, value in values.items() if key in header})
        header.pop("checksums", None)

    change_header(saved, change)


def trained(steps: Sequence[int]) -> tuple[torch.optim.AdamW, list[Parameter]]:
    """An AdamW of which each parameter has had as many gradients as ``steps`` says."""
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=1e-2, foreach=False)
    for step in range(max(steps)):
        for i, p in enumerate(params):
            p.grad = gradient(0, step, i) if step < steps[i] else None
        optimizer.step()
    return optimizer, params


def test_adamws_own_counts_are_taken_up_and_given_back():
    theirs, params = trained([6, 2, 0, 4, 6])
    mine = [Parameter(p.detach().clone()) for p in params]
    ours = OneBitAdam(mine, lr=1e-2, freeze_step=100)
    ours.load_state_dict(theirs.state_dict())
    assert [int(ours.state[p]["step"]) for p in mine] == [6, 2, 0, 4, 6]
    again = [Parameter(p.detach().clone()) for p in params]
    back = torch.optim.AdamW(again, lr=1e-2)
    back.load_state_dict(deepcopy(ours.state_dict()))  # which refers to live state, as torch's do
    for step in range(6, 9):
        for i, same in enumerate(zip(params, mine, again, strict=True)):
            for p in same:
                p.grad = None if step == 7 and i == 1 else gradient(0, step, i)
        for optimizer in (theirs, ours, back):
            optimizer.step()
    for p, q, r in zip(params, mine, again, strict=True):
        assert theirs.state[p]["step"] == ours.state[q]["step"] == back.state[r]["step"]
        assert relative(q, p) < 1e-6
        assert relative(r, p) < 1e-6


@pytest.mark.parametrize("freeze_step", [6, 100])
def test_a_checkpoint_with_one_shared_count_goes_on_alike(freeze_step):
    params = parameters()
    optimizer = OneBitAdam(params[:3], lr=1e-2, freeze_step=freeze_step, faults=Faults(guard="off"))
    for step in range(9):
        if step == 4:
            optimizer.add_param_group({"params": params[3:]})
        for i, p in enumerate(params):
            p.grad = gradient(0, step, i)
        optimizer.step()
    saved = deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = torch.tensor(9.0)
    saved["param_groups"][1]["added_at"] = 4
    rewrite(saved, {"variance_step": float(min(freeze_step, 9))})
    copies = [Parameter(p.detach().clone()) for p in params]
    again = OneBitAdam(
        [{"params": copies[:3]}, {"params": copies[3:]}], lr=1e-2, freeze_step=freeze_step, faults=Faults(guard="off")
    )
    again.load_state_dict(saved)
    for step in range(9, 12):
        assert [float(again.state[p]["step"]) for p in copies] == [step] * 3 + [step - 4] * 2
        for i, (p, q) in enumerate(zip(params, copies, strict=True)):
            p.grad = q.grad = gradient(0, step, i)
        optimizer.step()
        again.step()
        assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))
    assert "added_at" not in again.state_dict()["param_groups"][1]


# ---------------------------------------------------------------- long runs


def far_along(make: Make, updates: int, dtype: torch.dtype = torch.float32, rank: int = 0) -> tuple[Any, Any]:
    """An optimizer after so many updates, by its own checkpoint, edited."""
    params = [Parameter(p.detach().to(dtype)) for p in parameters()]
    optimizer = make(params)
    for i, p in enumerate(params):
        p.grad = gradient(rank, 0, i).to(dtype)
    optimizer.step()
    saved = optimizer.state_dict()
    rewrite(saved, {"updates": updates, "rounds": updates})
    for state in saved["state"].values():
        state["step"] = torch.tensor(float(updates), dtype=torch.float64)
    optimizer.load_state_dict(saved)
    return optimizer, params


@pytest.mark.parametrize("updates", [2**24 + 1, 2**31 - 1, 2**32 + 1], ids=["2^24", "2^31", "2^32"])
@pytest.mark.parametrize("make", [by_name(Lamb, lr=1e-3), OWN["lion"], OWN["marsit adam"]])
def test_updates_are_counted_far_past_what_float32_can_hold(make, updates):
    optimizer, params = far_along(make, updates)
    for further in range(1, 4):
        optimizer.step()
        assert [int(optimizer.state[p]["step"]) for p in params] == [updates + further] * len(params)
    assert optimizer.stats()["step"] == updates + 3


@pytest.mark.parametrize("updates", [2**24, 2**31 - 1, 2**40])
def test_stochastic_roundings_bits_change_with_every_update(updates):
    make = by_name(Lamb, lr=1e-4, stochastic_rounding=True)
    ends = []
    for count in (updates, updates + 1):
        optimizer, params = far_along(make, count, torch.bfloat16)
        optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in params]))
    assert not torch.equal(*ends)


@pytest.mark.parametrize("updates", [2**24 + 1, 2**31 - 1, 2**31])
def test_marsits_random_bits_change_with_every_round(updates):
    def work(rank: int, transport: Any) -> list[Tensor]:
        ends = []
        for count in (updates, updates + 1):
            make = by_name(MarsitSGD, lr=1e-3, full_precision_every=0, process_group=transport)
            optimizer, params = far_along(make, count, rank=rank)
            for i, p in enumerate(params):
                p.grad = gradient(rank, 1, i)
            optimizer.step()
            ends.append(torch.cat([p.detach().flatten() for p in params]))
        return ends

    for ends in SimulatedGroup(2).run(work):
        assert not torch.equal(*ends)
