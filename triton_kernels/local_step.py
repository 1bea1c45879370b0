"""0/1 Adam (Lu et al., 2022): a step between two synchronisations, and what follows one. Never autotuned."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import block_io as io
from . import rules
from . import user_tensors as users
from .advance import WIDTH, programs_of, renew_kernel, renew_plainly
from .eager import gather, live_mask, only_live, scaled, scatter, tiles
from .jit import jit, of, tl
from .nouns import (
    Coefficients,
    CoefTable,
    DoublePerTensor,
    Flag,
    Packed,
    PerBlock,
    PerElement,
    PerTensor,
    Places,
    Tensors,
)
from .op import op
from .rules import BETA1


class LocalStep(NamedTuple):
    """What a worker's own step between two synchronisations does (``local_step``)."""

    eps_inside_sqrt: bool
    """Which denom, as in ``Divisor``."""
    precondition: bool
    """Whether c sums m/denom, else m."""
    moves: bool
    """Whether this is a step; else only beta1*m is added where ``last``."""
    last: bool
    """Whether the next step synchronises; where it ``follows``, this one."""
    decay_in_update: bool
    """Whether c also sums the step's weight decay, wd*x*denom; only without ``precondition``."""
    follows: bool
    """Whether v is the worker's own, and c in units of parameters; then ``decay_in_update`` is false, and
    ``precondition`` says nothing."""


@jit()
def local_step_kernel(
    params_table, grads_table, tensors, exp_avg, exp_avg_sq, compensated, worker_scale, coef, places, step, hold,
    anchor, inside, inside_row, flags,
    PARAMS: tl.constexpr, GRADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks.

    Bytes per element: 8 for c, 4 for v (8 where FOLLOWS), 4 for m (8 unless LAST, or where FOLLOWS); where MOVES the
    gradient, x twice unless both LAST and FOLLOWS; 4 for the anchor.
    """
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    row = tl.load(places.live_row + b)
    at = b * BLOCK_SIZE + i
    if anchor is not None:
        owner = tl.load(places.block_tensor + b)
        of_block = users.place_of(params_table, tensors, owner, places.block_start, b, BLOCK_SIZE)
        x = users.keep(of_block, b, i, anchor, inside, inside_row, PARAMS, BLOCK_SIZE)
    if row == 1:
        tl.store(compensated + at, tl.zeros(i.shape, tl.float32))
        tl.store(worker_scale + b, 0.0)
    else:
        t, k = io.tensor_of(b, places.block_tensor, coef)
        mask = io.counting(places.live, row, i, BLOCK_SIZE)
        m = tl.load(exp_avg + at)
        v = tl.load(exp_avg_sq + at)
        if not step.FOLLOWS:
            d = rules.denominator(v, k, step.EPS_INSIDE_SQRT)
        c = rules.residual(tl.load(compensated + at), tl.load(worker_scale + b), False)
        tl.debug_barrier()  # all warps have read what the last synchronisation has left
        tl.store(worker_scale + b, 0.0)
        held = tl.load(hold) != 0
        finite = i >= 0
        if step.MOVES:
            place = users.place_of(params_table, tensors, t, places.block_start, b, BLOCK_SIZE)
            source = users.place_of(grads_table, tensors, t, places.block_start, b, BLOCK_SIZE)
            g = users.load(source, i, mask, row, GRADS)
            if anchor is None and not (step.FOLLOWS and step.LAST):
                x = users.load(place, i, mask, row, PARAMS)
            g = rules.counted(g, k)
            new = rules.momentum(m, g, k)
            if step.FOLLOWS:
                squares = rules.variance(v, g, k)
                u = rules.quotient(new, rules.denominator(squares, k, step.EPS_INSIDE_SQRT))
                summed = rules.owed(c, u, k)
                finite = finite & rules.finite(squares)
            else:
                u = tl.div_rn(new, d)
                added = new
                if step.PRECONDITION:
                    added = u
                if step.DECAY_IN_UPDATE:
                    added = rules.with_decay(added, x, d, k)
                summed = c + added
            finite = finite & rules.finite(summed) & rules.finite(u)
            counts = finite & mask
            if held:  # a branch: the assembler would keep a scalar's register for each thread, and spill
                counts = i < 0
            if not (step.FOLLOWS and step.LAST):
                users.store(place, i, tl.where(counts, rules.moved(x, u, k), x), None, mask, row, PARAMS)
            m = tl.where(counts, new, m)
            c = tl.where(counts, summed, c)
            if step.FOLLOWS:
                tl.store(exp_avg_sq + at, tl.where(counts, squares, v))
        if step.LAST and not step.FOLLOWS:
            kept = m
            if step.PRECONDITION:
                kept = tl.div_rn(m, d)
            total = c + kept * of(k, BETA1)
            fits = rules.finite(total)
            finite = finite & fits
            c = tl.where(fits, total, c)
        elif step.MOVES:
            tl.store(exp_avg + at, m)
        tl.store(compensated + at, tl.where(mask, c, 0.0))
        bad = io.any_of(~finite & mask)
        if (bad != 0) & (not held):
            tl.atomic_or(flags, io.NONFINITE)


@op(local_step_kernel, writes=("params", "exp_avg", "exp_avg_sq", "compensated", "worker_scale", "anchor", "flags"))
def local_step(
    params: Tensors, grads: Tensors, places: Places, exp_avg: PerElement, exp_avg_sq: PerElement,
    compensated: PerElement, worker_scale: PerBlock, coef: CoefTable, step: LocalStep, hold: Flag,
    anchor: PerElement | None, flags: Flag,
) -> None:  # fmt: skip
    """Take a worker's own step between two synchronisations (0/1 Adam, Algorithm 1, lines 4 to 6).

        m = beta1*m + (1 - beta1)*g;  x = (1 - lr*wd)*x - step_size * m/denom;  c = c + m/denom, or c + m

    ``c`` is the buffer u of the paper on top of the residual that the last synchronisation has left, which is
    deferred: it is formed when ``c`` is read again. Before the step that synchronises, ``last``, beta1*m is
    added as well: ``momentum_compress`` then only adds that step's gradient. An element whose gradient exceeds
    GRAD_LIMIT, or whose update is not finite, has none, keeps its moment, and sets the flag; nor is beta1*m added
    where ``c`` would not be finite.

    Where it ``follows``, v is the worker's own, too, and ``c`` in units of parameters:

        v = beta2*v + (1 - beta2)*g^2;  c = (1 - lr*wd)*c + step_size * m/denom

    and x stays in the ``last`` step, the one that synchronises: all will move from where they began.

    Other arguments as for ``apply_momentum``.

    Args:
        params: Written where ``moves``, but for a ``last`` step that ``follows``.
        grads: As for ``momentum_compress``, read where ``moves``.
        exp_avg: m, float32 [P], read; written where ``moves``, unless ``last``, or where it ``follows``.
        exp_avg_sq: v, float32 [P]; written where it ``follows``.
        compensated: c, float32 [P], read and written.
        worker_scale: s of the last synchronisation, float32 [B]; then 0.
        places: Elements that do not count get c = 0.
        hold: Where set x, m and v stay, and c gets no update.
        step: What it does.
        anchor: Written where this is a round's first step, else None: the parameters as they were, those
            that do not count included.
        flags: ``NONFINITE`` is set where it happened.
    """
    inside, precondition, moves, last, decay_in_update, follows = step
    flat, moments = places.rows(compensated), places.rows(exp_avg)
    for tile in tiles(places.sizes, 1, places.block_size, compensated.device, len(places.block_tensor)):
        b = tile.blocks
        k = coef[places.block_tensor[b]]
        m, v = moments[b], places.rows(exp_avg_sq)[b]
        d = rules.denominator(v, k, inside)
        c = rules.residual(flat[b], worker_scale[b, None], False)
        mask, finite = live_mask(places, tile), torch.ones_like(c, dtype=torch.bool)
        if moves:
            g = only_live(gather(grads, tile, places.block_size), places, tile)
            x = gather(params, tile, places.block_size)
            if anchor is not None:
                places.rows(anchor)[b] = x
            g = rules.counted(g, k)
            new, squares = rules.momentum(m, g, k), rules.variance(v, g, k) if follows else v
            if follows:
                u = rules.quotient(new, rules.denominator(squares, k, inside))
                summed = rules.owed(c, u, k)
            else:
                u = new / d
                added = u if precondition else new
                summed = c + (rules.with_decay(added, x, d, k) if decay_in_update else added)
            finite = rules.finite(summed) & rules.finite(u)
            if follows:
                finite = finite & rules.finite(squares)
            counts = (finite if mask is None else finite & mask) & (hold == 0)
            if not (follows and last):
                scatter(tl.where(counts, rules.moved(x, u, k), x), params, tile)
            m = tl.where(counts, new, m)
            c = tl.where(counts, summed, c)
            if follows:
                v.copy_(tl.where(counts, squares, v))
        if last and not follows:
            total = c + (m / d if precondition else m) * of(k, BETA1)
            fits = rules.finite(total)
            finite, c = finite & fits, tl.where(fits, total, c)
        elif moves:
            moments[b] = m
        flat[b] = only_live(c, places, tile)
        worker_scale[b] = 0.0
        bad = ~finite if mask is None else ~finite & mask
        if bad.any() and not hold:
            flags |= io.NONFINITE


@jit()
def rebuild_momentum_kernel(
    exp_avg_bits, exp_avg_bits_stride, exp_avg_scale, summed, awaited, exp_avg_sq, coefficients, block_tensor, live,
    live_row, exp_avg, sent, blocks, blocks_per_chunk,
    EPS_INSIDE_SQRT: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: blocks, and behind them, where coefficients are renewed, ceil(tensors / WIDTH).

    Bytes per element: 4 for m, 1/8 for bits, 4 for v, if any.
    """
    b = tl.program_id(0).to(tl.int64)
    if coefficients.groups is not None and b >= blocks:
        renew_kernel(b - blocks, coefficients, WIDTH)
        return
    i = io.elements(BLOCK_SIZE)
    row = tl.load(live_row + b)
    at = b * BLOCK_SIZE + i
    whole = tl.load(exp_avg_scale + b)
    tl.debug_barrier()  # all warps have read it
    tl.store(sent + b, whole)
    tl.store(exp_avg_scale + b, 0.0)
    if row == 1:
        tl.store(exp_avg + at, tl.zeros(i.shape, tl.float32))
    else:
        byte = io.bytes_at(exp_avg_bits, exp_avg_bits_stride, b, blocks_per_chunk, BLOCK_SIZE)
        signs = tl.load(byte)
        t, k = io.tensor_of(b, block_tensor, coefficients.table)
        scale = whole
        if summed is not None:
            scale = tl.div_rn(whole, tl.load(summed + t))
        if awaited is not None:
            scale = rules.seen(scale, tl.load(awaited + t))
        m = io.scaled(signs, signs, scale, False)
        if exp_avg_sq is not None:
            m = m * rules.denominator(tl.load(exp_avg_sq + at), k, EPS_INSIDE_SQRT)
        tl.store(exp_avg + at, io.only_active(m, io.counting(live, row, i, BLOCK_SIZE), row))


@op(
    rebuild_momentum_kernel,
    writes=("exp_avg_scale", "exp_avg", "sent", "coefficients.table", "coefficients.moved"),
    derive={
        "programs": ("i32", lambda blocks, coefficients_group_of: blocks + programs_of(coefficients_group_of)),
        "WIDTH": ("constexpr", lambda: WIDTH),
    },
)
def rebuild_momentum(
    places: Places, exp_avg_bits: Packed, exp_avg_scale: PerBlock, summed: PerTensor | None,
    awaited: DoublePerTensor | None, exp_avg_sq: PerElement | None, eps_inside_sqrt: bool, coefficients: Coefficients,
    exp_avg: PerElement, sent: PerBlock,
) -> None:  # fmt: skip
    """Rebuild the momentum from the buffer (0/1 Adam, Algorithm 1, line 9): m = scale/summed*sign(bits) * denom.

    Other arguments as for ``apply_momentum``.

    Args:
        exp_avg_bits: uint8 [W, P / 8W].
        exp_avg_scale: The buffer's scale; then 0, so that the bits stand for nothing.
        summed: Steps that the buffer sums; None: one.
        awaited: The mean of v, where what has none gets no momentum; or None.
        exp_avg_sq: v, float32 [P], or None: then without denom.
        eps_inside_sqrt: Which denom, as in ``Divisor``.
        coefficients: Renewed on the way where they have ``groups``; this op reads no column that is written then.
        places: Elements that do not count get 0.
        exp_avg: m, float32 [>= P], written.
        sent: Written: ``exp_avg_scale`` as it was.
    """
    renew_plainly(coefficients)
    coef = coefficients.table
    sent.copy_(exp_avg_scale)
    exp_avg_scale.zero_()
    scale, owner = sent, places.block_tensor.long()
    if summed is not None:
        scale = scale / summed[owner]
    if awaited is not None:
        scale = rules.seen(scale, awaited[owner])
    flat = places.rows(exp_avg[: len(scale) * places.block_size])
    for tile in tiles(places.sizes, len(exp_avg_bits), places.block_size, exp_avg.device, len(places.block_tensor)):
        b = tile.blocks
        m = scaled(exp_avg_bits[tile.chunk, ..., tile.bytes], scale[b, None])
        if exp_avg_sq is not None:
            v = places.rows(exp_avg_sq)[b]
            m.mul_(rules.denominator(v, coef[places.block_tensor[b]], eps_inside_sqrt))
        flat[b] = only_live(m, places, tile)
