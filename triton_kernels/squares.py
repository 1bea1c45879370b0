"""Shares squares of gradients between workers: what each tells of its own, and a server's mean of what all have told.

Of the mean gradient nobody but an average of floats knows the squares. What workers tell each other instead
(docs/numerics.md, "A shared variance"):

    logarithms      of each worker's own squares, 8 bits an element; their mean has the variance's shape
    projections     of its gradient on random signs, alike on all workers, a float for ``SHARE`` elements; the square
                    of their mean is that of the mean gradient, on average
    peaks           of each block, how large a square is where there is a gradient at all, and what the squares' EMA
                    is there: their ratio is how seldom an element has one

Logarithms are ``codes``: next to the largest of their block, to within 1/16, over 32 octaves below it; what is smaller
is 0.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from . import bit_rules, rules
from . import block_io as io
from . import user_tensors as users
from .codes import decode, decoded, encode, load_codes, store_codes
from .eager import gather, load, only_live, square_sum, tiles
from .jit import jit, rule, tl
from .nouns import Codes, Counter, Floats, Indices, Places, Stored, Tensors
from .op import op
from .rules import LARGEST

TOTAL, ALIVE, PROJECTED, PEAK, MET = 0, 1, 2, 3, 4  # rows of a server's sums by block
PEAKS = 2  # numbers that a worker tells of each block
FOLDS = 11  # halvings of a block until one is left, and one more: of the largest


# ---------------------------------------------------------------- what a worker tells


@jit()
def signed(x, seed, word, BLOCK_SIZE: tl.constexpr):
    """Return a block with random signs: a hashed word has those of 32 elements."""
    w = word.to(tl.uint32) + tl.arange(0, BLOCK_SIZE // 32).to(tl.uint32)
    bits = (bit_rules.mixed(w ^ seed)[:, None] >> tl.arange(0, 32).to(tl.uint32)[None, :]) & 1
    lines = tl.reshape(x, [BLOCK_SIZE // 32, 32])
    return tl.reshape(tl.where(bits != 0, rules.negative(lines), lines), [BLOCK_SIZE])


@jit()
def store_sums(x, share, at, BLOCK_SIZE: tl.constexpr):
    """Add neighbours of x [BLOCK_SIZE], again and again, and store the sums of ``share`` elements."""
    for fold in tl.static_range(0, FOLDS):
        if (BLOCK_SIZE >> fold) > 0:
            if share == 1 << fold:
                tl.store(at + tl.arange(0, BLOCK_SIZE >> fold), x + 0.0)  # no -0.0
            if (BLOCK_SIZE >> fold) > 1:
                x = tl.sum(tl.reshape(x, [BLOCK_SIZE >> (fold + 1), 2]), axis=1)


@rule
def weighted(total, weight):
    """Return a weighted mean, at most ``LARGEST``, which it also is where it is no number; 0 without weights."""
    mean = total / tl.where(weight > 0, weight, 1.0)
    return tl.where(mean <= LARGEST, mean, LARGEST)


@jit()
def tell_squares_kernel(
    grads_table, tensors, worker_sq, factor, updates, first_block, places, share, place, logs, projections,
    projections_stride, peaks, peaks_stride, blocks_per_chunk,
    GRADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks. Bytes per element: g, 4, 2 or 1 for the squares, 1 for the logarithm; 4 for a projection."""
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    chunk = b // blocks_per_chunk
    own = b - chunk * blocks_per_chunk
    squares = io.load(worker_sq, b, i, False, BLOCK_SIZE)
    at = logs.numbers + chunk * logs.numbers_stride + own * BLOCK_SIZE + i
    store_codes(squares, at, logs.exponents + chunk * logs.exponents_stride + own, None, False, False)
    t = tl.load(places.block_tensor + b)
    row = tl.load(places.live_row + b)
    place_of = users.place_of(grads_table, tensors, t, places.block_start, b, BLOCK_SIZE)
    mask = io.counting(places.live, row, i, BLOCK_SIZE)
    g = io.only_active(users.load(place_of, i, mask, row, GRADS), mask, row)
    if factor is not None:
        g = g * tl.load(factor)
    wide = g.to(tl.float64) * g.to(tl.float64)
    weight = tl.sum(wide)
    at = peaks + chunk * peaks_stride + own
    tl.store(at, weighted(tl.sum(wide * wide), weight).to(tl.float32))
    tl.store(at + blocks_per_chunk, weighted(tl.sum(wide * squares.to(tl.float64)), weight).to(tl.float32))
    word = (first_block + b) * (BLOCK_SIZE // 32)
    lower = updates.to(tl.pointer_type(tl.int32), bitcast=True)  # of a number of 64 bits, little-endian
    seed = bit_rules.block_seed((word >> 32).to(tl.uint32), tl.load(lower).to(tl.uint32, bitcast=True))
    x = signed(g, seed, word, BLOCK_SIZE)
    at = projections + chunk * projections_stride + tl.load(place + b)
    store_sums(x, tl.load(share + b), at, BLOCK_SIZE)


@op(
    tell_squares_kernel,
    writes=("logs.numbers", "logs.exponents", "projections", "peaks"),
    derive={"blocks_per_chunk": ("i32", lambda live_row, logs_numbers: len(live_row) // len(logs_numbers))},
)
def tell_squares(
    grads: Tensors, places: Places, worker_sq: Stored, factor: Annotated[Floats, "1"] | None, updates: Counter,
    first_block: int, share: Indices, place: Indices, logs: Annotated[Codes, "chunks=R elements=P/R blocks=B/R"],
    projections: Annotated[Floats, "R projections"], peaks: Annotated[Floats, "R 2 B/R"],
) -> None:  # fmt: skip
    """Write what a worker tells of its squares: their logarithms, and the sums of its gradient with random signs.

    A projection is a sum of neighbours' sums; its signs are a function of the number of ``updates`` and of the
    elements' places, the same on all ranks.

    Args:
        grads, places: As for ``momentum_compress``.
        worker_sq: The EMA of their squares.
        factor: What gradients are multiplied with, float32 [1]; None: nothing.
        updates: int64 [].
        first_block: Index of the first block here in all of the index space.
        share, place: See ``Projections``.
        logs: Written.
        projections: Written.
        peaks: Written: of each block the mean of g^2, and below it that of ``worker_sq``, both weighted by g^2.
    """
    chunks, per_chunk = logs.exponents.shape
    for tile in tiles(places.sizes, chunks, places.block_size, updates.device, len(places.live_row)):
        b, first = tile.blocks, tile.chunk * per_chunk
        own = slice(b.start - first, b.stop - first)
        squares = load(worker_sq, tile, signed=False)
        encode(squares, places.rows(logs.numbers[tile.chunk])[own], logs.exponents[tile.chunk, own])
        g = only_live(gather(grads, tile, places.block_size), places, tile)
        g = g if factor is None else g * factor
        wide = g.double().square()
        for row, of in enumerate((wide, squares.double())):
            peaks[tile.chunk, row, own] = weighted((wide * of).sum(1), wide.sum(1)).float()
        x = g * random_signs(updates, first_block + b.start, (len(g), places.block_size))
        for fold in range(places.block_size.bit_length()):
            rows = (share[b] == 1 << fold).nonzero().flatten()
            at = place[b][rows, None] + torch.arange(x.shape[1], device=x.device)
            projections[tile.chunk, at.long()] = x[rows] + 0.0
            x = x[:, ::2] + x[:, 1::2]


def random_signs(updates: Tensor, first_block: int, shape: tuple[int, int]) -> Tensor:
    """Return signs, float32 ``shape``, of blocks from ``first_block`` on: rows."""
    words = shape[1] // 32
    word = torch.arange(first_block * words, (first_block + shape[0]) * words, device=updates.device)
    seed = bit_rules.block_seed(word >> 32, updates & bit_rules.WORD)
    word = bit_rules.mixed((word & bit_rules.WORD) ^ seed)
    bits = (word[:, None] >> torch.arange(32, device=word.device)) & 1
    return (1.0 - 2.0 * bits.float()).view(shape)


# ---------------------------------------------------------------- a server's mean


@jit()
def average_squares_kernel(
    arrived, arrived_projections, arrived_projections_stride, arrived_peaks, arrived_peaks_stride, world_size,
    per_worker, blocks, live, live_row, share, place, mean_numbers, mean_exponents, sums, sums_stride,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of a chunk. Bytes per element: 1 for each worker's logarithm, 1 for the mean's."""
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    lane = tl.arange(0, BLOCK_SIZE)
    inside = lane < BLOCK_SIZE // tl.load(share + b)
    own = arrived.numbers + b * BLOCK_SIZE + i
    exponent_at = arrived.exponents + b
    at = arrived_projections + tl.load(place + b) + lane
    mean_sq = tl.zeros(i.shape, tl.float32)
    projected = tl.zeros([BLOCK_SIZE], tl.float32)
    rows = tl.arange(0, 2)
    peaks_at = arrived_peaks + rows * blocks + b
    peaks = tl.zeros([2], tl.float32)
    for _ in range(world_size):
        mean_sq += load_codes(own, exponent_at, False) * per_worker
        projected += tl.load(at, mask=inside, other=0.0)
        peaks += tl.load(peaks_at) * per_worker
        own += arrived.numbers_stride
        exponent_at += arrived.exponents_stride
        at += arrived_projections_stride
        peaks_at += arrived_peaks_stride
    code, exponent = store_codes(mean_sq, mean_numbers + b * BLOCK_SIZE + i, mean_exponents + b, None, False, False)
    told = decoded(code, exponent, False)
    row = tl.load(live_row + b)
    told = io.only_active(told, io.counting(live, row, i, BLOCK_SIZE), row)
    wide = (projected * per_worker).to(tl.float64)
    tl.store(sums + TOTAL * sums_stride + b, tl.minimum(io.total_of(told), LARGEST).to(tl.float32))
    tl.store(sums + ALIVE * sums_stride + b, io.count(told > 0).to(tl.float32))
    tl.store(sums + PROJECTED * sums_stride + b, io.total_of(wide * wide).to(tl.float32))
    tl.store(sums + (PEAK + rows) * sums_stride + b, peaks)


@op(
    average_squares_kernel,
    writes=("mean.numbers", "mean.exponents", "sums"),
    derive={
        "world_size": ("i32", lambda arrived_numbers: len(arrived_numbers)),
        "per_worker": ("fp32", lambda world_size: 1.0 / world_size),
        "blocks": ("i32", lambda live_row: len(live_row)),
    },
)
def average_squares(
    places: Places, arrived: Annotated[Codes, "chunks=W elements=P blocks=B"],
    arrived_projections: Annotated[Floats, "W projections"], arrived_peaks: Annotated[Floats, "W 2 B"],
    share: Indices, place: Indices, mean: Annotated[Codes, "chunks=1 elements=P blocks=B"],
    sums: Annotated[Floats, "5 B"],
) -> None:  # fmt: skip
    """Write the mean of what workers have told of a chunk, added in their order, and its sums.

    Args:
        arrived, arrived_projections, arrived_peaks: As ``tell_squares`` writes them, a row for each worker.
        places, share, place: Of the blocks of the chunk.
        mean: Written, one row.
        sums: Written: the sum of the means as they were rounded, how many are above 0, the square of the mean
            gradient's projections, infinite or NaN where any worker's is, and the means of both peaks.
    """
    per_worker, device = 1.0 / len(arrived.numbers), sums.device
    for tile in tiles((mean.numbers.numel(),), 1, places.block_size, device, len(places.live_row)):
        b = tile.blocks
        mean_sq = torch.zeros(tile.numel // places.block_size, places.block_size, device=device)
        for own, exponents in zip(*arrived, strict=True):
            mean_sq += decode(places.rows(own)[b], exponents[b]) * per_worker
        own, exponents = places.rows(mean.numbers[0])[b], mean.exponents[0, b]
        encode(mean_sq, own, exponents)
        told = only_live(decode(own, exponents), places, tile)
        sums[TOTAL, b] = told.sum(1, dtype=torch.float64).clamp(max=LARGEST).float()
        sums[ALIVE, b] = (told > 0).sum(1).float()
        lane = torch.arange(places.block_size, device=device)
        inside, at = lane < (places.block_size // share[b])[:, None], place[b][:, None] + lane
        projected = torch.zeros_like(mean_sq)
        at = torch.where(inside, at, 0).long()
        for each in arrived_projections:
            projected += torch.where(inside, each[at], 0.0)
        sums[PROJECTED, b] = square_sum(projected * per_worker).float()
        sums[PEAK:, b] = sum(each[:, b] * per_worker for each in arrived_peaks)
