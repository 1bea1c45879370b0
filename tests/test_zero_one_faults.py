"""0/1 Adam where a gradient, a rank or a loss scale goes wrong, in every place of a round."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from observe import caught, fingerprint, parameters
from ranks import run_ranks
from rounds import make, make_parameters, momenta, residuals, set_gradients, train, variances, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedonebit import (
    AbortedStepError,
    FusedOneBitWarning,
    NonFiniteGradientError,
    OutOfStepError,
    ZeroOneAdam,
    amp,
    ddp,
)
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.core.telemetry import HostMirror

ROUNDS = (0, 0, 1, 4, 0, 1, 1)
PLACES = {"local": 3, "last local": 5, "synchronising": 6, "renewing": 7, "alone": 8, "alone again": 9}
BEGINS = {"local": 3, "last local": 3, "synchronising": 3, "renewing": 7, "alone": 8, "alone again": 9}
LENGTH = {"local": 4, "last local": 4, "synchronising": 4, "renewing": 1, "alone": 1, "alone again": 1}
EACH_PLACE = pytest.mark.parametrize("place", PLACES)
BETA1, EPS = 0.8, 1e-8


def denominators(optimizer: ZeroOneAdam, renewals: int, share: float = 1e-3) -> np.ndarray:
    """What updates are divided by in rounds of bits."""
    found = []
    for v in variances(optimizer):
        v_hat = v.double() / (1 - 0.9**renewals)
        found.append((v_hat + share * v_hat.mean() + EPS**2).sqrt().reshape(-1))
    return torch.cat(found).numpy()


# ---------------------------------------------------------------- what is not finite


def bad_number(rank: int, world_size: int, place: str, nonfinite: str) -> dict[str, Any]:
    """A NaN on the last rank; what each worker's residual should have gained in the round, and did."""
    optimizer, begin, length = make(make_parameters(), ROUNDS, nonfinite=nonfinite), BEGINS[place], LENGTH[place]
    train(optimizer, rank, begin)
    values, variance = fingerprint(parameters(optimizer)), fingerprint(variances(optimizer))
    m, had = whole(momenta(optimizer)), whole(residuals(optimizer))  # which settles
    served = optimizer.algorithm.exchange.reducer.of_rank.server.numbers.clone()
    denom, due, outcome = denominators(optimizer, 2 if begin <= 7 else 3), torch.zeros_like(m), (None, "")
    kept, own = m.clone(), torch.from_numpy(denominators(optimizer, 2, 0.0) / denom)  # a renewal divides by its own
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(begin, begin + length):
            set_gradients(optimizer, rank, step)
            g = whole([p.grad for p in parameters(optimizer)])
            counts = torch.ones_like(g, dtype=torch.bool)
            last = step == begin + length - 1
            if rank == world_size - 1 and step == PLACES[place]:
                parameters(optimizer)[0].grad[0, 5] = float("nan")
                counts[5] = False
            outcome = caught(optimizer.step)
            assert outcome[0] is None or last
            m = torch.where(counts, BETA1 * m + (1 - BETA1) * g, BETA1 * m if last else m)
            due += torch.where(counts | last, m / denom, 0.0)
    gained, stats = whole(residuals(optimizer)) - had, optimizer.stats()
    settled = {
        "still": fingerprint(parameters(optimizer)) == values and fingerprint(variances(optimizer)) == variance,
        "servers": torch.equal(optimizer.algorithm.exchange.reducer.of_rank.server.numbers, served),
        "momentum": float((whole(momenta(optimizer)) - (kept * own if place == "renewing" else 0)).abs().max()),
        "lost": float((gained - (0 if place == "renewing" else due)).abs().max() / due.abs().max()),
        "counts": (stats["step"], stats["skipped_steps"]),
        "outcome": outcome,
        "warned": [str(w.message) for w in seen if issubclass(w.category, FusedOneBitWarning)],
    }
    train(optimizer, rank, 18 - begin, begin + length)  # the round once more, and up to the end of another one
    return settled | {"later": fingerprint([*parameters(optimizer), *momenta(optimizer)])}


@pytest.mark.long(but=1)
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@EACH_PLACE
def test_one_ranks_nonfinite_number_skips_a_round_without_loss(place, nonfinite):
    results = run_ranks(bad_number, 2, place, nonfinite, group_timeout=10)
    for seen in results:
        print(f"{place}, {nonfinite}: of the workers' updates lost {seen['lost']:.1e} (limit 3e-6)")
        assert seen["still"]
        assert seen["servers"]
        assert seen["momentum"] <= 2e-7
        assert seen["lost"] <= 3e-6
        assert seen["counts"] == (BEGINS[place] + LENGTH[place] - 1, 1)
        assert seen["later"] == results[0]["later"]
        if nonfinite == "raise":
            assert seen["outcome"][0] is NonFiniteGradientError
            assert seen["warned"] == []
        else:
            assert len(seen["warned"]) == 1
        assert "every rank skipped the step (1 so far)" in [*seen["warned"], seen["outcome"][1]][0]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("variance_floor", [0.0, 0.01])
@pytest.mark.parametrize("precondition", [True, False])
def test_until_a_renewal_was_not_skipped_nothing_moves(precondition, variance_floor, late):
    """There is no variance yet: steps of lr/eps would end everything. On CUDA skips are known one step ``late``."""
    options: dict[str, Any] = {"precondition": precondition, "variance_floor": variance_floor, "weight_decay": 0.0}
    optimizer = make(make_parameters(), (0, 1, 2, 1), **options)
    optimizer.frame.steps.outcomes._mirror = HostMirror(optimizer.frame.device, depth=late)
    before = [p.detach().clone() for p in parameters(optimizer)]
    phases = []
    for step in range(3 + late):
        set_gradients(optimizer, 0, step)
        if step < 3:
            parameters(optimizer)[0].grad[0, 0] = float("inf")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedOneBitWarning)
            optimizer.step()
        phases.append(optimizer.phase)
    moved = max(float((p.detach() - b).abs().max()) for p, b in zip(parameters(optimizer), before, strict=True))
    print(f"precondition {precondition}, floor {variance_floor}: moved {moved:.1e} before the first renewal")
    assert moved == 0
    for step in range(3 + late, 8):
        train(optimizer, 0, 1, step)
        phases.append(optimizer.phase)
    assert optimizer.stats()["skipped_steps"] == 3
    if late:  # rounds of bits, one skipped and one not, have begun before it was known that there is no variance
        assert phases == ["uncompressed", "one-bit"] * 2 + ["uncompressed", "local", "one-bit", "one-bit"]
    else:
        assert phases == ["uncompressed"] * 4 + ["one-bit", "local", "one-bit", "one-bit"]
    train(optimizer, 0, 6, 8)
    moved = max(float((p.detach() - b).abs().max()) for p, b in zip(parameters(optimizer), before, strict=True))
    assert moved > 0
    assert moved < 1 or variance_floor == 0, "a coordinate that a lone gradient has hardly seen"


# ---------------------------------------------------------------- loss scaling


def overflow(rank: int, world_size: int, place: str, attach: bool) -> dict[str, Any]:
    """An overflow on the last rank; with DDP gradients are averaged before they are unscaled."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer, model = make(net.parameters(), ROUNDS), net
    if attach:
        model = DistributedDataParallel(net)
        ddp.attach(model, optimizer)
    scaler, scales, prints, skipped = amp.GradScaler("cpu", 2.0**10, growth_interval=6), [], [], []
    for step in range(22):
        optimizer.zero_grad()
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1 + rank + 10 * step))
        scaler.scale(model(x).square().mean()).backward()
        if step == PLACES[place] and (rank == world_size - 1 or (attach and place == "renewing")):
            net[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        prints.append(fingerprint(parameters(optimizer)))
        skipped.append(optimizer.stats()["skipped_steps"])
    return {"scales": scales, "prints": prints, "skipped": skipped}


@pytest.mark.long(but=1)
@pytest.mark.parametrize("attach", [False, True], ids=["bare", "ddp"])
@EACH_PLACE
def test_one_ranks_overflow_lowers_the_scale_on_all_equally(place, attach):
    results = run_ranks(overflow, 2, place, attach, group_timeout=20)
    ends, end = [0, 1, 2, 6, 7, 8, 9, 10, 11, 12, 16, 17, 18, 19, 20, 21], BEGINS[place] + LENGTH[place] - 1
    skipped = PLACES[place] == end  # then the round is done once more; before it, a lone step is none
    if skipped:
        ends = [e for e in ends if e <= end] + [e + LENGTH[place] for e in ends if end <= e < 22 - LENGTH[place]]
    for seen in results:
        assert seen["scales"] == results[0]["scales"]
        assert [seen["prints"][end] for end in ends] == [results[0]["prints"][end] for end in ends]
    scales = results[0]["scales"]
    assert scales[end] == scales[end - 1] / 2, "where ranks meet"
    assert results[0]["skipped"][end] == skipped


def overflow_in_deepspeeds(rank: int, transport: Transport) -> tuple[list[str], list[float], str]:
    config = {"lr": 1e-2, "var_freeze_step": 3, "local_step_scaler": 3, "local_step_clipper": 4}
    optimizer = ZeroOneAdam.from_deepspeed(make_parameters(), config, transport)
    scaler, phases, scales = amp.GradScaler("cpu", 2.0**10, growth_interval=50), [], []
    for step in range(19):
        set_gradients(optimizer, rank, step)
        for p in parameters(optimizer):
            p.grad = scaler.scale(p.grad)
        if step == 11 and rank == 1:
            parameters(optimizer)[0].grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        phases.append(optimizer.phase)
        scales.append(scaler.get_scale())
    return phases, scales, fingerprint(parameters(optimizer))


def test_overflows_in_deepspeeds_rounds_lower_scales_at_the_end():
    (phases, scales, prints), (_, others, other) = SimulatedGroup(2).run(overflow_in_deepspeeds)
    assert phases[11] == "local"
    assert phases[-1] == "one-bit"
    end = phases.index("one-bit", 11)
    assert scales == others == [2.0**10] * end + [2.0**9] * (19 - end)
    assert prints == other


def parted(rank: int, world_size: int) -> tuple[type | None, str, str]:
    """Torch's own scaler: scales part, and DDP averages what they have multiplied."""
    torch.manual_seed(0)
    net = nn.Linear(8, 16)
    optimizer, model = make(net.parameters(), (0,)), DistributedDataParallel(net)
    ddp.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", 2.0 ** (10 + rank))
    scaler.scale(model(torch.randn(16, 8)).square().mean()).backward()
    return *caught(lambda: scaler.step(optimizer)), fingerprint(parameters(optimizer))


def test_loss_scales_that_differ_under_ddp_are_found_first():
    results = run_ranks(parted, 2, group_timeout=20)
    for kind, text, prints in results:
        assert kind is OutOfStepError
        assert "loss scale" in text
        assert prints == results[0][2]


# ---------------------------------------------------------------- one rank's own errors


def spoil(rank: int, world_size: int, place: str, case: str) -> dict[str, Any]:
    optimizer, begin, length = make(make_parameters(), ROUNDS), BEGINS[place], LENGTH[place]
    train(optimizer, rank, begin)
    values, outcomes = fingerprint(parameters(optimizer)), []
    for step in range(begin, begin + length):
        set_gradients(optimizer, rank, step)
        group = optimizer.param_groups[0]
        if rank == 1 and step == PLACES[place]:
            if case == "layout":
                parameters(optimizer)[0].grad = parameters(optimizer)[0].grad.to_sparse()
            elif case == "lr":
                group["lr"] = -1.0
            else:
                group[case] = {"weight_decay": 0.3, "betas": (0.7, 0.9)}[case]
        outcomes.append(caught(optimizer.step))
        group |= {"lr": 1e-2, "weight_decay": 1e-2, "betas": (0.8, 0.9)}
    still = fingerprint(parameters(optimizer)) == values
    train(optimizer, rank, 18 - begin, begin + length)  # the round once more, and up to the end of another one
    return {"outcomes": outcomes, "still": still, "later": fingerprint(parameters(optimizer))}


ABORTED = (AbortedStepError, "another rank could not take the step")
DIFFER = (OutOfStepError, "hyper-parameters (learning rate and the like)")
SPOILT: dict[str, list[tuple[type, str]]] = {
    "layout": [ABORTED, (TypeError, "the gradient of")],
    "lr": [ABORTED, (ValueError, "lr must be a finite number >= 0, got -1.0 in group 0")],
    "weight_decay": [DIFFER, DIFFER],
    "betas": [DIFFER, DIFFER],
}
"""What the other rank and this one hear of it."""


@pytest.mark.long(but=1)
@EACH_PLACE
def test_one_ranks_bad_gradient_or_setting_raises_on_all(place):
    for case, heard in SPOILT.items():
        results = run_ranks(spoil, 2, place, case, group_timeout=10)
        for seen, (error, text) in zip(results, heard, strict=True):
            assert [kind for kind, _ in seen["outcomes"]] == [None] * (LENGTH[place] - 1) + [error]
            assert text in seen["outcomes"][-1][1]
            assert seen["still"]
            assert seen["later"] == results[0]["later"]


def clipped(rank: int, transport: Transport, by_hand: bool) -> tuple[list[float], list[np.ndarray]]:
    optimizer = make(make_parameters(), ROUNDS, max_grad_norm=None if by_hand else 10.0, process_group=transport)
    told, seen = [], []
    for step in range(14):
        norms, totals = [], []
        for r in range(2):
            set_gradients(optimizer, r, step)
            for p in parameters(optimizer):
                p.grad *= 0.05 if step % 4 == 2 else 1.0 + r
            totals.append(whole([p.grad for p in parameters(optimizer)]))
            norms.append(float(totals[-1].norm()))
            if r == rank:
                mine = [p.grad.clone() for p in parameters(optimizer)]
        phase = ["uncompressed", "uncompressed", "one-bit", *["local"] * 3, "one-bit", "uncompressed"]
        kind = (phase + ["one-bit"] * 2 + phase)[step]
        average = float((sum(totals) / 2).norm())
        norm = {"uncompressed": average, "local": norms[rank], "one-bit": sum(norms) / 2}[kind]
        for p, g in zip(parameters(optimizer), mine, strict=True):
            p.grad = g * min(1.0, 10.0 / norm) if by_hand else g
        optimizer.step()
        assert optimizer.phase == kind
        told.append(norm if by_hand else optimizer.stats()["grad_norm"])
        seen.append(whole(parameters(optimizer)).numpy())
    return told, seen


def test_gradients_are_clipped_by_the_norm_that_is_known():
    group = SimulatedGroup(2)
    ours, theirs = (group.run(lambda r, t, way=way: clipped(r, t, way)) for way in (False, True))
    for (told, seen), (norms, expected) in zip(ours, theirs, strict=True):
        assert min(norms) < 10 < max(norms)
        np.testing.assert_allclose(told, norms, rtol=1e-5)
        worst = max(float(np.abs(a - b).max()) for a, b in zip(seen, expected, strict=True))
        print(f"from gradients clipped by hand: {worst:.1e} (limit 1e-6)")
        assert worst <= 1e-6
