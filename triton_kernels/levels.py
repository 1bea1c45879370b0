"""Brings the variance that each worker keeps of its own gradients to the level of the mean gradient.

A worker's squares are larger than those of the mean gradient, by the noise that the mean has less of. By how much, each
tensor is told at synchronisations, in a few numbers: projections of workers' gradients on random signs, the same on all
ranks, of whose mean the square is that of the mean gradient, on average; and sums of workers' v.
"""

from __future__ import annotations

from typing import Annotated

import torch

from . import bit_rules
from . import block_io as io
from . import user_tensors as users
from .advance import plain_power, power
from .eager import gather, only_live, tiles
from .jit import jit, rule, tl
from .nouns import (
    CoefTable,
    Counter,
    DoublePerTensor,
    Flag,
    Floats,
    Indices,
    OfTensors,
    PerBlock,
    PerElement,
    PerTensor,
    Places,
    Table,
    Tensors,
)
from .op import op
from .renewal import followed_level
from .rules import BETA2, COLUMNS, LARGEST
from .squares import random_signs, signed, store_sums

LEVEL, WEIGHT, FOLLOWED = 0, 1, 2  # rows of ``levels``
LEVELS = 3


@rule
def share_of(level, weight, total, unbias, least):
    """Compare |mean g|^2 with the mean of workers' |g|^2, both without their EMA's start: between ``least`` and 1.

    1 where there is nothing to compare; float64.
    """
    known = (weight > 0) & (total > 0)
    own = tl.where(known, total, 1.0) * unbias
    share = level / tl.where(known, weight, 1.0) / own
    share = tl.where(share > least, share, least)
    return tl.where(known & (share < 1.0), share, 1.0)


# ---------------------------------------------------------------- what a worker tells


@jit()
def tell_level_kernel(
    grads_table, tensors, exp_avg_sq, factor, updates, block_tensor, block_start, live, live_row, share, place,
    projections, sums,
    GRADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks. Bytes per element: g, 4 for v; 4 for a projection."""
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    row = tl.load(live_row + b)
    mask = io.counting(live, row, i, BLOCK_SIZE)
    v = io.only_active(tl.load(exp_avg_sq + b * BLOCK_SIZE + i), mask, row)
    tl.store(sums + b, tl.minimum(io.total_of(v), LARGEST).to(tl.float32))
    place_of = users.place_of(grads_table, tensors, tl.load(block_tensor + b), block_start, b, BLOCK_SIZE)
    g = io.only_active(users.load(place_of, i, mask, row, GRADS), mask, row)
    if factor is not None:
        g = g * tl.load(factor)
    word = b * (BLOCK_SIZE // 32)
    lower = updates.to(tl.pointer_type(tl.int32), bitcast=True)  # of a number of 64 bits, little-endian
    seed = bit_rules.block_seed((word >> 32).to(tl.uint32), tl.load(lower).to(tl.uint32, bitcast=True))
    x = signed(g, seed, word, BLOCK_SIZE)
    store_sums(x, tl.load(share + b), projections + tl.load(place + b), BLOCK_SIZE)


@op(tell_level_kernel, writes=("projections", "sums"))
def tell_level(
    grads: Tensors, places: Places, exp_avg_sq: PerElement, factor: Annotated[Floats, "1"] | None, updates: Counter,
    share: Indices, place: Indices, projections: Annotated[Floats, "projections"], sums: PerBlock,
) -> None:  # fmt: skip
    """Write the sums of a worker's gradient with random signs, and those of its v.

    A projection is a sum of neighbours' sums; its signs are a function of the number of ``updates`` and of the
    elements' places, the same on all ranks.

    Args:
        grads, places: As for ``momentum_compress``.
        exp_avg_sq: v, float32 [P].
        factor: What gradients are multiplied with, float32 [1]; None: nothing.
        updates: int64 [].
        share: Elements of which a projection is the sum: a power of two, int32 [B].
        place: Where each block's projections begin, int32 [B].
        projections: Written.
        sums: Written: of v.
    """
    for tile in tiles(places.sizes, 1, places.block_size, exp_avg_sq.device, len(places.live_row)):
        b = tile.blocks
        v = only_live(places.rows(exp_avg_sq)[b], places, tile)
        sums[b] = v.sum(1, dtype=torch.float64).clamp(max=LARGEST).float()
        g = only_live(gather(grads, tile, places.block_size), places, tile)
        g = g if factor is None else g * factor
        x = g * random_signs(updates, b.start, (len(g), places.block_size))
        for fold in range(places.block_size.bit_length()):
            rows = (share[b] == 1 << fold).nonzero().flatten()
            at = place[b][rows, None] + torch.arange(x.shape[1], device=x.device)
            projections[at.long()] = x[rows] + 0.0
            x = x[:, ::2] + x[:, 1::2]


# ---------------------------------------------------------------- what all make of it


@jit()
def follow_level_kernel(
    told, first, projections, per_worker, coef, steps, flags, absent, least: tl.float64, levels, levels_stride,
    rho,
):  # fmt: skip
    """Grid: tensors. Bytes per projection: 4."""
    t = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, io.SUM_LANES)
    squares = tl.zeros([io.SUM_LANES], tl.float64)
    end = tl.load(first + t + 1)
    for at in range(tl.load(first + t), end, io.SUM_LANES):
        wide = (tl.load(told + at + lane, mask=at + lane < end, other=0.0) * per_worker).to(tl.float64)
        squares += wide * wide
    square = io.tree_sum(squares)
    total = (tl.load(told + projections + t) * per_worker).to(tl.float64)
    done = tl.load(steps + t) + 1.0
    last = tl.load(levels + FOLLOWED * levels_stride + t).to(tl.float64)
    taken = (tl.load(flags) == 0) & (square > 0) & (square <= LARGEST) & (total <= LARGEST)
    if absent is not None:
        taken = taken & (tl.load(absent + t) == 0)
    beta2 = tl.load(coef + t * COLUMNS + BETA2).to(tl.float64)
    one = tl.zeros([1], tl.float64) + 1.0  # ``power`` takes lanes
    kept = tl.sum(power(one * beta2, one * tl.maximum(done - last, 1.0)))
    unbias = 1.0 / (1.0 - tl.sum(power(one * beta2, one * done)))
    level = tl.load(levels + LEVEL * levels_stride + t)
    weight = tl.load(levels + WEIGHT * levels_stride + t)
    new_level, new_weight = followed_level(level.to(tl.float64), weight.to(tl.float64), kept, square)
    share = share_of(new_level, new_weight, total, unbias, tl.full([], least, tl.float64))
    tl.debug_barrier()  # all warps have read what the first is about to write
    tl.store(levels + LEVEL * levels_stride + t, tl.where(taken, new_level.to(tl.float32), level))
    tl.store(levels + WEIGHT * levels_stride + t, tl.where(taken, new_weight.to(tl.float32), weight))
    tl.store(levels + FOLLOWED * levels_stride + t, tl.where(taken, done, last).to(tl.float32))
    tl.store(rho + t, tl.where(taken, share.to(tl.float32), tl.load(rho + t)))


@op(
    follow_level_kernel,
    writes=("levels", "rho"),
    derive={
        "programs": ("i32", lambda steps: len(steps)),
        "projections": ("i32", lambda told, steps: len(told) - len(steps)),
        "per_worker": ("fp32", lambda world_size: 1.0 / world_size),
        "least": ("fp64", lambda per_worker: per_worker),
    },
)
def follow_level(
    told: Annotated[Floats, "projections+T"], first: Annotated[Table, "T+1"], world_size: int, coef: CoefTable,
    steps: DoublePerTensor, flags: Flag, absent: OfTensors | None, levels: Annotated[Floats, "3 T"], rho: PerTensor,
) -> None:  # fmt: skip
    """Let each tensor's level follow the last gradient, and compare it with the workers' own squares.

        level = beta2^since * level + (1 - beta2^since) * |mean g|^2;  rho = level / (mean of sum v)

    both corrected for their start at 0, and rho between 1/W and 1. A step that was skipped, a tensor without a gradient
    on any rank, and one whose gradient is 0, change nothing.

    Args:
        told: What ``tell_level`` has written, summed over ranks: projections of each
            tensor, and its sum of v.
        first: Where each tensor's projections begin.
        world_size: W.
        coef: Of which BETA2 is read.
        steps: Each one's updates before this step.
        flags: int32 [1] of this step, not 0 where it is skipped.
        absent: Of which no rank had a gradient; None: none.
        levels: Read and written: the EMA of |mean g|^2, from 0; how much of its weights has been
            given; and the tensor's updates when it was last followed.
        rho: Written.
    """
    count, per_worker = len(told) - len(steps), 1.0 / world_size
    mean = (told * per_worker).double()
    lengths, total = first.diff().long(), mean[count:]
    square = torch.segment_reduce(mean[:count].square(), "sum", lengths=lengths, unsafe=True, initial=0.0)
    level, weight, last = levels.double()
    taken = (flags == 0) & (square > 0) & (square <= LARGEST) & (total <= LARGEST)
    if absent is not None:
        taken &= absent == 0
    beta2, done = coef[:, BETA2].double(), steps + 1
    new_level, new_weight = followed_level(level, weight, plain_power(beta2, (done - last).clamp(min=1.0)), square)
    share = share_of(new_level, new_weight, total, 1.0 / (1.0 - plain_power(beta2, done)), per_worker)
    levels.copy_(torch.where(taken, torch.stack([new_level, new_weight, done]).float(), levels))
    rho.copy_(torch.where(taken, share.float(), rho))
