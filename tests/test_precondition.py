"""Preconditioned momentum: how small the frozen variance may be, and that ranks agree on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from observe import fingerprint, observe
from op_arguments import Problem, wide
from optimizers import ADAM_AND_LAMB, UNGUARDED, construct
from ranks import simulate
from torch import Tensor

from fusedonebit import triton_kernels as ops
from fusedonebit.comm import ShardGroup, Transport
from fusedonebit.optim.freezing import quantile_floor
from fusedonebit.triton_kernels import Coef

SIZES = (300, 0, 128, 1, 129, 700)
MASKS = {0: torch.arange(300) % 3 > 0}
# Of the float32 that begins the median's bin, and of the median itself: a bin is up to 1/128 wide in v.
LIMIT, LIMIT_OF_THE_MEDIAN = 1000.1, 1000.1 * np.sqrt(1 + 1 / 128)
eps_inside = pytest.mark.parametrize("inside", [False, True], ids=["eps outside", "eps inside"])
every_eps = pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-2, 10.0])


def problem(eps: float, low: float, high: float, seed: int = 0) -> Problem:
    """v from 10^low to 10^high, zeros among them; what does not count is far below."""
    p = Problem(SIZES, 3, 128, seed=seed, masks=MASKS, excluded=[2])
    share = torch.rand(p.layout.numel, generator=torch.Generator().manual_seed(seed))
    p.exp_avg_sq = 10.0 ** (low + (high - low) * share)
    p.exp_avg_sq[::7] = 0.0
    p.exp_avg_sq[~p.live_mask] = 1e-30
    p.coef[:, Coef.EPS] *= eps / 1e-3
    return p


def least_of(p: Problem, inside: bool) -> Tensor:
    return quantile_floor(p.places, p.exp_avg_sq, p.coef, inside, ShardGroup())


def frozen(p: Problem, inside: bool) -> np.ndarray:
    ops.freeze(p.places, p.compensated, p.exp_avg_sq, inside, True, p.coef, torch.ones(len(SIZES)), least_of(p, inside))
    return wide(p.exp_avg_sq)


def largest_multiples(p: Problem, v: np.ndarray, median: np.ndarray, inside: bool) -> np.ndarray:
    """Of each element, its 1/denom as a multiple of that of the median v."""
    return p.denom(np.full(v.shape, float(median)), inside) / p.denom(v, inside)


@eps_inside
@every_eps
def test_no_unit_exceeds_a_thousand_times_the_medians(eps, inside):
    raised = 0
    for seed, (low, high) in enumerate([(-30, 10), (-12, 0), (-8, -1), (-25, -18), (-20, 30)]):
        p = problem(eps, low, high, seed)
        before = wide(p.exp_avg_sq)
        counted = np.sort(before[p.live & (before > 0)]).astype(np.float32)
        median = counted[(counted.size - 1) // 2]
        begins = (median.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        v = frozen(p, inside)
        of_bin, of_median = (largest_multiples(p, v, x, inside)[p.live].max() for x in (begins, median))
        assert of_bin <= LIMIT
        assert of_median <= LIMIT_OF_THE_MEDIAN
        # No more than needed: what was raised is at the limit, all else has its bits.
        changed = p.live & (before > 0) & (v != before)
        assert (v[changed] > before[changed]).all()
        raised += changed.sum()
        multiples = largest_multiples(p, v, begins, inside)[changed]
        np.testing.assert_allclose(multiples, 1000, rtol=1e-4)
    assert (raised > 0) == (eps < 1)


@eps_inside
@every_eps
@pytest.mark.parametrize(("low", "high"), [(-9.0, -4.5), (0.0, 0.0), (-13.0, -13.0), (4.0, 9.5)])
def test_where_no_unit_is_extreme_no_bit_of_the_variance_changes(low, high, eps, inside):
    p = problem(eps, low, high)
    p.exp_avg_sq[~p.live_mask] = p.exp_avg_sq[1]
    before = p.exp_avg_sq.clone()
    frozen(p, inside)
    own = (before > 0) & (torch.arange(len(before)) < p.layout.first_block[-1] * 128)
    assert torch.equal(p.exp_avg_sq[own], before[own])


@eps_inside
def test_nothing_to_take_a_median_of_raises_nothing(inside):
    p = problem(1e-3, -9.0, -4.0)
    p.exp_avg_sq[p.live_mask] = 0.0
    assert not least_of(p, inside).any()


def train(rank: int, transport: Transport, name: str, options: dict) -> tuple[str, list[dict], np.ndarray]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((33, 40), (7,), (900,), (3, 5, 7))]
    optimizer = construct(name, params, lr=1e-2, freeze_step=8, **UNGUARDED, **options, process_group=transport)
    generator, states = torch.Generator().manual_seed(rank), []
    for step in range(30):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=generator)
            # The gradients of some coordinates are so small that their variances are raised.
            p.grad.view(-1)[:: i + 5] *= 1e-5
        if step in (8, 29):
            states.append(observe(optimizer))
        optimizer.step()
    states.append(observe(optimizer))
    return fingerprint(params), states, optimizer.stats()["phase"]


@pytest.mark.long(but=1)
@ADAM_AND_LAMB
@pytest.mark.parametrize("floor", [None, 0.0])
def test_ranks_stay_bit_identical_and_freeze_the_same_variance(name, floor):
    (first, states, phase), (second, others, _) = simulate(
        train, 2, name, {"precondition": True, "variance_floor": floor}
    )
    assert phase == "compression"
    assert first == second
    for one, other in zip(states, others, strict=True):
        for key in ("x", "m", "v", "exp_avg_sq_fresh", "layer"):
            np.testing.assert_array_equal(one[key], other[key])
    warmup, frozen_, last = (state["v"] for state in states)
    assert (frozen_ > warmup).mean() > 0.05
    assert np.array_equal(frozen_, last)
    assert simulate(train, 2, name, {"precondition": False})[0][0] != first
