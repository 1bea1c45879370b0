"""Renews a living variance: from what workers have told of their squares to the next v, in whose unit all then is."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from . import block_io as io
from . import headers, rules
from .advance import plain_power, power
from .codes import decode, decoded
from .eager import keep, load, load_variance, nearest, only_live, scaled, store_nearest, tiles
from .jit import jit, rule, tl
from .nouns import (
    Codes,
    CoefTable,
    DoublePerTensor,
    Factors,
    Flag,
    Floats,
    FloatsOrDoubles,
    OfTensors,
    PerBlock,
    Places,
    Preconditioner,
    Signs,
    Stored,
    Table,
)
from .op import op
from .rules import BETA2, COLUMNS, FACTOR, INFINITY, LARGEST, LEAST, USUAL
from .squares import ALIVE, MET, PEAK, PROJECTED, TOTAL

LEVEL, WEIGHT, MEAN, FOLLOWED, HELD = 0, 1, 2, 3, 4  # rows of ``levels``
LEVELS = 5
VETO = headers.VETO
UNSEEN = 0.125  # share of its mean that v has at least at first, and where a renewal sees no gradient
MOST_FALL = 0.25  # of the level that a tensor had when a gradient of it was last seen
SUMS = 5  # rows of what servers tell of a block


# ---------------------------------------------------------------- formulas


@rule
def followed_level(level, weight, kept, square):
    """Return the EMA of |mean g|^2, from 0, and how much of its weights has been given; float64."""
    return kept * level + (1.0 - kept) * square, kept * weight + (1.0 - kept)


@rule
def idle(square, level, held):
    """Tell whether a tensor has had no gradient for so long that its level would fall too far, and stays."""
    return (square == 0.0) & (level < held * MOST_FALL)


@rule
def level_of(level, weight, total):
    """|mean g|^2, corrected for the EMA's start; 0 where there is nothing to divide it by; float64."""
    corrected = level / tl.where(weight > 0, weight, 1.0)
    return tl.where((corrected > 0) & (corrected <= total * LARGEST), corrected, 0.0)


@rule
def least_share(peak, met, beta2, weight, seen):
    """Return the share of its mean that v has at least: what Adam's own gets by one gradient of the usual size.

    An element that seldom has one keeps a small v in the step in which Adam's grows by (1 - beta2) g^2, over the
    ``weight`` of all. That is this share, if g^2 over the squares' EMA (``peak`` / ``met``) is the mean's, too.
    """
    entering, all_there = (1.0 - beta2) * peak, met * weight
    share = entering / tl.where(entering < all_there, all_there, entering)  # at most 1
    return tl.where(seen & (met > 0), share, UNSEEN)


@rule
def factors_of(level, total, alive, share, floor):
    """Return what workers' mean squares are multiplied with, v where there are none, and the least v; float64."""
    mean = level / tl.where(alive > 0, alive, 1.0)
    least, asked = mean * share, mean * floor
    return level / tl.where(total > 0, total, 1.0), mean, tl.where(least > asked, least, asked)


# ---------------------------------------------------------------- a tensor's level


@jit()
def _sums_of_blocks(sums, sums_stride, begin, end, blocks_per_chunk):
    """Sum each row of what servers have told over blocks ``begin:end``, in order, float64."""
    lane = tl.arange(0, io.SUM_LANES)
    total = tl.zeros([io.SUM_LANES], tl.float64)
    alive, square, peak, met = total, total, total, total
    for first in range(begin, end, io.SUM_LANES):
        b = (first + lane).to(tl.int64)
        chunk = b // blocks_per_chunk
        at, inside = sums + chunk * sums_stride + (b - chunk * blocks_per_chunk), b < end
        total += tl.load(at + TOTAL * blocks_per_chunk, mask=inside, other=0.0).to(tl.float64)
        alive += tl.load(at + ALIVE * blocks_per_chunk, mask=inside, other=0.0).to(tl.float64)
        square += tl.load(at + PROJECTED * blocks_per_chunk, mask=inside, other=0.0).to(tl.float64)
        peak += tl.load(at + PEAK * blocks_per_chunk, mask=inside, other=0.0).to(tl.float64)
        met += tl.load(at + MET * blocks_per_chunk, mask=inside, other=0.0).to(tl.float64)
    return io.tree_sum(total), io.tree_sum(alive), io.tree_sum(square), io.tree_sum(peak), io.tree_sum(met)


@jit()
def renew_levels_kernel(
    sums, sums_stride, first_block, coef, steps, flags, absent, floor: tl.float64, levels, levels_stride, mean_sq,
    entered, woken, factors, factors_stride, last, last_stride, blocks_per_chunk,
):  # fmt: skip
    """Grid: tensors. Bytes per block: 20."""
    t = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(first_block + t), tl.load(first_block + t + 1)
    total, alive, square, peak, met = _sums_of_blocks(sums, sums_stride, begin, end, blocks_per_chunk)
    level = tl.load(levels + LEVEL * levels_stride + t).to(tl.float64)
    weight = tl.load(levels + WEIGHT * levels_stride + t).to(tl.float64)
    done = tl.load(steps + t)
    followed = tl.load(levels + FOLLOWED * levels_stride + t)
    held = tl.load(levels + HELD * levels_stride + t)
    last_mean = tl.load(mean_sq + t)
    factor, usual = tl.load(factors + FACTOR * factors_stride + t), tl.load(factors + USUAL * factors_stride + t)
    least = tl.load(factors + LEAST * factors_stride + t)
    tl.debug_barrier()  # all warps have read what the first is about to write
    tl.store(last + FACTOR * last_stride + t, factor)
    tl.store(last + USUAL * last_stride + t, usual)
    tl.store(last + LEAST * last_stride + t, least)
    since = done - followed.to(tl.float64)
    beta2 = tl.load(coef + t * COLUMNS + BETA2).to(tl.float64)
    taken = ((tl.load(flags) & ~VETO) == 0) & (tl.abs(square) <= LARGEST)
    if absent is not None:
        taken = taken & (tl.load(absent + t) == 0)
    one = tl.zeros([1], tl.float64)  # ``power`` takes lanes
    kept = tl.sum(power(one + beta2, one + tl.where(since > 1.0, since, 1.0)))
    new_level, new_weight = followed_level(level, weight, kept, square)
    follows = taken & (idle(square, new_level, held.to(tl.float64)) == 0)
    tl.store(levels + HELD * levels_stride + t, tl.where(follows & (square > 0), new_level.to(tl.float32), held))
    level = tl.where(follows, new_level, level).to(tl.float32)
    weight = tl.where(follows, new_weight, weight).to(tl.float32)
    tl.store(levels + LEVEL * levels_stride + t, level)
    tl.store(levels + WEIGHT * levels_stride + t, weight)
    tl.store(levels + FOLLOWED * levels_stride + t, tl.where(follows, done.to(tl.float32), followed))
    level = level_of(level.to(tl.float64), weight.to(tl.float64), total)
    share = least_share(peak, met, beta2, weight.to(tl.float64), taken)
    factor, usual, least = factors_of(level, total, alive, share, floor)
    lives = usual.to(tl.float32) > 0.0
    tl.atomic_add(woken, 1, mask=lives & (last_mean == 0.0))
    tl.store(entered + t, INFINITY, mask=lives)
    mean = tl.where(lives, usual.to(tl.float32).to(tl.float64), last_mean)
    tl.store(factors + FACTOR * factors_stride + t, tl.where(lives, factor, 0.0).to(tl.float32))
    tl.store(factors + USUAL * factors_stride + t, mean.to(tl.float32))
    tl.store(factors + LEAST * factors_stride + t, tl.where(lives, least, mean).to(tl.float32))
    tl.store(levels + MEAN * levels_stride + t, mean.to(tl.float32))
    tl.store(mean_sq + t, mean)


@op(
    renew_levels_kernel,
    writes=("levels", "mean_sq", "entered", "woken", "factors", "last"),
    derive={"programs": ("i32", lambda steps: len(steps)), "blocks_per_chunk": ("i32", lambda sums: sums.shape[2])},
)
def renew_levels(
    sums: Annotated[FloatsOrDoubles, "chunks 5 blocks"], first_block: Annotated[Table, "T+1"], coef: CoefTable,
    steps: DoublePerTensor, flags: Flag, absent: OfTensors | None, floor: float, levels: Annotated[Floats, "5 T"],
    mean_sq: DoublePerTensor, entered: DoublePerTensor, woken: Flag, factors: Factors, last: Factors,
) -> None:  # fmt: skip
    """Let each tensor's level follow the last gradient, and make of it what the next v is made with.

        level = beta2^steps * level + (1 - beta2^steps) * |mean g|^2;  v = level / (sum of mean squares) * mean squares

    A step that only the guard has refused counts, too: a variance that is too small would be refused again and again.
    While a tensor has no gradient at all its level falls to a quarter, and stays: it would be too small by far when
    gradients return, and residuals in its unit too large before.

    Args:
        sums: As ``average_squares`` writes it.
        first_block: Where each tensor's blocks begin.
        coef: Of which BETA2 is read.
        steps: Each one's updates.
        flags: int32 [1] of the step whose gradients were told.
        absent: Of which no rank had a gradient in it; None: none.
        floor: Share of the tensor's mean that v has at least; see ``least_share`` for what else it has.
        levels: Read and written: the EMA of |mean g|^2, from 0; how much of its weights has been
            given; the mean of v, 0 while a tensor waits for its first gradient; the tensor's updates when the EMA was
            last followed; and what it was when there was a gradient last.
        mean_sq: That mean again, read and written.
        entered: Written: infinite where there is a variance.
        woken: The number of tensors that have come alive is added.
        factors: Written: what v is made with. Of a tensor whose squares have all become 0, that is its last mean
            alone: with this each v is a function of ``factors`` and of mean squares, and of nothing else.
        last: Written: what ``factors`` were.
    """
    rows = sums.transpose(0, 1).reshape(SUMS, -1)[:, : int(first_block[-1])].double().T.contiguous()
    lengths = first_block.diff().long()
    total, alive, square, peak, met = torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True, initial=0.0).T
    level, weight, _, followed, held = levels.double()
    taken = ((flags & ~int(VETO)) == 0) & (square.abs() <= LARGEST)
    if absent is not None:
        taken = taken & (absent == 0)
    beta2 = coef[:, BETA2].double()
    kept = plain_power(beta2, (steps - followed).clamp(min=1.0))
    new_level, new_weight = followed_level(level, weight, kept, square)
    follows = taken & ~idle(square, new_level, held)
    held = torch.where(square > 0, new_level, held)
    new = torch.stack([new_level, new_weight, mean_sq, steps, held]).float()
    levels.copy_(torch.where(follows, new, levels))
    level, weight = levels[:MEAN].double()
    share = least_share(peak, met, beta2, weight, taken)
    last.copy_(factors)
    factor, usual, least = factors_of(level_of(level, weight, total), total, alive, share, floor)
    lives = usual.float() > 0
    woken += (lives & (mean_sq == 0)).sum().int()
    entered.masked_fill_(lives, INFINITY)
    mean_sq.copy_(torch.where(lives, usual.float().double(), mean_sq))
    factors.copy_(torch.stack([torch.where(lives, factor, 0.0), mean_sq, torch.where(lives, least, mean_sq)]))
    levels[MEAN] = mean_sq


# ---------------------------------------------------------------- the change of units


@jit()
def renew_kernel(
    compensated, scale, settled, exp_avg, coef, block_tensor, exp_avg_sq, means, factors, factors_stride, live,
    live_row, blocks_per_chunk, TERNARY: tl.constexpr, WRITES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks.

    Bytes per element: 4, 2 or 1 for c, twice, and for v, twice if written; 1/8 for bits if any, 1 for a logarithm.
    """
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    t, k = io.tensor_of(b, block_tensor, coef)
    chunk = b // blocks_per_chunk
    own = b - chunk * blocks_per_chunk
    row = tl.load(live_row + b)
    mask = io.counting(live, row, i, BLOCK_SIZE)
    at = means.numbers + chunk * means.numbers_stride + own * BLOCK_SIZE
    code = tl.load(at + i).to(tl.int32)
    exponent = tl.load(means.exponents + chunk * means.exponents_stride + own).to(tl.int32)
    v = io.only_active(io.renewed(decoded(code, exponent, False), factors, factors_stride, t), mask, row)
    last = io.load_variance(exp_avg_sq, t, b, i, BLOCK_SIZE)
    if exp_avg_sq.factors is None:
        v, code, exponent = io.nearest(exp_avg_sq, v, False)
    if compensated.numbers is not None:
        c = io.load(compensated, b, i, True, BLOCK_SIZE)
        s = tl.load(scale + b)
        if exp_avg.bits is not None:
            packed = io.bytes_at(exp_avg.bits, exp_avg.bits_stride, b, blocks_per_chunk, BLOCK_SIZE)
            signs, nonzero = io.load_bits(packed, exp_avg.plane, TERNARY)
            kept = rules.carried(io.scaled(signs, nonzero, tl.load(exp_avg.scale + b), TERNARY), c, s, k, TERNARY)
        else:
            kept = rules.residual(c, s, TERNARY)
        old = rules.denominator(last, k, exp_avg_sq.EPS_INSIDE_SQRT)
        new = rules.denominator(v, k, exp_avg_sq.EPS_INSIDE_SQRT)
        c = io.only_active(rules.in_unit(kept, last, old, new), mask, row)
        _, code_of_c, exponent_of_c = io.nearest(compensated, c, True)
        io.store_nearest(compensated, b, i, code_of_c, exponent_of_c, BLOCK_SIZE)
        tl.debug_barrier()  # all have read the scales
        tl.store(settled + b, tl.load(settled + b) + s)
        tl.store(scale + b, 0.0)
        if exp_avg.bits is not None:
            tl.store(exp_avg.scale + b, 0.0)
    if WRITES:
        io.store_nearest(exp_avg_sq, b, i, code, exponent, BLOCK_SIZE)


@op(
    renew_kernel,
    writes=(
        *("compensated.numbers", "compensated.exponents", "scale", "settled", "exp_avg.scale"),
        *("exp_avg_sq.numbers", "exp_avg_sq.exponents"),
    ),
    derive={"blocks_per_chunk": ("i32", lambda live_row, means_numbers: len(live_row) // len(means_numbers))},
)
def renew(
    places: Places, compensated: Stored | None, scale: PerBlock | None, settled: PerBlock | None, exp_avg: Signs | None,
    ternary: bool, coef: CoefTable, exp_avg_sq: Preconditioner,
    means: Annotated[Codes, "chunks=R elements=P/R blocks=B/R"], factors: Factors, writes: bool,
) -> None:  # fmt: skip
    """Bring what is divided by one variance's root to the unit of the next: times old over new denominator.

    That is a residual e, and with it the momentum, as ``freeze`` puts it into ``compensated``: with both scales zero
    the next ``momentum_compress`` finds there what both contribute, so that nothing of what was compressed is lost.

    Args:
        compensated: c, of a worker or of a server [n], read and written, to nearest; None: nothing was divided.
        scale: s of c; written: 0.
        settled: To which it is added.
        exp_avg: m of the last step, of whose bits there is a row for each chunk; scales are written: 0. Of a
            server None.
        ternary: Whether bits have two planes.
        places, coef: As for ``momentum_compress``.
        exp_avg_sq: v, in whose unit c still is [n].
        means: Mean squares, of which the next v is made.
        factors: As ``renew_levels`` writes it.
        writes: Whether ``exp_avg_sq`` becomes the next v, or ``means`` where that is made of mean squares.
    """
    (chunks, per_chunk), numel = means.exponents.shape, exp_avg_sq.numbers.numel()
    for tile in tiles((numel,), chunks, places.block_size, factors.device, len(places.live_row)):
        b, owner, first = tile.blocks, places.block_tensor[tile.blocks], tile.chunk * per_chunk
        own = slice(b.start - first, b.stop - first)
        codes = places.rows(means.numbers[tile.chunk])[own], means.exponents[tile.chunk, own]
        last = load_variance(exp_avg_sq, places, tile)
        new = only_live(rules.renewed(decode(*codes), *factors[:, owner, None]), places, tile)
        if exp_avg_sq.factors is None:
            new = nearest(new, exp_avg_sq.numbers.dtype, signed=False)
        if compensated is not None and scale is not None:
            k, s, c = coef[owner], scale[b, None], load(compensated, tile)
            if exp_avg is None:
                kept = rules.residual(c, s, ternary)
            else:
                m = scaled(exp_avg.bits[tile.chunk, ..., tile.bytes], exp_avg.scale[b, None])
                kept = rules.carried(m, c, s, k, ternary)
            units = (rules.denominator(each, k, exp_avg_sq.eps_inside_sqrt) for each in (last, new))
            c = only_live(rules.in_unit(kept, last, *units), places, tile)
            store_nearest(compensated, c, tile)
        if writes and exp_avg_sq.factors is None:
            store_nearest(exp_avg_sq, new, tile, signed=False)
        elif writes:
            keep(exp_avg_sq, codes, tile)
    if scale is not None and settled is not None:
        settled += scale
        scale.zero_()
    if exp_avg is not None:
        exp_avg.scale.zero_()


def variance(places: Places, of: Preconditioner) -> Tensor:
    """Return v, float32 [n], in memory of its own; 0 of elements that do not count."""
    v = torch.empty(of.numbers.shape, device=of.numbers.device)
    for tile in tiles((len(v),), 1, places.block_size, v.device):
        store_nearest(Stored(v), only_live(load_variance(of, places, tile), places, tile), tile)
    return v
