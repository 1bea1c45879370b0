"""0/1 Adam with policies of one's own: any object will do, and all ranks must get the same answers."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from observe import fingerprint, parameters
from optimizers import objects
from ranks import run_ranks
from torch.nn import Parameter
from zero_one_rounds import (
    caught,
    make,
    make_parameters,
    set_gradients,
    train,
    variances,
)

from fusedonebit import DisagreementError, ZeroOneAdam, policies
from fusedonebit.deepspeed import DeepSpeedVariance
from fusedonebit.optim.policies import Progress

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
        assert "variance: test_zero_one_own_policies.Mine\nrounds: test_zero_one_own_policies.Mine\n" in text


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
        (
            "renews at first",
            "ranks differ: round 1 is a synchronisation after 1 steps on rank 0 but a renewal on rank 1",
        ),
        ("renews later", "ranks differ: round 5 is a synchronisation after 2 steps on rank 0 but a renewal on rank 1"),
        ("renews much later", "round 70 is a synchronisation after 1 steps on rank 0 but a renewal on rank 1"),
        (
            "length",
            "round 4 is a synchronisation after 2 steps on rank 0 but a synchronisation after 3 steps on rank 1",
        ),
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
    assert "variance_policy must renew the variance in the first round, but test_zero_one_own_policies.Mine" in text


@pytest.mark.parametrize("name", ["variance_policy", "sync_policy"])
@pytest.mark.parametrize("value", ["nothing", None, 3, "other", "class"])
def test_an_object_without_the_method_is_refused(name, value):
    good = {"variance_policy": policies.DoublingVariance(), "sync_policy": policies.EveryStep()}
    other = {"variance_policy": "sync_policy", "sync_policy": "variance_policy"}[name]
    value = good[other] if value == "other" else type(good[name]) if value == "class" else value
    if value is None:
        return  # the default
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


def test_within_a_round_the_variance_stays():
    optimizer = make(make_parameters(), (0, 3, 1))
    prints = []
    for step in range(10):
        train(optimizer, 0, 1, step)
        prints.append((optimizer.phase, fingerprint(variances(optimizer))))
    for (_, before), (phase, after) in pairwise(prints):
        assert (before != after) == (phase == "uncompressed")
