"""Shares what tests of checkpoint and others set up."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from observe import fingerprint, observe, parameters, through_a_file
from optimizers import construct
from torch.nn import Parameter

from fusedonebit import FusedOneBitWarning
from fusedonebit.comm import Transport

SHAPES = [(33, 40), (7,), (1,), (), (0,), (1500,)]

STEPS = 16


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
    """Trains straight through, and again from what was saved after ``cut`` steps."""
    straight = construct(name, make(dtype), lr=1e-2, process_group=transport, **options)
    prints = []
    for step in range(STEPS):
        if step == cut:
            params = [p.detach().clone() for p in parameters(straight)]
            saved, phase = through_a_file({"optimizer": straight.state_dict(), "params": params}), straight.phase
        step_once(straight, rank, step, bad)
        prints.append(fingerprint(parameters(straight)))

    fresh = make(dtype)
    resumed = construct(name, fresh, lr=0.5, process_group=transport, **options)
    with torch.no_grad():
        for p, value in zip(fresh, saved["params"], strict=True):
            p.copy_(value)
    resumed.load_state_dict(saved["optimizer"])
    again = []
    for step in range(cut, STEPS):
        step_once(resumed, rank, step, bad)
        again.append(fingerprint(fresh))
    states = observe(straight), observe(resumed)
    same_state = all(np.array_equal(states[0][key], states[1][key]) for key in states[0])
    same_counts = all(
        straight.stats().get(key) == resumed.stats().get(key)
        for key in (
            "phase",
            "step",
            "skipped_steps",
            "freeze_step",
            "rewarms",
            "vetoed_steps",
            "dead_tensors",
            "dead_coordinates",
        )
    )
    return again == prints[cut:], same_state and same_counts, phase


def saved_state(rank: int, world_size: int, name: str, dtype: torch.dtype, options: dict | None = None) -> dict:
    optimizer = construct(name, make(dtype), freeze_step=3, **options or {})
    for step in range(6):
        step_once(optimizer, rank, step)
    return through_a_file(optimizer.state_dict())
