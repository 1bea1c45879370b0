"""What the freeze has made of v, its bias correction included, does not follow ``betas[1]`` afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import PAPER, construct
from torch.nn import Parameter

from fusedonebit import Freeze, OneBitAdam, ZeroOneAdam, policies

FREEZE, CHANGE, STEPS = 6, 9, 15
CASES: dict[str, Any] = {
    "onebit-adam": {},
    "onebit-adam, plain": PAPER,
    "onebit-lamb-frozen": {"bias_correction": True},
    "zero-one": {},
    "zero-one, local steps": {},
}


def make(case: str, params: list[Parameter]) -> Any:
    name = case.split(",")[0]
    if name != "zero-one":
        return construct(name, params, 1e-2, freeze_step=FREEZE, **CASES[case])
    rounds = policies.DoublingRounds(after=8, scaler=1, most=2) if "local" in case else policies.EveryStep()
    variance = policies.DoublingVariance(scaler=100, until=FREEZE)
    return ZeroOneAdam(params, 1e-2, variance_policy=variance, sync_policy=rounds)


def train(optimizer: Any, params: list[Parameter], steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw) + 0.1
        optimizer.step()


def parameters() -> list[Parameter]:
    draw = torch.Generator().manual_seed(99)
    return [Parameter(torch.randn(shape, generator=draw)) for shape in ((300,), (9, 13))]


@pytest.mark.long(but=3)
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("resumed", [False, True], ids=["straight on", "through a checkpoint"])
@pytest.mark.parametrize("case", CASES)
def test_betas_changed_after_the_freeze_keep_vs_correction(case, resumed):
    ends = []
    for changed in (False, True):
        params = parameters()
        optimizer = make(case, params)
        train(optimizer, params, range(CHANGE))
        if changed:
            optimizer.param_groups[0]["betas"] = (0.9, 0.99999)
        if resumed:
            saved, optimizer = optimizer.state_dict(), make(case, params)
            optimizer.load_state_dict(saved)
        train(optimizer, params, range(CHANGE, STEPS))
        ends.append(params)
    for expected, found in zip(*ends, strict=True):
        assert torch.equal(expected, found)


def test_a_warm_start_corrects_v_with_the_betas_that_made_it():
    saved = []
    for changed in (False, True):
        params = parameters()
        optimizer = OneBitAdam(params, 1e-2, freeze_step=FREEZE)
        train(optimizer, params, range(CHANGE))
        if changed:
            optimizer.param_groups[0]["betas"] = (0.9, 0.99999)
        saved.append(optimizer.state_dict())
    ends = []
    for state in saved:
        params = parameters()
        train(OneBitAdam(params, 1e-2, freeze_step=Freeze(step=0, warm_start=state)), params, range(3))
        ends.append(params)
    for expected, found in zip(*ends, strict=True):
        assert torch.equal(expected, found)
