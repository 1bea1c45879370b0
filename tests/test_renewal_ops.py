"""Ops that share squares and renew a variance: each kernel equals eager torch, and that what is written in words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import DTYPES, assert_equal_backends, problem
from renewal_arguments import average_arguments, level_arguments, renew_arguments, squares, tell_arguments
from torch import Tensor

from fusedonebit.triton_kernels import Coef, average_squares, renew, renew_levels, tell_squares, unpack
from fusedonebit.triton_kernels.codes import decode
from fusedonebit.triton_kernels.headers import Flag
from fusedonebit.triton_kernels.projections import Projections
from fusedonebit.triton_kernels.squares import random_signs

SIZES = (300, 0, 5, 2048, 129)
MASKS = {0: torch.arange(300) % 3 > 0, 4: torch.arange(129) < 128}
LARGE = (200_000, 3, 5000)


@pytest.mark.kernels
@pytest.mark.long(but=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_tell_squares_equals_eager(world_size, dtype):
    for masks, factor, first in ((None, None, 0), (MASKS, 0.5, 7), (None, None, 2**29)):
        assert_equal_backends(
            "tell_squares",
            lambda m=masks, f=factor, b=first: tell_arguments(
                problem(SIZES, world_size, 128, dtype, special=True, masks=m), f, b
            ),
        )


@pytest.mark.kernels
@pytest.mark.parametrize("sizes", [pytest.param(LARGE, marks=pytest.mark.full), (3000, 1)])
def test_tell_squares_equals_eager_in_blocks_of_1024(sizes):
    assert_equal_backends("tell_squares", lambda: tell_arguments(problem(sizes, 2, 1024)))


@pytest.mark.kernels
@pytest.mark.long(but=2)
@pytest.mark.parametrize("block_size", [128, 1024])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_average_squares_equals_eager(workers, block_size):
    for masks in (None, MASKS):
        assert_equal_backends(
            "average_squares",
            lambda m=masks: average_arguments(problem(SIZES, 2, block_size, masks=m), workers, rank=1),
        )


LEVELS = [{}, {"flags": int(Flag.VETO)}, {"flags": int(Flag.NONFINITE)}, {"absent": True}, {"wide": True}]


@pytest.mark.kernels
@pytest.mark.parametrize("how", LEVELS)
def test_renew_levels_equals_eager(how):
    for world_size in (1, 3):
        assert_equal_backends("renew_levels", lambda w=world_size: level_arguments(problem(SIZES, w, 128), **how))


RENEWS = [{}, {"server": True, "writes": False}, {"divided": False}, {"inside": True, "half": True}]


@pytest.mark.kernels
@pytest.mark.long(but=4)
@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("how", RENEWS)
def test_renew_equals_eager(how, ternary):
    for masks in (None, MASKS):
        assert_equal_backends(
            "renew", lambda m=masks: renew_arguments(problem(SIZES, 2, 128, ternary=ternary, masks=m), **how)
        )


# ---------------------------------------------------------------- in words


def told(arguments: tuple, p: object) -> tuple[Tensor, Tensor]:
    """Squares as they are told, float32 [P], and projections."""
    tell_squares(*arguments)
    (codes, exponents), numbers = arguments.logs, arguments.projections
    return decode(codes.reshape(-1, p.layout.block_size), exponents.reshape(-1)).view(-1), numbers


def test_a_worker_tells_its_squares_and_sums_of_its_gradient_with_random_signs():
    p = problem(SIZES, 3, 128, masks=MASKS)
    arguments = tell_arguments(p, factor=0.5)
    found, numbers = told(arguments, p)
    own, block_size, places = arguments.worker_sq.numbers, p.layout.block_size, Projections.of(p.layout)
    largest = own.view(-1, block_size).amax(1).repeat_interleave(block_size)
    seen = own > largest * 2.0**-30
    torch.testing.assert_close(found[seen], own[seen], rtol=1 / 16 + 1e-6, atol=0)
    assert not found[own < largest * 2.0**-33].any()
    g = torch.from_numpy(np.where(p.live, p.flat(p.grads), 0.0)).float() * 0.5
    signed = (g * random_signs(torch.tensor(3), 0, (p.layout.n_blocks, block_size)).view(-1)).view(-1, block_size)
    for b, (share, place) in enumerate(zip(places.share.tolist(), places.place.tolist(), strict=True)):
        chunk, expected = b // p.layout.blocks_per_chunk, signed[b].double().view(-1, share).sum(1).float()
        torch.testing.assert_close(numbers[chunk, place : place + len(expected)], expected, rtol=1e-5, atol=1e-5)


def test_a_server_tells_the_mean_and_the_sums_of_what_it_tells():
    p = problem(SIZES, 2, 128, masks=MASKS)
    arguments = average_arguments(p, 3, rank=1)
    average_squares(*arguments)
    places, arrived, numbers, share, place, means, sums = arguments
    block_size = places.block_size
    each = [decode(a.view(-1, block_size), b) for a, b in zip(*arrived, strict=True)]
    found = decode(means.numbers.view(-1, block_size), means.exponents[0]).double()
    mean = torch.stack(each).double().mean(0)
    seen = mean > mean.amax(1, keepdim=True) * 2.0**-30
    torch.testing.assert_close(found[seen], mean[seen], rtol=1 / 16 + 1e-6, atol=0)
    live = p.live_mask.view(2, -1, block_size)[1]
    largest = torch.finfo(torch.float32).max
    torch.testing.assert_close(sums[0].double(), (found * live).sum(1).clamp(max=largest), rtol=1e-6, atol=0)
    assert torch.equal(sums[1], ((found > 0) & live).sum(1).float())
    for b in range(len(found)):
        mean_projection = numbers[:, place[b] : place[b] + block_size // share[b]].double().mean(0)
        torch.testing.assert_close(sums[2, b].double(), mean_projection.square().sum(), rtol=1e-5, atol=0)
    assert sums[2].isinf().any(), "what is not finite on one worker is not on all"


@pytest.mark.parametrize("how", LEVELS)
def test_levels_follow_what_counts(how):
    p = problem(SIZES, 3, 128)
    arguments = level_arguments(p, **how)
    sums, first, coef, steps, _, absent, floor, levels, mean_sq, entered, woken, tables = arguments
    before, earlier, waited = levels.double(), mean_sq.clone(), mean_sq == 0
    renew_levels(*arguments)
    by_block = sums.transpose(0, 1).reshape(3, -1).double()
    spans = [slice(a, b) for a, b in zip(first.tolist(), first[1:].tolist(), strict=False)]
    total, alive, square = torch.stack([by_block[:, s].sum(1) for s in spans], 1)
    kept = coef[:, Coef.BETA2].double() ** (steps - before[3]).clamp(min=1)
    counts = square.isfinite() & (how.get("flags", 0) != int(Flag.NONFINITE))
    if absent is not None:
        counts &= absent == 0
    follows = kept * before[0] + (1 - kept) * square
    counts &= (square != 0) | (follows >= before[4] / 4)
    assert not counts[0], "an idle tensor's level stays"
    assert torch.equal(levels[4].double()[~counts], before[4][~counts])
    seen = counts & (square > 0)
    torch.testing.assert_close(levels[4].double()[seen], follows[seen], rtol=1e-6, atol=0)
    level = torch.where(counts, kept * before[0] + (1 - kept) * square, before[0])
    weight = torch.where(counts, kept * before[1] + (1 - kept), before[1])
    torch.testing.assert_close(levels[0].double(), level, rtol=1e-6, atol=0)
    torch.testing.assert_close(levels[1].double(), weight, rtol=1e-6, atol=0)
    assert torch.equal(levels[3].double(), torch.where(counts, steps, before[3]))
    corrected = torch.where((total > 0) & (level > 0), level / weight.clamp(min=1e-30), 0.0)
    mean = corrected / alive.clamp(min=1e-30)
    expected = torch.stack([corrected / total.clamp(min=1e-30), mean, mean * floor])
    torch.testing.assert_close(tables.double(), expected.nan_to_num(), rtol=1e-6, atol=0)
    assert torch.equal(mean_sq, torch.where(tables[1] > 0, tables[1].double(), earlier))
    assert torch.equal(levels[2], mean_sq.float())
    assert torch.equal(entered, torch.where(tables[1] > 0, torch.inf, 0.0).double())
    assert int(woken) == 4 + int((waited & (tables[1] > 0)).sum())
    assert tables[0, -1] == 0
    assert counts.any() == (how.get("flags", 0) != int(Flag.NONFINITE))


@pytest.mark.parametrize("how", RENEWS)
@pytest.mark.parametrize("ternary", [False, True])
def test_a_renewal_multiplies_by_old_over_new_denominator(how, ternary):
    p = problem(SIZES, 2, 128, ternary=ternary, masks=MASKS)
    arguments = renew_arguments(p, **how)
    places, c, scale, settled, exp_avg, _, coef, (v, _, eps_inside), means, tables, writes = arguments
    bits, m_scale = exp_avg or (None, None)
    block_size, owner = places.block_size, places.block_tensor
    k, live = coef[owner.long()].double(), p.live_mask.view(-1, block_size)
    live = live[len(live) // 2 :] if how.get("server") else live
    old = v.float().view(-1, block_size).clone()
    mean_sq = decode(means.numbers.reshape(-1, block_size), means.exponents.reshape(-1))
    factor, usual, least = tables[:, owner.long(), None]
    new = torch.maximum(torch.where(mean_sq > 0, mean_sq * factor, usual), least)
    new = torch.where(usual > 0, new, old).to(v.dtype).float()
    expected, s = None, None
    if c is not None:
        s = scale.clone()
        x = c.numbers.view(-1, block_size).double()
        sent = torch.where(x != 0, x.sign(), 0.0 if ternary else 1.0)
        kept = x - sent * s[:, None].double()
        if bits is not None:
            signs = unpack(bits.reshape(len(bits), -1, p.layout.chunk_bytes)[:, 0]).view(-1, block_size)
            m = signs.double() * m_scale[:, None].double()
            if ternary:
                nonzero = unpack(bits[:, 1].contiguous()).view(-1, block_size) > 0
                m = torch.where(nonzero, m, 0.0)
            kept = k[:, Coef.BETA1, None] * m + kept

        def denominator(of: Tensor) -> Tensor:
            root, eps = of.double() * k[:, Coef.RSQRT_BIAS2, None] ** 2, k[:, Coef.EPS, None]
            return (root + eps).sqrt() if eps_inside else root.sqrt() + eps

        unit = torch.where(old > 0, denominator(old) / denominator(new), 1.0)
        expected = torch.where(live, kept * unit, 0.0)
    renew(*arguments)
    if expected is not None:
        torch.testing.assert_close(c.numbers.view(-1, block_size).double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(settled, s)
        assert not scale.any()
        assert m_scale is None or not m_scale.any()
    written = torch.where(live, new, 0.0) if writes else old
    assert torch.equal(v.float().view(-1, block_size), written)


def test_squares_are_told_over_more_octaves_than_bits_have():
    own = squares(problem((5000,), 1, 128))
    assert float(own.max() / own[own > 0].min()) > 2.0**34
