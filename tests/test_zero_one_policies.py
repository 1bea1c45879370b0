"""0/1 Adam's rounds: what policies answer, also users' own, what ranks have in common then, and what momentum is."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from observe import caught, fingerprint, parameters
from optimizers import objects
from ranks import WORLD_SIZES, run_ranks, simulate
from rounds import EveryRound, Script, make, make_parameters, momenta, set_gradients, step_once, train
from torch.nn import Parameter

from fusedonebit import DisagreementError, ZeroOneAdam, policies
from fusedonebit.comm import Transport
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


def adamw(rank: int, world_size: int) -> list[float]:
    """Renews the variance in every step; torch's AdamW takes averages."""
    torch.manual_seed(0)
    ours, theirs = make_parameters(), make_parameters()
    kwargs: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05}
    rounds: dict[str, Any] = {"variance_policy": EveryRound(), "sync_policy": policies.EveryStep()}
    optimizer = ZeroOneAdam(ours, 1e-2, max_grad_norm=20.0, **rounds, **objects(**kwargs))
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
        step_once(optimizer, rank, step, bad)
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


# ---------------------------------------------------------------- policies of one's own


class Mine:
    """Has no ``__repr__`` of its own, and differs by rank where it is told to."""

    def __init__(self, renewals: Any = lambda done: done.rounds < 2, lengths: Any = lambda done: 2) -> None:
        self.renewals, self.lengths = renewals, lengths

    def renews(self, done: Progress) -> Any:
        return self.renewals(done)

    def steps(self, done: Progress) -> Any:
        return self.lengths(done)


def with_mine(rank: int, world_size: int) -> tuple[list[str], str]:
    mine = Mine()
    optimizer = make(make_parameters(), variance_policy=mine, sync_policy=mine)
    phases = []
    for step in range(8):
        train(optimizer, rank, 1, step)
        phases.append(optimizer.phase)
    return phases, repr(optimizer)


def test_any_object_with_the_method_is_a_policy():
    for phases, text in run_ranks(with_mine, 2):
        assert phases == ["uncompressed"] * 2 + ["local", "one-bit"] * 3
        assert "variance: test_zero_one_policies.Mine\nrounds: test_zero_one_policies.Mine\n" in text


def disagree(rank: int, world_size: int, case: str) -> tuple[int, type | None, str, bool, float]:
    odd = rank == world_size - 1
    answers: dict[str, tuple[Any, Any]] = {
        "renews at first": (lambda done: done.rounds < 1 or (odd and done.rounds == 1), lambda done: 1),
        "renews later": (lambda done: done.rounds < 2 or (odd and done.rounds == 5), lambda done: 2),
        "renews much later": (lambda done: done.rounds < 2 or (odd and done.rounds == 70), lambda done: 1),
        "length": (lambda done: done.rounds < 2, lambda done: 3 if odd and done.rounds > 3 else 2),
        "raises": (lambda done: done.rounds < 2, lambda done: 1 // (0 if odd and done.rounds == 4 else 1)),
        "zero": (lambda done: done.rounds < 2, lambda done: 0 if odd and done.rounds == 4 else 1),
    }
    mine = Mine(*answers[case])
    optimizer = make([Parameter(torch.ones(300))], variance_policy=mine, sync_policy=mine)
    begin, outcome, step = time.monotonic(), (None, ""), 0
    while outcome[0] is None and step < 100:
        set_gradients(optimizer, rank, step)
        outcome = caught(optimizer.step)
        step += 1
    equal = fingerprint(parameters(optimizer))
    again = caught(optimizer.step)  # and it stays so
    return step, *outcome, again[0] is outcome[0], time.monotonic() - begin, equal


@pytest.mark.long(but=3)
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("renews at first", "round 1 is a synchronisation after 1 steps on rank 0 but a renewal on rank 1"),
        ("renews later", "ranks differ: round 5 is a synchronisation after 2 steps on rank 0 but a renewal on rank 1"),
        ("renews much later", "round 70 is a synchronisation after 1 steps on rank 0 but a renewal on rank 1"),
        ("length", "is a synchronisation after 2 steps on rank 0 but a synchronisation after 3 steps on rank 1"),
        ("raises", "round 4 is a synchronisation after 1 steps on rank 0 but nothing more on rank 1"),
        ("zero", "round 4 is a synchronisation after 1 steps on rank 0 but nothing more on rank 1"),
    ],
)
def test_policies_that_answer_differently_raise_alike_on_all(case, text):
    results = run_ranks(disagree, 2, case, group_timeout=10)
    for step, kind, message, again, seconds, equal in results:
        assert kind is DisagreementError
        assert text in message
        assert "policies must answer alike on all ranks" in message
        assert again
        assert seconds < 8
        assert (step, equal) == (results[0][0], results[0][5])


BAD: list[tuple[str, Any, type, str]] = [
    ("sync_policy", 0, ValueError, "sync_policy must answer with an int >= 1, got 0 for Progress(steps=2, rounds=2,"),
    ("sync_policy", None, ValueError, "sync_policy must answer with an int >= 1, got None for Progress("),
    ("sync_policy", True, ValueError, "sync_policy must answer with an int >= 1, got True for Progress("),
    ("variance_policy", None, ValueError, "variance_policy must answer with True or False, got None for Progress("),
    ("variance_policy", 1, ValueError, "variance_policy must answer with True or False, got 1 for Progress("),
]


@pytest.mark.parametrize(("which", "answer", "kind", "text"), BAD, ids=str)
def test_an_answer_that_is_none_is_named_and_nothing_moves(which, answer, kind, text):
    def bad(done: Progress) -> Any:
        return answer if done.rounds == 2 else which == "variance_policy" and done.rounds < 2

    mine = Mine(bad, lambda done: 1) if which == "variance_policy" else Mine(lengths=lambda done: answer)
    optimizer = make(make_parameters(), variance_policy=mine, sync_policy=mine)
    train(optimizer, 0, 2)
    before = fingerprint(parameters(optimizer))
    set_gradients(optimizer, 0, 2)
    for _ in range(2):
        found = caught(optimizer.step)
        assert found[0] is kind
        assert text in found[1]
    assert fingerprint(parameters(optimizer)) == before
    assert optimizer.stats()["step"] == 2


def test_a_policy_that_never_renews_is_told_at_the_first_step():
    mine = Mine(lambda done: False)
    optimizer = make(make_parameters(), variance_policy=mine, sync_policy=mine)
    kind, text = caught(lambda: train(optimizer, 0, 1))
    assert kind is RuntimeError
    assert "variance_policy must renew the variance in the first round, but test_zero_one_policies.Mine" in text


@pytest.mark.parametrize("name", ["variance_policy", "sync_policy"])
@pytest.mark.parametrize("value", ["nothing", 3, "other", "class"])
def test_an_object_without_the_method_is_refused(name, value):
    good = {"variance_policy": policies.DoublingVariance(), "sync_policy": policies.EveryStep()}
    other = {"variance_policy": "sync_policy", "sync_policy": "variance_policy"}[name]
    value = good[other] if value == "other" else type(good[name]) if value == "class" else value
    method = {"variance_policy": "renews", "sync_policy": "steps"}[name]
    with pytest.raises(TypeError, match=rf"{name} must have a method {method}\(done\), as fusedonebit.policies."):
        ZeroOneAdam(make_parameters(), **objects(**good | {name: value}))


@pytest.mark.parametrize(
    ("make_it", "text"),
    [
        (lambda: policies.DoublingVariance(scaler=0), "scaler must be an int >= 1, got 0"),
        (lambda: policies.DoublingVariance(until=True), "until must be an int >= 1, got True"),
        (lambda: policies.DoublingRounds(after=-1, scaler=1), "after must be an int >= 0, got -1"),
        (lambda: policies.DoublingRounds(after=0, scaler=1, most=12), "most must be a power of two, got 12"),
        (lambda: DeepSpeedVariance(var_freeze_step=1), "var_freeze_step must be an int >= 2, got 1"),
    ],
)
def test_bad_settings_of_policies_are_named(make_it, text):
    kind, said = caught(make_it)
    assert kind is ValueError
    assert said == text


def differ(rank: int, world_size: int) -> tuple[type | None, str]:
    policy = policies.DoublingRounds(after=3, scaler=2 + rank)
    return caught(lambda: ZeroOneAdam(make_parameters(), sync_policy=policy))


def test_policies_that_state_otherwise_are_found_at_construction():
    for kind, text in run_ranks(differ, 2, group_timeout=10):
        assert kind is DisagreementError
        assert "sync_policy is DoublingRounds(after=3, scaler=2, most=16) on rank 0 but DoublingRounds(" in text
