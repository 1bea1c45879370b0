"""Marsit where ranks fail, differ or are given bad arguments: one clear error on every rank, and nobody hangs."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from observe import caught, fingerprint, parameters
from optimizers import objects
from ranks import run_ranks
from rounds import EACH, EACH_PLACE, MARSIT, PLACES, kept, make_parameters, set_gradients, train
from torch import Tensor

from fusedonebit import (
    AbortedStepError,
    CollectiveError,
    DisagreementError,
    FusedOneBitWarning,
    MarsitSGD,
    NonFiniteGradientError,
    OutOfStepError,
    Rounds,
)
from fusedonebit.comm import SimulatedGroup, Transport

# ---------------------------------------------------------------- what is not finite


def bad_number(
    rank: int, world_size: int, name: str, options: dict, steps: int, value: float, nonfinite: str, at: int
) -> dict[str, Any]:
    """A number that is not finite, on the last rank, ``at`` steps after a round has begun."""
    optimizer = MARSIT[name](make_parameters(), 1e-2, nonfinite=nonfinite, compensation_limit=None, **options)
    local_steps = optimizer.frame.options.rounds.local_steps
    train(optimizer, rank, steps * local_steps)
    before, start, step = fingerprint(parameters(optimizer)), kept(optimizer), steps * local_steps
    momenta = [optimizer.momentum(p) for p in parameters(optimizer)]
    outcome, bad = (None, ""), rank == world_size - 1
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for position in range(local_steps):
            set_gradients(optimizer, rank, step + position)
            if bad and position == at:
                parameters(optimizer)[0].grad[3, 4] = value
            outcome = caught(optimizer.step)
            assert outcome[0] is None or position == local_steps - 1
    after, stats, still = kept(optimizer), optimizer.stats(), fingerprint(parameters(optimizer)) == before
    own = optimizer.momentum(parameters(optimizer)[0])
    train(optimizer, rank, 3 * local_steps, step + local_steps)
    return {
        "outcome": outcome,
        "still": still,
        "counts": (stats["step"], stats["skipped_steps"]),
        "warned": [str(w.message) for w in seen if issubclass(w.category, FusedOneBitWarning)],
        "gained": [b - a for a, b in zip(start, after, strict=True)],
        "kept moment": bool(local_steps > 1 or not bad or own[3, 4] == momenta[0][3, 4]),
        "prints": fingerprint(parameters(optimizer)),
        "finite": all(bool(c.isfinite().all()) for c in after),
    }


CASES = [
    ({"topology": "ring"}, 2, 2),
    ({"topology": "owner"}, 2, 2),
    ({"topology": "torus"}, 4, 2),
    ({"full_precision_every": 2}, 2, 2),
    ({"local_steps": 3}, 2, 2),
]


@pytest.mark.long(but=2)
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize(("options", "world_size", "steps"), CASES, ids=str)
@EACH
def test_a_nonfinite_number_on_one_rank_skips_the_round_on_all(name, options, world_size, steps, nonfinite):
    local_steps = options.get("local_steps", 1)
    for at in range(local_steps):
        value = float("nan" if at % 2 == 0 else "-inf")
        results = run_ranks(bad_number, world_size, name, options, steps, value, nonfinite, at, group_timeout=10)
        for seen in results:
            assert seen["still"]
            assert seen["counts"] == (steps * local_steps + local_steps - 1, 1)
            assert seen["finite"]
            assert seen["kept moment"]
            assert seen["prints"] == results[0]["prints"]
            if nonfinite == "raise":
                assert seen["outcome"][0] is NonFiniteGradientError
                assert seen["warned"] == []
            else:
                assert seen["outcome"][0] is None
                assert len(seen["warned"]) == 1
            assert "every rank skipped the step (1 so far)" in [*seen["warned"], seen["outcome"][1]][0]


def test_a_skipped_round_keeps_all_finite_work_of_the_workers():
    """The mean over the ranks of the compensation gains the mean of the updates."""

    def run(rank: int, transport: Transport, steps: int) -> tuple[list[Tensor], list[Tensor]]:
        options: dict = {"momentum": 0.0, "compensation_limit": None, "full_precision_every": 2}
        optimizer = MarsitSGD(make_parameters(), 1e-2, process_group=transport, **objects(**options))
        train(optimizer, rank, steps)
        start = kept(optimizer)
        set_gradients(optimizer, rank, steps)
        grads = [p.grad.clone() for p in parameters(optimizer)]
        if rank == 1:
            parameters(optimizer)[0].grad[3, 4], grads[0][3, 4] = float("inf"), 0.0
        optimizer.step()
        gained = [b - a for a, b in zip(start, kept(optimizer), strict=True)]
        return gained, [1e-2 * g for g in grads]

    for steps, full in ((2, True), (3, False)):
        with pytest.warns(FusedOneBitWarning, match="not finite"):
            ranks = SimulatedGroup(3).run(lambda rank, t, steps=steps: run(rank, t, steps))
        for of_ranks in zip(*(zip(gained, updates, strict=True) for gained, updates in ranks), strict=True):
            gained, updates = (torch.stack([pair[i] for pair in of_ranks]) for i in (0, 1))
            off = float((gained.mean(0) - updates.mean(0)).abs().max())
            print(f"full precision {full}: mean of what is kept, off by {off:.1e} (limit 3e-8)")
            assert off <= 3e-8
            assert full or float((gained - updates).abs().max()) <= 3e-8


# ---------------------------------------------------------------- ranks that differ


def build_differently(rank: int, world_size: int, case: str, values: tuple) -> tuple[type | None, str]:
    params, options = make_parameters(), {} if case == "algorithm" else {case: values[rank]}
    kind = MARSIT[values[rank] if case == "algorithm" else "sgd"]
    return caught(lambda: kind(params, **options))


@pytest.mark.parametrize(
    ("case", "values", "text"),
    [
        ("topology", ("ring", "owner"), "topology is 'ring' on rank 0 but 'owner' on rank 1"),
        ("seed", (0, 7), "seed is 0 on rank 0 but 7 on rank 1"),
        ("full_precision_every", (100, 99), "full_precision_every is 100 on rank 0 but 99 on rank 1"),
        ("local_steps", (1, 2), "local_steps is 1 on rank 0 but 2 on rank 1"),
        ("compensation_limit", (1.0, None), "compensation_limit is 1.0 on rank 0 but None on rank 1"),
        ("lr", (0.1, 0.2), "lr of group 0 is 0.1 on rank 0 but 0.2 on rank 1"),
        ("global_ratio", (0.3, 0.4), "global_ratio of group 0 is 0.3 on rank 0 but 0.4 on rank 1"),
        ("momentum", (0.9, 0.0), "momentum of group 0 is 0.9 on rank 0 but 0.0 on rank 1"),
        ("algorithm", ("sgd", "adam"), "the optimizer is MarsitSGD on rank 0 but MarsitAdam on rank 1"),
    ],
)
def test_different_construction_is_the_same_error_on_every_rank(case, values, text):
    results = run_ranks(build_differently, 2, case, values, group_timeout=10)
    assert results[0] == results[1]
    assert results[0][0] is DisagreementError
    assert text in results[0][1]


def other_lr(rank: int, world_size: int, topology: str, steps: int, key: str) -> tuple[type | None, str, bool, str]:
    optimizer = MarsitSGD(make_parameters(), 1e-2, topology=topology, rounds=Rounds(full_precision_every=3))
    train(optimizer, rank, steps)
    before, group = fingerprint(parameters(optimizer)), optimizer.param_groups[0]
    was = group[key]
    if rank == world_size - 1:
        group[key] = was * 1.01
    set_gradients(optimizer, rank, steps)
    outcome = caught(optimizer.step)
    still = fingerprint(parameters(optimizer)) == before and optimizer.stats()["step"] == steps
    group[key] = was
    train(optimizer, rank, 4, steps + 1)
    return *outcome, still, fingerprint(parameters(optimizer))


@pytest.mark.long(but=1)
@pytest.mark.parametrize("steps", [2, 3], ids=["one-bit", "full precision"])
@EACH_PLACE
def test_one_ranks_other_setting_raises_on_all_which_can_go_on(topology, world_size, steps):
    for key in ("lr", "global_ratio"):
        results = run_ranks(other_lr, world_size, topology, steps, key, group_timeout=10)
        for kind, message, still, bits in results:
            assert kind is OutOfStepError
            assert f"ranks are out of step after {steps} updates" in message
            assert "hyper-parameters (learning rate and the like)" in message
            assert still
            assert bits == results[0][3]


def other_lr_between_rounds(rank: int, world_size: int) -> list[type | None]:
    optimizer = MarsitSGD(make_parameters(), 1e-2, rounds=Rounds(local_steps=3, full_precision_every=0))
    seen = []
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 1e-1 if rank == 1 and step == 1 else 1e-2
        set_gradients(optimizer, rank, step)
        seen.append(caught(optimizer.step)[0])
    return seen


def test_a_rate_that_differs_between_rounds_raises_in_the_next():
    none = [None, None]
    for seen in run_ranks(other_lr_between_rounds, 2):
        assert seen == [*none, OutOfStepError, *none, None]


def step_once_more(rank: int, world_size: int, topology: str) -> tuple[type | None, str, float, str]:
    optimizer = MarsitSGD(make_parameters(), 1e-2, topology=topology)
    train(optimizer, rank, 2)
    if rank == 1:
        time.sleep(4)  # alive, but with other things to do
        return None, "", 0.0, ""
    start = time.perf_counter()
    outcome = caught(optimizer.step)
    return *outcome, time.perf_counter() - start, caught(optimizer.step)[1]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("topology", ["ring", "owner"])
def test_a_rank_that_steps_once_more_raises_and_cannot_go_on(topology):
    kind, message, waited, repeated = run_ranks(step_once_more, 2, topology, group_timeout=2)[0]
    print(f"{topology}: waited {waited:.1f} s for the other rank (limit 10)")
    assert kind is CollectiveError
    assert "after 2 updates" in message
    assert "does not call step() as often as this one" in message
    assert "can't go on" in repeated
    assert waited < 10


def out_of_step(rank: int, world_size: int, topology: str) -> tuple[type | None, str, bool]:
    """The last rank repeats a step."""
    optimizer = MarsitSGD(make_parameters(), 1e-2, topology=topology)
    train(optimizer, rank, 3)
    before = fingerprint(parameters(optimizer))
    if rank < world_size - 1:
        set_gradients(optimizer, rank, 3)
    return *caught(optimizer.step), fingerprint(parameters(optimizer)) == before


@EACH_PLACE
def test_a_rank_out_of_step_is_the_same_error_on_every_rank(topology, world_size):
    for kind, message, still in run_ranks(out_of_step, world_size, topology, group_timeout=10):
        assert kind is OutOfStepError
        assert "ranks are out of step after 3 updates" in message
        assert "a rank has skipped or repeated a step()" in message
        assert still


def fail_on_one_rank(rank: int, world_size: int, options: dict, at: int) -> tuple[list[type | None], str, str, int]:
    """Rank 1 has a gradient that can't be used ``at`` steps after a round has begun."""
    optimizer = MarsitSGD(make_parameters(), 1e-2, **objects(**options))
    local_steps = optimizer.frame.options.rounds.local_steps
    train(optimizer, rank, 2 * local_steps)
    before, kinds, message = fingerprint(parameters(optimizer)), [], ""
    for position in range(local_steps):
        set_gradients(optimizer, rank, 2 * local_steps + position)
        if rank == 1 and position == at:
            parameters(optimizer)[0].grad = torch.eye(40, 30).to_sparse()
        kind, text = caught(optimizer.step)
        kinds.append(kind)
        message = text or message
    assert fingerprint(parameters(optimizer)) == before
    train(optimizer, rank, 2 * local_steps, 3 * local_steps)
    return kinds, message, fingerprint(parameters(optimizer)), optimizer.stats()["skipped_steps"]


@pytest.mark.long(but=2)
@pytest.mark.parametrize(
    ("options", "world_size", "at"),
    [
        *(({"topology": topology}, world_size, 0) for topology, world_size in PLACES),
        ({"full_precision_every": 2}, 2, 0),
        *(({"local_steps": 3}, 2, at) for at in range(3)),
        ({"local_steps": 3, "topology": "owner"}, 2, 1),
    ],
    ids=str,
)
def test_one_ranks_error_raises_on_all_at_the_next_round(options, world_size, at):
    results = run_ranks(fail_on_one_rank, world_size, options, at, group_timeout=10)
    for rank, (kinds, message, bits, skipped) in enumerate(results):
        assert kinds[:-1] == [None] * (len(kinds) - 1)
        if rank == 1:
            assert kinds[-1] is TypeError
            assert "gradient of parameter 0 must be dense" in message
        else:
            assert kinds[-1] is AbortedStepError
            assert "another rank could not take the step" in message
        assert bits == results[0][2]
        assert skipped == 1


def build_badly(rank: int, world_size: int, name: str, options: dict) -> tuple[type | None, str]:
    return caught(lambda: MARSIT[name](make_parameters(), **options))


@pytest.mark.parametrize(
    ("name", "world_size", "options", "message"),
    [
        ("sgd", 2, {"topology": "tree"}, "topology must be one of 'ring', 'torus', 'owner', got 'tree'"),
        ("sgd", 4, {"topology": "torus", "rows": 3}, "one of [2] for a torus of 4 workers, or None, got 3"),
        ("sgd", 4, {"topology": "torus", "rows": 2.0}, "rows must be an int or None, got 2.0"),
        ("sgd", 3, {"topology": "torus"}, "needs a world size that is a product of two numbers >= 2, got 3"),
        ("sgd", 1, {"topology": "torus"}, "needs a world size that is a product of two numbers >= 2, got 1"),
        ("sgd", 2, {"rows": 2}, 'rows must be None unless topology is "torus", got 2'),
        ("sgd", 2, {"full_precision_every": -1}, "full_precision_every must be an int >= 0, got -1"),
        ("sgd", 2, {"full_precision_every": 2.5}, "full_precision_every must be an int >= 0, got 2.5"),
        ("sgd", 2, {"local_steps": 0}, "local_steps must be an int >= 1, got 0"),
        ("sgd", 2, {"local_steps": True}, "local_steps must be an int >= 1, got True"),
        ("sgd", 2, {"local_steps": 2, "stochastic_rounding": True}, "must be False with local_steps=2, got True"),
        ("sgd", 2, {"seed": -1}, "seed must be an int >= 0, got -1"),
        ("sgd", 2, {"momentum": 1.5}, "momentum must be a number in [0, 1), got 1.5"),
        ("sgd", 2, {"global_ratio": 0}, "global_ratio must be a finite number > 0, got 0"),
        ("adam", 2, {"global_ratio": float("nan")}, "global_ratio must be a finite number > 0, got nan"),
        ("adam", 2, {"eps": 0}, "eps must be > 0, got 0"),
        ("sgd", 2, {"compensation_limit": -1}, "compensation_limit must be a finite number >= 0 or None, got -1"),
        ("sgd", 2, {"compensation_limit": float("inf")}, "limit must be a finite number >= 0 or None, got inf"),
        ("sgd", 2, {"lr": -0.1}, "lr must be a finite number >= 0, got -0.1"),
        ("adam", 2, {"betas": (0.9, 1.0)}, "betas must be two numbers in [0, 1), got (0.9, 1.0)"),
        ("adam", 2, {"weight_decay": -1.0}, "weight_decay must be a finite number >= 0, got -1.0"),
        ("sgd", 2, {"nonfinite": "ignore"}, "nonfinite must be one of 'skip', 'raise', got 'ignore'"),
        ("sgd", 2, {"capturable": True}, "capturable must be False, got True: what a step does depends on its place"),
        ("adam", 2, {"capturable": True}, "capturable must be False, got True: what a step does depends on its place"),
    ],
    ids=str,
)
def test_bad_arguments_are_one_clear_error_on_every_rank(name, world_size, options, message):
    results = run_ranks(build_badly, world_size, name, options, group_timeout=10)
    assert len(set(results)) == 1
    kind, text = results[0]
    assert kind in (TypeError, ValueError)
    assert message in text
