"""What runs between the stages, in torch alone, against float64 NumPy: freeze, its floor, re-warm-up, statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from op_arguments import LIVE, MASKS, MIXED, Array, Problem, wide
from op_formulas import EPS32
from torch import Tensor

from fusedonebit import triton_kernels as ops
from fusedonebit.comm import ShardGroup
from fusedonebit.optim.freezing import quantile_floor
from fusedonebit.triton_kernels import Coef

eps_inside = pytest.mark.parametrize("inside", [False, True], ids=["eps outside", "eps inside"])
every_size = pytest.mark.parametrize(("sizes", "block"), [((1,), 1024), ((1025,), 1024), (MIXED, 128)], ids=str)
both_units = pytest.mark.parametrize("precondition", [False, True])


def unit_of(p: Problem, v: Array, precondition: bool, inside: bool) -> Array:
    """What momentum is multiplied with: the layer's unit, over the denominator where it is preconditioned."""
    return p.column(Coef.UNIT) / (p.denom(v, inside) if precondition else 1)


def own(p: Problem) -> slice:
    return slice(0, p.layout.first_block[-1] * p.layout.block_size)


@eps_inside
@pytest.mark.parametrize("least", [None, torch.tensor([0.0, 1.0, 1e-2, 1e3, 1e-4])], ids=["any", "least"])
@pytest.mark.parametrize("dead_value", [None, torch.arange(5) + 0.01], ids=["dead stay", "dead revive"])
@both_units
def test_freeze_scales_momentum_and_raises_and_revives_variances(precondition, dead_value, least, inside):
    p = Problem(MIXED, 3)
    p.exp_avg_sq[::4] = 0.0
    owner, m, before = p.places.block_tensor.long(), wide(p.compensated), wide(p.exp_avg_sq)
    v = before if dead_value is None else np.where(before == 0, p.by_element(dead_value[owner]), before)
    v = v if least is None else np.maximum(v, p.by_element(least[owner]))
    ops.freeze(p.places, p.compensated, p.exp_avg_sq, inside, precondition, p.coef, dead_value, least)
    assert np.array_equal(wide(p.exp_avg_sq)[own(p)], v[own(p)])
    assert (v[own(p)] != before[own(p)]).any() == (dead_value is not None or least is not None)
    expected = p.column(Coef.BETA1) * m * unit_of(p, v, precondition, inside)
    np.testing.assert_allclose(wide(p.compensated)[own(p)], expected[own(p)], rtol=8 * EPS32)


@eps_inside
@both_units
def test_rewarm_takes_the_unit_away_corrects_v_and_clips_m(precondition, inside):
    p = Problem(MIXED, 3, masks=MASKS, excluded=[2])
    p.compensated *= 0.1
    m, v = wide(p.compensated), wide(p.exp_avg_sq)
    ops.freeze(p.places, p.compensated, p.exp_avg_sq, inside, precondition, p.coef, None, None)
    ops.rewarm(p.places, p.compensated, p.exp_avg_sq, inside, precondition, p.coef)
    decayed = p.column(Coef.BETA1) * m  # by freeze, for the step that follows
    corrected = np.where(p.live, v * p.column(Coef.RSQRT_BIAS2) ** 2, 0.0)
    most = np.sqrt(corrected) / p.column(Coef.UNBIAS1)
    np.testing.assert_allclose(wide(p.compensated)[own(p)], np.clip(decayed, -most, most)[own(p)], rtol=40 * EPS32)
    np.testing.assert_allclose(wide(p.exp_avg_sq)[own(p)], corrected[own(p)], rtol=40 * EPS32)
    clipped = (np.abs(decayed) > most)[p.live]
    assert clipped.any()
    assert not clipped.all()


@eps_inside
@pytest.mark.parametrize("ones", [False, True], ids=["of x", "of ones"])
@pytest.mark.parametrize("live", LIVE)
def test_update_sums_square_live_elements_over_denominators(live, ones, inside):
    p = Problem(MIXED, 3, **live)
    x = None if ones else p.compensated * 3e20  # beyond float32, squared
    sums = ops.update_sums(p.places, x, p.exp_avg_sq, inside, p.coef)
    quotients = np.where(p.live, (1.0 if x is None else wide(x)) / p.denom(wide(p.exp_avg_sq), inside), 0.0)
    expected, used = np.square(quotients).reshape(p.layout.n_blocks, -1).sum(1), p.layout.first_block[-1]
    np.testing.assert_allclose(sums[:used].numpy(), expected[:used], rtol=8 * EPS32)
    assert not sums[used:].any()
    assert expected.any()


@pytest.mark.parametrize("live", LIVE)
def test_exponents_count_each_live_element_above_zero_once(live):
    p = Problem((*MIXED, 3000), 3, **live)
    x = p.exp_avg_sq * 10.0 ** torch.linspace(-30, 30, p.layout.numel)
    x[4::5], x[1::50], x[2::50] = 0.0, 1e-45, 3e38
    counts = ops.exponents(p.places, x)
    counted = x.numpy()[p.live & (x > 0).numpy()]
    assert counted.size > 0
    assert np.array_equal(counts.numpy(), np.bincount(counted.view(np.uint32) >> 16, minlength=1 << 15))


@every_size
def test_live_variance_and_square_sums_sum_and_count_each_block(sizes, block):
    p = Problem(sizes, 3, block)
    p.exp_avg_sq[::3] = 0.0
    sums, used = ops.live_variance(p.places, p.exp_avg_sq), p.layout.first_block[-1]
    rows = wide(p.exp_avg_sq).reshape(-1, block)[:used]
    np.testing.assert_allclose(sums[0, :used], rows.sum(1), rtol=1e-13)
    assert np.array_equal(sums[1, :used], (rows > 0).sum(1))
    assert not sums[:, used:].any()
    x = torch.where(p.live_mask, p.compensated, 7.0)
    squares = ops.square_sums(p.places, x)
    np.testing.assert_allclose(squares[:used], (wide(p.compensated) ** 2).reshape(-1, block).sum(1)[:used], rtol=1e-13)
    assert not squares[used:].any()


# ---------------------------------------------------------------- how small the frozen variance may be

SIZES = (300, 0, 128, 1, 129, 700)
FIRST = {0: torch.arange(300) % 3 > 0}
# Of the float32 that begins the median's bin, and of the median itself: a bin is up to 1/128 wide in v.
LIMIT, LIMIT_OF_THE_MEDIAN = 1000.1, 1000.1 * np.sqrt(1 + 1 / 128)
every_eps = pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-2, 10.0])


def problem(eps: float, low: float, high: float, seed: int = 0) -> Problem:
    """v from 10^low to 10^high, zeros among them; what does not count is far below."""
    p = Problem(SIZES, 3, 128, seed=seed, masks=FIRST, excluded=[2])
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
