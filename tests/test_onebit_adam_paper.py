"""The compression stage against Algorithm 1 in float64, each step from the optimizer's own state.

See ``teacher_forced`` for why, and for what may differ.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference_adam
import torch
from observe import flat, observe, parameters, per_tensor, served, whole_server_error
from optimizers import PAPER, objects
from ranks import simulate
from teacher_forced import Deviation

from fusedonebit import OneBitAdam
from fusedonebit.checkpoint import header_of
from fusedonebit.comm import Transport

SHAPES_AND_MAGNITUDES = [
    ((40, 30), 1.0),
    ((777,), 1e-4),
    ((1,), 1e2),
    ((3, 5, 7), 1e3),
    ((1030,), 1e-2),
    ((129, 9), 10.0),
    ((2048,), 1e-6),
]
FREEZE_STEP, STEPS, PRECONDITIONED_STEPS = 6, 50, 20
HYPER = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.5}


def gradient(rank: int, step: int, i: int) -> torch.Tensor:
    """Noise of each rank around a mean that drifts slowly, of the tensor's own magnitude."""
    shape, magnitude = SHAPES_AND_MAGNITUDES[i]
    drift = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * i + step // 9))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(7 + 1000 * i + 31 * step + 100_003 * rank))
    return (drift + noise) * magnitude


def denominators(v: np.ndarray) -> np.ndarray:
    return np.sqrt(v / (1 - HYPER["betas"][1] ** FREEZE_STEP)) + HYPER["eps"]


def observe_travelling(optimizer: OneBitAdam) -> dict[str, np.ndarray]:
    """All of the state, residuals and the last momentum in the unit in which they travel."""
    saved, params, state = optimizer.state_dict(), parameters(optimizer), observe(optimizer)
    states, travelled = per_tensor(optimizer, saved), []
    if optimizer.phase == "warmup":
        return state | {"travelled": state["m"]}
    for i, p in enumerate(params):
        bits = np.unpackbits(states[i]["exp_avg_bits"].numpy(), bitorder="little")[: p.numel()]
        scale = np.repeat(states[i]["exp_avg_scale"].numpy(), header_of(saved)["block_size"])
        travelled.append(np.where(bits, 1, -1) * scale[: p.numel()])
    state["travelled"] = np.concatenate(travelled)
    in_travel = {key: flat([states[i][key] for i in range(len(params))]) for key in ("worker_error", "server_error")}
    # What users see is in units of the momentum.
    denom = denominators(state["v"].astype(np.float64)) if optimizer.frame.options.numerics.precondition else 1.0
    np.testing.assert_allclose(state["m"], state["travelled"] * denom, rtol=5e-7)
    np.testing.assert_allclose(state["worker_error"], in_travel["worker_error"] * denom, rtol=5e-7)
    return state | in_travel


def record_steps(rank: int, transport: Transport, norm: str, precondition: bool, steps: int) -> dict:
    """Trains; returns all states, before the first compressed step and after each."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * magnitude) for shape, magnitude in SHAPES_AND_MAGNITUDES]
    options = PAPER | {"scale_norm": norm, "precondition": precondition, "variance_floor": 0.01 * precondition}
    optimizer = OneBitAdam(params, process_group=transport, **objects(freeze_step=FREEZE_STEP, **HYPER, **options))
    states, gradients = [], []
    for step in range(FREEZE_STEP + steps):
        for i, p in enumerate(params):
            p.grad = gradient(rank, step, i)
        if step >= FREEZE_STEP:
            gradients.append(flat([p.grad for p in params]))
            if not states:
                states.append(observe_travelling(optimizer))
        optimizer.step()
        if step >= FREEZE_STEP:
            states.append(observe_travelling(optimizer))
    assert optimizer.phase == "compression"
    return {"states": states, "gradients": gradients, "served": served(optimizer)}


def whole_state(runs: list[dict], t: int) -> reference_adam.State:
    """The state of all ranks before compressed step ``t`` as Algorithm 1 knows it."""
    here = [{k: a.astype(np.float64) for k, a in run["states"][t].items()} for run in runs]
    server_error = whole_server_error(here, [run["served"] for run in runs])
    worker_error = [state["worker_error"] for state in here]
    return reference_adam.State(here[0]["x"], here[0]["m"], here[0]["v"], worker_error, server_error)


def check_frozen(v: np.ndarray, frozen: np.ndarray, precondition: bool) -> None:
    """The warm-up's v, raised to 1/100 of its tensor's mean and where 1/denom is above 1000 times its median."""
    ends = np.cumsum([int(np.prod(shape)) for shape, _ in SHAPES_AND_MAGNITUDES])
    share = np.concatenate([np.full(part.size, 0.01 * part.mean()) for part in np.split(v, ends[:-1])])
    least = np.square(denominators(np.median(v)) / 1000 - HYPER["eps"]) * (1 - HYPER["betas"][1] ** FREEZE_STEP)
    expected = np.maximum(v, np.maximum(least, share)) if precondition else v
    for raised in (least > np.maximum(v, share), share > np.maximum(v, least)):
        assert raised.any(), "both must have something to do"
    np.testing.assert_array_equal(frozen[expected == v], v[expected == v])
    np.testing.assert_allclose(frozen, expected, rtol=1 / 64)  # the median is that of a histogram


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("norm", "precondition"), [("l1", False), ("l2", False), ("l1", True), ("contractive", True)])
def test_every_compressed_step_is_algorithm_1(norm, precondition):
    steps = PRECONDITIONED_STEPS if precondition else STEPS
    runs = simulate(record_steps, 4, norm, precondition, steps)
    parts = [run["served"] for run in runs]
    d = runs[0]["states"][0]["x"].size
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(d))
    deviation = Deviation()
    for t in range(steps):
        before, after = whole_state(runs, t), whole_state(runs, t + 1)
        travelled = runs[0]["states"][t + 1]["travelled"].astype(np.float64)
        unit = 1 / denominators(after.v) if precondition else np.ones(d)
        if t == 0:
            check_frozen(before.v, after.v, precondition)
            before = replace(before, v=after.v)
        else:
            # As exact as it is known to the optimizer, which has it in the unit in which it travels.
            before = replace(before, m=runs[0]["states"][t]["travelled"].astype(np.float64) / unit)
        gradients = [run["gradients"][t].astype(np.float64) for run in runs]
        spec = reference_adam.compressed_step(
            before,
            gradients,
            parts,
            lr=HYPER["lr"],
            beta1=HYPER["betas"][0],
            beta2=HYPER["betas"][1],
            eps=HYPER["eps"],
            weight_decay=HYPER["weight_decay"],
            step=FREEZE_STEP + t + 1,
            frozen_at=FREEZE_STEP,
            norm=norm,
            precondition=precondition,
        )
        np.testing.assert_array_equal(before.v, after.v)
        terms = [unit * (np.abs(before.m) + np.abs(g)) for g in gradients]
        agreed = deviation.compare_exchange(before, after, terms, parts, spec, travelled)
        deviation.compare_parameters(before, after, spec, agreed)
    deviation.check(norm + ", preconditioned" * precondition)
    moves = np.abs(runs[0]["states"][-1]["x"] - runs[0]["states"][0]["x"])
    assert (moves > 0).all()
