"""Trains what tests of checkpoints save, and compares runs with those that have been resumed."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from observe import fingerprint, observe, parameters, through_a_file
from optimizers import construct
from torch import nn
from torch.nn import Parameter

from fusedonebit import Faults, FusedOneBitWarning, OneBitAdam, dcp
from fusedonebit.checkpoint import KEY
from fusedonebit.comm import Transport
from fusedonebit.core.optimizer import DistributedOptimizer

SHAPES = [(33, 40), (7,), (1,), (), (0,), (1500,)]
STEPS = 16
COUNTS = ("phase", "step", "skipped_steps", "freeze_step", "rewarms", "vetoed_steps", "dead_tensors")
COUNTS += ("dead_coordinates",)


def make(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    params.append(Parameter(torch.randn(6, 5, 4, 3).to(dtype, memory_format=torch.channels_last)))
    params.append(Parameter(torch.randn(21, 8)[::2, ::3].to(dtype)))
    params.append(Parameter(torch.randn(9).to(dtype)))  # never has a gradient
    return params


def step_once(optimizer: torch.optim.Optimizer, rank: int, step: int, bad: tuple[int, ...] = (2, 10)) -> None:
    for i, p in enumerate(parameters(optimizer)[:-1]):
        generator = torch.Generator().manual_seed(1 + rank + 10 * step + 100_000 * i)
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    if step in bad and rank == 0:
        parameters(optimizer)[0].grad[0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        optimizer.step()


def resume(
    rank: int,
    transport: Transport | None,
    name: str,
    cut: int,
    dtype: torch.dtype,
    options: dict,
    bad: tuple[int, ...] = (2, 10),
) -> tuple[bool, bool, str]:
    """Trains straight through, and again from what was saved after ``cut`` steps; are parameters, and state, equal?"""
    straight = construct(name, make(dtype), lr=1e-2, process_group=transport, **options)
    prints = []
    for step in range(STEPS):
        if step == cut:
            params = [p.detach().clone() for p in parameters(straight)]
            saved, phase = through_a_file({"optimizer": straight.state_dict(), "params": params}), straight.phase
        step_once(straight, rank, step, bad)
        prints.append(fingerprint(parameters(straight)))

    fresh, again = make(dtype), []
    resumed = construct(name, fresh, lr=0.5, process_group=transport, **options)
    with torch.no_grad():
        for p, value in zip(fresh, saved["params"], strict=True):
            p.copy_(value)
    resumed.load_state_dict(saved["optimizer"])
    for step in range(cut, STEPS):
        step_once(resumed, rank, step, bad)
        again.append(fingerprint(fresh))
    states, told = ([look(each) for each in (straight, resumed)] for look in (observe, lambda each: each.stats()))
    same = all(np.array_equal(states[0][key], states[1][key]) for key in states[0])
    same &= all(told[0].get(key) == told[1].get(key) for key in COUNTS)
    return again == prints[cut:], same, phase


def saved_state(rank: int, world_size: int, name: str, dtype: torch.dtype, options: dict | None = None) -> dict:
    optimizer = construct(name, make(dtype), freeze_step=3, **options or {})
    for step in range(6):
        step_once(optimizer, rank, step)
    return through_a_file(optimizer.state_dict())


# ---------------------------------------------------------------- through folders


def everything(optimizer: DistributedOptimizer) -> tuple[str, str]:
    saved = optimizer.state_dict()
    tensors = [value for _, state in sorted(saved["state"].items()) for _, value in sorted(state.items())]
    groups = [sorted((k, v) for k, v in group.items() if k != KEY) for group in saved["param_groups"]]
    return fingerprint([*parameters(optimizer), *tensors]), repr((groups, optimizer.phase, optimizer.stats()["step"]))


def make_network() -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 5))
    return model, OneBitAdam(model.parameters(), lr=1e-2, freeze_step=2, faults=Faults(guard="off"))


def train_network(model: nn.Module, optimizer: DistributedOptimizer, rank: int, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def write_folder(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = make_network()
    train_network(model, optimizer, rank, 5)
    dcp.save(model, optimizer, folder)
