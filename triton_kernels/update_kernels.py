"""The Triton kernels that change parameters: Adam's update, the apply of synchronised bits. Never autotuned."""

from __future__ import annotations

import triton
import triton.language as tl

from .access import (
    BETA1,
    BETA2,
    DECAY,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    STEP_SIZE,
    UNIT,
    denom,
    elements,
    live_elements,
    load_bits,
    load_user,
    random_words,
    scaled,
    store_user,
    tensor_of,
)


@triton.jit
def move(
    base,
    kinds,
    start,
    b,
    i,
    update,
    k,
    live,
    row,
    rounding,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x = decay*x - step_size*update, for the elements of a block that count."""
    words = i
    if ROUNDING:
        words = random_words(rounding, b, i, BLOCK)
    update = update * tl.load(k + STEP_SIZE)
    decay = tl.load(k + DECAY)
    if row == 0:
        x = load_user(base, kinds, start, i, None, DTYPE, True, ALIGNED)
        store_user(base, kinds, start, i, x * decay - update, words, None, DTYPE, ROUNDING, True, ALIGNED)
    else:
        mask = live_elements(live, row, BLOCK)
        x = load_user(base, kinds, start, i, mask, DTYPE, False, ALIGNED)
        store_user(base, kinds, start, i, x * decay - update, words, mask, DTYPE, ROUNDING, False, ALIGNED)


@triton.jit
def apply_momentum(
    pointers,  # int64 [2, tensors]: address of each parameter and its dtype
    tensors,  # their number
    exp_avg_bits,  # uint8 [W, stride]
    exp_avg_stride,  # bytes between its rows
    plane,  # bytes between its planes where TERNARY
    exp_avg_scale,  # float32 [B]
    exp_avg_sq,  # float32 or bfloat16 [P] unless PRECONDITIONED
    coef,  # float32 [tensors, COLUMNS]
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B]
    skip,  # int32 [1]
    rounding,  # int64 [], updates done, read where ROUNDING
    blocks_per_chunk,  # B / W
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    VARIANCE: tl.constexpr,  # dtype of exp_avg_sq
    EPS_INSIDE: tl.constexpr,
    PRECONDITIONED: tl.constexpr,
    TERNARY: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x = (1 - lr*wd)*x - step_size * m/denom, m = scale*sign(bits)/unit.

    Grid: B. Bytes per element: x twice, 4 or 2 for v, 1/8 for bits (twice where TERNARY).
    """
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(live_row + b)
    if (tl.load(skip) == 0) & (row != 1):
        i = elements(BLOCK)
        byte = tl.arange(0, BLOCK // 8)
        chunk = b // blocks_per_chunk
        offset = (b - chunk * blocks_per_chunk) * (BLOCK // 8)
        base, kinds, start, k = tensor_of(b, block_tensor, block_start, pointers, tensors, coef)
        scale = tl.div_rn(tl.load(exp_avg_scale + b), tl.load(k + UNIT))
        signs, nonzero = load_bits(exp_avg_bits + chunk * exp_avg_stride + offset + byte, plane, TERNARY)
        update = scaled(signs, nonzero, scale, TERNARY)
        if not PRECONDITIONED:
            v = tl.load(exp_avg_sq + b * BLOCK + i).to(tl.float32)
            update = tl.div_rn(update, denom(v, k, EPS_INSIDE))
        move(base, kinds, start, b, i, update, k, live, row, rounding, DTYPE, ALIGNED, ROUNDING, BLOCK)


@triton.jit
def moments(grad, exp_avg, exp_avg_sq, exp_avg_sq_sums, b, i, k, live, row, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """Updates m and v of a block, and the sum of v where SUMS; returns both."""
    g = tl.load(grad + b * BLOCK + i)
    if row != 0:
        g = tl.where(live_elements(live, row, BLOCK), g, 0.0)
    m = tl.load(exp_avg + b * BLOCK + i) * tl.load(k + BETA1) + g * tl.load(k + ONE_MINUS_BETA1)
    v = tl.load(exp_avg_sq + b * BLOCK + i) * tl.load(k + BETA2) + g * tl.load(k + ONE_MINUS_BETA2) * g
    tl.store(exp_avg + b * BLOCK + i, m)
    tl.store(exp_avg_sq + b * BLOCK + i, v)
    if SUMS:
        tl.store(exp_avg_sq_sums + b, tl.sum(tl.sum(v.to(tl.float64), axis=1), axis=0))
    return m, v


@triton.jit
def adam_update(
    pointers,  # int64 [2, tensors]: address of each parameter and its dtype
    tensors,  # their number
    grad,  # averaged, float32 [P]
    exp_avg,  # m, float32 [P], read and written
    exp_avg_sq,  # v, float32 [P], read and written
    coef,  # float32 [tensors, COLUMNS]
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B]
    skip,  # int32 [1]
    exp_avg_sq_sums,  # float64 [B], written where SUMS
    rounding,  # int64 [], updates done, read where ROUNDING
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SUMS: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """AdamW on averaged gradients. Grid: B. Bytes per element: x twice, 4 for g, 8 for m, 8 for v."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(live_row + b)
    if (tl.load(skip) == 0) & (row != 1):
        i = elements(BLOCK)
        base, kinds, start, k = tensor_of(b, block_tensor, block_start, pointers, tensors, coef)
        m, v = moments(grad, exp_avg, exp_avg_sq, exp_avg_sq_sums, b, i, k, live, row, SUMS, BLOCK)
        update = tl.div_rn(m, denom(v, k, False))
        move(base, kinds, start, b, i, update, k, live, row, rounding, DTYPE, ALIGNED, ROUNDING, BLOCK)
