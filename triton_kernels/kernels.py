"""The Triton kernels. Each computes what its plain-torch twin of the same name specifies.

One program works on one block of the flat index space, laid out as [BLOCK / 8, 8]: a row is the
eight elements of one byte of bits, so that packing is a sum along a row. Users' tensors are reached
through a table of pointers, one per tensor; which tensor a block belongs to, where it begins there
and which of its elements count is in tables, so that full blocks take a path without masks whose
loads are 128 bits wide.

Nothing here may be autotuned: all of it updates in place, and trial runs would update too.
"""

from __future__ import annotations

import triton
import triton.language as tl

FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
MIXED = tl.constexpr(3)

# Columns of the coefficient table; ``coefficients.Coef`` names them for the host.
BETA1 = tl.constexpr(0)
ONE_MINUS_BETA1 = tl.constexpr(1)
BETA2 = tl.constexpr(2)
ONE_MINUS_BETA2 = tl.constexpr(3)
STEP_SIZE = tl.constexpr(4)
DECAY = tl.constexpr(5)
RSQRT_BIAS2 = tl.constexpr(6)
EPS = tl.constexpr(7)
UNIT = tl.constexpr(8)
COLUMNS = tl.constexpr(9)

LARGEST = tl.constexpr(3.4028234663852886e38)  # of the finite float32 numbers


@triton.jit
def _elements(BLOCK: tl.constexpr):
    """Index within the block, int32 [BLOCK / 8, 8]."""
    return tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _bits_of(bits):
    """0 or 1, int32 [n, 8], from bytes uint8 [n], LSB first."""
    return (bits.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1


@triton.jit
def _bytes_of(positive):
    """uint8 [n] from bool [n, 8]; int32 until the end (summing uint8 has crashed the compiler)."""
    return tl.sum(positive.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def _live(live, row, BLOCK: tl.constexpr):
    """Which elements of a block count, bool [BLOCK / 8, 8]."""
    bits = tl.load(live + row.to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8))
    return _bits_of(bits) != 0


@triton.jit
def _load_as(base, start, i, mask, dtype: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = base.to(tl.pointer_type(dtype)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if FULL:
        return tl.load(pointer + i).to(tl.float32)
    else:
        return tl.load(pointer + i, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_user(base, kinds, start, i, mask, DTYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    """A block of the user's tensor at address ``base`` as float32; zeros where that is 0.

    ``kinds`` points at the tensor's dtype, read only where a list has several.
    """
    x = tl.zeros(i.shape, tl.float32)
    if base != 0:
        if DTYPE == FP32:
            x = _load_as(base, start, i, mask, tl.float32, FULL, ALIGNED)
        elif DTYPE == BF16:
            x = _load_as(base, start, i, mask, tl.bfloat16, FULL, ALIGNED)
        elif DTYPE == FP16:
            x = _load_as(base, start, i, mask, tl.float16, FULL, ALIGNED)
        else:
            kind = tl.load(kinds)
            if kind == FP32:
                x = _load_as(base, start, i, mask, tl.float32, FULL, ALIGNED)
            elif kind == BF16:
                x = _load_as(base, start, i, mask, tl.bfloat16, FULL, ALIGNED)
            else:
                x = _load_as(base, start, i, mask, tl.float16, FULL, ALIGNED)
    return x


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Rounds to nearest even. By hand for bfloat16: Triton's interpreter would cut the bits off."""
    if dtype == tl.bfloat16:
        u = x.to(tl.uint32, bitcast=True)
        up = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        return tl.where(x == x, up, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _store_as(base, start, i, x, mask, dtype: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = base.to(tl.pointer_type(dtype)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if FULL:
        tl.store(pointer + i, _rounded(x, dtype))
    else:
        tl.store(pointer + i, _rounded(x, dtype), mask=mask)


@triton.jit
def _store_user(base, kinds, start, i, x, mask, DTYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    if DTYPE == FP32:
        _store_as(base, start, i, x, mask, tl.float32, FULL, ALIGNED)
    elif DTYPE == BF16:
        _store_as(base, start, i, x, mask, tl.bfloat16, FULL, ALIGNED)
    elif DTYPE == FP16:
        _store_as(base, start, i, x, mask, tl.float16, FULL, ALIGNED)
    else:
        kind = tl.load(kinds)
        if kind == FP32:
            _store_as(base, start, i, x, mask, tl.float32, FULL, ALIGNED)
        elif kind == BF16:
            _store_as(base, start, i, x, mask, tl.bfloat16, FULL, ALIGNED)
        else:
            _store_as(base, start, i, x, mask, tl.float16, FULL, ALIGNED)


@triton.jit
def _denom(v, k, EPS_INSIDE: tl.constexpr):
    root = tl.load(k + RSQRT_BIAS2)
    eps = tl.load(k + EPS)
    if EPS_INSIDE:
        return tl.sqrt_rn(v * root * root + eps)
    else:
        return tl.sqrt_rn(v) * root + eps


@triton.jit
def _residual(c, s):
    """The deferred error e = c - s*sign(c)."""
    return c - tl.where(c >= 0, s, -s)


@triton.jit
def _store_partials(partials, stride, b, c, dropped):
    """Sums of |c| and c^2 over a block, in float64, where squares are exact; and dropped elements."""
    wide = c.to(tl.float64)
    tl.store(partials + b, tl.sum(tl.sum(tl.abs(wide), axis=1), axis=0))
    tl.store(partials + stride + b, tl.sum(tl.sum(wide * wide, axis=1), axis=0))
    tl.store(partials + 2 * stride + b, tl.sum(tl.sum(dropped.to(tl.int32), axis=1), axis=0).to(tl.float64))


@triton.jit
def pack(
    x,  # any float [n]
    bits,  # uint8 [n / 8], written
    n,  # elements, a multiple of 8
    BLOCK: tl.constexpr,
):
    """bits = x >= 0. Grid: ceil(n / BLOCK). Bytes per element: x, and 1/8."""
    b = tl.program_id(0).to(tl.int64)
    i = _elements(BLOCK)
    start = b * BLOCK
    byte = tl.arange(0, BLOCK // 8)
    if start + BLOCK <= n:
        value = tl.load(x + start + i)
        tl.store(bits + b * (BLOCK // 8) + byte, _bytes_of(value >= 0))
    else:
        value = tl.load(x + start + i, mask=start + i < n, other=0)
        tl.store(bits + b * (BLOCK // 8) + byte, _bytes_of(value >= 0), mask=start + byte * 8 < n)


@triton.jit
def unpack(
    bits,  # uint8 [n / 8]
    x,  # any float [n], written
    n,  # elements, a multiple of 8
    BLOCK: tl.constexpr,
):
    """x = +1 or -1. Grid: ceil(n / BLOCK). Bytes per element: 1/8, and x."""
    b = tl.program_id(0).to(tl.int64)
    i = _elements(BLOCK)
    start = b * BLOCK
    byte = tl.arange(0, BLOCK // 8)
    if start + BLOCK <= n:
        sign = _bits_of(tl.load(bits + b * (BLOCK // 8) + byte)) * 2 - 1
        tl.store(x + start + i, sign.to(tl.float32).to(x.dtype.element_ty))
    else:
        sign = _bits_of(tl.load(bits + b * (BLOCK // 8) + byte, mask=start + byte * 8 < n, other=0)) * 2 - 1
        tl.store(x + start + i, sign.to(tl.float32).to(x.dtype.element_ty), mask=start + i < n)


@triton.jit
def flatten(
    pointers,  # int64 [2, tensors]: address (0: zeros) and dtype of each
    tensors,  # their number
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    tail_row,  # int32 [B], row of the elements that exist
    tails,  # uint8 [rows, BLOCK / 8]
    factor,  # float
    out,  # float32 [P], written
    marker,  # float32 [1], set to 1 if any value is not finite
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = factor * tensors, padding zero. Grid: B. Bytes per element: the tensor's, and 4."""
    b = tl.program_id(0).to(tl.int64)
    i = _elements(BLOCK)
    t = tl.load(block_tensor + b)
    base = tl.load(pointers + t)
    kinds = pointers + tensors + t
    start = tl.multiple_of(tl.load(block_start + b), 16)
    row = tl.load(tail_row + b)
    x = tl.zeros(i.shape, tl.float32)
    if row == 0:
        x = _load_user(base, kinds, start, i, None, DTYPE, True, ALIGNED)
    elif row != 1:
        x = _load_user(base, kinds, start, i, _live(tails, row, BLOCK), DTYPE, False, ALIGNED)
    x = x * factor
    tl.store(out + b * BLOCK + i, x)
    bad = tl.max(tl.max((~(tl.abs(x) <= LARGEST)).to(tl.int32), axis=1), axis=0)
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
    exp_avg_sq,  # float32 [P] where PRECONDITION, else unused
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B]
    bits,  # uint8 [W, stride], written
    bits_stride,  # bytes between its rows
    partials,  # float64 [3, B], written
    partials_stride,  # elements between its rows
    blocks_per_chunk,  # B / W
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    EPS_INSIDE: tl.constexpr,
    PRECONDITION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """c = beta1*m + (1 - beta1)*g*unit + c - s*sign(c); bits = c >= 0; sums of |c| and c^2.

    Grid: B. Bytes per element: g, 4 + 4 for c, 1/8 + 1/8 for bits; 4 more with PRECONDITION.
    """
    b = tl.program_id(0).to(tl.int64)
    i = _elements(BLOCK)
    byte = tl.arange(0, BLOCK // 8)
    chunk = b // blocks_per_chunk
    offset = (b - chunk * blocks_per_chunk) * (BLOCK // 8)
    t = tl.load(block_tensor + b)
    base = tl.load(pointers + t)
    kinds = pointers + tensors + t
    start = tl.multiple_of(tl.load(block_start + b), 16)
    row = tl.load(live_row + b)
    k = coef + t * COLUMNS
    s = tl.load(worker_scale + b)
    scale = tl.load(exp_avg_scale + b)
    c = tl.load(compensated + b * BLOCK + i)
    sign = _bits_of(tl.load(exp_avg_bits + chunk * exp_avg_stride + offset + byte))
    m = tl.where(sign != 0, scale, -scale)
    kept = m * tl.load(k + BETA1) + _residual(c, s)
    if row == 0:
        g = _load_user(base, kinds, start, i, None, DTYPE, True, ALIGNED)
    else:
        g = _load_user(base, kinds, start, i, _live(live, row, BLOCK), DTYPE, False, ALIGNED)
    g = g * tl.load(k + ONE_MINUS_BETA1)
    if PRECONDITION:
        g = tl.div_rn(g, _denom(tl.load(exp_avg_sq + b * BLOCK + i), k, EPS_INSIDE))
    else:
        g = g * tl.load(k + UNIT)
    c = g + kept
    if row != 0:
        c = tl.where(_live(live, row, BLOCK), c, 0.0)
    finite = tl.abs(c) <= LARGEST
    c = tl.where(finite, c, kept)
    tl.store(compensated + b * BLOCK + i, c)
    tl.store(bits + chunk * bits_stride + offset + byte, _bytes_of(c >= 0))
    _store_partials(partials, partials_stride, b, c, ~finite)


@triton.jit
def _sum_rows(row, begin, end, LANES: tl.constexpr):
    """Sum of row[begin:end], float64: each lane adds in order, then the lanes are added."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    for at in range(begin, end, LANES):
        total += tl.load(row + at + lane, mask=at + lane < end, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def finish(
    partials,  # float64 [3, B], rows ``partials_stride`` apart
    partials_stride,
    blocks,  # B
    segment,  # int32 [B], the scale that each block shares
    segment_start,  # int64 [segments + 1], first block of each
    segments,  # their number
    count,  # float64 [segments], live elements of each
    scale,  # float32 [B], written
    message_scales,  # float32 [messages, slots], written
    scales_stride,  # elements between its rows
    message_flags,  # int32 [messages], written
    flags_stride,  # elements between them
    messages,  # their number
    blocks_per_chunk,  # B / messages
    NORM: tl.constexpr,
    LANES: tl.constexpr,
):
    """Scales from partial sums, in a fixed order. Grid: segments + 1; the last writes the flags."""
    j = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    if j == segments:
        dropped = _sum_rows(partials + 2 * partials_stride, 0, blocks, LANES)
        for w in range(messages):
            tl.store(message_flags + w * flags_stride, (dropped > 0).to(tl.int32))
    else:
        begin = tl.load(segment_start + j)
        end = tl.load(segment_start + j + 1)
        n = tl.maximum(tl.load(count + j), 1.0)
        l1 = _sum_rows(partials, begin, end, LANES) / n
        l2 = tl.sqrt(_sum_rows(partials + partials_stride, begin, end, LANES) / n)
        if NORM == 0:
            s = l1.to(tl.float32)
        elif NORM == 1:
            s = l2.to(tl.float32)
        else:
            s = tl.minimum(l2, 1.9 * l1).to(tl.float32)
        for at in range(begin, end, LANES):
            tl.store(scale + at + lane, tl.zeros([LANES], tl.float32) + s, mask=at + lane < end)
        for chunk in range(begin // blocks_per_chunk, (end - 1) // blocks_per_chunk + 1):
            slot = j - tl.load(segment + chunk * blocks_per_chunk)
            tl.store(message_scales + chunk * scales_stride + slot, s)


@triton.jit
def server_reduce(
    arrived_bits,  # uint8 [W, stride]
    arrived_stride,  # bytes between its rows
    arrived_scales,  # float32 [W, slots]
    scales_stride,  # elements between its rows
    slot,  # int32 [B / W], each block's slot
    skip,  # int32 [1]
    compensated,  # the server's c, float32 [P / W], read and written
    server_scale,  # its s of the last step, float32 [B / W]
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B / W]
    bits,  # uint8 [P / 8W], written
    partials,  # float64 [3, B / W], written
    partials_stride,  # elements between its rows
    world_size,  # W
    per_worker,  # float, 1 / W
    BLOCK: tl.constexpr,
):
    """c = mean over ranks of s_w*sign_w + c - s*sign(c); bits = c >= 0; sums of |c| and c^2.

    Grid: B / W. Bytes per element of the chunk: W/8 in, 4 + 4 for c, 1/8 out. Sums in rank order.
    """
    b = tl.program_id(0).to(tl.int64)
    i = _elements(BLOCK)
    byte = tl.arange(0, BLOCK // 8)
    row = tl.load(live_row + b)
    at = tl.load(slot + b)
    c = tl.load(compensated + b * BLOCK + i)
    c = _residual(c, tl.load(server_scale + b))
    if tl.load(skip) == 0:
        total = tl.zeros(i.shape, tl.float32)
        # Pointers that move on: w * stride would need 64 bits.
        arrived = arrived_bits + b * (BLOCK // 8) + byte
        scales = arrived_scales + at
        for _ in range(world_size):
            scale = tl.load(scales)
            total += tl.where(_bits_of(tl.load(arrived)) != 0, scale, -scale)
            arrived += arrived_stride
            scales += scales_stride
        c = c + total * per_worker
    if row != 0:
        c = tl.where(_live(live, row, BLOCK), c, 0.0)
    tl.store(compensated + b * BLOCK + i, c)
    tl.store(bits + b * (BLOCK // 8) + byte, _bytes_of(c >= 0))
    _store_partials(partials, partials_stride, b, c, tl.zeros(i.shape, tl.int32))


@triton.jit
def adam_apply(
    pointers,  # int64 [2, tensors]: address of each parameter and its dtype
    tensors,  # their number
    exp_avg_bits,  # uint8 [W, stride]
    exp_avg_stride,  # bytes between its rows
    exp_avg_scale,  # float32 [B]
    exp_avg_sq,  # float32 [P] unless PRECONDITIONED
    coef,  # float32 [tensors, COLUMNS]
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B]
    skip,  # int32 [1]
    blocks_per_chunk,  # B / W
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    EPS_INSIDE: tl.constexpr,
    PRECONDITIONED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x = (1 - lr*wd)*x - step_size * m/denom, m = scale*sign(bits)/unit.

    Grid: B. Bytes per element: x twice, 4 for v, 1/8 for bits.
    """
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(live_row + b)
    if (tl.load(skip) == 0) & (row != 1):
        i = _elements(BLOCK)
        byte = tl.arange(0, BLOCK // 8)
        chunk = b // blocks_per_chunk
        offset = (b - chunk * blocks_per_chunk) * (BLOCK // 8)
        t = tl.load(block_tensor + b)
        base = tl.load(pointers + t)
        kinds = pointers + tensors + t
        start = tl.multiple_of(tl.load(block_start + b), 16)
        k = coef + t * COLUMNS
        scale = tl.div_rn(tl.load(exp_avg_scale + b), tl.load(k + UNIT))
        sign = _bits_of(tl.load(exp_avg_bits + chunk * exp_avg_stride + offset + byte))
        update = tl.where(sign != 0, scale, -scale)
        if not PRECONDITIONED:
            v = tl.load(exp_avg_sq + b * BLOCK + i)
            update = tl.div_rn(update, _denom(v, k, EPS_INSIDE))
        update = update * tl.load(k + STEP_SIZE)
        decay = tl.load(k + DECAY)
        if row == 0:
            x = _load_user(base, kinds, start, i, None, DTYPE, True, ALIGNED)
            _store_user(base, kinds, start, i, x * decay - update, None, DTYPE, True, ALIGNED)
        else:
            mask = _live(live, row, BLOCK)
            x = _load_user(base, kinds, start, i, mask, DTYPE, False, ALIGNED)
            _store_user(base, kinds, start, i, x * decay - update, mask, DTYPE, False, ALIGNED)


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
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """AdamW on averaged gradients. Grid: B. Bytes per element: x twice, 4 for g, 8 for m, 8 for v."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(live_row + b)
    if (tl.load(skip) == 0) & (row != 1):
        i = _elements(BLOCK)
        t = tl.load(block_tensor + b)
        base = tl.load(pointers + t)
        kinds = pointers + tensors + t
        start = tl.multiple_of(tl.load(block_start + b), 16)
        k = coef + t * COLUMNS
        g = tl.load(grad + b * BLOCK + i)
        if row != 0:
            g = tl.where(_live(live, row, BLOCK), g, 0.0)
        m = tl.load(exp_avg + b * BLOCK + i) * tl.load(k + BETA1) + g * tl.load(k + ONE_MINUS_BETA1)
        v = tl.load(exp_avg_sq + b * BLOCK + i) * tl.load(k + BETA2) + g * tl.load(k + ONE_MINUS_BETA2) * g
        tl.store(exp_avg + b * BLOCK + i, m)
        tl.store(exp_avg_sq + b * BLOCK + i, v)
        if SUMS:
            tl.store(exp_avg_sq_sums + b, tl.sum(tl.sum(v.to(tl.float64), axis=1), axis=0))
        update = tl.div_rn(m, _denom(v, k, False))
        update = update * tl.load(k + STEP_SIZE)
        decay = tl.load(k + DECAY)
        if row == 0:
            x = _load_user(base, kinds, start, i, None, DTYPE, True, ALIGNED)
            _store_user(base, kinds, start, i, x * decay - update, None, DTYPE, True, ALIGNED)
        else:
            mask = _live(live, row, BLOCK)
            x = _load_user(base, kinds, start, i, mask, DTYPE, False, ALIGNED)
            _store_user(base, kinds, start, i, x * decay - update, mask, DTYPE, False, ALIGNED)
