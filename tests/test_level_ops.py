"""Ops that bring workers' own variances to the mean gradient's level: kernels equal eager torch, and that the words."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from backends import DTYPES, assert_equal_backends, problem
from level_arguments import follow_arguments, tell_arguments

from fusedonebit.optim.own_variance import MOST, places
from fusedonebit.triton_kernels import Coef, FlatLayout, follow_level, tell_level
from fusedonebit.triton_kernels.squares import random_signs

SIZES = (300, 0, 5, 2048, 129)
MASKS = {0: torch.arange(300) % 3 > 0, 4: torch.arange(129) < 128}
HOW = [{}, {"flags": 1}, {"absent": True}, {"first": True}, {"world_size": 1}]


@pytest.mark.kernels
@pytest.mark.long(but=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_tell_level_equals_eager(world_size, dtype):
    for masks, factor in ((None, None), (MASKS, 0.5)):
        assert_equal_backends(
            "tell_level",
            lambda m=masks, f=factor: tell_arguments(problem(SIZES, world_size, 128, dtype, special=True, masks=m), f),
        )


@pytest.mark.kernels
@pytest.mark.parametrize("sizes", [pytest.param((200_000, 3, 5000), marks=pytest.mark.full), (3000, 1)])
def test_tell_level_equals_eager_in_blocks_of_1024(sizes):
    assert_equal_backends("tell_level", lambda: tell_arguments(problem(sizes, 2, 1024)))


@pytest.mark.kernels
@pytest.mark.parametrize("how", HOW)
def test_follow_level_equals_eager(how):
    for sizes in (SIZES, (70_000, 5)):
        assert_equal_backends("follow_level", lambda s=sizes: follow_arguments(problem(s, 2, 128), **how))


# ---------------------------------------------------------------- in words


def test_a_worker_tells_sums_of_its_gradient_with_random_signs_and_of_its_variance():
    p = problem(SIZES, 3, 128, masks=MASKS)
    arguments = tell_arguments(p, factor=0.5)
    tell_level(*arguments)
    share, place, projections, sums = arguments[-4:]
    g = torch.from_numpy(np.where(p.live, p.flat(p.grads), 0.0)).float() * 0.5
    signed = (g * random_signs(torch.tensor(3), 0, (p.layout.n_blocks, 128)).view(-1)).view(-1, 128)
    v = torch.where(p.live_mask, p.exp_avg_sq, 0.0).view(-1, 128)
    torch.testing.assert_close(sums, v.double().sum(1).float(), rtol=1e-6, atol=0)
    assert projections.isfinite().all(), "each is written"
    for b in range(p.layout.n_blocks):
        expected = signed[b].double().view(-1, int(share[b])).sum(1).float()
        torch.testing.assert_close(projections[place[b] :][: len(expected)], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_levels_follow_what_counts(how):
    p = problem(SIZES, 2, 128)
    told, first, world_size, coef, steps, flags, absent, levels, rho = follow_arguments(p, **how)
    before, count = levels.double(), int(first[-1])
    follow_level(told, first, world_size, coef, steps, flags, absent, levels, rho)
    mean = told.double() / world_size
    square = torch.stack([mean[a:b].square().sum() for a, b in zip(first.tolist(), first[1:].tolist(), strict=False)])
    beta2, done = coef[:, Coef.BETA2].double(), steps + 1
    kept = beta2 ** (done - before[2])
    expected = torch.stack([kept * before[0] + (1 - kept) * square, kept * before[1] + 1 - kept, done])
    share = expected[0] / expected[1] / (mean[count:] / (1 - beta2**done))
    share = torch.where(mean[count:] > 0, share.clamp(1 / world_size, 1.0), 1.0)
    counts = square.isfinite() & (square > 0) & (int(flags) == 0)
    if absent is not None:
        counts &= absent == 0
    print(f"{how}: rho {rho.tolist()}")
    torch.testing.assert_close(levels.double(), torch.where(counts, expected, before), rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(rho.double(), torch.where(counts, share, 0.7).double(), rtol=1e-5, atol=1e-7)


def test_projections_are_few_and_their_squares_are_those_of_the_gradient_on_average():
    sizes = (3, 70, 400, 5000, 300_000)
    layout = FlatLayout(sizes, 2, 1024)
    share, lengths, first = places(layout)
    counts = [b - a for a, b in itertools.pairwise(first)]
    print(f"projections of {sizes}: {counts}")
    assert all(min(size, MOST / 2) <= count <= MOST for size, count in zip(sizes, counts, strict=True))
    blocks = layout.first_block[-1]
    assert sum(lengths) == int((1024 // share[:blocks]).sum())


def test_it_lets_rho_tell_noise_from_signal():
    """Gradients that all workers have alike have a rho of 1, noise one of 1/W, and their sum one in between."""
    generator, world_size, size = torch.Generator().manual_seed(1), 4, 20_000
    signal, found = torch.randn(size, generator=generator), {}
    for share in (0.0, 0.5, 1.0):
        levels, rho, coef = torch.zeros(3, 1), torch.ones(1), torch.full((1, len(Coef)), 0.99)
        layout = FlatLayout((size,), 1, 1024)
        of_block, lengths, first = places(layout)
        counts = 1024 // of_block
        for t in range(60):
            told = torch.zeros(first[-1] + 1)
            for _ in range(world_size):
                noise = torch.randn(size, generator=generator)
                g = share**0.5 * signal + (1 - share) ** 0.5 * noise
                p = problem((size,), 1, 1024)
                p.grads, p.exp_avg_sq = [g], torch.zeros(layout.numel)
                p.exp_avg_sq[:size] = 1 - 0.99 ** (t + 1)
                arguments = tell_arguments(p, updates=t)
                tell_level(*arguments)
                own = arguments.projections[: int(counts.sum())]
                sums = torch.segment_reduce(own, "sum", lengths=torch.tensor(lengths))
                told += torch.cat([sums, arguments.sums.sum().reshape(1)])
            nothing = torch.zeros(1, dtype=torch.int32)
            where = (torch.tensor(first, dtype=torch.int32), world_size, coef, torch.tensor([float(t)]).double())
            follow_level(told, *where, nothing, None, levels, rho)
        found[share] = float(rho)
        expected = share + (1 - share) / world_size
        print(f"{share} signal: rho {float(rho):.3f} ({expected} expected)")
        assert abs(float(rho) / expected - 1) < 0.15
