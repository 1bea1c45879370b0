"""DeepSpeed 0.19.6's own trajectories and learning rates, step by step."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from deepspeed_configs import ADAM, SCHEDULES, VALID
from ranks import simulate
from torch import Tensor

import fusedonebit
from benchmarks import deepspeed_peer
from fusedonebit import AdamW, OneBitAdam, OneBitLamb, ZeroOneAdam
from fusedonebit.comm import Transport
from fusedonebit.deepspeed import from_config, schedule
from fusedonebit.optim.policies import DoublingVariance

DATA = Path(__file__).parent / "data"
STAGES, ROUNDS = {"warmup", "compression"}, {"uncompressed", "one-bit"}
RECORDED: dict[str, tuple[Any, set[str]]] = {
    "adam_flat": (OneBitAdam, STAGES),
    "lamb": (OneBitLamb, STAGES),
    "zoadam_flat": (ZeroOneAdam, ROUNDS | {"local"}),
    "zoadam_nofreeze_flat": (ZeroOneAdam, ROUNDS),
}
ABOUT = ("algo", "backend", "mode", "world", "steps", "source", "seed")
"""What recordings say beside DeepSpeed's options."""


class Errors(NamedTuple):
    """The largest of each step's parameters and LAMB's coefficients, and of the moments at the end."""

    parameters: list[float]
    coefficients: list[float]
    momentum: float
    variance: float
    phases: set[str]


def apart(found: Any, recorded: np.ndarray) -> float:
    return float(np.abs(np.asarray(found) - recorded).max(initial=0.0))


def replay(rank: int, transport: Transport, name: str, wrapped: bool) -> Errors:
    recording, (kind, _) = np.load(DATA / f"deepspeed_{name}_w2_open.npz"), RECORDED[name]
    config, shapes = json.loads(str(recording["config"])), json.loads(str(recording["shapes"]))
    splits = np.cumsum([np.prod(shape) for shape in shapes])[:-1]

    def parts(flat: np.ndarray) -> list[Tensor]:
        return [torch.from_numpy(p.copy()).view(s) for p, s in zip(np.split(flat, splits), shapes, strict=True)]

    def together(tensors: list[Tensor]) -> np.ndarray:
        return torch.cat([x.detach().flatten() for x in tensors]).numpy()

    params = [torch.nn.Parameter(p) for p in parts(recording["init"])]
    given = {key: value for key, value in config.items() if key not in ABOUT}
    given = {"type": kind.__name__, "params": given} if wrapped else given
    optimizer = kind.from_deepspeed(params, given, process_group=transport)
    errors, coefficients, phases = [], [], set()
    for step in range(config["steps"]):
        for p, g in zip(params, parts(recording["grads"][rank, step]), strict=True):
            p.grad = g
        optimizer.step()
        phases.add(optimizer.phase)
        # Within a round each rank has parameters of its own; recorded are those of rank 0.
        if rank == 0 or optimizer.phase != "local":
            errors.append(apart(together(params), recording["params"][step]))
        if kind is OneBitLamb:
            c = optimizer.stats(layers=True)["layers"]["coefficient"]
            coefficients.append(apart(c, recording["lamb_coeffs"][step]))
    momentum = apart(together([optimizer.momentum(p) for p in params]), recording["exp_avg"])
    variance = apart(together([optimizer.state[p]["exp_avg_sq"] for p in params]), recording["exp_avg_sq"])
    return Errors(errors, coefficients, 0.0 if rank and kind is ZeroOneAdam else momentum, variance, phases)


@pytest.mark.long(but=3)
@pytest.mark.parametrize("name", RECORDED)
def test_replays_deepspeed_within_1e_5_at_all_20_steps(name):
    for wrapped in (True, False) if name == "adam_flat" else (True,):
        results = simulate(replay, 2, name, wrapped)
        for rank, found in enumerate(results):
            most = max(found.coefficients, default=0.0)
            print(f"{name}, rank {rank}: largest error of parameters over {len(found.parameters)} steps", end=" ")
            print(f"{max(found.parameters):.2e} (limit 1e-5), of LAMB's coefficients {most:.2e} (limit 1e-4)")
            assert max(found.parameters) <= 1e-5
            assert most <= 1e-4
            assert found.momentum <= 1e-6
            assert found.variance <= 1e-6
            assert found.phases == RECORDED[name][1]
            assert len(found.coefficients) == 20 * (name == "lamb")
        assert len(results[0].parameters) == 20


def test_what_is_no_key_of_0_1_adam_is_refused():
    p = [torch.nn.Parameter(torch.zeros(8))]
    with pytest.raises(ValueError, match="unknown keys in the DeepSpeed config: freeze_step; 0/1 Adam's is"):
        ZeroOneAdam.from_deepspeed(p, {"freeze_step": 100})
    with pytest.raises(ValueError, match="variance_policy must be a DeepSpeedVariance"):
        ZeroOneAdam.from_deepspeed(p, {}, variance_policy=DoublingVariance())
    assert ZeroOneAdam.from_deepspeed(p, {"type": "ZeroOneAdam", "params": None}).param_groups[0]["lr"] == 1e-3


def test_a_config_names_its_optimizer():
    p = [torch.nn.Parameter(torch.zeros(8))]
    for kind in (OneBitAdam, OneBitLamb, ZeroOneAdam):
        block = {"type": kind.__name__.lower(), "params": {"lr": 0.5}}
        made = from_config(p, block)
        assert type(made) is type(kind.from_deepspeed(p, block))
        assert isinstance(made, kind)
        assert made.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="must be one of OneBitAdam, OneBitLamb, ZeroOneAdam, got None"):
        from_config(p, {"lr": 0.5})
    with pytest.raises(TypeError, match=", or a subclass, got AdamW"):
        from_config(p, {"lr": 0.5}, kind=AdamW)


def test_a_subclass_is_made_as_itself():
    class Mine(OneBitAdam):
        pass

    assert type(Mine.from_deepspeed([torch.nn.Parameter(torch.zeros(8))], {})) is Mine


# ---------------------------------------------------------------- learning rates of its schedules


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
