"""``adam_update``, against float64 NumPy, and each of its kernels against eager torch."""

from __future__ import annotations

import numpy as np
import pytest
import reference_ops as reference
import torch
from backends import assert_equal_backends, problem
from reference_ops import EPS32, Problem, wide
from test_kernels import EACH_SIZE, block_of
from test_ops_reduce_and_update import DTYPES, MASKS, MIXED, check_moved, every_size, same_bits

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import Coef
from fusedonebit.triton_kernels.codes import keep_nearest
from fusedonebit.triton_kernels.headers import PARTLY
from fusedonebit.triton_kernels.nouns import Moments
from fusedonebit.triton_kernels.tables import EMPTY_ROW

UNCOUNTED = (torch.nan, torch.inf, -torch.inf, 3e38, -2e19)


# ---------------------------------------------------------------- its formula


@pytest.mark.parametrize("dtype", DTYPES)
@every_size
def test_adam_update_is_its_formula_rounded_once(sizes, block, dtype):
    check_adam_update(sizes, block, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adam_update_moves_no_masked_or_excluded_element(dtype):
    check_adam_update(MIXED, 128, dtype, masks=MASKS, excluded=[2])


def check_adam_update(sizes: tuple[int, ...], block: int, dtype: torch.dtype, **live: object) -> None:
    p, before = (Problem(sizes, 2, block, dtype=dtype, **live) for _ in range(2))
    arguments = p.update_arguments()
    grad, sums = p.flat(arguments.grads), arguments.exp_avg_sq_sums
    m, v, x = reference.adam_update(p, grad, wide(p.compensated), wide(p.exp_avg_sq))
    ops.adam_update(*arguments)
    # What blocks without live elements have for moments is nobody's: their tensors move no more.
    in_use = p.table.row.numpy() != EMPTY_ROW
    used = in_use.repeat(block)
    size = np.abs(wide(before.compensated)) + np.abs(grad)
    assert (np.abs(wide(p.compensated) - m)[used] <= 8 * EPS32 * size[used]).all()
    np.testing.assert_allclose(wide(p.exp_avg_sq)[used], v[used], rtol=8 * EPS32)
    update = p.column(Coef.STEP_SIZE) * size / reference.denom(p, v, False)
    check_moved(p, before, x, np.abs(before.flat(before.params)) + update)
    expected = wide(p.exp_avg_sq).reshape(-1, block).sum(1)
    np.testing.assert_allclose(sums.numpy()[in_use], expected[in_use], rtol=1e-13)


def test_padding_never_enters_a_moment():
    p = Problem(MIXED, 3, masks=MASKS)
    dead = torch.from_numpy(~p.live)
    p.exp_avg_sq[dead] = 0.0
    ops.adam_update(*p.update_arguments())
    assert not p.compensated[dead].any()
    assert not p.exp_avg_sq[dead].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_whose_gradient_does_not_count_stays_with_its_moments_and_all_others_move(dtype):
    plain, p, before = (Problem(MIXED, 2, masks=MASKS, dtype=dtype) for _ in range(3))
    p.coef[:, Coef.GRAD_LIMIT] = plain.coef[:, Coef.GRAD_LIMIT] = 100.0
    bad = torch.zeros(p.layout.numel, dtype=torch.bool)
    for i in range(4):
        bad[p.layout.offset(0) + 7 * i] = True
    bad &= p.live_mask  # masked ones count for nothing
    assert bad.any()
    arguments, (found, found_before) = p.update_arguments(sums=False), p.flags_found()
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf, 101.0)):
        arguments.grads[0][7 * i] = value
    ops.adam_update(*arguments, found, found_before)
    ops.adam_update(*plain.update_arguments(sums=False))
    assert (int(found), int(found_before)) == (PARTLY, 0)
    for name in ("compensated", "exp_avg_sq"):
        new, other, old = (getattr(each, name) for each in (p, plain, before))
        assert same_bits(new[bad], old[bad])
        assert same_bits(new[~bad], other[~bad])
    x, other, old = (each.flat(each.params) for each in (p, plain, before))
    assert np.array_equal(x, np.where(bad.numpy(), old, other))


def test_moments_in_bfloat16_are_neighbours_of_exact_ones_and_exact_on_average():
    exact, halves = Problem(MIXED, 2), Problem(MIXED, 2)
    halves.compensated, halves.exp_avg_sq = halves.compensated.bfloat16(), halves.exp_avg_sq.bfloat16()
    exact.compensated.copy_(halves.compensated)
    exact.exp_avg_sq.copy_(halves.exp_avg_sq)
    start = halves.compensated.clone(), halves.exp_avg_sq.clone()
    arguments, drawn = halves.update_arguments(sums=False), torch.zeros((), dtype=torch.int64)
    grads = [g.clone() for g in arguments.grads]
    ops.adam_update(*exact.update_arguments(sums=False))
    totals = [torch.zeros(exact.layout.numel, dtype=torch.float64) for _ in range(2)]
    draws = 400
    for draw in range(draws):
        halves.compensated.copy_(start[0])
        halves.exp_avg_sq.copy_(start[1])
        drawn.fill_(draw)
        for g, was in zip(arguments.grads, grads, strict=True):
            g.copy_(was)
        ops.adam_update(*arguments._replace(moments_drawn=drawn), *halves.flags_found())
        for total, found in zip(totals, (halves.compensated, halves.exp_avg_sq), strict=True):
            total += found.double()
    for total, kept, wanted in zip(
        totals, (halves.compensated, halves.exp_avg_sq), (exact.compensated, exact.exp_avg_sq), strict=True
    ):
        unit = wanted.abs().double() * 2.0**-7  # an upper bound of what lies between two neighbours
        assert ((kept.double() - wanted.double()).abs() <= unit).all()
        live = torch.from_numpy(exact.live) & (wanted != 0)
        off = ((total / draws - wanted.double()) / unit)[live]
        assert off.abs().max() < 6 * 0.5 / draws**0.5  # of each element
        assert abs(float(off.mean())) < 5 * 0.5 / (draws * len(off)) ** 0.5


def test_nothing_is_found_where_all_gradients_count():
    p, plain = Problem(MIXED, 2), Problem(MIXED, 2)
    found, found_before = p.flags_found()
    ops.adam_update(*p.update_arguments(sums=False), found, found_before)
    ops.adam_update(*plain.update_arguments(sums=False))
    assert (int(found), int(found_before)) == (0, 0)
    assert all(same_bits(a, b) for a, b in zip(p.params, plain.params, strict=True))


# ---------------------------------------------------------------- its kernels


@pytest.mark.long(but=2)
@pytest.mark.parametrize("dtype", DTYPES)
@EACH_SIZE
@pytest.mark.kernels
def test_adam_update_equals_eager(sizes, dtype):
    for skip in (0, 1):
        for sums in (False, True):

            def make(skip=skip, sums=sums) -> tuple:
                arguments = problem(sizes, 2, block_of(sizes), dtype).update_arguments(skip, sums)
                if sums:
                    arguments.exp_avg_sq_sums.zero_()  # blocks that are all padding are not written
                return arguments

            assert_equal_backends("adam_update", make)


def with_uncounted(p: Problem, arguments: tuple) -> tuple:
    """Gradients of any dtype, of which some do not count, also of masked elements; and flags."""
    grads = [g.to((torch.bfloat16, torch.float32)[i % 2]) for i, g in enumerate(arguments.grads)]
    for i, value in enumerate(UNCOUNTED):
        for g in grads:
            if g.numel() > 37 * i:
                g[37 * i] = value
    p.exp_avg_sq.mul_(p.live_mask)
    found, found_before = p.flags_found()
    return arguments._replace(grads=grads, found=found, found_before=found_before)


def in_fewer_bits(p: Problem, coded: bool) -> Moments:
    """The problem's moments in bfloat16, or in codes."""
    drawn = torch.tensor(12_345)
    if not coded:
        return Moments(p.compensated.bfloat16(), p.exp_avg_sq.bfloat16(), None, drawn)
    codes = [torch.empty(p.layout.numel, dtype=torch.uint8) for _ in range(2)]
    moments = Moments(*codes, torch.zeros(2, p.layout.n_blocks, dtype=torch.uint8), drawn)
    for x, stored, signed in zip((p.compensated, p.exp_avg_sq), moments.stored, (True, False), strict=True):
        keep_nearest(x, *stored, signed=signed)
    return moments


@pytest.mark.long(but=8, full=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("uncounted", [False, True])
@pytest.mark.parametrize("coded", [False, True])
@EACH_SIZE
@pytest.mark.kernels
def test_adam_update_of_moments_in_fewer_bits_equals_eager(sizes, coded, uncounted, dtype):
    def make() -> tuple:
        p = problem(sizes, 2, block_of(sizes), dtype, masks={0: torch.arange(sizes[0]) % 3 > 0} if uncounted else None)
        p.exp_avg_sq.mul_(p.live_mask)
        for moment in (p.compensated, p.exp_avg_sq):  # further below their blocks' largest than codes reach
            moment[::4] *= 2.0**-40
        found, found_before = p.flags_found()
        how = {"moments": in_fewer_bits(p, coded), "found": found, "found_before": found_before}
        arguments = p.update_arguments(sums=False)._replace(**how)
        for g in arguments.grads:
            g[::4] *= 2.0**-24
        return with_uncounted(p, arguments) if uncounted else arguments

    assert_equal_backends("adam_update", make)


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("name", ["adam_update", "lamb_update"])
@pytest.mark.kernels
def test_what_does_not_count_stays_as_it_is_on_all_backends(name, skip):
    masks = {0: torch.arange(300) % 3 > 0}

    def make() -> tuple:
        p = Problem((300, 0, 5, 900, 129), 2, 128, masks=masks)
        made = p.update_arguments(skip, False) if name == "adam_update" else p.lamb_update_arguments(False, skip, False)
        return with_uncounted(p, made)

    assert_equal_backends(name, make)


@pytest.mark.kernels
@pytest.mark.parametrize("coded", [False, True])
def test_a_part_of_the_index_space_is_updated_as_the_whole_is(coded):
    """Of three tensors the last two, by views: random bits are those of their places in the whole."""
    sizes, block = (300, 1100, 129), 128

    def make(whole: bool) -> tuple:
        p = Problem(sizes, 1, block, masks={1: torch.arange(1100) % 7 > 0}, dtype=torch.bfloat16)
        p.exp_avg_sq.mul_(p.live_mask)
        moments, correction = in_fewer_bits(p, coded), torch.full((p.layout.numel,), 5, dtype=torch.int8)
        grads = p.layout.cut(p.normal(p.layout.numel))
        at = 0 if whole else p.layout.first_block[1]
        flat, these, parts = slice(at * block, None), slice(at, None), slice(int(not whole), None)
        owners = p.places.block_tensor[these] - int(not whole)
        places = p.places.at(these)._replace(sizes=sizes[parts], block_tensor=owners)
        first = (p.params[parts], grads[parts], places, moments.at(flat, these), p.coef[parts])
        how = (torch.zeros(1, dtype=torch.int32), None, moments.drawn, *p.flags_found())
        return *first, *how, correction[flat], None if whole else torch.tensor([at], dtype=torch.int32)

    assert_equal_backends("adam_update", lambda: make(False))
    whole, part = make(True), make(False)
    ops.adam_update(*whole)
    ops.adam_update(*part)
    after = int(part[-1]) * block
    assert all(map(torch.equal, whole[0][1:], part[0]))
    for one, other in zip(whole[3][:2], part[3][:2], strict=True):  # both moments
        assert torch.equal(one[after:], other)
    assert torch.equal(whole[10][after:], part[10])  # the correction
