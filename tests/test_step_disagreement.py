"""A step that one rank can't take, or takes otherwise: every rank raises, none hangs, and none goes on alone."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from observe import caught, fingerprint, give_gradients, parameters, train
from optimizers import by_name
from ranks import run_ranks
from rounds import PLACES, kept
from rounds import make_parameters as strided
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import (
    AbortedStepError,
    CollectiveError,
    FusedOneBitWarning,
    Lamb,
    MarsitAdam,
    MarsitSGD,
    NonFiniteGradientError,
    OneBitAdam,
    OneBitLamb,
    OutOfStepError,
)
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.core.optimizer import DistributedOptimizer

FREEZE_STEP = 4
STEPS = (2, 7)
MARSIT = ("MarsitSGD", "MarsitAdam")
KINDS: dict[str, Callable[..., Any]] = {
    "OneBitAdam": by_name(OneBitAdam, freeze_step=FREEZE_STEP),
    "OneBitLamb": by_name(OneBitLamb, freeze_step=FREEZE_STEP),
    "OneBitLamb, frozen": by_name(OneBitLamb, freeze_step=FREEZE_STEP, variance="frozen", adaptive=False),
    "Lamb": by_name(Lamb),
    "MarsitSGD": by_name(MarsitSGD, lr=1e-2),
    "MarsitAdam": by_name(MarsitAdam, lr=1e-2),
}


def new(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    params = strided() if name in MARSIT else [Parameter(torch.randn(shape)) for shape in ((40, 30), (7,))]
    return KINDS[name](params, **options)


SPOILED = ("sparse gradient", "wrong shape", "cast")


def spoil(case: str, p: Tensor) -> Callable[[], None]:
    """Makes this rank's step impossible; returns what repairs it."""
    values = p.data
    if case == "sparse gradient":
        p.grad = p.grad.to_sparse()
    elif case == "wrong shape":
        p.grad.data = torch.ones(3)
    else:
        p.grad, p.data = None, values.to(torch.bfloat16)

    def repair() -> None:
        p.grad, p.data = None, values

    return repair


def local_steps_of(optimizer: DistributedOptimizer) -> int:
    return getattr(optimizer.frame.options.rounds, "local_steps", 1) if type(optimizer).__name__ in MARSIT else 1


def fail_on_one_rank(
    rank: int, world_size: int, name: str, options: dict, steps: int, case: str, at: int
) -> tuple[list[Any], bool, tuple[int, int], str]:
    """Rank 1's step is impossible ``at`` steps after a round has begun."""
    optimizer = new(name, **options)
    length = local_steps_of(optimizer)
    train(optimizer, rank, range(steps * length))
    before, told = fingerprint(parameters(optimizer)), []
    for position in range(length):
        give_gradients(optimizer, rank, steps * length + position)
        repair = spoil(case, parameters(optimizer)[0]) if (rank, position) == (1, at) else lambda: None
        told.append(caught(optimizer.step))
        repair()
    still = fingerprint(parameters(optimizer)) == before
    train(optimizer, rank, range((steps + 1) * length, (steps + 7) * length))
    stats = optimizer.stats()
    return told, still, (stats["step"] - 7 * length + 1, stats["skipped_steps"]), fingerprint(parameters(optimizer))


@pytest.mark.long(but=3)
@pytest.mark.parametrize(
    ("name", "options", "world_size", "steps", "case", "at"),
    [
        *(("OneBitAdam", {}, 4, steps, case, 0) for case in SPOILED for steps in STEPS),
        *(("OneBitLamb", {}, 4, steps, "wrong shape", 0) for steps in (*STEPS, FREEZE_STEP)),
        ("Lamb", {}, 4, 2, "sparse gradient", 0),
        *(("MarsitSGD", {"topology": place}, ranks, 2, "sparse gradient", 0) for place, ranks in PLACES),
        ("MarsitSGD", {"full_precision_every": 2}, 2, 2, "sparse gradient", 0),
        *(("MarsitSGD", {"local_steps": 3}, 2, 2, "sparse gradient", at) for at in range(3)),
        ("MarsitSGD", {"local_steps": 3, "topology": "owner"}, 2, 2, "sparse gradient", 1),
    ],
    ids=str,
)
def test_one_ranks_error_stops_all_and_training_can_go_on(name, options, world_size, steps, case, at):
    results = run_ranks(fail_on_one_rank, world_size, name, options, steps, case, at, group_timeout=10)
    length = options.get("local_steps", 1)
    for rank, (told, still, counts, bits) in enumerate(results):
        *earlier, (kind, message) = told
        assert earlier == [(None, "")] * (length - 1)
        if rank == 1:
            assert kind in (RuntimeError, TypeError, ValueError)
            assert "parameter 0" in message
        else:
            assert kind is AbortedStepError
            assert f"another rank could not take the step{f' after {steps} updates' * (length == 1)}" in message
        assert still
        assert counts == (steps * length, 1)
        assert bits == results[0][3]


def bad_number(
    rank: int, world_size: int, name: str, options: dict, steps: int, value: float, at: int
) -> dict[str, Any]:
    """A number that is not finite, on the last rank, ``at`` steps after a round has begun."""
    optimizer = new(name, **options)
    length, bad, first = local_steps_of(optimizer), rank == world_size - 1, parameters(optimizer)[0]
    train(optimizer, rank, range(steps * length))
    before, moment, told = fingerprint(parameters(optimizer)), optimizer.momentum(first), []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "after so few updates")  # of LAMB's average
        for position in range(length):
            give_gradients(optimizer, rank, steps * length + position)
            if bad and position == at:
                first.grad[3, 4] = value
            told.append(caught(optimizer.step))
    stats, still = optimizer.stats(), fingerprint(parameters(optimizer)) == before
    marsits = name in MARSIT
    keeps = not (marsits and bad and length == 1) or bool(optimizer.momentum(first)[3, 4] == moment[3, 4])
    keeps &= marsits or float(optimizer.state[first]["step"]) == steps
    finite = not marsits or all(bool(c.isfinite().all()) for c in kept(optimizer))
    train(optimizer, rank, range((steps + 1) * length, (steps + 7) * length))
    warned = [str(w.message) for w in seen if issubclass(w.category, FusedOneBitWarning)]
    told.append((still, keeps, finite, stats["step"], stats["skipped_steps"]))
    return {"told": told, "warned": warned, "bits": fingerprint(parameters(optimizer))}


NAN, INF = float("nan"), float("inf")


@pytest.mark.long(but=4)
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize(
    ("name", "options", "world_size", "steps", "values"),
    [
        *(("OneBitAdam", {}, 2, steps, [value]) for steps in STEPS for value in (NAN, INF, -INF)),
        *(("OneBitLamb", {}, 2, steps, [NAN]) for steps in (*STEPS, FREEZE_STEP)),
        ("OneBitLamb, frozen", {}, 2, FREEZE_STEP, [INF]),
        ("Lamb", {}, 2, 2, [-INF]),
        *((name, {"topology": place}, ranks, 2, [NAN]) for name in MARSIT for place, ranks in PLACES),
        *((name, {"full_precision_every": 2}, 2, 2, [NAN]) for name in MARSIT),
        *((name, {"local_steps": 3}, 2, 2, [NAN, -INF, NAN]) for name in MARSIT),
    ],
    ids=str,
)
def test_a_number_that_is_not_finite_on_one_rank_moves_no_rank(name, options, world_size, steps, values, nonfinite):
    given = options | {"nonfinite": nonfinite} | ({"compensation_limit": None} if name in MARSIT else {})
    for at, value in enumerate(values):
        results = run_ranks(bad_number, world_size, name, given, steps, value, at, group_timeout=10)
        for seen in results:
            *earlier, (kind, message), after = seen["told"]
            assert earlier == [(None, "")] * (len(values) - 1)
            assert after == (True, True, True, (steps + 1) * len(values) - 1, 1)
            assert kind is (NonFiniteGradientError if nonfinite == "raise" else None)
            (said,) = [*seen["warned"], *([message] if message else [])]
            assert "every rank skipped the step (1 so far)" in said
            assert len(values) > 1 or f"not finite after {steps} updates" in said
            assert seen["bits"] == results[0]["bits"]


def test_a_skipped_round_keeps_all_finite_work_of_the_workers():
    """The mean over the ranks of the compensation gains the mean of the updates."""

    def run(rank: int, transport: Transport, steps: int) -> tuple[list[Tensor], list[Tensor]]:
        options = {"momentum": 0.0, "compensation_limit": None, "full_precision_every": 2}
        optimizer = new("MarsitSGD", process_group=transport, **options)
        train(optimizer, rank, range(steps))
        start = kept(optimizer)
        give_gradients(optimizer, rank, steps)
        grads = [p.grad.clone() for p in parameters(optimizer)]
        if rank == 1:
            parameters(optimizer)[0].grad[3, 4], grads[0][3, 4] = INF, 0.0
        optimizer.step()
        return [b - a for a, b in zip(start, kept(optimizer), strict=True)], [1e-2 * g for g in grads]

    for steps, full in ((2, True), (3, False)):
        with pytest.warns(FusedOneBitWarning, match="not finite"):
            ranks = SimulatedGroup(3).run(lambda rank, t, steps=steps: run(rank, t, steps))
        for of_ranks in zip(*(zip(gained, updates, strict=True) for gained, updates in ranks), strict=True):
            gained, updates = (torch.stack([pair[i] for pair in of_ranks]) for i in (0, 1))
            off = float((gained.mean(0) - updates.mean(0)).abs().max())
            print(f"full precision {full}: mean of what is kept, off by {off:.1e} (limit 3e-8)")
            assert off <= 3e-8
            assert full or float((gained - updates).abs().max()) <= 3e-8


def other_setting(
    rank: int, world_size: int, name: str, options: dict, steps: int, key: str, tensor: bool
) -> tuple[type | None, str, bool, str]:
    optimizer = new(name, **options)
    group = optimizer.param_groups[0]
    group["lr"] = torch.tensor(1e-3) if tensor else group["lr"]
    train(optimizer, rank, range(steps))
    before, was = fingerprint(parameters(optimizer)), group[key]
    group[key] = was * (1.0001 if key == "lr" else 1.5) if rank == world_size - 1 else was
    give_gradients(optimizer, rank, steps)
    outcome = caught(optimizer.step)
    still = fingerprint(parameters(optimizer)) == before and optimizer.stats()["step"] == steps
    group[key] = was
    train(optimizer, rank, range(steps + 1, steps + 7))
    return *outcome, still, fingerprint(parameters(optimizer))


@pytest.mark.long(but=3)
@pytest.mark.parametrize(
    ("name", "options", "world_size", "steps", "key", "tensor"),
    [
        *(("OneBitAdam", {}, w, steps, "lr", tensor) for steps in STEPS for tensor in (False, True) for w in (2, 4)),
        *(("OneBitLamb", {}, 2, steps, "lr", False) for steps in STEPS),
        ("OneBitLamb", {}, 2, 7, "r_max", False),
        ("Lamb", {}, 2, 2, "lr", True),
        ("Lamb", {}, 2, 7, "c_max", False),
        *(
            ("MarsitSGD", {"full_precision_every": 3, "topology": place}, ranks, steps, key, False)
            for steps in (2, 3)  # in bits, and in full precision
            for key in ("lr", "global_ratio")
            for place, ranks in PLACES
        ),
    ],
    ids=str,
)
def test_another_setting_of_one_rank_is_caught_on_all(name, options, world_size, steps, key, tensor):
    results = run_ranks(other_setting, world_size, name, options, steps, key, tensor, group_timeout=10)
    for kind, message, still, bits in results:
        assert kind is OutOfStepError
        assert f"ranks are out of step after {steps} updates" in message
        assert "hyper-parameters (learning rate" in message
        assert key in ("lr", "global_ratio") or f"{key}=" in message
        assert still
        assert bits == results[0][3]


def other_lr_between_rounds(rank: int, world_size: int) -> list[type | None]:
    optimizer = new("MarsitSGD", local_steps=3, full_precision_every=0)
    seen = []
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 1e-1 if rank == 1 and step == 1 else 1e-2
        give_gradients(optimizer, rank, step)
        seen.append(caught(optimizer.step)[0])
    return seen


def test_a_rate_that_differs_between_rounds_raises_in_the_next():
    assert run_ranks(other_lr_between_rounds, 2) == [[None, None, OutOfStepError, None, None, None]] * 2


def step_once_more(rank: int, world_size: int, name: str, options: dict, steps: int) -> tuple[Any, Any, float]:
    optimizer = new(name, **options)
    train(optimizer, rank, range(steps))
    if rank == 1:
        time.sleep(4)  # alive, but with other things to do
        return None, None, 0.0
    start = time.perf_counter()
    outcome = caught(optimizer.step)
    waited = time.perf_counter() - start
    return outcome, caught(optimizer.step), waited


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [*(("OneBitAdam", {}, steps) for steps in STEPS), *(("MarsitSGD", {"topology": t}, 2) for t in ("ring", "owner"))],
    ids=str,
)
def test_a_rank_that_steps_once_more_raises_and_cannot_go_on(name, options, steps):
    outcome, repeated, waited = run_ranks(step_once_more, 2, name, options, steps, group_timeout=2)[0]
    print(f"{name}, {options}: waited {waited:.1f} s for the other rank (limit 10)")
    assert outcome[0] is repeated[0] is CollectiveError
    assert re.search(r"(all_to_all|all_reduce|all_gather|exchange) of rank 0 of 2 failed \(gloo\): ", outcome[1])
    assert outcome[1].endswith("Restart all ranks from the last checkpoint.")
    assert f"after {steps} updates" in outcome[1]
    assert "Another rank has died, hangs, or does not call step() as often as this one" in outcome[1]
    assert "can't go on" in repeated[1]
    assert waited < 10
