"""What the ops estimate that bring workers' own variances to the mean gradient's level."""

from __future__ import annotations

import itertools

import torch
from op_arguments import Problem

from fusedonebit.optim.own_variance import MOST, places
from fusedonebit.triton_kernels import Coef, FlatLayout, follow_level, tell_level


def test_projections_are_few_and_cover_each_block():
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
                p = Problem((size,), 1, 1024)
                p.grads, p.exp_avg_sq = [g], torch.zeros(layout.numel)
                p.exp_avg_sq[:size] = 1 - 0.99 ** (t + 1)
                arguments = p.arguments("tell_level", updates=t)
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
