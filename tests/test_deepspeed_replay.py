"""DeepSpeed 0.19.6's own trajectory, step by step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from ranks import run_ranks

from fusedonebit import OneBitAdam

RECORDING = Path(__file__).parent / "data" / "deepspeed_adam_flat_w2_open.npz"


def replay(rank: int, world_size: int, wrapped: bool) -> tuple[list[float], float, float]:
    recording = np.load(RECORDING)
    config = json.loads(str(recording["config"]))
    params = {key: config[key] for key in ("lr", "betas", "eps", "weight_decay", "freeze_step")}
    p = torch.nn.Parameter(torch.from_numpy(recording["init"].copy()))
    optimizer = OneBitAdam.from_deepspeed([p], {"type": "OneBitAdam", "params": params} if wrapped else params)
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
        for errors, momentum, variance in run_ranks(replay, 2, wrapped):
            print(f"largest parameter error over 20 steps: {max(errors):.2e} (limit 1e-5)")
            assert len(errors) == 20
            assert max(errors) <= 1e-5
            assert momentum <= 1e-6
            assert variance <= 1e-6
