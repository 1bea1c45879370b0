"""The Triton kernel of distributed Lion's worker. Never autotuned."""

from __future__ import annotations

import triton
import triton.language as tl

from .access import (
    BETA1,
    BETA2,
    LARGEST,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    bytes_of,
    counted,
    elements,
    live_elements,
    load_user,
    mixed,
    random_words,
    tensor_of,
)

NONFINITE = tl.constexpr(1)


@triton.jit
def _bytes_at(bits, stride, b, blocks_per_chunk, BLOCK: tl.constexpr):
    """Where a block's bits lie; computed where they are written, so that no register holds it meanwhile."""
    chunk = b // blocks_per_chunk
    return bits + chunk * stride + (b - chunk * blocks_per_chunk) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)


@triton.jit
def lion_compress(
    pointers,  # int64 [2, tensors]: address of each gradient (0: zeros) and its dtype
    tensors,  # their number
    exp_avg,  # m, float32 [P], read and written
    coef,  # float32 [tensors, COLUMNS]
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B]
    step,  # updates done, int64 []
    hold,  # int32 [1]
    bits,  # uint8 [W, stride], written
    bits_stride,  # bytes between its rows
    flags,  # int32 [1]
    blocks_per_chunk,  # B / W
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """bits = beta1*m + (1 - beta1)*g >= 0; m = beta2*m + (1 - beta2)*g.

    Grid: B. Bytes per element: the gradient, 8 for m, 1/8 for bits.
    """
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    row = tl.load(live_row + b)
    if row == 1:
        tl.store(_bytes_at(bits, bits_stride, b, blocks_per_chunk, BLOCK), tl.full([BLOCK // 8], 0xFF, tl.uint8))
    else:
        base, kinds, start, k = tensor_of(b, block_tensor, block_start, pointers, tensors, coef)
        mask = i >= 0
        if row == 0:
            g = load_user(base, kinds, start, i, None, DTYPE, True, ALIGNED)
        else:
            mask = live_elements(live, row, BLOCK)
            g = load_user(base, kinds, start, i, mask, DTYPE, False, ALIGNED)
        g = counted(g, k)
        m = tl.load(exp_avg + b * BLOCK + i)
        new = m * tl.load(k + BETA2) + g * tl.load(k + ONE_MINUS_BETA2)
        c = m * tl.load(k + BETA1) + g * tl.load(k + ONE_MINUS_BETA1)
        finite = (tl.abs(new) <= LARGEST) & (tl.abs(c) <= LARGEST)
        held = tl.load(hold) != 0
        tl.store(exp_avg + b * BLOCK + i, tl.where(finite & mask & (not held), new, m))
        c = tl.where(finite, c, m)
        coin = (mixed(random_words(step, b, i, BLOCK)) >> 16) & 1
        c = tl.where(c == 0, coin.to(tl.float32) - 0.5, c)
        byte = _bytes_at(bits, bits_stride, b, blocks_per_chunk, BLOCK)
        tl.store(byte, bytes_of(tl.where(mask, c, 0.0) >= 0))
        bad = tl.max(tl.max((~finite & mask).to(tl.int32), axis=1), axis=0)
        if (bad != 0) & (not held):
            tl.atomic_or(flags, NONFINITE)
