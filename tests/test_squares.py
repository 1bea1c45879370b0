"""What workers tell each other of their gradients' squares: an estimate without bias, and logarithms of 8 bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import run_ranks, simulate
from torch import Tensor

from benchmarks.shapes import bert_large, sizes
from fusedonebit import reference
from fusedonebit.comm import Messages, TorchTransport, Transport
from fusedonebit.comm.shared_squares import Looks, SharedSquares
from fusedonebit.optim.variance import LONGEST
from fusedonebit.triton_kernels import FlatLayout, choose_block_size, live_table
from fusedonebit.triton_kernels.codes import decode, encode
from fusedonebit.triton_kernels.nouns import Places, Stored
from fusedonebit.triton_kernels.projections import Projections
from fusedonebit.triton_kernels.squares import random_signs

SHAPES = [(128,), (129,), (150,), (300,), (12, 12, 3), (500,), (700,), (1000,), (31, 33), (1500,), (2048,), (3000,)]
SHAPES += [(4096,), (70, 71), (7000,), (9999,), (128, 130), (20_000,), (30_000,), (66_000,)]
EXACT = [(1,), (17,), (64,), (9, 14)]
"""Tensors with a projection of each element."""
WORKERS, DRAWS, ERRORS = 4, 400, 5.0


def places_of(layout: FlatLayout) -> Places:
    return Places.of(layout, layout.block_tensor().int(), live_table(layout))


def projected(worker: int, shape: tuple[int, ...], draw: int, other_signs: bool = False) -> Tensor:
    """A worker's projections of its gradient: a mean that all have, and noise of its own of twice the size."""
    size = int(np.prod(shape))
    layout = FlatLayout((size,), 1, 128)
    generators = [torch.Generator().manual_seed(n) for n in (size, 1000 * worker + size)]
    g = torch.randn(size, generator=generators[0]) + 2 * torch.randn(size, generator=generators[1])
    updates = torch.tensor(draw + 10**6 * (other_signs and worker == 1))
    shared = SharedSquares(layout, 0, torch.device("cpu"), Stored(torch.zeros(layout.numel)))
    shared.tell([g.view(shape)], Looks(updates), 0, places_of(layout))
    return shared.sent.projections[0]


def mean_square(shape: tuple[int, ...]) -> float:
    size = int(np.prod(shape))
    own = [torch.randn(size, generator=torch.Generator().manual_seed(1000 * w + size)) for w in range(WORKERS)]
    mean = torch.randn(size, generator=torch.Generator().manual_seed(size)) + 2 * torch.stack(own).mean(0)
    return float(mean.double().square().sum())


def drawn(shapes: list[tuple[int, ...]], other_signs: bool = False) -> list[np.ndarray]:
    """Of each shape all draws of the square of the mean projection."""

    def square(shape: tuple[int, ...], draw: int) -> float:
        mean = sum(projected(w, shape, draw, other_signs).double() / WORKERS for w in range(WORKERS))
        return float(mean.square().sum())

    return [np.array([square(shape, draw) for draw in range(DRAWS)]) for shape in shapes]


def worst_deviation(draws: list[np.ndarray]) -> float:
    """Of their mean from |mean g|^2, in standard errors: the largest of all shapes."""
    pairs = zip(SHAPES, draws, strict=True)
    return max(abs(found.mean() - mean_square(shape)) / found.std() * DRAWS**0.5 for shape, found in pairs)


@pytest.mark.full
def test_projections_estimate_the_square_of_the_mean_gradient():
    draws = drawn(SHAPES)
    right, larger = worst_deviation(draws), worst_deviation([1.02 * found for found in draws])
    other = worst_deviation(drawn(SHAPES, other_signs=True))
    print(f"deviation of {len(SHAPES)} shapes, {DRAWS} draws: {right:.1f} standard errors (limit {ERRORS})")
    print(f"1.02 times as large: {larger:.1f}; with signs of its own on one worker: {other:.1f} (both above)")
    assert right <= ERRORS < min(larger, other)
    for shape, found in zip(EXACT, drawn(EXACT), strict=True):
        np.testing.assert_allclose(found, mean_square(shape), rtol=1e-5)


def test_signs_are_fair_and_differ_by_step_and_place():
    signs = torch.stack([random_signs(torch.tensor(t), t, (32, 128)).flatten() for t in range(64)])
    assert (signs.abs() == 1).all()
    means = [signs.mean(0), signs.mean(1), (signs[1:] * signs[:-1]).mean(1), (signs[:, 1:] * signs[:, :-1]).mean(0)]
    for mean, n in zip(means, (64, 4096, 4096, 64), strict=True):
        assert float(mean.abs().max()) <= 6 / n**0.5
    further = random_signs(torch.tensor(5), 8, (8, 128))
    assert torch.equal(further, random_signs(torch.tensor(5), 0, (16, 128))[8:]), "a part has the signs of the whole"
    far = random_signs(torch.tensor(5), 2**30, (1, 128))
    assert not torch.equal(far, random_signs(torch.tensor(5), 0, (1, 128))), "beyond 2^32 there are others"


def coded(x: Tensor, blocks: int) -> Tensor:
    logs, tops = (torch.empty(n, dtype=torch.uint8) for n in (x.numel(), blocks))
    encode(x.view(blocks, -1), logs.view(blocks, -1), tops)
    return decode(logs.view(blocks, -1), tops).view_as(x)


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-12, 1.0, 1e20, 3e37])
def test_a_logarithm_is_within_a_sixteenth_over_32_octaves(magnitude):
    exponents = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 30
    x = (magnitude * torch.exp2(-exponents)).double().clamp(min=1.2e-38).float()
    found = coded(x, 8)
    off = float(((found - x).abs() / x).max())
    print(f"{magnitude}: off by {off:.4f} (limit 1/16)")
    assert off <= 1 / 16 * (1 + 1e-6)


def test_logarithms_of_zero_of_the_tiny_and_of_the_largest():
    x = torch.zeros(3, 128)
    x[0, :3], x[1, 0], x[1, 2] = torch.tensor([1.0, 0.0, 2.0**-40]), 3.4e38, 1.0
    found = coded(x.view(-1), 3).view(3, 128)
    assert found[0, :3].tolist() == [1.0, 0.0, 0.0]
    assert 3e38 < found[1, 0] < float("inf")
    assert not found[1, 1:].any()
    assert not found[2].any()
    again = coded(torch.rand(256).square(), 2)
    assert torch.equal(coded(again, 2), again), "what was told once is told again without loss"


@pytest.mark.parametrize("world_size", [8, 64])
def test_projections_are_a_hundredth_of_what_a_large_model_sends(world_size):
    counts = sizes(bert_large())
    layout = FlatLayout(counts, world_size, choose_block_size(counts, world_size))
    places = Projections.of(layout)
    in_a_step = 4 * world_size * places.width / LONGEST
    share = in_a_step / (2 * world_size * Messages.size(layout.scale_slots("block")[1], layout))
    print(f"{len(counts)} tensors, W={world_size}: projections {share:.3%} of a message (limit 1 %)")
    assert share <= 0.01
    found = [size // share for size, share in zip(counts, places.shares, strict=True)]
    assert min(n for n, size in zip(found, counts, strict=True) if size >= 64) >= 64
    chunks = places.place.view(world_size, -1).diff(), layout.block_size // places.share.view(world_size, -1)[:, :-1]
    assert torch.equal(*chunks), "one block's begin where the last one's end"


LAYOUT = {"sizes": (700, 1, 4000), "block_size": 128}


def squares_of(rank: int, numel: int) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).square()
    return x * torch.exp2(-20 * torch.rand(numel, generator=torch.Generator().manual_seed(9))) * 10.0 ** (3 * rank)


def padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def averaged(rank: int, transport: Transport) -> tuple[np.ndarray, int]:
    layout = FlatLayout(LAYOUT["sizes"], transport.world_size, LAYOUT["block_size"])
    own, before = Stored(squares_of(rank, layout.numel)), transport.traffic.bytes_total
    shared = SharedSquares(layout, rank, torch.device("cpu"), own)
    grads = [torch.full((size,), float(rank + 1)) for size in layout.sizes]
    shared.tell(grads, Looks(torch.tensor(7)), 0, places_of(layout))
    shared.exchange(transport)
    sent = transport.traffic.bytes_total - before
    blocks, widest = layout.blocks_per_chunk, Projections.of(layout).width
    numbers = widest + 2 * blocks, 5 * blocks
    assert sent == (transport.world_size - 1) * sum(padded(129 * blocks) + padded(4 * n) for n in numbers)
    means = shared.means
    logs, tops = (codes.reshape(-1) for codes in means.codes)
    told = decode(logs.view(len(tops), -1), tops)
    check_sums(layout, told, means.sums.transpose(0, 1).reshape(5, -1))
    return told.view(-1).numpy(), sent


def check_sums(layout: FlatLayout, told: Tensor, sums: Tensor) -> None:
    """What servers say of each block: the sum of what is told, how many are alive, its square, and peaks."""
    counted = torch.where(live_table(layout).mask().view(told.shape), told, 0.0).double()
    np.testing.assert_allclose(sums[0].numpy(), counted.sum(1).numpy(), rtol=1e-6)
    np.testing.assert_array_equal(sums[1].numpy(), (counted > 0).sum(1).numpy())
    mean, first = (1 + layout.world_size) / 2, layout.first_block
    assert sums[2, first[1]] == pytest.approx(mean**2), "the second tensor, of one element, is told as it is"
    assert float(sums[2, first[2] :].sum()) == pytest.approx(4000 * mean**2, rel=1.0)
    squares = [(rank + 1.0) ** 2 for rank in range(layout.world_size)]
    assert sums[3, first[1]] == pytest.approx(np.mean(squares))
    stored = [squares_of(rank, layout.numel)[128 * first[1]] for rank in range(layout.world_size)]
    assert sums[4, first[1]] == pytest.approx(np.mean(stored), rel=1e-5)


def averaged_over_gloo(rank: int, world_size: int) -> tuple[np.ndarray, int]:
    return averaged(rank, TorchTransport(None, torch.device("cpu")))


def check_average(results: list[tuple[np.ndarray, int]]) -> None:
    world_size = len(results)
    for found, _ in results[1:]:
        np.testing.assert_array_equal(found, results[0][0])
    numel = results[0][0].size
    mean = torch.stack([squares_of(rank, numel) for rank in range(world_size)]).mean(0).numpy()
    seen = mean > mean.reshape(-1, 128).max(1).repeat(128) * 2.0**-28
    off = np.abs(results[0][0] - mean)[seen] / mean[seen]
    print(f"{world_size} ranks: mean of squares off by {off.max():.3f} (limit {2 / 16 + 1 / 256})")
    assert off.max() <= 2 / 16 + 1 / 256
    sent = results[0][1] * world_size / max(1, world_size - 1) / numel
    print(f"{sent:.4f} bytes an element, of blocks of 128")


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_know_the_same_mean_of_squares(world_size):
    check_average(simulate(averaged, world_size))


def test_ranks_over_gloo_know_the_same_mean_of_squares():
    check_average(run_ranks(averaged_over_gloo, 2))


@pytest.mark.parametrize(
    ("often", "least", "most"), [(1.0, 0.02, 0.04), (0.1, 0.2, 0.4), (0.01, 1, 1), (0.0, 1 / 8, 1 / 8)]
)
def test_the_rarer_gradients_are_the_more_of_its_mean_has_v(often, least, most):
    """A Gaussian's fourth moment is 3: one of usual size adds 3 (1 - beta2) / often of the mean to Adam's v."""
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(2, 8192, generator=generator) * (torch.rand(2, 8192, generator=generator) < often)
    g[1, :4096] = 0  # a worker without a gradient in a block tells nothing of it
    share = reference.least_share(g, torch.full_like(g, often), 0.01, 4096)
    print(f"gradients in {often:g} of the steps: at least {share:.2f} of the mean ({least:g} to {most:g})")
    assert least <= share <= most
