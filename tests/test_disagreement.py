"""Ranks that differ, fail or stop: every rank raises, none hangs, and none goes on alone."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from observe import caught, fingerprint, observe
from optimizers import construct
from ranks import run_ranks
from torch.nn import Parameter

from fusedonebit import (
    AbortedStepError,
    CollectiveError,
    DisagreementError,
    FusedOneBitWarning,
    NonFiniteGradientError,
    OneBitAdam,
    OutOfStepError,
    Wire,
)
from fusedonebit.core.optimizer import DistributedOptimizer

FREEZE_STEP = 4
STEPS = (2, 7)
STAGES = pytest.mark.parametrize("steps", STEPS, ids=["warmup", "compression"])


def make(*shapes: tuple[int, ...]) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape)) for shape in shapes or ((40, 30), (7,))]


def set_gradients(params: list[Parameter], rank: int, step: int) -> None:
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + rank + 10 * step + 1000 * i))


def train(optimizer: DistributedOptimizer, params: list[Parameter], rank: int, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        set_gradients(params, rank, step)
        optimizer.step()


# ---------------------------------------------------------------- construction


def build(case: str, rank: int, name: str) -> DistributedOptimizer:
    """Constructs something else on rank 1."""
    odd = rank == 1
    a, b, c = make((5, 4), (5, 4), (6,))
    options: dict = {"freeze_step": 5}
    params: list = [a, b, c]
    if case == "count":
        params = params[: 2 if odd else 3]
    elif case == "shape":
        params[1] = Parameter(torch.zeros(4, 5) if odd else torch.zeros(5, 4))
    elif case == "dtype":
        params[1] = Parameter(torch.zeros(5, 4).to(torch.bfloat16 if odd else torch.float32))
    elif case == "memory order":
        params[1] = Parameter(torch.zeros(4, 5).t() if odd else torch.zeros(5, 4))
    elif case == "frozen":
        b.requires_grad_(not odd)
    elif case == "value":
        with torch.no_grad():
            b[3, 2] += 1e-6 * odd
    elif case == "swapped values":
        params = [b, a, c] if odd else [a, b, c]
    elif case == "grouping":
        split = 2 if odd else 1
        params = [{"params": params[:split], "lr": 1e-2}, {"params": params[split:], "lr": 1e-4}]
    elif case == "group option":
        params = [{"params": [a]}, {"params": [b, c], "weight_decay": 0.1 + 0.1 * odd}]
    elif case == "mask":
        mask = torch.ones(5, 4, dtype=torch.bool)
        mask[0, int(odd)] = False
        options["mask"] = {b: mask}
    elif case == "broadcast":
        options["broadcast_parameters"] = odd
    elif case == "error":
        options["betas"] = (2.0, 0.9) if odd else (0.9, 0.9)
    elif case == "unusable":
        params[1] = Parameter(torch.zeros(5, 4).double()) if odd else b
    else:
        options[case] = {
            "lr": (1e-3, 2e-3),
            "betas": ((0.9, 0.99), (0.9, 0.999)),
            "freeze_step": (5, 6),
            "scale_norm": ("l1", "l2"),
            "block_size": (128, 256),
            "nonfinite": ("skip", "raise"),
            "c_max": (10.0, 11.0),
            "r_threshold": (0.1, 0.2),
            "adaptive": (True, False),
            "momentum_scaling": (True, False),
            "variant": ("paper", "deepspeed"),
            "eps_inside_sqrt": (False, True),
            "precondition": (True, False),
            "guard": ("rewarm", "off"),
            "variance_floor": (None, 0.1),
        }[case][rank]
        if case == "momentum_scaling":
            options["precondition"] = False
    return construct(name, params, **options)


def build_differently(rank: int, world_size: int, case: str, name: str = "onebit-adam") -> tuple[type | None, str]:
    return caught(lambda: build(case, rank, name))


@pytest.mark.long(but=10)
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("count", "the number of trainable parameters is 3 on rank 0 but 2 on rank 1"),
        ("shape", "parameter 1 is float32 (5, 4)"),
        ("dtype", "but bfloat16 (5, 4)"),
        ("memory order", "in memory order (1, 5) on rank 1"),
        ("frozen", "the number of trainable parameters is 3 on rank 0 but 2 on rank 1"),
        ("value", "the checksum of parameter 1's values"),
        ("swapped values", "the checksum of parameter 0's values"),
        ("grouping", "the group of parameter 1 is 1 on rank 0 but 0 on rank 1"),
        ("group option", "weight_decay of group 1 is 0.1 on rank 0 but 0.2 on rank 1"),
        ("mask", "the mask of parameter 1"),
        ("broadcast", "broadcast_parameters is False on rank 0 but True on rank 1"),
        ("lr", "lr of group 0 is 0.001 on rank 0 but 0.002 on rank 1"),
        ("betas", "betas of group 0 is (0.9, 0.99) on rank 0 but (0.9, 0.999) on rank 1"),
        ("freeze_step", "freeze_step is 5 on rank 0 but 6 on rank 1"),
        ("scale_norm", "scale_norm is 'l1' on rank 0 but 'l2' on rank 1"),
        ("precondition", "precondition is True on rank 0 but False on rank 1"),
        ("guard", "guard is 'rewarm' on rank 0 but 'off' on rank 1"),
        ("variance_floor", "variance_floor is None on rank 0 but 0.1 on rank 1"),
        ("block_size", "block_size is 128 on rank 0 but 256 on rank 1"),
        ("nonfinite", "nonfinite is 'skip' on rank 0 but 'raise' on rank 1"),
    ],
)
def test_different_construction_is_named_by_its_first_difference(case, text):
    results = run_ranks(build_differently, 2, case, group_timeout=10)
    for kind, message in results:
        assert kind is DisagreementError
        assert text in message
    assert results[0] == results[1]
    if "values" in text:
        assert "pass Wire(broadcast_parameters=True) to use rank 0's" in results[0][1]


@pytest.mark.parametrize(
    ("name", "case", "text"),
    [
        ("lamb", "c_max", "c_max of group 0 is 10.0 on rank 0 but 11.0 on rank 1"),
        ("lamb", "eps_inside_sqrt", "eps_inside_sqrt is False on rank 0 but True on rank 1"),
        ("onebit-lamb", "r_threshold", "r_threshold of group 0 is 0.1 on rank 0 but 0.2 on rank 1"),
        ("onebit-lamb", "adaptive", "adaptive is True on rank 0 but False on rank 1"),
        ("onebit-lamb", "momentum_scaling", "momentum_scaling is True on rank 0 but False on rank 1"),
        ("onebit-lamb", "variant", "variant is 'paper' on rank 0 but 'deepspeed' on rank 1"),
    ],
)
def test_what_lamb_adds_is_compared_too(name, case, text):
    for kind, message in run_ranks(build_differently, 2, case, name, group_timeout=10):
        assert kind is DisagreementError
        assert text in message


def build_another(rank: int, world_size: int) -> tuple[type | None, str]:
    return caught(lambda: construct(("lamb", "onebit-lamb")[rank], make(), freeze_step=5))


def test_another_optimizer_on_one_rank_is_named():
    for kind, message in run_ranks(build_another, 2, group_timeout=10):
        assert kind is DisagreementError
        assert "the optimizer is Lamb on rank 0 but OneBitLamb on rank 1" in message


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [("error", ValueError, "betas must be"), ("unusable", TypeError, "parameter 1 must be float32, bfloat16")],
)
def test_an_error_on_one_rank_at_construction_is_told_on_all(case, kind, text):
    (other, told), (own, message) = run_ranks(build_differently, 2, case, group_timeout=10)
    assert own is kind
    assert text in message
    assert other is DisagreementError
    assert "failed on rank 1" in told
    assert text in told


def broadcast(rank: int, world_size: int) -> str:
    torch.manual_seed(rank)
    params = [Parameter(torch.randn(300)), Parameter(torch.randn(20, 30).t()), Parameter(torch.randn(40, 50)[::3, ::2])]
    optimizer = OneBitAdam(params, freeze_step=5, wire=Wire(broadcast_parameters=True))
    train(optimizer, params, rank, 8)
    return fingerprint(params)


def test_broadcast_parameters_starts_all_from_rank_0s_values():
    assert len(set(run_ranks(broadcast, 4))) == 1


def add_differently(rank: int, world_size: int, name: str, case: str) -> tuple[type | None, str, int, str]:
    params = make()
    optimizer = construct(name, params, freeze_step=FREEZE_STEP)
    train(optimizer, params, rank, 2)
    group: dict = {"params": make((9,))}
    if rank == 1:
        group = {"params": make((8,))} if case == "shape" else {**group, "eps": -1.0}
    outcome = caught(lambda: optimizer.add_param_group(group))
    train(optimizer, params, rank, 5, start=2)
    return *outcome, len(optimizer.param_groups), fingerprint(params)


@pytest.mark.parametrize(
    ("name", "case"), [("onebit-adam", "shape"), ("onebit-adam", "error"), ("onebit-lamb", "shape"), ("lamb", "error")]
)
def test_groups_added_differently_are_refused_on_every_rank(name, case):
    results = run_ranks(add_differently, 2, name, case, group_timeout=10)
    for kind, message, groups, _ in results:
        assert issubclass(kind, ValueError)
        assert ("(9,)" in message and "(8,)" in message) or "eps must be a finite number >= 0, got -1.0" in message
        assert groups == 1
    assert len({bits for *_, bits in results}) == 1


# ---------------------------------------------------------------- steps


SPOILED = ("sparse gradient", "wrong shape", "cast")


def spoil(case: str, params: list[Parameter]) -> Callable[[], None]:
    """Makes this rank's step impossible; returns what repairs it."""
    p = params[0]
    if case == "sparse gradient":
        p.grad = p.grad.to_sparse()
    elif case == "wrong shape":
        p.grad.data = torch.ones(3)
    elif case == "cast":
        values = p.data
        p.grad, p.data = None, p.data.to(torch.bfloat16)

        def back() -> None:
            p.grad, p.data = None, values

        return back
    return lambda: setattr(p, "grad", None)


def fail_on_one_rank(
    rank: int, world_size: int, name: str, steps: int, case: str
) -> tuple[type | None, str, bool, str]:
    params = make()
    optimizer = construct(name, params, freeze_step=FREEZE_STEP)
    train(optimizer, params, rank, steps)
    before = fingerprint(params)
    set_gradients(params, rank, steps)
    repair = spoil(case, params) if rank == 1 else lambda: None
    outcome = caught(optimizer.step)
    repair()
    still = fingerprint(params) == before and optimizer.stats()["step"] == steps
    train(optimizer, params, rank, 6, start=steps + 1)
    assert optimizer.stats()["step"] == steps + 6
    return *outcome, still, fingerprint(params)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "case", "steps"),
    [
        *(("onebit-adam", case, steps) for case in SPOILED for steps in STEPS),
        *(("onebit-lamb", "wrong shape", steps) for steps in (*STEPS, FREEZE_STEP)),
        ("lamb", "sparse gradient", 2),
    ],
)
def test_one_ranks_error_stops_all_and_training_can_go_on(name, case, steps):
    results = run_ranks(fail_on_one_rank, 4, name, steps, case, group_timeout=10)
    for rank, (kind, message, still, _) in enumerate(results):
        if rank == 1:
            assert kind in (RuntimeError, TypeError, ValueError)
            assert "parameter 0" in message
        else:
            assert kind is AbortedStepError
            assert f"another rank could not take the step after {steps} updates" in message
        assert still
    assert len({bits for *_, bits in results}) == 1


def bad_number(rank: int, world_size: int, name: str, steps: int, value: float, nonfinite: str) -> tuple:
    params = make()
    optimizer = construct(name, params, freeze_step=FREEZE_STEP, nonfinite=nonfinite)
    train(optimizer, params, rank, steps)
    before = observe(optimizer)["x"]
    set_gradients(params, rank, steps)
    if rank == world_size - 1:
        params[0].grad[3, 4] = value
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "after so few updates")  # of LAMB's average
        outcome = caught(optimizer.step)
    stats = optimizer.stats()
    still = bool((observe(optimizer)["x"] == before).all()) and float(optimizer.state[params[0]]["step"]) == steps
    train(optimizer, params, rank, 6, start=steps + 1)
    warned = [str(w.message) for w in seen if issubclass(w.category, FusedOneBitWarning)]
    return outcome, still, (stats["step"], stats["skipped_steps"]), warned, fingerprint(params)


@pytest.mark.long(but=2)
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize(
    ("name", "steps", "value"),
    [
        *(("onebit-adam", steps, float(v)) for steps in STEPS for v in ("nan", "inf", "-inf")),
        *(("onebit-lamb", steps, float("nan")) for steps in (*STEPS, FREEZE_STEP)),
        ("onebit-lamb-frozen", FREEZE_STEP, float("inf")),
        ("lamb", 2, float("-inf")),
    ],
)
def test_a_gradient_that_is_not_finite_on_one_rank_moves_no_rank(name, steps, value, nonfinite):
    results = run_ranks(bad_number, 2, name, steps, value, nonfinite, group_timeout=10)
    text = f"a gradient on some rank was not finite after {steps} updates"
    for (kind, message), still, counts, warned, _ in results:
        assert still
        assert counts == (steps, 1)
        if nonfinite == "raise":
            assert kind is NonFiniteGradientError
            assert text in message
            assert not warned
        else:
            assert kind is None
            assert len(warned) == 1
            assert text in warned[0]
    assert len({bits for *_, bits in results}) == 1


def other_lr(rank: int, world_size: int, name: str, steps: int, tensor_lr: bool) -> tuple:
    params = make()
    optimizer = construct(name, params, torch.tensor(1e-3) if tensor_lr else 1e-3, freeze_step=FREEZE_STEP)
    train(optimizer, params, rank, steps)
    before = observe(optimizer)["x"]
    rates = [1e-3, 1.0001e-3] if rank == world_size - 1 else [1e-3, 1e-3]
    optimizer.param_groups[0]["lr"] = torch.tensor(rates[1]) if tensor_lr else rates[1]
    set_gradients(params, rank, steps)
    outcome = caught(optimizer.step)
    still = bool(np.array_equal(observe(optimizer)["x"], before)) and optimizer.stats()["step"] == steps
    optimizer.param_groups[0]["lr"] = torch.tensor(rates[0]) if tensor_lr else rates[0]
    train(optimizer, params, rank, 6, start=steps + 1)
    return *outcome, still, fingerprint(params)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "steps", "tensor_lr", "world_size"),
    [
        *(("onebit-adam", steps, tensor_lr, w) for steps in STEPS for tensor_lr in (False, True) for w in (2, 4)),
        *(("onebit-lamb", steps, False, 2) for steps in STEPS),
        ("lamb", 2, True, 2),
    ],
)
def test_another_learning_rate_on_one_rank_is_caught_on_all(name, steps, tensor_lr, world_size):
    results = run_ranks(other_lr, world_size, name, steps, tensor_lr, group_timeout=10)
    for kind, message, still, _ in results:
        assert kind is OutOfStepError
        assert f"ranks are out of step after {steps} updates: hyper-parameters (learning rate" in message
        assert still
    assert len({bits for *_, bits in results}) == 1


def other_bound(rank: int, world_size: int, name: str, key: str) -> tuple[type | None, str, bool]:
    params = make()
    optimizer = construct(name, params, freeze_step=FREEZE_STEP)
    train(optimizer, params, rank, 7)
    before = fingerprint(params)
    optimizer.param_groups[0][key] *= 1.5 if rank else 1.0
    set_gradients(params, rank, 7)
    return *caught(optimizer.step), fingerprint(params) == before


@pytest.mark.parametrize(("name", "key"), [("onebit-lamb", "r_max"), ("lamb", "c_max")])
def test_another_bound_on_one_rank_is_caught_on_all(name, key):
    for kind, message, still in run_ranks(other_bound, 2, name, key, group_timeout=10):
        assert kind is OutOfStepError
        assert f"{key}=" in message
        assert still


def step_once_more(rank: int, world_size: int, steps: int) -> tuple[type | None, str, float, type | None, str]:
    params = make()
    optimizer = OneBitAdam(params, freeze_step=FREEZE_STEP)
    train(optimizer, params, rank, steps)
    if rank == 1:
        time.sleep(4)  # alive, but with other things to do
        return None, "", 0.0, None, ""
    start = time.perf_counter()
    outcome = caught(optimizer.step)
    waited = time.perf_counter() - start
    return *outcome, waited, *caught(optimizer.step)


@pytest.mark.long(but=1)
@STAGES
def test_a_rank_that_steps_once_more_raises_and_cannot_go_on(steps):
    kind, message, waited, again, repeated = run_ranks(step_once_more, 2, steps, group_timeout=2)[0]
    print(f"waited {waited:.1f} s for the other rank (limit 10)")
    assert kind is again is CollectiveError
    assert f"after {steps} updates" in message
    assert "Another rank has died, hangs, or does not call step() as often as this one" in message
    assert "can't go on" in repeated
    assert waited < 10
