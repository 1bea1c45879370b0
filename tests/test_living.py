"""When a living variance is renewed, whom it waits for, and how long it warms up."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from observe import change_header, fingerprint, through_a_file
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


def step(optimizer: OneBitAdam, t: int, rank: int = 0, late_from: int = 0) -> None:
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + rank + 10 * t + 10_000 * i))
        p.grad = g * (0.0 if i == LATE and t < late_from else 10.0**i)
    optimizer.step()


def test_renewals_are_close_at_first_and_50_steps_apart_later():
    optimizer, seen = make(), [0]
    for t in range(420):
        step(optimizer, t)
        seen.append(optimizer.stats()["renewals"])
    begun = [t - 5 for t in range(1, len(seen)) if seen[t] > seen[t - 1]]  # steps after the freeze
    assert begun[:8] == [2, 3, 4, 5, 6, 7, 8, 10]
    apart = [b - a for a, b in pairwise(begun)]
    assert apart == sorted(apart)
    assert apart[-3:] == [50, 50, 50]
    assert all(gap <= max(1, t // 4) for gap, t in zip(apart, begun[1:], strict=True))


@pytest.mark.long(but=1)
@pytest.mark.parametrize("precondition", [True, False])
def test_a_tensor_that_is_late_moves_by_steps_of_the_usual_size(precondition):
    def train(rank: int, transport: Transport) -> tuple[list[float], list[list[str]], str]:
        optimizer = make(transport, lr=1e-3, weight_decay=0.0, numerics=Numerics(precondition=precondition))
        moved, waiting = [], []
        params = optimizer.param_groups[0]["params"]
        for t in range(160):
            before = params[LATE].detach().clone()
            step(optimizer, t, rank, late_from=60)
            moved.append(float((params[LATE].detach() - before).square().mean().sqrt()) / 1e-3)
            waiting.append(optimizer.stats()["dead_tensors"])
        return moved, waiting, fingerprint(params)

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


def test_scales_contract_as_usual_until_the_variance_has_settled():
    optimizer, used = make(betas=(0.9, 0.95)), []
    for t in range(16):
        step(optimizer, t)
        used.append(optimizer.algorithm.exchange.reducer.worker.norm)
    norms = {name: SCALE_NORMS[name] for name in ("contractive", "relaxed")}
    assert used[5:] == [norms["contractive"]] * 5 + [norms["relaxed"]] * 6
    assert make(numerics=Numerics(scale_norm="l2")).algorithm.exchange.reducer.worker.norm == SCALE_NORMS["l2"]


def drop_late(optimizer: OneBitAdam, t: int, late_from: int) -> None:
    """Take a step in which the late tensor has no gradient at all, until it has."""
    params = optimizer.param_groups[0]["params"]
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + 10 * t + 10_000 * i))
        p.grad = None if i == LATE and t < late_from else g
    optimizer.step()


@pytest.mark.parametrize("guard", ["rewarm", "warn", "off"])
def test_a_tensor_whose_gradients_come_late_begins_as_adams(guard):
    optimizer = make(betas=(0.9, 0.999), lr=1e-3, weight_decay=0.0, faults=Faults(guard=guard))
    late, moved = optimizer.param_groups[0]["params"][LATE], []
    for t in range(120):
        before = late.detach().clone()
        drop_late(optimizer, t, late_from=40)
        moved.append(float((late.detach() - before).square().mean().sqrt()) / 1e-3)
    stats = optimizer.stats()
    print(f"guard={guard}: first step {moved[40]:.2f} learning rates (limit 2), the largest {max(moved):.2f} (limit 2)")
    assert not any(moved[:40])
    assert 0.2 < moved[40] <= 2.0
    assert max(moved) <= 2.0
    assert (stats["vetoed_steps"], stats["rewarms"], stats["dead_tensors"]) == (0, 0, [])


def test_a_step_that_the_guard_refuses_still_tells_the_level():
    """Else a variance that is too small by far would be refused for good."""
    optimizer = make(warmup=30, faults=Faults(guard="warn"))
    params = optimizer.param_groups[0]["params"]
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


def test_a_tensors_first_gradients_bring_renewals_closer_again():
    optimizer, seen = make(), [0]
    for t in range(260):
        step(optimizer, t, late_from=150)
        seen.append(optimizer.stats()["renewals"])
    assert seen[150] - seen[100] <= 2
    alive = next(t for t in range(150, 260) if not optimizer_waits(seen, t))
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


def optimizer_waits(seen: list[int], t: int) -> bool:
    """Whether no renewal has followed the first gradient yet."""
    return seen[t] == seen[150]


@pytest.mark.long(but=1)
@BOTH
def test_a_run_resumes_between_a_projection_and_its_renewal(kind):
    for cut in (6, 7, 40, 41, 42, 43, 44, 45, 46):
        straight = make(kind=kind)
        for t in range(cut):
            step(straight, t, late_from=38)
        resumed = make(kind=kind)
        with torch.no_grad():
            for p, q in zip(resumed.param_groups[0]["params"], straight.param_groups[0]["params"], strict=True):
                p.copy_(q)
        resumed.load_state_dict(through_a_file(straight.state_dict()))
        for t in range(cut, cut + 25):
            for optimizer in (straight, resumed):
                step(optimizer, t, late_from=38)
        prints = [fingerprint(o.param_groups[0]["params"]) for o in (straight, resumed)]
        assert prints[0] == prints[1], cut
        assert straight.stats()["renewals"] == resumed.stats()["renewals"] > 5


def test_a_late_layer_of_lamb_moves_no_farther_than_it_is_large():
    optimizer, moved = make(kind=OneBitLamb, lr=1e-3, weight_decay=0.0), []
    late = optimizer.param_groups[0]["params"][LATE]
    for t in range(160):
        before = late.detach().clone()
        step(optimizer, t, late_from=60)
        moved.append(float((late.detach() - before).norm() / before.norm()) / 1e-3)
    print(f"first step {moved[60]:.2f}, at most {max(moved):.2f} learning rates of its norm (limit 1 / 0.4375)")
    assert not any(moved[:60])
    assert moved[60] > 0.2
    assert max(moved) <= 1 / rules.SHARE_OF_NORM * 1.001


def test_without_adaptation_a_living_lamb_is_a_living_adam():
    either = make(), make(kind=OneBitLamb, eps=1e-8, layerwise=Layerwise(c_min=1.0, c_max=1.0))
    for t in range(60):
        for optimizer in either:
            step(optimizer, t)
    for a, b in zip(*(o.param_groups[0]["params"] for o in either), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("beta2", [0.9, 0.99])
def test_a_tensor_idle_for_long_returns_by_steps_of_usual_size(beta2):
    optimizer = make(betas=(0.9, beta2), lr=1e-3, weight_decay=0.0)
    late, moved = optimizer.param_groups[0]["params"][LATE], []
    for t in range(1000):
        before = late.detach().clone()
        step(optimizer, t, late_from=900 if t >= 60 else 0)
        moved.append(float((late.detach() - before).square().mean().sqrt()) / 1e-3)
    print(f"beta2={beta2}: at most {max(moved):.2f} learning rates in a step (limit 3)")
    assert max(moved) <= 3.0
    assert min(moved[920:]) > 0.01


@pytest.mark.long(but=1)
@BOTH
def test_a_rewarmup_between_squares_and_renewal_can_be_resumed(kind):
    faults = Faults(rewarm_steps=10)
    for cut in (5, 6, 7, 8, 9, 15, 19, 20, 21, 22, 23):
        straight, resumed, never_saved = (refusing(make(kind=kind, faults=faults), 4) for _ in range(3))
        for t in range(cut):
            step(straight, t)
        with torch.no_grad():
            for p, q in zip(resumed.param_groups[0]["params"], straight.param_groups[0]["params"], strict=True):
                p.copy_(q)
        for t in range(40):
            step(never_saved, t)
        resumed.load_state_dict(through_a_file(straight.state_dict()))
        for t in range(cut, 40):
            step(resumed, t)
        prints = [fingerprint(o.param_groups[0]["params"]) for o in (never_saved, resumed)]
        assert prints[0] == prints[1], cut


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
def test_a_copy_goes_on_as_the_original(kind):
    optimizer = make(kind=kind)
    for t in range(12):
        step(optimizer, t)
    copied = copy.deepcopy(optimizer)
    for t in range(12, 40):
        step(optimizer, t)
        step(copied, t)
    assert fingerprint(optimizer.param_groups[0]["params"]) == fingerprint(copied.param_groups[0]["params"])


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


@pytest.mark.parametrize("value", [None, [], [1, 2], [1, 2, 3, -4, 5, 6], "1"])
def test_a_damaged_header_is_refused(value):
    optimizer = make()
    for t in range(8):
        step(optimizer, t)
    saved = optimizer.state_dict()
    change_header(saved, lambda header: header.update(renewals=value))
    with pytest.raises(ValueError, match=r"the checkpoint's header is damaged: renewals must .*load another"):
        make().load_state_dict(saved)


def test_another_variance_is_refused_where_a_checkpoint_goes_on():
    optimizer = make()
    for t in range(8):
        step(optimizer, t)
    saved = optimizer.state_dict()
    frozen = OneBitAdam([Parameter(torch.randn(shape)) for shape in SHAPES], freeze_step=5, betas=(0.9, 0.99))
    with pytest.raises(ValueError, match="variance='shared', but here it is 'frozen'; it can only be changed before"):
        frozen.load_state_dict(saved)
    with pytest.raises(ValueError, match="variance must be one of"):
        OneBitAdam([Parameter(torch.zeros(3))], variance="dead")
    with pytest.raises(ValueError, match=r'got "own": .* ZeroOneAdam'):
        OneBitAdam([Parameter(torch.zeros(3))], variance="own")


@BOTH
def test_ranks_stay_alike_where_one_of_them_lacks_gradients(kind):
    def train(rank: int, transport: Transport) -> list[str]:
        optimizer, seen = make(transport, kind=kind), []
        for t in range(45):
            for i, p in enumerate(optimizer.param_groups[0]["params"]):
                g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1 + rank + 10 * t + 10_000 * i))
                lacks = t % 5 == 4 or (rank == 0 and t % 3 == 2)
                p.grad = None if i and lacks and t > 5 else g
            optimizer.step()
            seen.append(fingerprint(optimizer.param_groups[0]["params"]))
        return seen

    first, second = simulate(train, 2)
    assert first == second
    assert len(set(first)) == 45


def test_a_run_resumes_where_missing_gradients_leave_the_table():
    def at(optimizer: Any, t: int) -> None:
        drop_late(optimizer, t, late_from=t if t % 4 else t + 1)

    for cut in (14, 17, 20, 25):
        straight, resumed = make(kind=OneBitLamb), make(kind=OneBitLamb)
        for t in range(cut):
            at(straight, t)
        with torch.no_grad():
            for p, q in zip(resumed.param_groups[0]["params"], straight.param_groups[0]["params"], strict=True):
                p.copy_(q)
        resumed.load_state_dict(through_a_file(straight.state_dict()))
        for t in range(cut, cut + 12):
            at(straight, t)
            at(resumed, t)
        assert len({fingerprint(o.param_groups[0]["params"]) for o in (straight, resumed)}) == 1, cut


@BOTH
def test_a_checkpoint_loads_while_a_first_gradient_is_reported(kind):
    optimizer, told = make(kind=kind), 0
    for t in range(320):
        step(optimizer, t, late_from=300)
        if t < 300:
            continue
        variance = optimizer.algorithm.compression.variance
        told += FIRST_GRADIENT in variance.plain_state()["renewals"]
        resumed = make(kind=kind)
        resumed.load_state_dict(through_a_file(optimizer.state_dict()))
        assert resumed.algorithm.compression.variance.plain_state() == variance.plain_state()
    assert told


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
