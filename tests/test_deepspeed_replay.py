"""DeepSpeed 0.19.6's own trajectory, step by step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import simulate

from fusedonebit import AdamW, OneBitAdam, OneBitLamb, ZeroOneAdam
from fusedonebit.comm import Transport
from fusedonebit.deepspeed import from_config
from fusedonebit.optim.policies import DoublingVariance

DATA = Path(__file__).parent / "data"


def replay(rank: int, transport: Transport, wrapped: bool) -> tuple[list[float], float, float]:
    recording = np.load(DATA / "deepspeed_adam_flat_w2_open.npz")
    config = json.loads(str(recording["config"]))
    params = {key: config[key] for key in ("lr", "betas", "eps", "weight_decay", "freeze_step")}
    p = torch.nn.Parameter(torch.from_numpy(recording["init"].copy()))
    given = {"type": "OneBitAdam", "params": params} if wrapped else params
    optimizer = OneBitAdam.from_deepspeed([p], given, process_group=transport)
    errors = []
    for step in range(config["steps"]):
        p.grad = torch.from_numpy(recording["grads"][rank, step].copy())
        optimizer.step()
        errors.append(float(np.abs(p.detach().numpy() - recording["params"][step]).max()))
    momentum = float(np.abs(optimizer.momentum(p).numpy() - recording["exp_avg"]).max())
    variance = float(np.abs(optimizer.state[p]["exp_avg_sq"].numpy() - recording["exp_avg_sq"]).max())
    return errors, momentum, variance


def test_replays_deepspeed_within_1e_5_at_all_20_steps():
    for wrapped in (True, False):
        for errors, momentum, variance in simulate(replay, 2, wrapped):
            print(f"largest parameter error over 20 steps: {max(errors):.2e} (limit 1e-5)")
            assert len(errors) == 20
            assert max(errors) <= 1e-5
            assert momentum <= 1e-6
            assert variance <= 1e-6


def replay_lamb(rank: int, transport: Transport) -> tuple[list[float], list[float], float, float]:
    recording = np.load(DATA / "deepspeed_lamb_w2_open.npz")
    config, shapes = json.loads(str(recording["config"])), json.loads(str(recording["shapes"]))
    keys = ("lr", "betas", "eps", "weight_decay", "freeze_step", "coeff_beta", "max_coeff", "min_coeff")
    keys += ("factor_max", "factor_min", "factor_threshold")
    splits = np.cumsum([np.prod(shape) for shape in shapes])[:-1]

    def parts(flat: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(p.copy()).view(s) for p, s in zip(np.split(flat, splits), shapes, strict=True)]

    params = [torch.nn.Parameter(p) for p in parts(recording["init"])]
    given = {"type": "OneBitLamb", "params": {k: config[k] for k in keys}}
    optimizer = OneBitLamb.from_deepspeed(params, given, process_group=transport)
    errors, coefficients = [], []
    for step in range(config["steps"]):
        for p, g in zip(params, parts(recording["grads"][rank, step]), strict=True):
            p.grad = g
        optimizer.step()
        x = torch.cat([p.detach().flatten() for p in params]).numpy()
        errors.append(float(np.abs(x - recording["params"][step]).max()))
        c = optimizer.stats(layers=True)["layers"]["coefficient"]
        coefficients.append(float(np.abs(c - recording["lamb_coeffs"][step]).max()))
    momentum = np.concatenate([optimizer.momentum(p).flatten().numpy() for p in params])
    variance = np.concatenate([optimizer.state[p]["exp_avg_sq"].flatten().numpy() for p in params])
    return (
        errors,
        coefficients,
        float(np.abs(momentum - recording["exp_avg"]).max()),
        float(np.abs(variance - recording["exp_avg_sq"]).max()),
    )


def test_replays_deepspeeds_lamb_and_its_coefficients():
    for errors, coefficients, momentum, variance in simulate(replay_lamb, 2):
        print(f"1-bit LAMB, largest parameter error over 20 steps: {max(errors):.2e} (limit 1e-5)")
        print(f"1-bit LAMB, largest coefficient error over 20 steps: {max(coefficients):.2e} (limit 1e-4)")
        assert len(errors) == len(coefficients) == 20
        assert max(errors) <= 1e-5
        assert max(coefficients) <= 1e-4
        assert momentum <= 1e-6
        assert variance <= 1e-6


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


def replay_zero_one(rank: int, transport: Transport, name: str) -> tuple[list[float], set[str], float, float]:
    recording = np.load(DATA / name)
    config = json.loads(str(recording["config"]))
    keys = ("lr", "betas", "eps", "weight_decay", "var_freeze_step", "var_update_scaler")
    keys += ("local_step_scaler", "local_step_clipper")
    p = torch.nn.Parameter(torch.from_numpy(recording["init"].copy()))
    given = {"type": "ZeroOneAdam", "params": {k: config[k] for k in keys}}
    optimizer = ZeroOneAdam.from_deepspeed([p], given, process_group=transport)
    errors, phases = [], set()
    for step in range(config["steps"]):
        p.grad = torch.from_numpy(recording["grads"][rank, step].copy())
        optimizer.step()
        phases.add(optimizer.phase)
        # Within a round each rank has parameters of its own; recorded are those of rank 0.
        if rank == 0 or optimizer.phase != "local":
            errors.append(float(np.abs(p.detach().numpy() - recording["params"][step]).max()))
    momentum = float(np.abs(optimizer.momentum(p).numpy() - recording["exp_avg"]).max())
    variance = float(np.abs(optimizer.state[p]["exp_avg_sq"].numpy() - recording["exp_avg_sq"]).max())
    return errors, phases, momentum if rank == 0 else 0.0, variance


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("deepspeed_zoadam_flat_w2_open.npz", {"uncompressed", "one-bit", "local"}),
        ("deepspeed_zoadam_nofreeze_flat_w2_open.npz", {"uncompressed", "one-bit"}),
    ],
)
def test_replays_deepspeeds_0_1_adam_within_1e_5_at_all_20_steps(name, phases):
    results = simulate(replay_zero_one, 2, name)
    for rank, (errors, seen, momentum, variance) in enumerate(results):
        print(f"0/1 Adam, {name}, rank {rank}: largest parameter error over {len(errors)} steps: {max(errors):.2e}")
        assert max(errors) <= 1e-5
        assert seen == phases
        assert momentum <= 1e-6
        assert variance <= 1e-6
    assert len(results[0][0]) == 20
