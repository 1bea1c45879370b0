"""The schedules of DeepSpeed's configs have DeepSpeed's learning rates."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from deepspeed_configs import ADAM, SCHEDULES, VALID

import fusedonebit
from benchmarks import deepspeed_peer
from fusedonebit.deepspeed import schedule

pytestmark = pytest.mark.filterwarnings("ignore:step.. found no gradient")  # of schedules alone


def rates(block: dict[str, Any], count: int) -> list[float]:
    optimizer = fusedonebit.OneBitAdam([torch.nn.Parameter(torch.zeros(2))], lr=0.002, freeze_step=100)
    scheduler, seen = schedule(optimizer, block), []
    for _ in range(count):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.long(but=8)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_has_deepspeeds_learning_rate_in_every_step(name):
    kind, params = SCHEDULES[name]["config"]
    recorded = SCHEDULES[name]["rates"]
    mine = rates({"type": kind, "params": params}, len(recorded))
    worst = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(mine, recorded, strict=True))
    print(f"{name}: largest relative error of the learning rate over {len(recorded)} steps: {worst:.1e} (limit 1e-12)")
    assert worst <= 1e-12


@pytest.mark.skipif(not deepspeed_peer.available(), reason=deepspeed_peer.MISSING)
@pytest.mark.parametrize("name", SCHEDULES)
def test_recorded_learning_rates_are_deepspeeds(name):
    assert deepspeed_rates(*SCHEDULES[name]["config"], count=len(SCHEDULES[name]["rates"])) == SCHEDULES[name]["rates"]


def deepspeed_rates(kind: str, params: dict[str, Any], count: int) -> list[float]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=0.002)
    theirs, seen = getattr(lr_schedules, kind)(optimizer, **params), []
    for _ in range(count):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        theirs.step()
    return seen


@pytest.mark.parametrize("name", sorted(VALID))
def test_schedule_of_valid_arguments_runs_and_is_carried_over(name, migrate):
    block = {"type": name, "params": VALID[name]}
    assert len(set(rates(block, 5))) > 1
    status, printed, _ = migrate({"optimizer": ADAM, "scheduler": block})
    assert status == 0
    assert 'scheduler.type: fusedonebit.deepspeed.schedule(optimizer, config["scheduler"])' in printed


def test_each_group_goes_on_from_its_own_rate():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": lr} for lr in (1e-3, 4e-3)]
    optimizer = fusedonebit.OneBitAdam(groups, freeze_step=100)
    scheduler = schedule(optimizer, {"type": "WarmupLR", "params": {"warmup_num_steps": 2}})
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 4e-3]


@pytest.mark.parametrize(
    "name", ["__class__", "Optimizer", "partial", "LambdaLR", "ReduceLROnPlateau", None, ["StepLR"]]
)
def test_name_that_is_no_schedule_of_plain_values_is_refused(name, migrate):
    status, printed, error = migrate({"optimizer": ADAM, "scheduler": {"type": name}})
    assert (status, printed) == (2, "")
    assert re.fullmatch(r"fusedonebit: .*scheduler: type must be one of WarmupLR, .*StepLR.*, got .*\n", error)


def test_key_that_is_no_argument_of_the_schedule_is_named(migrate):
    for kind in ("StepLR", "LRRangeTest"):
        params = {"step_size": 2} if kind == "StepLR" else {}
        status, printed, _ = migrate({"optimizer": ADAM, "scheduler": {"type": kind, "params": params | {"x y": 1}}})
        assert status == 1
        assert "scheduler.params.x y: not a key" in printed
    with pytest.raises(ValueError, match=r"params must be of lr_range_test_min_lr, .*, got 'x'"):
        rates({"type": "LRRangeTest", "params": {"x": 1}}, 1)
