"""When a living variance is renewed, whom it waits for, and how long it warms up."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from observe import change_header, fingerprint, parameters, resumed
from optimizers import refusing
from ranks import simulate
from torch.nn import Parameter

from fusedonebit import Faults, Freeze, FusedOneBitWarning, Layerwise, Numerics, OneBitAdam, OneBitLamb
from fusedonebit.comm import Transport
from fusedonebit.optim.variance import FIRST_GRADIENT
from fusedonebit.triton_kernels import SCALE_NORMS, rules

SHAPES = ((300,), (20, 9), (40,))
LATE = 1  # index of the tensor that has no gradient at first
BOTH = pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])


def make(transport: Transport | None = None, kind: Any = OneBitAdam, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"warmup": 5, "betas": (0.9, 0.99), "faults": Faults(guard="off")} | options
    params = [Parameter(torch.randn(shape)) for shape in SHAPES]
    return kind(params, variance="shared", process_group=transport, **options)


def step(optimizer: Any, t: int, rank: int = 0, late_from: int = 0, drops: bool = False) -> None:
    """Until ``late_from`` the late tensor's gradient is 0, or ``drops`` it."""
    for i, p in enumerate(parameters(optimizer)):
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + rank + 10 * t + 10_000 * i))
        late = i == LATE and t < late_from
        p.grad = (None if late else g) if drops else g * (0.0 if late else 10.0**i)
    optimizer.step()


def trained(steps: int, late_from: int = 0, **options: Any) -> Any:
    optimizer = make(**options)
    for t in range(steps):
        step(optimizer, t, late_from=late_from)
    return optimizer


def moves(optimizer: Any, steps: int, take: Callable[..., None], of_norm: bool = False) -> list[float]:
    """How far the late tensor goes in each step, in learning rates: of its elements, or of its norm."""
    late, found = parameters(optimizer)[LATE], []
    for t in range(steps):
        before = late.detach().clone()
        take(optimizer, t)
        far = late.detach() - before
        found.append(float(far.norm() / before.norm() if of_norm else far.square().mean().sqrt()) / 1e-3)
    return found


def renewals(optimizer: Any, steps: int, late_from: int = 0) -> list[int]:
    """How many there were before the first step and after each."""
    seen = [0]
    for t in range(steps):
        step(optimizer, t, late_from=late_from)
        seen.append(optimizer.stats()["renewals"])
    return seen


SLOW = {"lr": 1e-3, "weight_decay": 0.0}


def test_renewals_are_close_at_first_and_50_steps_apart_later():
    seen = renewals(make(), 620)
    begun = [t - 5 for t in range(1, len(seen)) if seen[t] > seen[t - 1]]  # steps after the freeze
    assert begun[:16] == [*range(2, 17), 18]
    apart = [b - a for a, b in pairwise(begun)]
    assert apart == sorted(apart)
    assert apart[-3:] == [50, 50, 50]
    assert all(gap <= max(1, t // 8) for gap, t in zip(apart, begun[1:], strict=True))


@pytest.mark.long(but=1)
@pytest.mark.parametrize("precondition", [True, False])
def test_a_tensor_that_is_late_moves_by_steps_of_the_usual_size(precondition):
    def train(rank: int, transport: Transport) -> tuple[list[float], list[list[str]], str]:
        optimizer, waiting = make(transport, numerics=Numerics(precondition=precondition), **SLOW), []

        def take(optimizer: Any, t: int) -> None:
            step(optimizer, t, rank, late_from=60)
            waiting.append(optimizer.stats()["dead_tensors"])

        return moves(optimizer, 160, take), waiting, fingerprint(parameters(optimizer))

    (moved, waiting, first), (_, _, second) = simulate(train, 2)
    assert first == second
    assert not any(moved[:60]), "without a gradient nothing moves"
    shared = next(t for t, names in enumerate(waiting) if t > 5 and not names)
    assert all(names == ["parameter 1"] for names in waiting[5:shared])
    assert 60 <= shared <= 110
    begins = next(t for t, far in enumerate(moved) if far > 0)
    print(f"moved after {begins - 60} steps (limit 0, or 50), by {max(moved):.2f} learning rates at most (limit 5)")
    assert begins == (60 if precondition else shared)
    assert max(moved) <= 5.0
    assert min(moved[begins + 20 :]) > 0.01


@pytest.mark.parametrize("guard", ["rewarm", "warn", "off"])
def test_a_tensor_whose_gradients_come_late_begins_as_adams(guard):
    optimizer = make(betas=(0.9, 0.999), faults=Faults(guard=guard), **SLOW)
    moved, stats = moves(optimizer, 120, partial(step, late_from=40, drops=True)), optimizer.stats()
    print(f"guard={guard}: first step {moved[40]:.2f} learning rates (limit 2), the largest {max(moved):.2f} (limit 2)")
    assert not any(moved[:40])
    assert 0.2 < moved[40] <= 2.0
    assert max(moved) <= 2.0
    assert (stats["vetoed_steps"], stats["rewarms"], stats["dead_tensors"]) == (0, 0, [])


@pytest.mark.long(but=1)
@pytest.mark.parametrize("beta2", [0.9, 0.99])
def test_a_tensor_idle_for_long_returns_by_steps_of_usual_size(beta2):
    optimizer = make(betas=(0.9, beta2), **SLOW)
    moved = moves(optimizer, 1000, lambda o, t: step(o, t, late_from=900 if t >= 60 else 0))
    print(f"beta2={beta2}: at most {max(moved):.2f} learning rates in a step (limit 3)")
    assert max(moved) <= 3.0
    assert min(moved[920:]) > 0.01


def test_a_late_layer_of_lamb_moves_no_farther_than_it_is_large():
    moved = moves(make(kind=OneBitLamb, **SLOW), 160, partial(step, late_from=60), of_norm=True)
    print(f"first step {moved[60]:.2f}, at most {max(moved):.2f} learning rates of its norm (limit 1 / 0.4375)")
    assert not any(moved[:60])
    assert moved[60] > 0.2
    assert max(moved) <= 1 / rules.SHARE_OF_NORM * 1.001


def test_a_tensors_first_gradients_bring_renewals_closer_again():
    seen = renewals(make(), 360, late_from=250)
    assert seen[250] - seen[200] <= 2
    alive = next(t for t in range(250, 360) if seen[t] != seen[250])  # a renewal has followed the first gradient
    assert seen[alive + 12] - seen[alive] >= 6


def test_a_tensors_first_gradient_soon_gets_a_variance():
    """Although renewals are far apart by then."""
    optimizer, soon = make(), 12
    for t in range(300):
        step(optimizer, t, late_from=1000)
        if t > 220 and optimizer.algorithm.compression.variance.since == 20:  # of 50
            break
    before = optimizer.stats()["renewals"]
    for after in range(1, soon + 1):
        step(optimizer, t + after, late_from=t + 1)
    print(f"{optimizer.stats()['renewals'] - before} renewals within {soon} steps (limit 1 or more)")
    assert optimizer.stats()["renewals"] > before
    assert optimizer.stats()["dead_tensors"] == []


def test_scales_contract_as_usual_until_the_variance_has_settled():
    optimizer, used = make(betas=(0.9, 0.95)), []
    for t in range(16):
        step(optimizer, t)
        used.append(optimizer.algorithm.exchange.reducer.worker.norm)
    norms = {name: SCALE_NORMS[name] for name in ("contractive", "relaxed")}
    assert used[5:] == [norms["contractive"]] * 5 + [norms["relaxed"]] * 6
    assert make(numerics=Numerics(scale_norm="l2")).algorithm.exchange.reducer.worker.norm == SCALE_NORMS["l2"]


def test_a_step_that_the_guard_refuses_still_tells_the_level():
    """Else a variance that is too small by far would be refused for good."""
    optimizer = make(warmup=30, faults=Faults(guard="warn"))
    params = parameters(optimizer)
    for t in range(400):
        for p in params:
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(t + p.numel()))
            p.grad = g * (1e4 if t > 100 else 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedOneBitWarning)
            optimizer.step()
    refused = optimizer.stats()["vetoed_steps"]
    print(f"{refused} of 299 steps refused (limit 100)")
    assert 0 < refused <= 100


def test_without_adaptation_a_living_lamb_is_a_living_adam():
    either = make(), make(kind=OneBitLamb, eps=1e-8, layerwise=Layerwise(c_min=1.0, c_max=1.0))
    for t in range(60):
        for optimizer in either:
            step(optimizer, t)
    for a, b in zip(*map(parameters, either), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precondition", [True, False])
def test_what_was_told_is_given_back_when_it_was_used(precondition):
    optimizer, wire = make(numerics=Numerics(precondition=precondition)), []
    for t in range(50):
        step(optimizer, t)
        wire.append(optimizer.stats()["wire_bytes"])
    elements = optimizer.frame.layout.numel
    assert max(wire) > min(wire) + elements
    assert wire[40] == min(wire), "no squares wait"


@BOTH
def test_ranks_stay_alike_where_one_of_them_lacks_gradients(kind):
    def train(rank: int, transport: Transport) -> list[str]:
        optimizer, seen = make(transport, kind=kind), []
        for t in range(45):
            for i, p in enumerate(parameters(optimizer)):
                g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + rank + 10 * t + 10_000 * i))
                lacks = t % 5 == 4 or (rank == 0 and t % 3 == 2)
                p.grad = None if i and lacks and t > 5 else g
            optimizer.step()
            seen.append(fingerprint(parameters(optimizer)))
        return seen

    first, second = simulate(train, 2)
    assert first == second
    assert len(set(first)) == 45


@BOTH
def test_a_copy_goes_on_as_the_original(kind):
    optimizer = trained(12, kind=kind)
    copied = copy.deepcopy(optimizer)
    for t in range(12, 40):
        step(optimizer, t)
        step(copied, t)
    assert fingerprint(parameters(optimizer)) == fingerprint(parameters(copied))


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({"warmup": 7}, 7),
        ({"warmup": 0.05, "total_steps": 200}, 10),
        ({"warmup": 0.001, "total_steps": 200}, 1),
        ({"warmup": None, "betas": (0.9, 0.99)}, 25),
        ({"warmup": None, "betas": (0.9, 0.95)}, 5),
        ({"warmup": None, "freeze_step": 9}, 9),
    ],
)
def test_the_warm_up_is_a_count_a_share_or_follows_from_beta2(options, updates):
    optimizer = make(**options)
    for t in range(updates + 1):
        assert optimizer.phase == "warmup", t
        step(optimizer, t)
    assert optimizer.phase == "compression"
    assert optimizer.stats()["freeze_step"] == updates
    assert f"after {updates} updates" in repr(optimizer)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"warmup": 0}, r"warmup must be an int >= 1, a share .*, got 0"),
        ({"warmup": 1.5}, r"warmup must be .*, got 1.5"),
        ({"warmup": -0.1, "total_steps": 10}, r"warmup must be .*, got -0.1"),
        ({"warmup": True}, r"warmup must be .*, got True"),
        ({"warmup": "auto"}, r"warmup must be .*, got 'auto'"),
        ({"warmup": 0.1}, r"total_steps must be an int >= 1 where warmup is a share.*, got None with warmup=0.1"),
        ({"warmup": 5, "total_steps": 100}, r"total_steps must be .*, got 100 with warmup=5"),
        ({"warmup": 0.1, "total_steps": 0}, r"total_steps must be an int >= 1, got 0"),
        ({"warmup": 5, "freeze_step": 7}, r"warmup must be None where freeze_step says .*, got 5; pass one of them"),
        ({"warmup": None, "freeze_step": Freeze(lr_warmup_steps=5)}, r"lr_warmup_steps and deadline must be left out"),
        (
            {"numerics": Numerics(dead_coordinates="keep", precondition=False)},
            r'dead_coordinates must be "mean" with variance="shared", got "keep"',
        ),
    ],
)
def test_bad_options_are_one_error_that_says_the_way_out(options, says):
    with pytest.raises((ValueError, TypeError), match=says):
        make(**options)


# ---------------------------------------------------------------- checkpoints


def check_cuts(new: Callable[[], Any], take: Callable[[Any, int], None], cuts: Sequence[int], further: int) -> None:
    """Runs that go on from what was saved before some steps are those that were never saved."""
    never, straight, prints = new(), new(), []
    for t in range(cuts[-1] + further):
        take(never, t)
        prints.append((fingerprint(parameters(never)), never.stats()["renewals"]))
    for t in range(cuts[-1] + 1):
        if t in cuts:
            again = resumed(straight, new())
            for u in range(t, t + further):
                take(again, u)
            assert (fingerprint(parameters(again)), again.stats()["renewals"]) == prints[t + further - 1], t
            assert again.stats()["renewals"] > 0
        take(straight, t)
    assert fingerprint(parameters(straight)) == prints[cuts[-1]][0]


@pytest.mark.long(but=1)
@BOTH
def test_a_run_resumes_between_a_projection_and_its_renewal(kind):
    check_cuts(partial(make, kind=kind), partial(step, late_from=38), (6, 7, *range(40, 47)), 25)


@pytest.mark.long(but=1)
@BOTH
def test_a_rewarmup_between_squares_and_renewal_can_be_resumed(kind):
    faults = Faults(rewarm_steps=10)
    check_cuts(lambda: refusing(make(kind=kind, faults=faults), 4), step, (5, 6, 7, 8, 9, 15, *range(19, 24)), 17)


def test_a_run_resumes_where_missing_gradients_leave_the_table():
    def take(optimizer: Any, t: int) -> None:
        step(optimizer, t, late_from=t if t % 4 else t + 1, drops=True)

    check_cuts(partial(make, kind=OneBitLamb), take, (14, 17, 20, 25), 12)


@pytest.mark.parametrize("value", [None, [], [1, 2], [1, 2, 3, -4, 5, 6], "1"])
def test_a_damaged_header_is_refused(value):
    saved = trained(8).state_dict()
    change_header(saved, lambda header: header.update(renewals=value))
    with pytest.raises(ValueError, match=r"the checkpoint's header is damaged: renewals must .*load another"):
        make().load_state_dict(saved)


def test_another_variance_is_refused_where_a_checkpoint_goes_on():
    frozen = OneBitAdam([Parameter(torch.randn(shape)) for shape in SHAPES], freeze_step=5, betas=(0.9, 0.99))
    with pytest.raises(ValueError, match="here it is 'frozen'; it can only be changed in the warm-up; pass variance="):
        frozen.load_state_dict(trained(8).state_dict())
    for variance, said in (("dead", "variance must be one of"), ("own", r'got "own": .* ZeroOneAdam')):
        with pytest.raises(ValueError, match=said):
            OneBitAdam([Parameter(torch.zeros(3))], variance=variance)


@BOTH
def test_a_checkpoint_loads_while_a_first_gradient_is_reported(kind):
    optimizer, told = make(kind=kind), 0
    for t in range(320):
        step(optimizer, t, late_from=300)
        if t < 300:
            continue
        variance = optimizer.algorithm.compression.variance
        told += FIRST_GRADIENT in variance.plain_state()["renewals"]
        again = resumed(optimizer, make(kind=kind))
        assert again.algorithm.compression.variance.plain_state() == variance.plain_state()
    assert told


# ---------------------------------------------------------------- the guard


@pytest.mark.long(but=2)
@pytest.mark.parametrize("coherent", [False, True])
@pytest.mark.parametrize(("size", "bounds"), [(0.02, {"c_min": 1.0, "c_max": 1.0}), (0.0, {}), (1.0, {})])
def test_a_living_lambs_guard_refuses_no_healthy_step(size, bounds, coherent):
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape) * size) for shape in SHAPES]
    optimizer = OneBitLamb(params, lr=1e-3, warmup=30, betas=(0.9, 0.99), layerwise=Layerwise(**bounds))
    for t in range(200):
        for p in params:
            p.grad = torch.randn(p.shape) + (2.0 if coherent and t > 80 else 0.0)
        optimizer.step()
    assert optimizer.stats()["vetoed_steps"] == 0


def test_the_guard_lets_updates_become_as_large_as_adams_may_be():
    """From noise, of which a slow momentum has little, to gradients that agree."""
    optimizer = OneBitAdam([Parameter(torch.randn(500))], lr=1e-3, warmup=300, betas=(0.99, 0.99))
    for t in range(900):
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t)) + (3.0 if t > 400 else 0.0)
        optimizer.step()
    stats = optimizer.stats()
    print(f"update of norm {stats['update_norm']:.1f}, limit {stats['update_norm_limit']:.1f}")
    assert stats["update_norm"] > 10.0
    assert stats["vetoed_steps"] == 0
