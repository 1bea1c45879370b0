"""0/1 Adam's rounds: what policies answer, what ranks have in common after them, and what momentum is made of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from observe import fingerprint, parameters
from optimizers import objects
from ranks import WORLD_SIZES, run_ranks, simulate
from torch.nn import Parameter
from zero_one_rounds import (
    EveryRound,
    Script,
    make,
    make_parameters,
    momenta,
    set_gradients,
    train,
)

from fusedonebit import FusedOneBitWarning, ZeroOneAdam, policies
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.deepspeed import DeepSpeedRounds, DeepSpeedVariance
from fusedonebit.optim.policies import Progress

ROUNDS = (0, 0, 1, 3, 1, 0, 2)


# ---------------------------------------------------------------- what ranks have in common


def follow(rank: int, transport: Transport, options: dict[str, Any]) -> list[tuple[str, str, str]]:
    optimizer = make(make_parameters(), ROUNDS, process_group=transport, **options)
    seen = []
    for step in range(18):
        train(optimizer, rank, 1, step)
        seen.append((optimizer.phase, fingerprint(parameters(optimizer)), fingerprint(momenta(optimizer))))
    return seen


@pytest.mark.long(but=1)
@pytest.mark.parametrize("options", [{}, {"precondition": False, "scale_scope": "global"}], ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_are_equal_after_each_round_and_differ_within(world_size, options):
    ranks = simulate(follow, world_size, options)
    assert [phase for phase, *_ in ranks[0]] == Script(ROUNDS).places(18)
    for of_ranks in zip(*ranks, strict=True):
        phases, prints, of_momenta = (set(values) for values in zip(*of_ranks, strict=True))
        assert len(phases) == 1
        assert len(prints) == (world_size if phases == {"local"} else 1)
        if phases != {"local"}:
            assert len(of_momenta) == 1


def test_one_rank_learns_alone():
    torch.manual_seed(0)
    x = torch.randn(256, 20)
    y = x @ torch.randn(20, 1)
    weight = Parameter(torch.zeros(20, 1))
    optimizer = ZeroOneAdam([weight], 3e-2, sync_policy=policies.DoublingRounds(after=32, scaler=16, most=8))
    losses = []
    for step in range(400):
        batch = torch.arange(32) + 32 * (step % 8)
        loss = (x[batch] @ weight - y[batch]).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    stats = optimizer.stats()
    print(f"one rank: loss {losses[0]:.3f} -> {losses[-1]:.5f}, {stats['rounds']} rounds, {stats['renewals']} renewals")
    assert losses[-1] < 0.01 * losses[0]
    assert stats["rounds"] < 250
    assert stats["bytes_total"] == 0


def adamw(rank: int, world_size: int) -> list[float]:
    """Renews the variance in every step; torch's AdamW takes averages."""
    torch.manual_seed(0)
    ours, theirs = make_parameters(), make_parameters()
    kwargs: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05}
    optimizer = ZeroOneAdam(
        ours,
        1e-2,
        variance_policy=EveryRound(),
        sync_policy=policies.EveryStep(),
        max_grad_norm=20.0,
        **objects(**kwargs),
    )
    reference = torch.optim.AdamW(theirs, 1e-2, **kwargs)
    off = []
    for step in range(40):
        for r in range(world_size):
            set_gradients(reference, r, step)
            for p in theirs:
                p.total = getattr(p, "total", 0.0) + p.grad / world_size
        for p in theirs:
            p.grad = p.total
            del p.total
        torch.nn.utils.clip_grad_norm_(theirs, 20.0)
        reference.step()
        train(optimizer, rank, 1, step)
        off.append(max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True)))
    assert optimizer.stats()["phase"] == "uncompressed"
    assert optimizer.stats()["renewals"] == 40
    assert optimizer.worker_error(ours[0]).count_nonzero() == 0
    return off


def test_where_every_round_renews_the_variance_it_is_adamw():
    for off in run_ranks(adamw, 2):
        print(f"from torch.optim.AdamW over {len(off)} steps: {max(off):.1e} (limit 2e-6)")
        assert max(off) <= 2e-6


# ---------------------------------------------------------------- weight decay


def decays(rank: int, transport: Transport, deepspeed: bool) -> tuple[list[float], list[float]]:
    """All gradients are 0 behind the renewals: momentum fades, then only decay is left."""
    torch.manual_seed(0)
    p = Parameter(torch.randn(200))
    if deepspeed:
        config = {
            "lr": 1e-2,
            "weight_decay": 0.1,
            "var_freeze_step": 2,
            "local_step_scaler": 3,
            "local_step_clipper": 4,
        }
        optimizer = ZeroOneAdam.from_deepspeed([p], config, transport)
    else:
        optimizer = make([p], (0, 0, *(1, 3, 2, 4) * 5), weight_decay=0.1, process_group=transport)
    start = p.detach().double()
    ratios, momentum = [], []
    for step in range(22):
        # A variance there must be, but no momentum: two opposite gradients.
        p.grad = (1.0 if step == 0 else -0.8) * torch.ones_like(p) if step < 2 else torch.zeros_like(p)
        before = p.detach().double()
        optimizer.step()
        if step < 2:
            with torch.no_grad():
                p.copy_(start)
            optimizer.algorithm.moments.exp_avg.zero_()
            continue
        ratios.append(float((p.detach().double() / before).mean()))
        momentum.append(float(optimizer.momentum(p).abs().max()))
    off = (p.detach().double() - start * (1 - 1e-2 * 0.1) ** 20).abs().max()
    return [float(off), *ratios], momentum


def test_weight_decay_is_none_of_the_momentum_and_deepspeeds_is():
    for (off, *ratios), momentum in SimulatedGroup(2).run(lambda r, t: decays(r, t, False)):
        print(f"decay by the exact product, off by {off:.1e} (limit 2e-6); momentum at most {max(momentum)}")
        assert off <= 2e-6
        assert max(momentum) == 0.0
        assert all(abs(ratio - (1 - 1e-3)) < 1e-6 for ratio in ratios)
    for _, momentum in SimulatedGroup(2).run(lambda r, t: decays(r, t, True)):
        print(f"DeepSpeed's: decay makes a momentum of {max(momentum):.1e}")
        assert max(momentum) > 1e-4


# ---------------------------------------------------------------- intervals


def sequences(policy: Any, rounds: Any, steps: int) -> tuple[list[int], list[int], list[int]]:
    """Steps (from 0) that renew, that synchronise in bits; and the rounds that renew."""
    renewing, bits, at, done = [], [], [], Progress(0, 0, 0, 0)
    while done.steps < steps:
        if policy.renews(done):
            renewing.append(done.steps)
            at.append(done.rounds)
            done = Progress(done.steps + 1, done.rounds + 1, done.renewals + 1, 0)
        else:
            k = rounds.steps(done)
            bits.append(done.steps + k - 1)
            done = Progress(done.steps + k, done.rounds + 1, done.renewals, done.since_renewal + 1)
    return renewing, bits, at


def places(rank: int, world_size: int, steps: int, bad: tuple[int, ...]) -> tuple[list[int], list[int], int]:
    variance = policies.DoublingVariance(scaler=2)
    rounds = policies.DoublingRounds(after=6, scaler=3, most=4)
    optimizer = make(make_parameters(), variance_policy=variance, sync_policy=rounds)
    phases = []
    for step in range(steps):
        set_gradients(optimizer, rank, step)
        if step in bad and rank == 1:
            parameters(optimizer)[0].grad[0, 0] = float("nan")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedOneBitWarning)
            optimizer.step()
        phases.append(optimizer.phase)
    renewing, bits = ([i for i, phase in enumerate(phases) if phase == kind] for kind in ("uncompressed", "one-bit"))
    return renewing, bits, optimizer.stats()["skipped_steps"]


def test_intervals_count_rounds_and_make_up_for_skipped_ones():
    """By hand: renewals 0, 1 at distance 1, then 2, 2, 4, 4, 8: rounds 0, 1, 2, 4, 6, 10, 14, 22.

    Rounds 0 to 5 are of 1 step; 6 to 8 would be of 2 steps, and 9 on of 4, but for those that renew. The bad steps
    skip rounds 1, 4, 10 (renewals) and 13 (calls 27 to 30), which are done once more, as long as before.
    """
    renewing = [0, 1, 2, 4, 6, 15, 28]
    bits = [3, 5, 8, 10, 14, 19, 23, 27, 32, 36, 40]
    expected = sequences(policies.DoublingVariance(scaler=2), policies.DoublingRounds(after=6, scaler=3, most=4), 38)
    print(f"T_v {expected[0]}, in rounds {expected[2]}; T_u {expected[1]}")
    assert expected[2] == [0, 1, 2, 4, 6, 10, 14]
    assert (expected[0], expected[1]) == (renewing, bits)
    for found in run_ranks(places, 2, 41, ()):
        assert found == (renewing, bits, 0)
    renewing = [0, 1, 2, 3, 5, 6, 8, 17, 18, 35]
    bits = [4, 7, 10, 12, 16, 22, 26, 30, 34, 39]
    for found in run_ranks(places, 2, 41, (1, 5, 17, 27)):
        assert found == (renewing, bits, 4)


def test_doubling_variance_stops():
    variance, rounds = policies.DoublingVariance(scaler=2, until=7), policies.EveryStep()
    assert sequences(variance, rounds, 30)[2] == [0, 1, 2, 4, 6]
    assert sequences(policies.DoublingVariance(scaler=100), rounds, 30)[2] == list(range(30))


def test_rounds_grow_up_to_the_longest():
    rounds = policies.DoublingRounds(after=2, scaler=2, most=8)
    lengths = [rounds.steps(Progress(0, n, 1, 0)) for n in range(12)]
    assert lengths == [1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 8, 8]
    assert policies.DoublingRounds(after=0, scaler=1, most=1).steps(Progress(0, 10**6, 1, 0)) == 1
    assert policies.DoublingRounds(after=0, scaler=1, most=16).steps(Progress(0, 10**6, 1, 0)) == 16


# ---------------------------------------------------------------- DeepSpeed's counters


def counters(
    steps: int, var_freeze_step: int, var_update_scaler: int, local_step_scaler: int, local_step_clipper: int
) -> list[str]:
    """DeepSpeed 0.19.6's zoadam.py, by what it counts: what each of its steps is."""
    var_interval = local_interval = 1
    var_counter = local_counter = 0
    freeze, found = False, []
    for step in range(1, steps + 1):
        if step == 1:
            kind = "first"  # only sets up its buffers, but goes on to count
        elif not freeze:
            kind = "uncompressed" if step % var_interval == 0 else "one-bit"
        else:
            kind = "one-bit" if step % local_interval == 0 else "local"
        found.append(kind)
        if step == 1:
            continue
        if not freeze:
            if step % var_interval == 0:
                var_counter += 1
                if var_counter == var_update_scaler:
                    var_counter, var_interval = 0, var_interval * 2
        else:
            local_counter += 1
            if local_counter == local_step_scaler:
                local_counter, local_interval = 0, min(local_step_clipper, local_interval * 2)
        if step > var_freeze_step:
            freeze = True
    return found


SETTINGS = {
    "var_freeze_step": st.integers(2, 60),
    "var_update_scaler": st.integers(1, 9),
    "local_step_scaler": st.integers(1, 12),
    "local_step_clipper": st.integers(1, 17),
}


@settings(max_examples=300)
@given(**SETTINGS)
@example(var_freeze_step=6, var_update_scaler=2, local_step_scaler=3, local_step_clipper=4)
def test_deepspeeds_policies_are_its_counters(
    var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper
):
    variance = DeepSpeedVariance(var_freeze_step, var_update_scaler)
    rounds = DeepSpeedRounds(var_freeze_step, local_step_scaler, local_step_clipper)
    renewing, bits, _ = sequences(variance, rounds, 150)
    kinds = ["local"] * 200
    for step in renewing:
        kinds[step] = "uncompressed"
    for step in bits:
        kinds[step] = "one-bit"
    expected = counters(150, var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)[1:]
    assert kinds[:149] == expected
