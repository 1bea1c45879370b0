"""Changes parameters: Adam's update, the apply of synchronised bits. Never autotuned: all is in place."""

from __future__ import annotations

from typing import Annotated

import torch

from . import block_io as io
from . import rules
from . import user_tensors as users
from .advance import WIDTH, count_kernel, count_plainly, programs_of
from .eager import follow, gather, load, move, only_live, scaled, square_sum, tiles, write
from .jit import jit, tl
from .nouns import (
    CoefTable,
    Correction,
    Count,
    Counter,
    Counters,
    Divisor,
    DoublePerBlock,
    DoublePerTensor,
    Flag,
    Floats,
    Moments,
    PerBlock,
    PerElement,
    Places,
    Signs,
    Stored,
    Tensors,
)
from .op import op


@jit()
def moved_kernel(place, words, b, i, update, k, mask, row, fine, correction,
                 PARAMS: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Move the elements of a block that count, and are ``fine`` if that is given; return where to, unrounded."""
    before = users.load_master(place, b, i, correction, mask, row, PARAMS, BLOCK_SIZE)
    x = rules.moved(before, update, k)
    if fine is not None:
        x = tl.where(fine, x, before)
    users.store_master(place, b, i, x, words, correction, mask, row, PARAMS, BLOCK_SIZE)
    return x


@jit()
def moments_kernel(place, moments, exp_avg_sq_sums, found, first, b, i, k, mask, row,
                   AS_KEPT: tl.constexpr, GRADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Update m and v of a block, and the sum of v where asked; return both, and which gradients count.

    Where there is ``found``, elements whose gradient does not keep both. AS_KEPT: returns what is kept of both, which
    another launch reads again; else both before they are rounded.
    """
    g = users.load(place, i, mask, row, GRADS)
    exp_avg = Stored(moments.exp_avg, moments.exponents)
    exponents = None if moments.exponents is None else moments.exponents + moments.exponents_stride
    exp_avg_sq = Stored(moments.exp_avg_sq, exponents)
    m_before = io.load(exp_avg, b, i, True, BLOCK_SIZE)
    v_before = io.load(exp_avg_sq, b, i, False, BLOCK_SIZE)
    m, v = rules.momentum(m_before, g, k), rules.variance(v_before, g, k)
    fine = rules.counts(g, k)
    if found is not None:
        m, v = tl.where(fine, m, m_before), tl.where(fine, v, v_before)
    if exp_avg_sq_sums is not None:
        tl.store(exp_avg_sq_sums + b, io.total_of(v))
        m = rules.momentum(m_before, g, k)  # again, behind the sum, or sm_80 spills a register
        if found is not None:
            m = tl.where(fine, m, m_before)
    bits = io.moment_bits(moments.drawn, io.place_in_whole(b, first), i, BLOCK_SIZE)
    kept_m = io.store(exp_avg, bits, b, i, m, True, BLOCK_SIZE)
    kept_v = io.store(exp_avg_sq, bits, b, i, v, False, BLOCK_SIZE)
    if AS_KEPT:
        m, v = kept_m, kept_v
    return m, v, fine


@jit()
def tell_kernel(found, fine):
    """Tell of gradients that do not count; a caller does so where fewest registers are in use."""
    if found is not None:
        bad = io.any_of(~fine)
        if bad != 0:
            tl.atomic_or(found, io.PARTLY)


@jit()
def forget_kernel(b, found_before):
    """Clear, by the first program, what the last step has found: the host has seen it, or has a copy."""
    if found_before is not None and b == 0:
        tl.store(found_before, 0)


@jit()
def apply_momentum_kernel(
    params_table, tensors, exp_avg, exp_avg_sq, coef, places, skip, rounding, digest, x_squares, count, steps,
    correction, blocks, blocks_per_chunk, blocks_per_digest,
    PARAMS: tl.constexpr, TERNARY: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: blocks, and behind them, where the step is counted, ceil(tensors / WIDTH).

    Bytes per element: x and its correction twice, 4 or 2 for v, 1/8 for bits (twice where TERNARY).
    """
    b = tl.program_id(0).to(tl.int64)
    if b < blocks:
        row = tl.load(places.live_row + b)
        packed = io.bytes_at(exp_avg.bits, exp_avg.bits_stride, b, blocks_per_chunk, BLOCK_SIZE)
        signs, nonzero = io.load_bits(packed, exp_avg.plane, TERNARY)
        if (tl.load(skip) == 0) & (row != 1):
            i = io.elements(BLOCK_SIZE)
            t, k = io.tensor_of(b, places.block_tensor, coef)
            update = io.scaled(signs, nonzero, rules.plain_scale(tl.load(exp_avg.scale + b), k), TERNARY)
            if exp_avg_sq.numbers is not None:
                v = io.load(exp_avg_sq, b, i, False, BLOCK_SIZE)
                update = rules.preconditioned(update, v, k, exp_avg_sq.EPS_INSIDE_SQRT)
            mask = io.counting(places.live, row, i, BLOCK_SIZE)
            place = users.place_of(params_table, tensors, t, places.block_start, b, BLOCK_SIZE)
            words = io.random_words(rounding, b, i, BLOCK_SIZE)
            x = moved_kernel(place, words, b, i, update, k, mask, row, None, correction, PARAMS, BLOCK_SIZE)
            if x_squares is not None:
                io.store_norm(x_squares, b, io.only_active(x, mask, row))
        if digest is not None:  # at the end: no load waits for this sum
            summed = io.sum_of_bytes(signs)
            if TERNARY:
                summed += io.sum_of_bytes(nonzero)
            tl.atomic_add(digest + b // blocks_per_digest, summed, sem="relaxed")
    elif steps is not None:
        count_kernel(b - blocks, skip, count, steps, tensors, WIDTH)


@op(
    apply_momentum_kernel,
    writes=(
        *("params", "digest", "count.updates", "count.number", "count.replays", "steps", "x_squares", "correction"),
    ),
    derive={
        "programs": ("i32", lambda blocks, steps: blocks + programs_of(steps)),
        "blocks_per_digest": ("i32", lambda blocks, digest: blocks if digest is None else blocks // len(digest)),
        "WIDTH": ("constexpr", lambda: WIDTH),
    },
)
def apply_momentum(
    params: Tensors, places: Places, exp_avg: Signs, exp_avg_sq: Divisor | None,
    coef: Annotated[Floats, "T+ COLUMNS"], skip: Flag, rounding: Counter | None,
    digest: Annotated[Counters, "parts"] | None = None, x_squares: PerBlock | None = None, count: Count | None = None,
    steps: DoublePerTensor | None = None, correction: Correction | None = None,
) -> None:  # fmt: skip
    """Apply the synchronised momentum with the frozen variance (1-bit Adam).

        x = (1 - lr*wd)*x - step_size * m/denom,  m = scale*sign(bits)/unit
        denom = sqrt(v)/sqrt(1 - beta2^F) + eps, or eps inside the root

    Args:
        params: Parameters of any float dtype, dense, written; computed in float32, rounded once.
        places: Where they lie; elements that do not count stay.
        exp_avg: m.
        exp_avg_sq: Frozen variance, and which denom (Fixing 1-bit Adam, eq. 2, puts eps inside); None where the unit is
            over denom already.
        coef: float32 [tensors, columns of ``Coef``].
        skip: Where set nothing moves.
        rounding: Updates done, int64 []: then bfloat16 parameters are rounded stochastically, with bits
            drawn from it and from the flat index (``bit_rules.random_bits``); or None: to nearest. Not the updates
            of ``count``, which counts meanwhile.
        digest: To each of which are added the bits of as many blocks, one part after the other, as
            8-byte words, wrapping; also of blocks that do not move, and where ``skip`` is set: ranks compare them.
            Or None.
        x_squares: Written: sums of squares of where x goes, unrounded; those of padding stay. Or None.
        count: Where the step is counted, as ``advance`` does; or None.
        steps: Written with it: updates of each.
        correction: What bfloat16 parameters lack of their float32 masters, which are what moves, in units of the
            masters' last bit, read and written: int16 [P]; or int8 [P], in units of 256 of them, where masters are
            rounded stochastically, with the bits of ``rounding``, and parameters to nearest. 0 for other parameters.
            None: there are no masters.
    """
    if steps is not None and count is not None:
        steps += count_plainly(skip, count)
    if digest is not None:
        by_part = exp_avg.bits.view(torch.int64).unflatten(0, (len(digest), -1))
        digest += by_part.sum(tuple(range(1, by_part.dim())))
    if skip:
        return
    chunks, device = len(exp_avg.bits), exp_avg.scale.device
    for tile in tiles(places.sizes, chunks, places.block_size, device, len(places.block_tensor)):
        b = tile.blocks
        k = coef[places.block_tensor[b]]
        update = scaled(exp_avg.bits[tile.chunk, ..., tile.bytes], rules.plain_scale(exp_avg.scale[b, None], k))
        if exp_avg_sq is not None:
            v = load(exp_avg_sq, tile, signed=False)
            update = rules.preconditioned(update, v, k, exp_avg_sq.eps_inside_sqrt)
        x = move(params, tile, places, update, k, rounding, None, correction)
        if x_squares is not None:
            told = square_sum(only_live(x, places, tile)).float()
            x_squares[b] = torch.where(places.live_row[b] != 1, told, x_squares[b])


@jit()
def adam_update_kernel(
    params_table, tensors, grads_table, moments, coef, places, skip, exp_avg_sq_sums, rounding, found, found_before,
    correction, first,
    PARAMS: tl.constexpr, GRADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks. Bytes per element: x and its correction twice, g, 8, 4 or 2 for m and for v."""
    b = tl.program_id(0).to(tl.int64)
    forget_kernel(b, found_before)
    row = tl.load(places.live_row + b)
    if (tl.load(skip) == 0) & (row != 1):
        i = io.elements(BLOCK_SIZE)
        t, k = io.tensor_of(b, places.block_tensor, coef)
        mask = io.counting(places.live, row, i, BLOCK_SIZE)
        place = users.place_of(grads_table, tensors, t, places.block_start, b, BLOCK_SIZE)
        given = place, moments, exp_avg_sq_sums, found, first
        m, v, fine = moments_kernel(*given, b, i, k, mask, row, False, GRADS, BLOCK_SIZE)
        update = rules.preconditioned(m, v, k, False)
        place = users.place_of(params_table, tensors, t, places.block_start, b, BLOCK_SIZE)
        words = io.random_words(rounding, io.place_in_whole(b, first), i, BLOCK_SIZE)
        if found is None:
            moved_kernel(place, words, b, i, update, k, mask, row, None, correction, PARAMS, BLOCK_SIZE)
        else:
            moved_kernel(place, words, b, i, update, k, mask, row, fine, correction, PARAMS, BLOCK_SIZE)
        tell_kernel(found, fine)


@op(
    adam_update_kernel,
    writes=(
        *("params", "moments.exp_avg", "moments.exp_avg_sq", "moments.exponents"),
        *("exp_avg_sq_sums", "found", "found_before", "correction"),
    ),
)
def adam_update(
    params: Tensors, grads: Tensors, places: Places, moments: Moments, coef: CoefTable, skip: Flag,
    exp_avg_sq_sums: DoublePerBlock | None, rounding: Counter | None, found: Flag | None = None,
    found_before: Flag | None = None, correction: Correction | None = None, first: Flag | None = None,
) -> None:  # fmt: skip
    """Take one step of AdamW, on averaged gradients also the warm-up of 1-bit Adam (1-bit LAMB, eq. 1).

    Other arguments as for ``apply_momentum``.

    Args:
        grads: Gradients of any float dtype, dense, in the parameters' memory order; empty is zeros.
        moments: Read and written; of blocks where nothing counts they may stay.
        exp_avg_sq_sums: Written: sum of v per block (for the freeze rule); or None.
        found: ``PARTLY`` is set where an element of a gradient exceeds GRAD_LIMIT, or is no number: it
            and its moments stay as they are. None: all count.
        found_before: Written: 0, also where ``skip`` is set; or None.
        first: Which of a longer index space's blocks the first one is: random bits are those of its place
            there. None: there is none.
    """
    if found_before is not None:
        found_before.zero_()
    if skip:
        return
    for tile in tiles(places.sizes, 1, places.block_size, skip.device, first=0 if first is None else int(first)):
        k = coef[places.block_tensor[tile.blocks]]
        g = only_live(gather(grads, tile, places.block_size), places, tile)
        m, v, still = follow(g, moments, exp_avg_sq_sums, found, tile, k)
        update = rules.preconditioned(m, v, k, False)
        move(params, tile, places, update, k, rounding, still, correction)


@jit()
def add_values_kernel(
    params_table, tensors, values, places, skip, rounding,
    PARAMS: tl.constexpr, REPLACES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks. Bytes per element: 4, and the parameter twice (once)."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(places.live_row + b)
    if (tl.load(skip) == 0) & (row != 1):
        i = io.elements(BLOCK_SIZE)
        mask = io.counting(places.live, row, i, BLOCK_SIZE)
        t = tl.load(places.block_tensor + b)
        place = users.place_of(params_table, tensors, t, places.block_start, b, BLOCK_SIZE)
        new = tl.load(values + b * BLOCK_SIZE + i)
        if not REPLACES:
            new = users.load(place, i, mask, row, PARAMS) - new
        users.store(place, i, new, io.random_words(rounding, b, i, BLOCK_SIZE), mask, row, PARAMS)


@op(add_values_kernel, writes=("params",))
def add_values(
    params: Tensors, places: Places, values: PerElement, replaces: bool, skip: Flag, rounding: Counter | None,
) -> None:  # fmt: skip
    """x = x - values, or x = values, for the elements that count (Marsit, Algorithm 2, line 6).

    Other arguments as for ``apply_momentum``.

    Args:
        values: float32 [>= P].
        replaces: Which of the two.
    """
    if skip:
        return
    for tile in tiles(places.sizes, 1, places.block_size, values.device):
        new = places.rows(values[tile.start : tile.start + tile.numel])
        x = gather(params, tile, places.block_size)
        write(params, tile, new.clone() if replaces else x - new, x, places, rounding)
