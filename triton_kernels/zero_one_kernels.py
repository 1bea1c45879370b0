"""The Triton kernels of 0/1 Adam: a step between two synchronisations, and what follows one. Never autotuned."""

from __future__ import annotations

import triton
import triton.language as tl

from .access import (
    BETA1,
    COLUMNS,
    DECAY,
    LARGEST,
    ONE_MINUS_BETA1,
    STEP_SIZE,
    WEIGHT_DECAY,
    bits_of,
    counted,
    denom,
    elements,
    live_elements,
    load_user,
    negative,
    residual,
    store_user,
    tensor_of,
)

NONFINITE = tl.constexpr(1)


@triton.jit
def local_step(
    params,  # int64 [2, tensors]: address of each parameter and its dtype
    grads,  # int64 [2, tensors]: address of each gradient (0: zeros) and its dtype
    tensors,  # their number
    exp_avg,  # m, float32 [P], read; written where MOVES, unless LAST
    exp_avg_sq,  # v, float32 [P]
    compensated,  # c, float32 [P], read and written
    worker_scale,  # s, float32 [B]
    coef,  # float32 [tensors, COLUMNS]
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B]
    hold,  # int32 [1]
    flags,  # int32 [1]
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    GRAD_ALIGNED: tl.constexpr,
    EPS_INSIDE: tl.constexpr,
    PRECONDITION: tl.constexpr,
    MOVES: tl.constexpr,
    LAST: tl.constexpr,
    LEAKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """c = c - s*sign(c) + u; x = decay*x - step_size * m/denom.

    Grid: B. Bytes per element: 8 for c, 4 for v, 4 for m (8 unless LAST); where MOVES the gradient, x twice.
    """
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    row = tl.load(live_row + b)
    at = b * BLOCK + i
    if row == 1:
        tl.store(compensated + at, tl.zeros(i.shape, tl.float32))
    else:
        base, kinds, start, k = tensor_of(b, block_tensor, block_start, params, tensors, coef)
        mask = i >= 0
        if row != 0:
            mask = live_elements(live, row, BLOCK)
        m = tl.load(exp_avg + at)
        d = denom(tl.load(exp_avg_sq + at), k, EPS_INSIDE)
        c = residual(tl.load(compensated + at), tl.load(worker_scale + b), False)
        held = tl.load(hold) != 0
        finite = i >= 0
        if MOVES:
            source, sources, start, k = tensor_of(b, block_tensor, block_start, grads, tensors, coef)
            if row == 0:
                g = load_user(source, sources, start, i, None, GRAD_DTYPE, True, GRAD_ALIGNED)
                x = load_user(base, kinds, start, i, None, DTYPE, True, ALIGNED)
            else:
                g = load_user(source, sources, start, i, mask, GRAD_DTYPE, False, GRAD_ALIGNED)
                x = load_user(base, kinds, start, i, mask, DTYPE, False, ALIGNED)
            new = m * tl.load(k + BETA1) + counted(g, k) * tl.load(k + ONE_MINUS_BETA1)
            u = tl.div_rn(new, d)
            added = new
            if PRECONDITION:
                added = u
            if LEAKS:
                added = added + x * tl.load(k + WEIGHT_DECAY) * d
            finite = (tl.abs(c + added) <= LARGEST) & (tl.abs(u) <= LARGEST)
            counts = finite & mask & (not held)
            moved = tl.where(counts, x * tl.load(k + DECAY) - u * tl.load(k + STEP_SIZE), x)
            if row == 0:
                store_user(base, kinds, start, i, moved, i, None, DTYPE, False, True, ALIGNED)
            else:
                store_user(base, kinds, start, i, moved, i, mask, DTYPE, False, False, ALIGNED)
            m = tl.where(counts, new, m)
            c = tl.where(counts, c + added, c)
        if LAST:
            kept = m
            if PRECONDITION:
                kept = tl.div_rn(m, d)
            total = c + kept * tl.load(k + BETA1)
            fits = tl.abs(total) <= LARGEST
            finite = finite & fits
            c = tl.where(fits, total, c)
        elif MOVES:
            tl.store(exp_avg + at, m)
        tl.store(compensated + at, tl.where(mask, c, 0.0))
        bad = tl.max(tl.max((~finite & mask).to(tl.int32), axis=1), axis=0)
        if (bad != 0) & (not held):
            tl.atomic_or(flags, NONFINITE)


@triton.jit
def rebuild_momentum(
    exp_avg_bits,  # uint8 [W, stride]
    exp_avg_stride,  # bytes between its rows
    exp_avg_scale,  # float32 [B]
    exp_avg_sq,  # v, float32 [P] where PRECONDITION
    coef,  # float32 [tensors, COLUMNS]
    block_tensor,  # int32 [B]
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B]
    exp_avg,  # m, float32 [P], written
    blocks_per_chunk,  # B / W
    EPS_INSIDE: tl.constexpr,
    PRECONDITION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """m = scale*sign(bits) * denom. Grid: B. Bytes per element: 4 for m, 1/8 for bits, 4 for v where PRECONDITION."""
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    row = tl.load(live_row + b)
    at = b * BLOCK + i
    if row == 1:
        tl.store(exp_avg + at, tl.zeros(i.shape, tl.float32))
    else:
        chunk = b // blocks_per_chunk
        offset = (b - chunk * blocks_per_chunk) * (BLOCK // 8)
        byte = exp_avg_bits + chunk * exp_avg_stride + offset + tl.arange(0, BLOCK // 8)
        s = tl.load(exp_avg_scale + b)
        m = tl.where(bits_of(tl.load(byte)) != 0, s, negative(s))
        if PRECONDITION:
            k = coef + tl.load(block_tensor + b) * COLUMNS
            m = m * denom(tl.load(exp_avg_sq + at), k, EPS_INSIDE)
        if row != 0:
            m = tl.where(live_elements(live, row, BLOCK), m, 0.0)
        tl.store(exp_avg + at, m)
