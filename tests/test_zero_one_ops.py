"""0/1 Adam's ops and distributed Lion's: eager against float64 NumPy, and what their formulas promise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import reference_zero_one as reference
import torch
from reference_ops import EPS32, Problem, denom, packed, sign, unpacked, wide
from test_ops import DTYPES, MASKS, MIXED, WORLD_SIZES, same_bits
from torch import Tensor
from zero_one_arguments import WAYS, Way, lion_arguments, local_step_arguments, rebuild_arguments

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import Coef, using
from fusedonebit.triton_kernels.nouns import Compensated

SIZES = (1, 7, 1023, 1024, 1025, 100_000)
LIVE = ({}, {"masks": MASKS}, {"excluded": [2]}, {"masks": MASKS, "excluded": [0, 3]})
EACH_WAY = pytest.mark.parametrize("way", WAYS, ids=lambda way: "".join("mlkpf"[i] for i in range(5) if way[i]) or "-")


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    with using("plain"):
        yield


def off_by_dtype(p: Problem, x: np.ndarray) -> np.ndarray:
    """Largest error of rounding to each tensor's dtype."""
    infos = [torch.finfo(tensor.dtype) for tensor in p.params]
    tensor = p.places.block_tensor.long().repeat_interleave(p.layout.block_size).numpy()
    eps, least = (np.array([getattr(info, name) for info in infos])[tensor] for name in ("eps", "smallest_normal"))
    return eps / 2 * np.abs(x) + least * eps


def check_local_step(p: Problem, way: Way, inside: bool = False, hold: int = 0) -> bool:
    arguments = local_step_arguments(p, way, inside, hold)
    expected = reference.local_step(p, arguments.exp_avg, inside, way, hold)
    ops.local_step(*arguments)
    x, m, c = p.flat(p.params), wide(arguments.exp_avg), wide(p.compensated)
    assert (np.abs(x - expected.x) <= expected.x_off + off_by_dtype(p, expected.x)).all()
    assert (np.abs(m - expected.m) <= expected.m_off).all()
    assert (np.abs(wide(p.exp_avg_sq) - expected.v) <= expected.v_off).all()
    assert (np.abs(c - expected.c) <= expected.c_off).all()
    assert not c[~p.live].any()
    assert bool(arguments.flags) == expected.told
    return expected.told


# ---------------------------------------------------------------- local_step


@pytest.mark.long(but=25)
@EACH_WAY
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_local_step_is_its_formula(size, dtype, way):
    assert not check_local_step(Problem((size,), 1, 1024, dtype=dtype), way)


@pytest.mark.long(but=19)
@EACH_WAY
@pytest.mark.parametrize("inside", [False, True], ids=["eps outside", "eps inside"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_local_step_takes_each_tensors_row_and_live_elements(world_size, inside, way):
    for live in LIVE:
        p = Problem(MIXED, world_size, **live)
        p.params = [x.to(DTYPES[i % 3]) for i, x in enumerate(p.params)]
        assert not check_local_step(p, way, inside)


@EACH_WAY
@pytest.mark.parametrize("hold", [0, 1])
def test_a_bad_gradient_is_dropped_alone_told_unless_held_and_not_where_it_does_not_count(way, hold):
    p, clean = (Problem(MIXED, 3, masks=MASKS) for _ in range(2))
    for i, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
        p.grads[0][3 * i] = p.grads[4][128] = bad  # masked
        p.grads[0][3 * i + 1] = bad
    assert check_local_step(p, way, hold=hold) == (way[0] and not hold)
    ops.local_step(*local_step_arguments(clean, way, hold=hold))
    others = torch.ones(300, dtype=torch.bool)
    others[[1, 4, 7]] = False
    assert torch.equal(p.params[0][others], clean.params[0][others])
    assert torch.equal(p.compensated[:300][others], clean.compensated[:300][others])


@EACH_WAY
def test_a_held_step_only_settles_and_adds_the_momentum_where_the_next_one_synchronises(way):
    p = Problem(MIXED, 2)
    arguments, before = local_step_arguments(p, way, hold=1), [x.clone() for x in p.params]
    check_local_step(p, way, hold=1)
    assert all(map(same_bits, p.params, before))
    if not way[1]:
        settled = Problem(MIXED, 2)
        ops.settle(Compensated(settled.compensated, settled.worker_scale), False, settled.places)
        assert same_bits(p.compensated, settled.compensated)
    assert not arguments.flags.any()


def test_an_empty_gradient_stands_for_zeros_and_padding_never_enters():
    for way in WAYS:
        p, other = (Problem(MIXED, 2, masks=MASKS) for _ in range(2))
        p.grads[0], other.grads[0] = torch.empty(0), torch.zeros(300)
        p.compensated[~p.live_mask] = torch.nan
        arguments, others = (local_step_arguments(q, way) for q in (p, other))
        arguments.exp_avg[~p.live_mask] = torch.inf
        ops.local_step(*arguments)
        ops.local_step(*others)
        assert same_bits(p.compensated, other.compensated)
        assert all(map(same_bits, p.params, other.params))
        assert not arguments.flags.any()


@EACH_WAY
def test_the_first_step_of_a_round_keeps_all_parameters_as_they_were_those_that_do_not_move_included(way):
    p, other = (Problem(MIXED, 2, masks=MASKS) for _ in range(2))
    before = [x.clone() for x in p.params]
    arguments, others = local_step_arguments(p, way, begins=True), local_step_arguments(other, way)
    ops.local_step(*arguments)
    ops.local_step(*others)
    assert all(map(same_bits, p.params, other.params))
    assert same_bits(p.compensated, other.compensated)
    anchor = arguments.anchor
    assert (anchor is not None) == way[0]
    if way[0]:
        kept = torch.zeros(p.layout.numel)
        for i, x in enumerate(before):
            kept[p.layout.offset(i) :][: x.numel()] = x.float()
        assert same_bits(anchor, kept)


def test_a_local_step_counts_as_a_change_of_the_parameters():
    p = Problem((300,))
    p.params = [torch.nn.Parameter(x) for x in p.params]
    before = p.params[0]._version
    with torch.no_grad():
        ops.local_step(*local_step_arguments(p, WAYS[0]))
    assert p.params[0]._version > before


@pytest.mark.parametrize("precondition", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_what_a_round_compresses_is_the_sum_of_all_its_updates_on_top_of_the_residual(steps, precondition):
    """0/1 Adam, Algorithm 1, line 6: the buffer u of a round, and what the last synchronisation has left."""
    p = Problem(MIXED, 2, masks=MASKS)
    p.coef[:, Coef.UNIT] = 1.0
    d = denom(p, wide(p.exp_avg_sq), False) if precondition else 1.0
    arguments = rebuild_arguments(p, precondition)
    ops.rebuild_momentum(*arguments)
    exp_avg = arguments.exp_avg
    m, old = wide(exp_avg), wide(p.compensated)
    expected = old - p.by_element(p.worker_scale) * sign(old)
    size = np.abs(old) + p.by_element(p.worker_scale)
    for step in range(steps):
        p.grads = [p.normal(n) for n in p.layout.sizes]
        m = p.column(Coef.BETA1) * m + p.column(Coef.ONE_MINUS_BETA1) * np.where(p.live, p.flat(p.grads), 0.0)
        expected, size = expected + m / d, size + np.abs(m / d) + np.abs(m).max()
        if step + 1 < steps:
            own = local_step_arguments(p, (True, step + 2 == steps, False, precondition, False))
            ops.local_step(*own._replace(exp_avg=exp_avg))
            assert not p.worker_scale.any()  # the residual is formed
    if steps == 1:  # else beta1*m is in the buffer, and the bits stand for nothing
        p.exp_avg_scale.copy_(arguments.sent)
    ops.momentum_compress(*p.momentum_arguments(p.exp_avg_sq if precondition else None))
    assert (np.abs(wide(p.compensated) - np.where(p.live, expected, 0.0)) <= 32 * steps * EPS32 * size).all()


# ---------------------------------------------------------------- rebuild_momentum


@pytest.mark.long(but=13)
@pytest.mark.parametrize("inside", [False, True], ids=["eps outside", "eps inside"])
@pytest.mark.parametrize("precondition", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rebuild_momentum_is_its_formula(world_size, precondition, inside):
    for sizes, block, live in [*((MIXED, 128, live) for live in LIVE), *(((size,), 1024, {}) for size in SIZES)]:
        p = Problem(sizes, world_size, block, **live)
        scale = p.exp_avg_scale.clone()
        for of_rounds in (False, True):
            p.exp_avg_scale.copy_(scale)
            arguments = rebuild_arguments(p, precondition, inside, of_rounds)
            expected = reference.rebuild_momentum(p, inside, precondition, arguments.summed, arguments.awaited)
            ops.rebuild_momentum(*arguments)
            np.testing.assert_allclose(wide(arguments.exp_avg), expected, rtol=8 * EPS32, atol=0)
            assert same_bits(arguments.sent, scale)
            assert not p.exp_avg_scale.any()  # the bits stand for nothing any more


# ---------------------------------------------------------------- lion_compress


def check_lion_compress(p: Problem, step: int = 7, hold: int = 0) -> reference.Vote:
    arguments = lion_arguments(p, step, hold)
    exp_avg = arguments.exp_avg
    expected = reference.lion_compress(p, exp_avg, hold)
    ops.lion_compress(*arguments)
    assert (np.abs(wide(exp_avg) - expected.m) <= expected.m_off).all()
    assert bool(arguments.flags) == expected.told
    weights, rank = arguments[-3:-1]
    assert (weights == (1.0 if (step + rank) % len(weights) else 1.5)).all()
    bits, nothing = unpacked(p.bits) > 0, expected.c_off == 0
    tossed = nothing & (expected.c == 0) & p.live
    certain = (np.abs(expected.c) > expected.c_off) & p.live
    assert (tossed | certain | ~p.live).mean() > 0.999
    assert (bits[certain] == (expected.c[certain] > 0)).all()
    assert bits[~p.live].all()
    some = np.flatnonzero(tossed)[:500]
    assert [bool(bit) for bit in bits[some]] == [reference.coin(int(i), step) for i in some]
    return expected


@pytest.mark.long(but=9)
@pytest.mark.parametrize("hold", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_lion_compress_is_its_formula(world_size, dtype, hold):
    for sizes, block, live in [*((MIXED, 128, live) for live in LIVE), *(((size,), 1024, {}) for size in SIZES)]:
        assert not check_lion_compress(Problem(sizes, world_size, block, dtype=dtype, **live), hold=hold).told


@pytest.mark.parametrize("hold", [0, 1])
def test_lion_drops_a_bad_gradient_alone_votes_with_its_momentum_and_tells(hold):
    p = Problem(MIXED, 3, masks=MASKS)
    p.grads[0][[0, 3]] = torch.nan  # masked
    p.grads[0][[1, 4, 7]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    arguments = lion_arguments(p, hold=hold)
    before = arguments.exp_avg.clone()
    ops.lion_compress(*arguments)
    at = torch.tensor([1, 4, 7])
    assert same_bits(arguments.exp_avg[at], before[at])
    assert [bool(p.bits[0, i // 8] >> (i % 8) & 1) for i in at] == (before[at] > 0).tolist()
    assert arguments.flags.tolist() == [0 if hold else 1]
    assert arguments.exp_avg.isfinite().all()


def test_lions_vote_is_the_sign_that_packing_gives_where_nothing_is_zero():
    p = Problem(MIXED, 2)
    arguments = lion_arguments(p)
    arguments.exp_avg[:] = p.normal(p.layout.numel)
    c = reference.lion_compress(p, arguments.exp_avg, 0).c
    ops.lion_compress(*arguments)
    assert np.array_equal(p.bits.numpy(), packed(np.where(p.live, c, 1.0), p.bits))


def coins(step: int, line: Tensor) -> Tensor:
    p = Problem((len(line),))
    arguments = lion_arguments(p, step)
    arguments.exp_avg.zero_()
    p.grads[0].copy_(line)
    ops.lion_compress(*arguments)
    return p.bits.clone()


def test_coins_do_not_depend_on_the_rank_and_zeros_of_both_signs_are_zeros():
    zeros = torch.zeros(3000)
    assert same_bits(coins(5, zeros), coins(5, -zeros))
    assert not same_bits(coins(5, zeros), coins(6, zeros))
    line = zeros.clone()
    line[::7] = -1.0
    differ = (coins(5, zeros) ^ coins(5, line)).numpy()
    assert not np.unpackbits(differ, bitorder="little")[:3000].reshape(-1)[np.arange(3000) % 7 != 0].any()
