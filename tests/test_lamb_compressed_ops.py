"""The ops of 1-bit LAMB's compression stage, against float64 NumPy (``reference_ops``), element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference_ops as reference
import torch
from reference_ops import EPS32, RATIO_WAYS, Problem, wide
from test_lamb_ops import (
    DTYPES,
    LIVE,
    MASKS,
    MIXED,
    ROUNDED,
    WORLD_SIZES,
    check_lamb_move,
    check_lamb_update,
    check_norm,
    check_step_columns,
    copies,
    either_variant,
    eps_inside,
    equal_copies,
)
from test_ops_reduce_and_update import every_size, same_bits
from torch import Tensor

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import BLOCK_SIZES, Coef, Layer

# ---------------------------------------------------------------- lamb_ratio


def check_lamb_ratio(
    p: Problem,
    started: int = 1,
    inside: bool = False,
    preconditioned: bool = False,
    deepspeed: bool = False,
    blend: bool = False,
) -> Any:
    arguments = p.lamb_ratio_arguments(started, inside, preconditioned, deepspeed, blend)
    check_lamb_ratio_arguments(p, arguments)
    return arguments


def check_lamb_ratio_arguments(p: Problem, arguments: Any) -> None:
    _, places, (bits, scale), (last_bits, last_scale), (frozen, _, inside), fresh, started, *_ = arguments
    preconditioned, deepspeed, block = arguments.preconditioned, arguments.of_denominators, places.block_size
    *_, (largest, norms) = arguments
    frozen64, held = wide(frozen), wide(fresh)
    per_unit = reference.denom(p, frozen64, inside) if preconditioned else None
    m = reference.momentum_of(p, bits, scale, per_unit)
    last = reference.momentum_of(p, last_bits, last_scale, per_unit) if started else held
    v, bound = reference.fresh_variance(p, m, last, held if started else frozen64)
    unchanged = copies((p.params, frozen, bits, scale, started, p.coef))
    ops.lamb_ratio(*arguments)
    found = wide(fresh)
    assert (np.abs(found - v) <= bound + 2.0**-149).all()
    assert not found[~p.live].any()
    # Of the variance as it was written: its own errors are bounded above.
    ratio = reference.ratios(p, frozen64, found, inside, deepspeed).reshape(-1, block).max(1)
    np.testing.assert_allclose(wide(largest), ratio, rtol=8 * EPS32)
    assert same_bits(last_bits, bits)
    assert same_bits(last_scale, scale)
    if norms is not None:
        x, u, off = reference.lamb_direction(p, m, frozen64, inside)
        decay = p.column(Coef.WEIGHT_DECAY) * x
        check_norm(norms[0], np.where(p.live, u - decay, 0.0), off, block)
        check_norm(norms[1], u, off, block)
    assert equal_copies(copies((p.params, frozen, bits, scale, started, p.coef)), unchanged)


@pytest.mark.long(but=26)
@either_variant
@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("started", [0, 1])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@every_size
def test_lamb_ratio_is_its_formula(sizes, block, world_size, started, ternary, deepspeed):
    check_lamb_ratio(Problem(sizes, world_size, block, ternary=ternary), started, deepspeed=deepspeed)


@pytest.mark.long(but=24)
@eps_inside
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deepspeed", [False, True])
@every_size
def test_lamb_ratio_finds_the_norms_for_the_blend(sizes, block, deepspeed, dtype, inside):
    check_lamb_ratio(Problem(sizes, 2, block, dtype=dtype), 1, inside, deepspeed=deepspeed, blend=True)


@pytest.mark.parametrize("way", [way for way in RATIO_WAYS if way[2]], ids=str)
@every_size
def test_preconditioned_lamb_ratio_is_its_formula(sizes, block, way):
    check_lamb_ratio(Problem(sizes, 2, block), *way)


def test_lamb_ratio_of_momentum_in_units_of_one_over_denom_is_that_of_the_momentum():
    outcomes = []
    for preconditioned in (False, True):
        p = Problem((128, 128))
        p.exp_avg_sq.fill_(0.25), p.coef[:, Coef.EPS].fill_(0.5), p.coef[:, Coef.RSQRT_BIAS2].fill_(3.0)  # denom = 2
        arguments = p.lamb_ratio_arguments(1, False, preconditioned, blend=True)
        if preconditioned:
            arguments.exp_avg.scale.div_(2.0), arguments.last.scale.div_(2.0)
        ops.lamb_ratio(*arguments)
        outcomes.append([arguments.fresh, *arguments.ratios])
    assert equal_copies(*outcomes)


@pytest.mark.long(but=13)
@pytest.mark.parametrize("live", LIVE[1:])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_lamb_ratio_counts_no_masked_or_excluded_element(block, world_size, live):
    for started in (0, 1):
        for deepspeed in (False, True):
            p = Problem(MIXED, world_size, block, **live)
            arguments = check_lamb_ratio(p, started, deepspeed=deepspeed, blend=True)
            nothing = ~p.live.reshape(-1, block).any(1)
            assert not arguments.ratios_largest[torch.from_numpy(nothing)].any()
            assert not arguments.ratios_norms[:, torch.from_numpy(nothing)].any()


@pytest.mark.parametrize("junk", [3.0, torch.nan, torch.inf])
def test_what_does_not_count_enters_no_ratio_and_no_norm(junk):
    for started in (0, 1):
        for deepspeed in (False, True):
            outcomes = []
            for value in (0.0, junk):
                p = Problem(MIXED, 3, masks=MASKS, excluded=[2])
                arguments = p.lamb_ratio_arguments(started, False, False, deepspeed, True)
                p.params[0][0] = p.params[2][5] = value
                arguments.exp_avg_sq.numbers[~p.live_mask] = arguments.fresh[~p.live_mask] = value
                ops.lamb_ratio(*arguments)
                outcomes.append([arguments.fresh, *arguments.ratios])
            assert equal_copies(*outcomes)


def test_a_coordinate_without_frozen_variance_has_ratio_zero_in_the_paper_and_one_over_eps_in_deepspeed():
    for deepspeed in (False, True):
        p = Problem((128, 128, 128))
        p.exp_avg_sq[:128] = 0.0  # of the first tensor all, of the second half, of the third none
        p.exp_avg_sq[128:192] = 0.0
        arguments = check_lamb_ratio(p, 1, deepspeed=deepspeed)
        assert (arguments.fresh > 0).all()
        assert [x > 0 for x in arguments.ratios_largest.tolist()] == [deepspeed, True, True]


@pytest.mark.parametrize("frozen", [0.0, 1e-45])
def test_a_fresh_variance_of_zero_gives_an_infinite_ratio_that_is_clipped(frozen):
    p = Problem((100, 100))
    arguments = p.lamb_ratio_arguments(1)
    p.exp_avg_sq[:128] = frozen
    arguments.exp_avg.scale.zero_(), arguments.last.scale.zero_(), arguments.fresh[:128].zero_()
    check_lamb_ratio_arguments(p, arguments)
    largest = arguments.ratios_largest
    assert not arguments.fresh[:128].any()
    assert largest[0] == (torch.inf if frozen else 0.0)
    _, norms, *rest, layers = p.lamb_rescale_arguments()
    layers[Layer.RATIO] = 1.0
    ops.lamb_rescale(largest, norms, *rest, layers)
    threshold = p.coef[0, Coef.R_THRESHOLD].double()
    assert layers[Layer.RATIO, 0] == (float((1 + threshold).float()) if frozen else 1.0)
    assert layers.isfinite().all()


def test_a_first_step_takes_the_momentum_in_full_precision_and_later_ones_the_bits():
    p = Problem(MIXED, 2)
    p.coef[:, Coef.UNIT] = 1.0
    first = p.lamb_ratio_arguments(0)
    check_lamb_ratio_arguments(p, first)
    second = first._replace(started=torch.ones(1, dtype=torch.int32))
    v = wide(second.fresh)
    # The same momentum once more: g = m.
    check_lamb_ratio_arguments(p, second)
    m = p.by_element(p.exp_avg_scale)
    expected = p.column(Coef.BETA2) * v + p.column(Coef.ONE_MINUS_BETA2) * m * m
    np.testing.assert_allclose(wide(second.fresh), np.where(p.live, expected, 0.0), rtol=1e-4)


# ---------------------------------------------------------------- lamb_rescale


def check_lamb_rescale(p: Problem, arguments: tuple) -> Tensor:
    largest, norms, _, _, deepspeed, started, coef, layers = arguments
    before, old = coef.clone(), layers.clone()
    norms64 = None if norms is None else norms.numpy()
    r = reference.lamb_rescale(p, wide(largest), norms64, old.double().numpy(), deepspeed)
    ops.lamb_rescale(*arguments)
    np.testing.assert_allclose(wide(layers[Layer.RATIO]), r, rtol=ROUNDED)
    c = wide(layers[Layer.RATIO]) * wide(old[Layer.AVERAGE])
    np.testing.assert_allclose(wide(layers[Layer.COEFFICIENT]), c, rtol=ROUNDED)
    assert same_bits(layers[Layer.AVERAGE], old[Layer.AVERAGE])
    assert started.item() == 1
    check_step_columns(p, before, c)
    return layers


@pytest.mark.long(but=23)
@either_variant
@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@every_size
def test_lamb_rescale_is_its_formula(sizes, block, world_size, blend, deepspeed):
    for seed in range(4):
        p = Problem(sizes, world_size, block, seed=seed)
        arguments = p.lamb_rescale_arguments(deepspeed, blend)
        if seed > 1:  # nothing limits the change: the range and the blend show
            p.coef[:, Coef.R_THRESHOLD] = 100.0
            arguments.largest.mul_(10.0 ** (seed - 3))
        check_lamb_rescale(p, arguments)


@pytest.mark.parametrize(
    ("found", "last", "paper", "deepspeed"),
    [(3.0, 0.25, 0.5, 0.375), (3.0, 8.0, 4.0, 4.0), (100.0, 1.0, 1.5, 1.5), (0.1, 10.0, 4.0, 5.0)],
)
def test_the_order_of_the_two_limits(found, last, paper, deepspeed):
    for variant, expected in ((False, paper), (True, deepspeed)):
        p = Problem((128,))
        p.coef[:, Coef.R_MIN], p.coef[:, Coef.R_MAX], p.coef[:, Coef.R_THRESHOLD] = 0.5, 4.0, 0.5
        arguments = p.lamb_rescale_arguments(variant)
        arguments.largest.fill_(found)
        arguments.layers[Layer.RATIO] = last
        assert check_lamb_rescale(p, arguments)[Layer.RATIO].item() == expected


def test_the_blend_replaces_the_share_of_the_weight_decay_by_one():
    for adam, u, expected in ((3.0, 4.0, 1.75), (0.0, 4.0, 1.0), (5.0, 4.0, 2.0), (0.0, 0.0, 2.0)):
        p = Problem((128,))
        p.coef[:, Coef.R_THRESHOLD], p.coef[:, Coef.R_MAX] = 100.0, 9.0
        arguments = p.lamb_rescale_arguments(deepspeed=True, blend=True)
        arguments.largest.fill_(2.0)
        arguments.norms[:, 0] = torch.tensor([adam**2, u**2])
        assert check_lamb_rescale(p, arguments)[Layer.RATIO].item() == expected


@either_variant
@pytest.mark.parametrize("blend", [False, True])
def test_a_layer_without_a_ratio_keeps_its_own(blend, deepspeed):
    p = Problem(MIXED, 2)  # the second tensor is empty
    arguments = p.lamb_rescale_arguments(deepspeed, blend)
    arguments.largest[p.layout.first_block[2]] = 0.0
    last = arguments.layers[Layer.RATIO].fill_(0.01).clone()  # outside of its range: not even that is enforced
    layers = check_lamb_rescale(p, arguments)
    kept = layers[Layer.RATIO] == last
    assert [bool(kept[1]), bool(kept[2])] == [True, True]
    assert not kept[[0, 3, 4]].any()


# ---------------------------------------------------------------- lamb_follow


def check_lamb_follow(p: Problem, arguments: tuple) -> tuple[Tensor, Tensor]:
    """Run it and compare; return c of this step, over that of the unit, and of the next."""
    x_squares, scale, numel, _, _, coef, layers, mean = arguments
    before, old = coef.clone(), layers.clone()
    following, moved, c = reference.lamb_follow(p, wide(x_squares), wide(scale) ** 2 * wide(numel), wide(mean))
    ops.lamb_follow(*arguments)
    np.testing.assert_allclose(wide(mean), following, rtol=ROUNDED)
    np.testing.assert_allclose(wide(layers[Layer.COEFFICIENT]), c, rtol=ROUNDED)
    assert same_bits(coef[:, Coef.UNIT], layers[Layer.COEFFICIENT])
    others = [row for row in Layer if row != Layer.COEFFICIENT]
    assert same_bits(layers[others], old[others])
    k = before.double().numpy()
    # Bits are in the unit c_t, but it is the table's new one by which they are divided when they are applied.
    per_bits = wide(coef[:, Coef.STEP_SIZE]) / wide(coef[:, Coef.UNIT])
    np.testing.assert_allclose(per_bits, k[:, Coef.LR] * moved * k[:, Coef.UNBIAS1] / k[:, Coef.UNIT], rtol=3 * EPS32)
    np.testing.assert_allclose(
        wide(coef[:, Coef.DECAY]), 1 - k[:, Coef.LR] * moved * k[:, Coef.WEIGHT_DECAY], rtol=ROUNDED
    )
    rest = [column for column in Coef if column not in (Coef.STEP_SIZE, Coef.DECAY, Coef.UNIT)]
    assert same_bits(coef[:, rest], before[:, rest])
    return torch.tensor(moved / k[:, Coef.UNIT]), layers[Layer.COEFFICIENT]


@pytest.mark.long(but=5)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@every_size
def test_lamb_follow_is_its_formula(sizes, block, world_size):
    for seed in range(4):
        p = Problem(sizes, world_size, block, seed=seed)
        arguments = p.lamb_follow_arguments()
        arguments.scale.mul_(10.0 ** (seed - 2))
        check_lamb_follow(p, arguments)


def test_a_layer_that_moves_farther_than_its_mean_is_held_back_and_one_that_moves_less_is_not_pushed():
    for size, held in ((100.0, True), (1e-3, False)):
        p = Problem((128,))
        p.coef[:, Coef.C_MIN], p.coef[:, Coef.C_MAX], p.coef[:, Coef.UNIT] = 1e-6, 1e6, 1.0
        arguments = p.lamb_follow_arguments()
        arguments.x_squares.fill_(1.0), arguments.scale.fill_(size)
        share, _ = check_lamb_follow(p, arguments)
        assert (share.item() < 1) == held


def test_a_group_without_adaptation_moves_as_adam_does():
    p = Problem(MIXED, 2)
    p.coef[:, Coef.C_MIN] = p.coef[:, Coef.C_MAX] = p.coef[:, Coef.UNIT] = 1.0
    arguments = p.lamb_follow_arguments()
    arguments.scale.mul_(1e4)
    share, c = check_lamb_follow(p, arguments)
    assert share.tolist() == c.tolist() == [1.0] * len(MIXED)


def test_a_layer_that_did_not_move_keeps_its_mean_and_one_without_a_mean_takes_the_first():
    p = Problem((100, 100), 1)
    arguments = p.lamb_follow_arguments()
    arguments.scale[0], arguments.update_squares[1] = 0.0, 0.0
    before = arguments.update_squares.clone()
    check_lamb_follow(p, arguments)
    assert arguments.update_squares[0] == before[0] > 0
    assert arguments.update_squares[1] > 0


@pytest.mark.parametrize("sizes", [(0,), (0, 0), (0, 5, 0)])
def test_tensors_without_elements_take_part_in_no_op(sizes):
    p = Problem(sizes, 2)
    check_lamb_update(p, False)
    check_lamb_move(False, sizes, 2)
    largest = check_lamb_ratio(p, 0, deepspeed=True, blend=True)[-1].largest
    assert (largest > 0).sum() == sizes.count(5)


# ---------------------------------------------------------------- square_sums


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@every_size
def test_square_sums_are_those_of_each_block(sizes, block, world_size):
    p = Problem(sizes, world_size, block)
    x = p.compensated.clone()
    x[~p.live_mask] = 7.0
    sums = ops.square_sums(p.places, x)
    blocks = p.layout.first_block[-1]
    expected = (wide(p.compensated) ** 2).reshape(-1, block).sum(1)
    np.testing.assert_allclose(sums[:blocks], expected[:blocks], rtol=1e-13)
    assert not sums[blocks:].any()
    assert same_bits(x[p.live_mask], p.compensated[p.live_mask])
