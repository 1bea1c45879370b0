"""The planner's steps: what the backward pass hides, what others send, what a measured step tells, the verdict."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from benchmarks.pages import PERFORMANCE
from fusedonebit.apps.plan import METHODS, TYPICAL, Network, methods
from fusedonebit.apps.plan.costs import powersgd_bytes, transformer_width
from fusedonebit.apps.plan.hidden_messages import DDP_FIRST, DDP_OTHERS, ddp, ours, whole
from fusedonebit.apps.plan.plan_tables import advice
from fusedonebit.apps.plan.report import LEAST_SPEEDUP, Plan, calibrate, crossing, step

SLOW = Network(12.5e9 / 8, gpus_per_node=1)


# ---------------------------------------------------------------- overlap


def timeline(sizes: list[float], messages: float, backward: float) -> float:
    """Seconds after the backward pass until the last of some buckets has been sent, one event after the other."""
    total, filled, free = sum(sizes), 0.0, 0.0
    for size in sizes:
        filled += size / total
        free = max(free, filled * backward) + messages * size / total
    return free - backward


@pytest.mark.parametrize("messages", [0.01, 0.3, 0.99, 1.0, 1.5, 30.0])
def test_what_is_exposed_is_what_a_timeline_of_buckets_says(messages):
    assert whole(1e9).exposed(messages, 1.0) == pytest.approx(messages)
    assert ours(1e9).exposed(messages, 1.0) == pytest.approx(timeline([1, 1, 1, 1], messages, 1.0))
    for parameters in (1e5, 1e6, 5e6, 25e6, 1e9):
        sizes, rest = [], 4 * parameters
        for largest in [DDP_FIRST, *[DDP_OTHERS] * 200]:
            sizes.append(min(largest, rest))
            rest -= sizes[-1]
        sizes = [size for size in sizes if size]
        buckets = ddp(parameters)
        assert buckets.count == len(sizes)
        # The last bucket is taken for a full one, which the timeline's need not be.
        bucket = (messages + 1) * max(sizes) / sum(sizes) if len(sizes) > 2 else 1e-9
        assert buckets.exposed(messages, 1.0) == pytest.approx(timeline(sizes, messages, 1.0), abs=bucket)


def test_no_overlap_exposes_all_and_sends_each_message_once():
    for method in METHODS.values():
        told = step(method, 1e9, 16, SLOW, compute=1.0, overlap=False)
        assert told.exposed == told.messages == method.cost(1e9, 16, SLOW).seconds
        assert told.seconds == 1 + told.exposed


def test_only_ddps_hooks_and_our_overlap_hide_anything():
    plan = Plan(10**9, 16, SLOW, compute=1.0)
    hidden = {name for name, told in plan.steps().items() if told.exposed < 0.999 * told.messages}
    assert hidden == {"fp32", "bf16", "int8", "powersgd", "flat-overlap"}
    assert "flat-overlap" not in replace(plan, overlap=False).steps()


def test_every_bucket_pays_for_its_hops():
    hops = Network(1e30, inside=1e30, gpus_per_node=1, between_latency=1e-3)
    one, told = METHODS["bf16"].cost(1e9, 16, hops).seconds, step(METHODS["bf16"], 1e9, 16, hops)
    assert told.messages == pytest.approx(ddp(1e9).count * one)
    assert told.sent == pytest.approx(METHODS["bf16"].cost(1e9, 16, hops).sent)


# ---------------------------------------------------------------- those we are compared with


def test_powersgd_sends_two_factors_of_a_transformers_matrices():
    assert transformer_width(1.2e9) == pytest.approx(2154, abs=1)
    layers = transformer_width(1.2e9) / 100
    assert 12 * transformer_width(1.2e9) ** 2 * layers == pytest.approx(1.2e9)
    matrices = 12 * layers
    factors = matrices * 4 * (2 * 4 * transformer_width(1.2e9) + transformer_width(1.2e9))
    assert powersgd_bytes(1.2e9, 4) == pytest.approx(factors)
    assert powersgd_bytes(1.2e9, 10**6) == 4 * 1.2e9  # no more than it compresses
    assert methods(powersgd_rank=8)["powersgd"].payload(1e9) / methods()["powersgd"].payload(1e9) == 17 / 9


def test_diloco_averages_once_in_h_steps_zero_one_adam_in_two():
    fp32, flat = (METHODS[name].cost(1e9, 64, TYPICAL) for name in ("fp32", "flat"))
    diloco = methods(diloco_steps=500)["diloco"]
    assert "500" in diloco.label
    assert diloco.cost(1e9, 64, TYPICAL).seconds == pytest.approx(fp32.seconds / 500)
    assert METHODS["zero-one"].cost(1e9, 64, TYPICAL).sent == pytest.approx(flat.sent / 2)


# ---------------------------------------------------------------- calibration

PARAMETERS, GPUS, ONE_GPU, FP32_STEP, BF16_STEP = 1_200_000_000, 8, 1.4, 6.4, 3.6
"""Measured on one node without NVLink; the bf16 hook's step is predicted, and nothing was fitted to it."""


@pytest.mark.parametrize("overlap", [True, False])
def test_a_bf16_step_is_predicted_from_an_fp32_step_and_one_gpu(overlap):
    network = calibrate(ONE_GPU, {"fp32": FP32_STEP}, PARAMETERS, GPUS, Network(math.inf), overlap)
    fp32, bf16 = (step(METHODS[name], PARAMETERS, GPUS, network, ONE_GPU, overlap) for name in ("fp32", "bf16"))
    error = bf16.seconds / BF16_STEP - 1
    print(
        f"overlap {overlap}: a GPU sends {network.inside / 1e9:.2f} GB/s; bf16 hook predicted {bf16.seconds:.2f} s, "
        f"measured {BF16_STEP} s ({error:+.1%}, limit 10%)"
    )
    assert f"{bf16.seconds:.2f} s" in PERFORMANCE.read_text()
    assert fp32.seconds == pytest.approx(FP32_STEP)
    assert abs(error) <= 0.10


def test_calibration_finds_the_rate_that_made_the_steps():
    random.seed(0)
    for gpus in (4, 64):
        for overlap in (True, False):
            rate, compute = 10 ** random.uniform(8.5, 9.5), random.uniform(0.1, 0.3)
            made = Network(rate, 1e11, 8) if gpus > 8 else Network(math.inf, rate, 8)
            steps = {name: step(METHODS[name], 1e9, gpus, made, compute, overlap).seconds for name in ("fp32", "bf16")}
            for timed in (steps, {"fp32": steps["fp32"]}, {"bf16": steps["bf16"]}):
                start = Network(math.inf, 1e11 if gpus > 8 else 200e9, 8)
                found = calibrate(compute, timed, 10**9, gpus, start, overlap)
                assert (found.between if gpus > 8 else found.inside) == pytest.approx(rate, rel=1e-6)


def test_two_steps_that_disagree_are_missed_by_as_much_each():
    timed = {"fp32": FP32_STEP, "bf16": BF16_STEP}
    network = calibrate(ONE_GPU, timed, PARAMETERS, GPUS, Network(math.inf))
    ratios = [step(METHODS[n], PARAMETERS, GPUS, network, ONE_GPU).seconds / t for n, t in timed.items()]
    assert ratios[0] * ratios[1] == pytest.approx(1)
    assert ratios[0] > 1.001  # between the two rates that each alone would give


def test_steps_that_no_rate_explains_are_an_error():
    inside = Network(math.inf, inside=1e8)  # that alone takes longer
    with pytest.raises(ValueError, match="shorter than any rate explains"):
        calibrate(1.4, {"fp32": 1.5}, PARAMETERS, 64, inside)
    with pytest.raises(ValueError, match="longer than any rate explains"):
        calibrate(1e-9, {"fp32": 1e9}, 1000, GPUS, Network(math.inf))


# ---------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("asked", "verdict"),
    [
        (Plan(340 * 10**6, 1, TYPICAL), "Don't compress: one GPU sends nothing"),
        (Plan(340 * 10**6, 8, TYPICAL, 10.0), "Don't compress: bf16 all-reduce (bf16_compress_hook) takes 10 s a step"),
        (Plan(10**9, 64, Network(400e9), 1.0), "Don't compress: bf16 all-reduce"),
        (Plan(340 * 10**6, 8, TYPICAL), "Don't compress where a step computes for more than 1"),
        (Plan(10, 16384, TYPICAL), "Don't compress: bf16 all-reduce (bf16_compress_hook) takes 364 us for messages"),
        (Plan(10**9, 64, Network(5e8), 1.0), "Compress: "),
    ],
)
def test_the_first_line_is_the_verdict(asked, verdict):
    assert advice(asked)[0].startswith(verdict), advice(asked)


def test_hiding_messages_can_turn_the_verdict():
    plan = Plan(10**9, 64, Network(12.5e9), 1.0)
    assert not plan.pays
    assert replace(plan, overlap=False).pays


@pytest.mark.parametrize("gpus", [4, 64])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_verdict_turns_at_the_rate_it_names(gpus, overlap):
    plan = Plan(10**9, gpus, Network(12.5e9), 1.0, overlap)
    rate = plan.pays_below()
    assert 1e7 < rate < 1e12
    for share, pays in ((0.99, True), (1.01, False)):
        assert replace(plan, network=plan.network.at_rate(gpus, share * rate)).pays is pays
    assert any(f"{rate / 1e9:,.4g} GB/s" in line for line in advice(plan))


def test_the_verdict_turns_at_the_compute_it_names():
    plan = Plan(340_000_000, 64, Network(12.5e9))
    enough = plan.pays_until()
    for share, pays in ((0.99, True), (1.01, False)):
        there = replace(plan, compute=share * enough)
        assert there.pays is pays is (there.speedup() >= LEAST_SPEEDUP)


def test_where_hops_are_all_no_rate_pays():
    plan = Plan(10, 16384, Network(400e9), 1e-6)
    assert plan.pays_below() == 0
    assert any("at no rate" in line for line in advice(plan))


def test_a_rival_that_is_faster_is_named():
    lines = advice(Plan(10**9, 64, Network(5e8), 1.0))
    assert any(line.startswith("Faster than all of ours: PowerSGD, rank 4 (powerSGD_hook)") for line in lines)
    assert not any("Faster" in line for line in advice(Plan(10**9, 64, Network(400e9), 1.0)))


def test_no_number_is_nan_or_negative_anywhere():
    for gpus in (1, 2, 3, 8, 64, 16384):
        for between in (1e3, 1e9, 1e13):
            for compute in (None, 1e-6, 1e3):
                plan = Plan(10**8, gpus, Network(between), compute)
                for told in plan.steps().values():
                    assert all(0 <= number < math.inf for number in told)
                assert 0 < plan.speedup() < math.inf
                assert not any(word in line for line in advice(plan) for word in ("nan", "inf"))


def test_a_crossing_that_is_not_there_is_0_or_inf():
    assert crossing(lambda value: value < 7, 1, 100) == pytest.approx(7)
    assert crossing(lambda value: False, 1, 100) == 0
    assert crossing(lambda value: True, 1, 100) == math.inf
