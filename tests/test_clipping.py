"""Clipping by the global norm: exact in the warm-up; in the compression stage one factor for all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference_adam
import torch
from freeze_runs import gradient
from freeze_runs import make as make_of
from observe import fingerprint, flat, observe, parameters, served, whole_server_error
from optimizers import ADAM_AND_LAMB, PAPER, by_name, construct, objects
from ranks import simulate
from teacher_forced import Deviation
from torch.nn import Parameter

from fusedonebit import Lamb, OneBitAdam, OneBitLion, amp
from fusedonebit.comm import Transport

SHAPES = ((33, 40), (7,), (300,))
EPS = 1e-6  # added to a norm that divides
LR, BETAS, ADAM_EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1


def make() -> list[Parameter]:
    return make_of(*SHAPES)


def local_gradients(rank: int, step: int, params: list[Parameter]) -> list[torch.Tensor]:
    """Of norms that differ by a factor of 10 or 100 from rank to rank and from step to step."""
    size = 10.0 ** ((rank + step) % 3 - 1)
    return [size * gradient(rank, step, p, i) for i, p in enumerate(params)]


def factor_of(norm: float, most: float) -> float:
    return min(1.0, most / (norm + EPS))


@pytest.mark.parametrize("kind", [by_name(OneBitAdam, freeze_step=3), by_name(OneBitLion)], ids=["adam", "lion"])
def test_norms_that_are_kept_stay_what_they_were(kind):
    p = Parameter(torch.zeros(300))
    optimizer = kind([p], max_grad_norm=1.0)
    kept = []
    for size in range(1, 7):
        p.grad = torch.full((300,), float(size))
        optimizer.step()
        kept.append(optimizer.last_grad_norm)
    assert torch.allclose(torch.stack(kept), 300**0.5 * torch.arange(1.0, 7.0))


# ---------------------------------------------------------------- the warm-up


def warm_up(rank: int, transport: Transport, most: float, scaled: bool) -> tuple[list[float], list[float], float, str]:
    """Against torch's own clipping and AdamW, on gradients averaged in float64."""
    ours = OneBitAdam(make(), LR, BETAS, ADAM_EPS, DECAY, freeze_step=100, max_grad_norm=most, process_group=transport)
    torchs = torch.optim.AdamW(make(), LR, BETAS, ADAM_EPS, DECAY)
    scaler = amp.GradScaler("cpu", 2.0**12, enabled=scaled)
    told, expected, worst = [], [], 0.0
    for step in range(40):
        theirs, mine = parameters(torchs), parameters(ours)
        every = [local_gradients(r, step, theirs) for r in range(transport.world_size)]
        for p, q, *grads in zip(mine, theirs, *every, strict=True):
            p.grad = scaler.scale(grads[rank].clone())
            q.grad = torch.stack(grads).double().mean(0).float()
        expected.append(float(torch.nn.utils.clip_grad_norm_(theirs, most)))
        torchs.step()
        scaler.step(ours)
        scaler.update()
        told.append(ours.stats()["grad_norm"])
        worst = max(worst, float(np.abs(flat(mine) - flat(theirs)).max()))
    return told, expected, worst, fingerprint(parameters(ours))


@pytest.mark.long(but=1)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled loss"])
def test_in_the_warmup_it_is_torchs_clipping_of_the_averages(scaled):
    results = simulate(warm_up, 2, 25.0, scaled)
    assert results[0] == results[1]
    told, expected, worst, _ = results[0]
    off = max(abs(a / b - 1) for a, b in zip(told, expected, strict=True))
    share = np.mean([norm > 25.0 for norm in expected])
    print(f"clipped {share:.0%} of steps; norm, relative: {off:.1e} (limit 1e-6); parameters: {worst:.1e} (limit 3e-6)")
    assert 0.2 < share < 0.8
    assert off <= 1e-6
    assert worst <= 3e-6  # 40 steps of 1e-2 on parameters of about 1


def lamb_by_hand(rank: int, transport: Transport) -> tuple[list[float], float]:
    """Lamb with clipping, and without on gradients that were clipped by hand."""
    clipped, plain = Lamb(make(), max_grad_norm=25.0, process_group=transport), Lamb(make(), process_group=transport)
    norms = []
    for step in range(12):
        for i, (p, q) in enumerate(zip(parameters(clipped), parameters(plain), strict=True)):
            every = [local_gradients(r, step, parameters(plain))[i] for r in range(transport.world_size)]
            p.grad, q.grad = every[rank].clone(), sum(every) / transport.world_size
        torch.nn.utils.clip_grad_norm_(parameters(plain), 25.0)
        for optimizer in (clipped, plain):
            optimizer.step()
        norms.append(clipped.stats()["grad_norm"])
    return norms, float(np.abs(flat(parameters(clipped)) - flat(parameters(plain))).max())


def test_lamb_clips_the_averaged_gradient():
    for norms, worst in simulate(lamb_by_hand, 2):
        assert min(norms) < 25.0 < max(norms)
        assert worst <= 1e-6


HYPER: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": ADAM_EPS, "weight_decay": DECAY}
FREEZE, STEPS = 10, 25


def record(rank: int, transport: Transport, most: float | None, scaled: bool) -> dict[str, Any]:
    """All states of the paper's algorithm, before the first compressed step and after each, and what was told."""
    optimizer = OneBitAdam(
        make(), max_grad_norm=most, process_group=transport, **objects(freeze_step=FREEZE, **HYPER, **PAPER)
    )
    scaler = amp.GradScaler("cpu", 2.0**10, enabled=scaled)
    told: dict[str, Any] = {"states": [], "norms": [], "prints": []}
    for step in range(FREEZE + STEPS):
        if step == FREEZE:
            told["states"].append(observe(optimizer))
        for p, g in zip(parameters(optimizer), local_gradients(rank, step, parameters(optimizer)), strict=True):
            p.grad = scaler.scale(g)
        scaler.step(optimizer)
        scaler.update()
        told["prints"].append(fingerprint(parameters(optimizer)))
        if step >= FREEZE:
            told["states"].append(observe(optimizer))
            told["norms"].append(optimizer.stats()["grad_norm"])
    return told | {"served": served(optimizer)}


def state_before(runs: list[dict], t: int) -> reference_adam.State:
    here = [{k: a.astype(np.float64) for k, a in run["states"][t].items()} for run in runs]
    server_error = whole_server_error(here, [run["served"] for run in runs])
    return reference_adam.State(
        here[0]["x"], here[0]["m"], here[0]["v"], [state["worker_error"] for state in here], server_error
    )


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("world_size", "scaled"), [(2, False), (2, True), (3, False)])
def test_clipped_steps_are_algorithm_1_with_one_factor_for_all(world_size, scaled):
    most = 40.0
    runs = simulate(record, world_size, most, scaled)
    assert all(run["prints"] == runs[0]["prints"] and run["norms"] == runs[0]["norms"] for run in runs)
    parts, deviation, off, clipped = [run["served"] for run in runs], Deviation(), 0.0, 0
    for t in range(STEPS):
        before, after = state_before(runs, t), state_before(runs, t + 1)
        local = [flat(local_gradients(r, FREEZE + t, make())).astype(float) for r in range(world_size)]
        mean_norm = float(np.mean([np.linalg.norm(g) for g in local]))
        assert np.linalg.norm(np.mean(local, 0)) <= mean_norm
        off = max(off, abs(runs[0]["norms"][t] / mean_norm - 1))
        clipped += mean_norm > most
        gradients = [factor_of(mean_norm, most) * g for g in local]
        named = dict(zip(("beta1", "beta2"), BETAS, strict=True), lr=LR, eps=ADAM_EPS, weight_decay=DECAY, norm="l2")
        spec = reference_adam.compressed_step(before, gradients, parts, step=FREEZE + t + 1, frozen_at=FREEZE, **named)
        terms = [np.abs(before.m) + np.abs(g) for g in gradients]
        agreed = deviation.compare_exchange(before, after, terms, parts, spec, after.m)
        deviation.compare_parameters(before, after, spec, agreed)
    print(f"{world_size} ranks: {clipped} of {STEPS} steps clipped; mean norm, relative: {off:.1e} (limit 1e-6)")
    assert 0 < clipped < STEPS or world_size == 3  # of three ranks all three sizes are there in every step
    assert off <= 1e-6
    deviation.check("clipped" + ", scaled loss" * scaled)


# ---------------------------------------------------------------- what it costs, and what it does not change


def train(rank: int, transport: Transport, name: str, most: float | None, nan_at: tuple[int, ...]) -> dict[str, Any]:
    options = {} if name == "lamb" else {"guard": "off"}
    optimizer = construct(name, make(), LR, freeze_step=8, max_grad_norm=most, **options, process_group=transport)
    told: dict[str, Any] = {"prints": [], "collectives": [], "bytes": [], "norms": []}
    for step in range(20):
        params = parameters(optimizer)
        for p, g in zip(params, local_gradients(rank, step, params), strict=True):
            p.grad = g
        if rank == 1 and step in nan_at:
            params[1].grad[3] = float("nan")
        if rank == 0 and step in (5, 15):
            params[0].grad = None
        if rank == 1 and step in (6, 16):
            optimizer.zero_grad()
        optimizer.step()
        stats = optimizer.stats()
        told["prints"].append(fingerprint(params))
        told["collectives"].append(stats["collectives_step"])
        told["bytes"].append(stats["bytes_step"])
        told["norms"].append(stats["grad_norm"])
    return told | {"skipped": optimizer.stats()["skipped_steps"]}


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb", "lamb"])
def test_a_limit_never_reached_changes_no_bit_nonfinite_or_not(name):
    nan_at = (3, 12, 13)
    without, limited = (simulate(train, 2, name, most, nan_at) for most in (None, 1e9))
    for a, b in zip(without, limited, strict=True):
        assert a["prints"] == b["prints"] == without[0]["prints"]
        assert a["skipped"] == b["skipped"] == 3
        assert a["norms"] == [None] * 20
        assert all(0 < norm < 1e4 for norm in b["norms"])  # also of a step with a NaN: that of the other elements
        for step in nan_at:
            assert b["prints"][step] == b["prints"][step - 1]


@pytest.mark.long(but=1)
@ADAM_AND_LAMB
def test_only_a_limit_costs_a_third_collective(name):
    without, limited = (simulate(train, 2, name, most, ()) for most in (None, 30.0))
    assert without[0]["collectives"] == [1] * 8 + [2] * 12
    assert limited[0]["collectives"] == [1] * 8 + [3] * 12
    assert [b - a for a, b in zip(without[0]["bytes"], limited[0]["bytes"], strict=True)] == [0] * 8 + [8] * 12
    assert limited[0]["prints"] == limited[1]["prints"] != without[0]["prints"]


def test_gradients_of_16_bits_have_a_norm_in_float32():
    p, q = (Parameter(torch.zeros(4096, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16))
    optimizer = OneBitAdam([p, q], freeze_step=1, max_grad_norm=1.0)
    for _ in range(2):
        p.grad, q.grad = (torch.full_like(x, 1024.0) for x in (p, q))  # float16 ends at 65504
        optimizer.step()
        assert optimizer.stats()["grad_norm"] == pytest.approx(1024 * 8192**0.5, rel=1e-6)
    assert optimizer.phase == "compression"


@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb", "lamb"])
@pytest.mark.parametrize("most", [0, 0.0, -1, float("nan"), float("inf"), "1", True])
def test_a_limit_that_makes_no_sense_is_refused(most, name):
    with pytest.raises(ValueError, match=f"max_grad_norm must be a finite number > 0 or None, got {most!r}"):
        construct(name, make(), freeze_step=1, max_grad_norm=most)
