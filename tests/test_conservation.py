"""What was compressed away is never lost: skips, dropped elements and aborted steps included.

With m the momentum, e the workers' residuals, E the servers', after every step

    m_t + E_t + mean(e_t) = beta1 * m_{t-1} + (1 - beta1) * mean(g_t) + E_{t-1} + mean(e_{t-1})

up to rounding, where g_t counts only what was finite; all in units of the momentum, also where it
is scaled before it is compressed, and of each element relative to its own terms, so that one that is loud costs
quiet tensors nothing but their rounding. A skipped step leaves alone what 1-bit LAMB rebuilds gradients from.
Where no rank has a gradient, no term changes at all.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from conservation import BETA2, SKIPPING, WARMUP, imbalance, look, set_gradients
from hypothesis import example, given, settings
from hypothesis import strategies as st
from observe import observe, parameters, served
from optimizers import ADAM_AND_LAMB, LAMBS, LIVING, UNGUARDED, construct
from ranks import simulate
from torch.nn import Parameter

from fusedonebit import AbortedStepError
from fusedonebit.comm import Transport
from fusedonebit.core.optimizer import DistributedOptimizer

EVENTS = ("fine", "nan", "inf", "many nan", "none", "zero", "large", "broken", "loud", "too large")
NOTHING = ("none", "none")
"""No rank has a gradient of anything: all is left alone, but for what the freeze makes anew."""
REBUILDING = ("exp_avg_sq_fresh", "exp_avg_last_bits", "exp_avg_last_scale", "layer", "unit", "started")
"""What 1-bit LAMB keeps besides; equal on all ranks."""

Schedule = list[tuple[str, str]]


def follow(rank: int, transport: Transport, name: str, schedule: Schedule, beta1: float, options: dict) -> dict:
    """Trains along a schedule of events by rank; records everything before and after each step."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in ((700,), (9, 13), (1,))]
    optimizer = construct(
        name, params, betas=(beta1, BETA2), freeze_step=WARMUP, **UNGUARDED, **options, process_group=transport
    )
    for step in range(WARMUP):
        set_gradients(params, rank, step, "fine")
        optimizer.step()
    states, gradients, updates = [look(optimizer)], [], []
    for step, events in enumerate(schedule):
        gradients.append(set_gradients(params, rank, WARMUP + step, events[rank]))
        try:
            optimizer.step()
        except (AbortedStepError, TypeError):
            assert "broken" in events
        states.append(look(optimizer))
        updates.append(optimizer.stats()["step"])
    assert [p.shape for p in parameters(optimizer)] == [p.shape for p in params]
    return {"states": states, "gradients": gradients, "updates": updates, "served": served(optimizer)}


def check(name: str, schedule: Schedule, beta1: float, options: dict) -> list[dict]:
    """Runs a schedule on two ranks, checks every step, and returns what the ranks recorded."""
    runs = simulate(follow, 2, name, schedule, beta1, options)
    updates, worst = WARMUP, 0.0
    for t, events in enumerate(schedule):
        before, after = (runs[0]["states"][k] for k in (t, t + 1))
        if SKIPPING & set(events):
            np.testing.assert_array_equal(before["x"], after["x"])
        else:
            updates += 1
            assert (before["x"] != after["x"]).any() == (events != NOTHING)
        assert [run["updates"][t] for run in runs] == [updates, updates]
        for key in ("x", "m", "v", *REBUILDING):
            np.testing.assert_array_equal(runs[0]["states"][t + 1][key], runs[1]["states"][t + 1][key])
        renewed = (before["v"] != after["v"]).any()
        if t and events == NOTHING and not renewed:
            starts = (before["started"] != after["started"]).any()
            for key in set(before).difference(REBUILDING if starts else ()):
                for run in runs:
                    np.testing.assert_array_equal(run["states"][t][key], run["states"][t + 1][key], err_msg=key)
        else:  # a freeze, or a renewal, turns the momentum into residual, with or without gradients
            worst = np.maximum(worst, imbalance(runs, t, beta1))  # a NaN stays
    print(f"{name}, {len(schedule)} steps: imbalance, of the terms: {worst:.1e} (limit 3e-7)")
    assert worst <= 3e-7
    return runs


BETAS1 = st.sampled_from([0.0, 0.5, 0.9])
SCHEDULES = st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(EVENTS)), min_size=1, max_size=8)
OPTIONS = {
    "scale_norm": st.sampled_from(["l1", "l2", "contractive"]),
    "scale_scope": st.sampled_from(["global", "layer", "block"]),
    "block_size": st.sampled_from([None, 1024, 128]),
    "ternary": st.booleans(),
}
PLAIN = {"precondition": False}
SKIPS_FIRST = [("nan", "fine"), ("fine", "fine"), ("inf", "many nan"), ("fine", "fine")]
SKIPS_LATER = [("fine", "fine"), ("broken", "fine"), ("fine", "nan"), ("none", "large")]
RENEWALS = [("fine", "fine")] * 30
LOUD_ONES = [("fine", "fine"), ("louder", "nan"), ("louder", "fine"), *[("fine", "fine")] * 3, ("too large", "loud")]
LEFT_ALONE = [("fine", "fine"), NOTHING, ("fine", "large"), NOTHING]
LEFT_ALONE_FIRST = [NOTHING, ("fine", "fine"), ("nan", "none"), NOTHING, ("zero", "none")]
LEFT_ALONE_LATE = [("nan", "fine"), NOTHING, ("fine", "fine"), ("fine", "fine")]


@settings(max_examples=25)
@given(schedule=SCHEDULES, beta1=BETAS1, options=st.fixed_dictionaries(OPTIONS | {"precondition": st.booleans()}))
@example(schedule=SKIPS_FIRST, beta1=0.9, options={})
@example(schedule=SKIPS_LATER, beta1=0.9, options={})
@example(schedule=SKIPS_FIRST, beta1=0.9, options=PLAIN)
@example(schedule=SKIPS_LATER, beta1=0.9, options=PLAIN | {"ternary": True})
@example(schedule=LEFT_ALONE, beta1=0.9, options={})
@example(schedule=LEFT_ALONE_FIRST, beta1=0.9, options=PLAIN)
@example(schedule=LOUD_ONES, beta1=0.9, options={})
@example(schedule=LOUD_ONES, beta1=0.9, options={"scale_scope": "global"})
@example(schedule=LOUD_ONES, beta1=0.9, options=PLAIN | {"scale_norm": "l2", "scale_scope": "global"})
def test_nothing_that_was_compressed_away_is_lost(schedule, beta1, options):
    check("onebit-adam", schedule, beta1, options)


@settings(max_examples=15)
@given(name=st.sampled_from(LIVING), schedule=SCHEDULES, beta1=BETAS1, options=st.fixed_dictionaries(OPTIONS))
@example(name=LIVING[0], schedule=SKIPS_FIRST, beta1=0.9, options={})
@example(name=LIVING[0], schedule=SKIPS_LATER, beta1=0.9, options={})
@example(name=LIVING[0], schedule=LEFT_ALONE, beta1=0.9, options={"ternary": True})
@example(name=LIVING[0], schedule=LEFT_ALONE_FIRST, beta1=0.9, options={})
@example(name=LIVING[0], schedule=RENEWALS, beta1=0.9, options={})
@example(name=LIVING[1], schedule=RENEWALS, beta1=0.9, options={})
@example(name=LIVING[1], schedule=SKIPS_LATER, beta1=0.9, options={})
@example(name=LIVING[1], schedule=LEFT_ALONE, beta1=0.9, options={})
def test_renewals_of_a_living_variance_lose_nothing_either(name, schedule, beta1, options):
    runs = check(name, schedule, beta1, options)
    if schedule is RENEWALS:
        variances = [state["v"] for state in runs[0]["states"][1:]]
        renewed = [t for t, (a, b) in enumerate(pairwise(variances), 1) if (a != b).any()]
        assert renewed == [*range(1, 15), 16, 18, 20, 22, 25, 28], renewed


@pytest.mark.long
@settings(max_examples=20)
@given(
    name=st.sampled_from(["onebit-lamb", "onebit-lamb", "onebit-lamb-frozen"]),
    schedule=SCHEDULES,
    beta1=BETAS1,
    options=st.fixed_dictionaries(OPTIONS | {"variant": st.sampled_from(["paper", "deepspeed"])}),
    unit=st.sampled_from([{"precondition": True}, PLAIN, PLAIN | {"momentum_scaling": False}]),
)
@example(name="onebit-lamb", schedule=SKIPS_FIRST, beta1=0.9, options={}, unit=PLAIN)
@example(name="onebit-lamb", schedule=SKIPS_LATER, beta1=0.9, options={}, unit=PLAIN)
@example(name="onebit-lamb-frozen", schedule=SKIPS_FIRST, beta1=0.9, options={}, unit=PLAIN)
@example(name="onebit-lamb", schedule=SKIPS_LATER, beta1=0.9, options={}, unit=PLAIN | {"momentum_scaling": False})
@example(name="onebit-lamb", schedule=SKIPS_FIRST, beta1=0.9, options={}, unit={"precondition": True})
@example(name="onebit-lamb", schedule=SKIPS_LATER, beta1=0.9, options={"ternary": True}, unit=PLAIN)
@example(name="onebit-lamb", schedule=LEFT_ALONE, beta1=0.9, options={}, unit=PLAIN)
@example(name="onebit-lamb", schedule=LEFT_ALONE_FIRST, beta1=0.9, options={}, unit=PLAIN)
@example(name="onebit-lamb", schedule=LEFT_ALONE_LATE, beta1=0.9, options={}, unit={"precondition": True})
def test_lamb_loses_nothing_and_rebuilds_from_the_last_momentum(name, schedule, beta1, options, unit):
    assert name in LAMBS
    runs = check(name, schedule, beta1, options | unit)
    states = runs[0]["states"]
    scaled = unit == PLAIN
    assert all((state["unit"].size > 0) == scaled for state in states[1:])
    assert not scaled or np.ptp(states[1]["unit"]) > 1, "all units alike would hide a wrong one"
    applied, worst = states[0]["m"].astype(float), 0.0
    for t, events in enumerate(schedule):
        before, after = states[t], states[t + 1]
        if SKIPPING & set(events):
            for key in REBUILDING if t else ():
                np.testing.assert_array_equal(before[key], after[key])
            assert t or not after["started"].any()
            continue
        if name == "onebit-lamb":
            assert after["started"].all()
            started = t > 0 and before["started"].all()
            last = before["exp_avg_sq_fresh"] if started else after["v"]
            if events == NOTHING:
                np.testing.assert_array_equal(after["exp_avg_sq_fresh"], last)
                applied = applied * started  # none in bits yet: the next rebuilt gradient holds the whole momentum
                continue
            g = (after["m"] - beta1 * applied) / (1 - beta1)
            fresh = BETA2 * last.astype(float) + (1 - BETA2) * g * g
            terms = (np.abs(after["m"]) + beta1 * np.abs(applied)) / (1 - beta1)
            size = BETA2 * last.astype(float) + (1 - BETA2) * terms**2
            error = np.abs(after["exp_avg_sq_fresh"] - fresh)[size > 0] / size[size > 0]
            worst = np.maximum(worst, error.max())
        applied = after["m"].astype(float)
    print(f"{name}: fresh variance, deviation of the terms: {worst:.1e} (limit 1e-6)")
    assert worst <= 1e-6


@ADAM_AND_LAMB
def test_a_skipped_step_before_the_freeze_changes_nothing_at_all(name):
    for before, after, skipped in simulate(skip_in_the_warmup, 2, name):
        for key, value in before.items():
            np.testing.assert_array_equal(value, after[key])
        assert skipped == 1


def skip_in_the_warmup(rank: int, transport: Transport, name: str) -> tuple[dict, dict, int]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(700))]
    optimizer: DistributedOptimizer = construct(name, params, freeze_step=100, process_group=transport)
    set_gradients(params, rank, 0, "fine")
    optimizer.step()
    before = observe(optimizer)
    set_gradients(params, rank, 1, "nan" if rank == 1 else "large")
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 1
    return before, observe(optimizer), optimizer.stats()["skipped_steps"]
