"""The Triton kernels of compression and exchange. Each computes what its twin of the same name specifies.

One program works on one block of the flat index space. Which tensor a block belongs to, where it
begins there and which of its elements count is in tables. Where TERNARY, bits are two planes of P / 8W
bytes, one behind the other: uint8 [W, 2, P / 8W].

Nothing here may be autotuned: all of it updates in place, and trial runs would update too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .access import (
    BETA1,
    LARGEST,
    ONE_MINUS_BETA1,
    UNIT,
    bits_of,
    bytes_of,
    counted,
    denom,
    elements,
    live_elements,
    load_bits,
    load_user,
    negative,
    residual,
    scaled,
    store_bits,
    store_norm,
    store_partials,
    tensor_of,
)


@triton.jit
def pack(
    x,  # any float [n]
    bits,  # uint8 [n / 8], written
    n,  # elements, a multiple of 8
    BLOCK: tl.constexpr,
):
    """bits = x >= 0. Grid: ceil(n / BLOCK). Bytes per element: x, and 1/8."""
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    start = b * BLOCK
    byte = tl.arange(0, BLOCK // 8)
    if start + BLOCK <= n:
        value = tl.load(x + start + i)
        tl.store(bits + b * (BLOCK // 8) + byte, bytes_of(value >= 0))
    else:
        value = tl.load(x + start + i, mask=start + i < n, other=0)
        tl.store(bits + b * (BLOCK // 8) + byte, bytes_of(value >= 0), mask=start + byte * 8 < n)


@triton.jit
def unpack(
    bits,  # uint8 [n / 8]
    x,  # any float [n], written
    n,  # elements, a multiple of 8
    BLOCK: tl.constexpr,
):
    """x = +1 or -1. Grid: ceil(n / BLOCK). Bytes per element: 1/8, and x."""
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    start = b * BLOCK
    byte = tl.arange(0, BLOCK // 8)
    if start + BLOCK <= n:
        sign = bits_of(tl.load(bits + b * (BLOCK // 8) + byte)) * 2 - 1
        tl.store(x + start + i, sign.to(tl.float32).to(x.dtype.element_ty))
    else:
        sign = bits_of(tl.load(bits + b * (BLOCK // 8) + byte, mask=start + byte * 8 < n, other=0)) * 2 - 1
        tl.store(x + start + i, sign.to(tl.float32).to(x.dtype.element_ty), mask=start + i < n)


@triton.jit
def _existing(
    b,
    i,
    pointers,
    tensors,
    block_tensor,
    block_start,
    tail_row,
    tails,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of the user's tensors, float32, zeros behind their ends."""
    t = tl.load(block_tensor + b)
    base = tl.load(pointers + t)
    kinds = pointers + tensors + t
    start = tl.multiple_of(tl.load(block_start + b), 16)
    row = tl.load(tail_row + b)
    x = tl.zeros(i.shape, tl.float32)
    if row == 0:
        x = load_user(base, kinds, start, i, None, DTYPE, True, ALIGNED)
    elif row != 1:
        x = load_user(base, kinds, start, i, live_elements(tails, row, BLOCK), DTYPE, False, ALIGNED)
    return x


@triton.jit
def gradient_squares(
    pointers,  # int64 [2, tensors]: address (0: zeros) and dtype of each
    tensors,  # their number
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    tail_row,  # int32 [B], row of the elements that exist
    tails,  # uint8 [rows, BLOCK / 8]
    bound,  # float32 [1]
    squares,  # float64 [B], written
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of squares of what is at most ``bound``. Grid: B. Bytes per element: the tensor's."""
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    x = _existing(b, i, pointers, tensors, block_tensor, block_start, tail_row, tails, DTYPE, ALIGNED, BLOCK)
    store_norm(squares, b, tl.where(tl.abs(x) <= tl.load(bound), x, 0.0))


@triton.jit
def flatten(
    pointers,  # int64 [2, tensors]: address (0: zeros) and dtype of each
    tensors,  # their number
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    tail_row,  # int32 [B], row of the elements that exist
    tails,  # uint8 [rows, BLOCK / 8]
    factor,  # float
    unscale,  # float32 [], read where SCALED
    most,  # float, the largest value that counts
    out,  # float32 [P], written
    marker,  # float32 [1], set to 1 if any value is not finite, or larger
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = factor * unscale * tensors, padding zero. Grid: B. Bytes per element: the tensor's, and 4."""
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    x = _existing(b, i, pointers, tensors, block_tensor, block_start, tail_row, tails, DTYPE, ALIGNED, BLOCK)
    x = x * factor
    if SCALED:
        x = x * tl.load(unscale)
    tl.store(out + b * BLOCK + i, x)
    bad = tl.max(tl.max((~(tl.abs(x) <= most)).to(tl.int32), axis=1), axis=0)
    if bad != 0:
        tl.store(marker, 1.0)  # whoever stores, stores the same


@triton.jit
def momentum_compress(
    pointers,  # int64 [2, tensors]: address of each gradient (0: zeros) and its dtype
    tensors,  # their number
    compensated,  # c, float32 [P], read and written
    worker_scale,  # s, float32 [B]
    exp_avg_bits,  # signs of m, uint8 [W, stride]
    exp_avg_stride,  # bytes between its rows
    exp_avg_scale,  # |m|, float32 [B]
    coef,  # float32 [tensors, COLUMNS]
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    exp_avg_sq,  # float32 or bfloat16 [P] where PRECONDITION, else unused
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B]
    bits,  # uint8 [W, stride], written
    bits_stride,  # bytes between its rows
    plane,  # bytes between the planes of bits
    partials,  # float64 [3, B], or [4, B] where TERNARY, written
    partials_stride,  # elements between its rows
    hold,  # int32 [1]
    blocks_per_chunk,  # B / W
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    VARIANCE: tl.constexpr,  # dtype of exp_avg_sq
    EPS_INSIDE: tl.constexpr,
    PRECONDITION: tl.constexpr,
    TERNARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """c = beta1*m + (1 - beta1)*g*unit + c - s*sign(c); bits = c >= 0; sums of |c| and c^2.

    Grid: B. Bytes per element: g, 4 + 4 for c, 1/8 + 1/8 for bits (twice where TERNARY); the variance, 4 or 2, with
    PRECONDITION.
    """
    if tl.load(hold) != 0:
        return
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    byte = tl.arange(0, BLOCK // 8)
    chunk = b // blocks_per_chunk
    offset = (b - chunk * blocks_per_chunk) * (BLOCK // 8)
    base, kinds, start, k = tensor_of(b, block_tensor, block_start, pointers, tensors, coef)
    row = tl.load(live_row + b)
    s = tl.load(worker_scale + b)
    scale = tl.load(exp_avg_scale + b)
    c = tl.load(compensated + b * BLOCK + i)
    signs, nonzero = load_bits(exp_avg_bits + chunk * exp_avg_stride + offset + byte, plane, TERNARY)
    m = scaled(signs, nonzero, scale, TERNARY)
    kept = m * tl.load(k + BETA1) + residual(c, s, TERNARY)
    if row == 0:
        g = load_user(base, kinds, start, i, None, DTYPE, True, ALIGNED)
    else:
        g = load_user(base, kinds, start, i, live_elements(live, row, BLOCK), DTYPE, False, ALIGNED)
    g = counted(g, k) * tl.load(k + ONE_MINUS_BETA1)
    if PRECONDITION:
        v = tl.load(exp_avg_sq + b * BLOCK + i).to(tl.float32)
        g = tl.div_rn(g, denom(v, k, EPS_INSIDE))
    else:
        g = g * tl.load(k + UNIT)
    c = g + kept
    if row != 0:
        c = tl.where(live_elements(live, row, BLOCK), c, 0.0)
    finite = tl.abs(c) <= LARGEST
    c = tl.where(finite, c, kept)
    tl.store(compensated + b * BLOCK + i, c)
    store_bits(bits + chunk * bits_stride + offset + byte, plane, c, TERNARY)
    store_partials(partials, partials_stride, b, c, ~finite, TERNARY)


@triton.jit
def moved(pointer, stride, times: tl.constexpr):
    """``pointer`` so many strides on; their product would need 64 bits."""
    for _ in tl.static_range(times):
        pointer += stride
    return pointer


@triton.jit
def load_four(arrived, stride, plane, TERNARY: tl.constexpr):
    """Four ranks' bytes one behind the other, int32 [n]: of signs and, where TERNARY, of what is not zero.

    Four loads are under way together, and cross from the threads that load to those that add in one exchange.
    """
    signs, nonzero = load_bits(arrived, plane, TERNARY)
    four, four_nonzero = signs.to(tl.int32), nonzero.to(tl.int32)
    for place in tl.static_range(8, 32, 8):
        arrived += stride
        signs, nonzero = load_bits(arrived, plane, TERNARY)
        four |= signs.to(tl.int32) << place
        four_nonzero |= nonzero.to(tl.int32) << place
    return four, four_nonzero


@triton.jit
def load_four_scales(scales, stride, per_worker):
    """s_w/W of four ranks."""
    first = tl.load(scales) * per_worker
    scales += stride
    second = tl.load(scales) * per_worker
    scales += stride
    third = tl.load(scales) * per_worker
    scales += stride
    return first, second, third, tl.load(scales) * per_worker


@triton.jit
def add_one(total, most, four, four_nonzero, place: tl.constexpr, scale, TERNARY: tl.constexpr):
    """Adds what the bytes at bit ``place`` stand for, and the scale itself."""
    bit = tl.arange(0, 8)[None, :] + place
    x = tl.where(((four[:, None] >> bit) & 1) != 0, scale, negative(scale))
    if TERNARY:
        x = tl.where(((four_nonzero[:, None] >> bit) & 1) != 0, x, 0.0)
    return total + x, most + scale


@triton.jit
def add_four(total, most, fours, scales, TERNARY: tl.constexpr):
    """Adds four ranks, in their order."""
    signs, nonzero = fours
    first, second, third, fourth = scales
    total, most = add_one(total, most, signs, nonzero, 0, first, TERNARY)
    total, most = add_one(total, most, signs, nonzero, 8, second, TERNARY)
    total, most = add_one(total, most, signs, nonzero, 16, third, TERNARY)
    return add_one(total, most, signs, nonzero, 24, fourth, TERNARY)


@triton.jit
def server_reduce(
    arrived_bits,  # uint8 [W, stride]
    arrived_stride,  # bytes between its rows
    plane,  # bytes between the planes of bits
    arrived_scales,  # float32 [W, slots]
    scales_stride,  # elements between its rows
    slot,  # int32 [B / W], each block's slot
    skip,  # int32 [1]
    compensated,  # the server's c, float32 [P / W], read and written where KEEPS
    server_scale,  # its s of the last step, float32 [B / W], read where KEEPS
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B / W]
    bits,  # uint8 [P / 8W], or two planes of that, written
    partials,  # float64 [3, B / W], or [4, B / W] where TERNARY, written
    partials_stride,  # elements between its rows
    agreement,  # float64 [2, B / W], written
    agreement_stride,  # elements between its rows
    hold,  # int32 [1]
    world_size,  # W
    per_worker,  # float, 1 / W
    TERNARY: tl.constexpr,
    KEEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """c = sum over ranks of s_w/W*sign_w + c - s*sign(c); bits = c >= 0; sums of |c| and c^2.

    Grid: B / W. Bytes per element of the chunk: W/8 in, 4 + 4 for c where KEEPS, 1/8 out; bits twice where TERNARY.
    Sums in rank order.
    """
    if tl.load(hold) != 0:
        return
    b = tl.program_id(0).to(tl.int64)
    i = elements(BLOCK)
    byte = tl.arange(0, BLOCK // 8)
    row = tl.load(live_row + b)
    at = tl.load(slot + b)
    c = tl.zeros(i.shape, tl.float32)
    if KEEPS:
        c = residual(tl.load(compensated + b * BLOCK + i), tl.load(server_scale + b), TERNARY)
    total = tl.zeros(i.shape, tl.float32)
    most = 0.0
    if tl.load(skip) == 0:
        # Pointers that move on: w * stride would need 64 bits.
        arrived = arrived_bits + b * (BLOCK // 8) + byte
        scales = arrived_scales + at
        for _ in range(world_size // 8):
            first = load_four(arrived, arrived_stride, plane, TERNARY)
            first_scales = load_four_scales(scales, scales_stride, per_worker)
            arrived = moved(arrived, arrived_stride, 4)
            scales = moved(scales, scales_stride, 4)
            second = load_four(arrived, arrived_stride, plane, TERNARY)
            second_scales = load_four_scales(scales, scales_stride, per_worker)
            arrived = moved(arrived, arrived_stride, 4)
            scales = moved(scales, scales_stride, 4)
            total, most = add_four(total, most, first, first_scales, TERNARY)
            total, most = add_four(total, most, second, second_scales, TERNARY)
        for _ in range(world_size % 8):
            scale = tl.load(scales) * per_worker
            signs, nonzero = load_bits(arrived, plane, TERNARY)
            total += scaled(signs, nonzero, scale, TERNARY)
            most += scale
            arrived += arrived_stride
            scales += scales_stride
        c = c + total
    if row != 0:
        counted = live_elements(live, row, BLOCK)
        c = tl.where(counted, c, 0.0)
        total = tl.where(counted, total, 0.0)
    if KEEPS:
        tl.store(compensated + b * BLOCK + i, c)
    store_bits(bits + b * (BLOCK // 8) + byte, plane, c, TERNARY)
    store_partials(partials, partials_stride, b, c, tl.zeros(i.shape, tl.int32), TERNARY)
    store_norm(agreement, b, total)
    widest = tl.cast(most, tl.float64)
    tl.store(agreement + agreement_stride + b, widest * widest)
