"""The Triton kernels of LAMB and 1-bit LAMB. Each computes what its twin of the same name specifies.

Two of them work on blocks and leave partial results, two work on layers, one program for each, and
read those in a fixed order. Never autotuned: all update in place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .access import (
    AVERAGE,
    BETA1,
    BETA2,
    BETA3,
    C_MAX,
    C_MIN,
    COEFFICIENT,
    COLUMNS,
    DECAY,
    LR,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    R_MAX,
    R_MIN,
    R_THRESHOLD,
    RATIO,
    STEP_SIZE,
    UNBIAS1,
    UNIT,
    WEIGHT_DECAY,
    denom,
    elements,
    live_elements,
    load_bits,
    load_user,
    scaled,
    store_norm,
    sum_of,
    tensor_of,
)
from .update_kernels import moments, move


@triton.jit
def _load_live(base, kinds, start, i, live, row, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The live elements of a block of the user's tensor, zeros elsewhere."""
    if row == 0:
        x = load_user(base, kinds, start, i, None, DTYPE, True, ALIGNED)
    else:
        x = load_user(base, kinds, start, i, live_elements(live, row, BLOCK), DTYPE, False, ALIGNED)
    return x


@triton.jit
def lamb_update(
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
    norms,  # float64 [2, B], written
    norms_stride,  # elements between its rows
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    EPS_INSIDE: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """m, v, and sums of x^2 and u^2. Grid: B. Bytes per element: x, 4 for g, 8 for m, 8 for v."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(live_row + b)
    if (tl.load(skip) == 0) & (row != 1):
        i = elements(BLOCK)
        base, kinds, start, k = tensor_of(b, block_tensor, block_start, pointers, tensors, coef)
        m, v = moments(grad, exp_avg, exp_avg_sq, exp_avg_sq_sums, b, i, k, live, row, SUMS, BLOCK)
        x = _load_live(base, kinds, start, i, live, row, DTYPE, ALIGNED, BLOCK)
        u = tl.div_rn(m * tl.load(k + UNBIAS1), denom(v, k, EPS_INSIDE)) + x * tl.load(k + WEIGHT_DECAY)
        if row != 0:
            u = tl.where(live_elements(live, row, BLOCK), u, 0.0)
        store_norm(norms, b, x)
        store_norm(norms + norms_stride, b, u)


@triton.jit
def _write_step(c, k):
    """The columns that move a layer's parameters, from its coefficient; float64, rounded once."""
    step = tl.load(k + LR).to(tl.float64) * c
    tl.store(k + STEP_SIZE, (step * tl.load(k + UNBIAS1).to(tl.float64)).to(tl.float32))
    tl.store(k + DECAY, (1.0 - step * tl.load(k + WEIGHT_DECAY).to(tl.float64)).to(tl.float32))


@triton.jit
def lamb_coefficient(
    norms,  # float64 [2, B]
    norms_stride,  # elements between its rows
    layer_start,  # int64 [tensors + 1], first block of each tensor, and B
    skip,  # int32 [1]
    coef,  # float32 [tensors, COLUMNS], two columns written
    layers,  # float32 [3, tensors], read and written
    tensors,  # their number
    DEEPSPEED: tl.constexpr,
    LANES: tl.constexpr,
):
    """c = clip(|x|/|u|) and its moving average. Grid: tensors."""
    t = tl.program_id(0).to(tl.int64)
    if tl.load(skip) == 0:
        begin = tl.load(layer_start + t)
        end = tl.load(layer_start + t + 1)
        k = coef + t * COLUMNS
        x = tl.sqrt(sum_of(norms, begin, end, LANES))
        u = tl.sqrt(sum_of(norms + norms_stride, begin, end, LANES))
        c = tl.maximum(x / u, tl.load(k + C_MIN).to(tl.float64))
        c = tl.minimum(c, tl.load(k + C_MAX).to(tl.float64))
        c = tl.where((x > 0) & (u > 0), c, 1.0)
        beta3 = tl.load(k + BETA3).to(tl.float64)
        average = tl.load(layers + AVERAGE * tensors + t).to(tl.float64)
        moved = beta3 * average + (1.0 - beta3) * c
        if DEEPSPEED:
            moved = tl.where(c == 1.0, average, moved)
        tl.store(layers + AVERAGE * tensors + t, moved.to(tl.float32))
        tl.store(layers + COEFFICIENT * tensors + t, c.to(tl.float32))
        _write_step(c, k)


@triton.jit
def lamb_move(
    pointers,  # int64 [2, tensors]: address of each parameter and its dtype
    tensors,  # their number
    exp_avg,  # m, float32 [P]
    exp_avg_sq,  # v, float32 [P]
    coef,  # float32 [tensors, COLUMNS]
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B]
    skip,  # int32 [1]
    rounding,  # int64 [], updates done, read where ROUNDING
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    EPS_INSIDE: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x = decay*x - step_size*m/denom. Grid: B. Bytes per element: x twice, 4 for m, 4 for v."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(live_row + b)
    if (tl.load(skip) == 0) & (row != 1):
        i = elements(BLOCK)
        base, kinds, start, k = tensor_of(b, block_tensor, block_start, pointers, tensors, coef)
        v = tl.load(exp_avg_sq + b * BLOCK + i)
        update = tl.div_rn(tl.load(exp_avg + b * BLOCK + i), denom(v, k, EPS_INSIDE))
        move(base, kinds, start, b, i, update, k, live, row, rounding, DTYPE, ALIGNED, ROUNDING, BLOCK)


@triton.jit
def lamb_ratio(
    pointers,  # int64 [2, tensors]: address of each parameter and its dtype; read where BLEND
    tensors,  # their number
    exp_avg_bits,  # signs of m_t, uint8 [W, stride]
    exp_avg_stride,  # bytes between its rows
    plane,  # bytes between the planes of bits: P / 8W
    exp_avg_scale,  # float32 [B]
    last_bits,  # signs of m_{t-1}, uint8 [P / 8] without gaps, or planes as above, read and written
    last_scale,  # float32 [B], read and written
    exp_avg_sq,  # the frozen variance, float32 or bfloat16 [P]
    fresh,  # float32 [P], read and written
    started,  # int32 [1]
    coef,  # float32 [tensors, COLUMNS]
    block_tensor,  # int32 [B]
    block_start,  # int64 [B], where the block begins in its tensor
    live,  # uint8 [rows, BLOCK / 8]
    live_row,  # int32 [B]
    skip,  # int32 [1]
    largest,  # float32 [B], written
    norms,  # float64 [2, B], written where BLEND
    norms_stride,  # elements between its rows
    blocks_per_chunk,  # B / W
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    VARIANCE: tl.constexpr,  # dtype of exp_avg_sq
    EPS_INSIDE: tl.constexpr,
    PRECONDITIONED: tl.constexpr,
    DEEPSPEED: tl.constexpr,
    BLEND: tl.constexpr,
    TERNARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient from two momenta, fresh variance, largest frozen/fresh.

    Grid: B. Bytes per element: 4 or 2 for the frozen variance, 4 + 4 for the fresh one, 3/8 for bits (twice where
    TERNARY); x with BLEND.
    """
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(live_row + b)
    if tl.load(skip) == 0:
        i = elements(BLOCK)
        byte = tl.arange(0, BLOCK // 8)
        chunk = b // blocks_per_chunk
        offset = (b - chunk * blocks_per_chunk) * (BLOCK // 8)
        # Where nothing is blended, the compiler drops the loads of what is not used.
        base, kinds, start, k = tensor_of(b, block_tensor, block_start, pointers, tensors, coef)
        unit = tl.load(k + UNIT)
        scale = tl.load(exp_avg_scale + b)
        signs, nonzero = load_bits(exp_avg_bits + chunk * exp_avg_stride + offset + byte, plane, TERNARY)
        held = tl.load(fresh + b * BLOCK + i)
        frozen = tl.load(exp_avg_sq + b * BLOCK + i).to(tl.float32)
        before = tl.div_rn(tl.load(last_scale + b), unit)
        last_at = last_bits + b * (BLOCK // 8) + byte
        if TERNARY:
            last_at += chunk * plane  # the chunks before have a second plane each
        last_signs, last_nonzero = load_bits(last_at, plane, TERNARY)
        now = tl.div_rn(scale, unit)
        m = scaled(signs, nonzero, now, TERNARY)
        last = scaled(last_signs, last_nonzero, before, TERNARY)
        if PRECONDITIONED:
            m = m * denom(frozen, k, EPS_INSIDE)
            last = last * denom(frozen, k, EPS_INSIDE)
        running = tl.load(started) != 0
        last = tl.where(running, last, held)
        old = tl.where(running, held, frozen)
        g = tl.div_rn(m - last * tl.load(k + BETA1), tl.load(k + ONE_MINUS_BETA1))
        v = old * tl.load(k + BETA2) + g * tl.load(k + ONE_MINUS_BETA2) * g
        if row != 0:
            v = tl.where(live_elements(live, row, BLOCK), v, 0.0)
        if DEEPSPEED:
            ratio = tl.div_rn(denom(frozen, k, EPS_INSIDE), denom(v, k, EPS_INSIDE))
        else:
            ratio = tl.div_rn(frozen, v)
        ratio = tl.where(ratio >= 0, ratio, 0.0)  # not where it is 0/0 or inf/inf
        if row != 0:
            ratio = tl.where(live_elements(live, row, BLOCK), ratio, 0.0)
        tl.store(largest + b, tl.max(tl.max(ratio, axis=1), axis=0))
        tl.store(fresh + b * BLOCK + i, v)
        tl.store(last_at, signs)
        if TERNARY:
            tl.store(last_at + plane, nonzero)
        tl.store(last_scale + b, scale)
        if BLEND:
            x = _load_live(base, kinds, start, i, live, row, DTYPE, ALIGNED, BLOCK)
            adam = tl.div_rn(m * tl.load(k + UNBIAS1), denom(frozen, k, EPS_INSIDE))
            if row != 0:
                adam = tl.where(live_elements(live, row, BLOCK), adam, 0.0)
            store_norm(norms, b, adam)
            store_norm(norms + norms_stride, b, adam + x * tl.load(k + WEIGHT_DECAY))


@triton.jit
def _max_of(row, begin, end, LANES: tl.constexpr):
    """Largest of row[begin:end], float32; 0 of nothing."""
    lane = tl.arange(0, LANES)
    most = tl.zeros([LANES], tl.float32)
    for at in range(begin, end, LANES):
        most = tl.maximum(most, tl.load(row + at + lane, mask=at + lane < end, other=0.0))
    return tl.max(most, axis=0)


@triton.jit
def _limit_change(r, last, k):
    """Line 18 of Algorithm 1."""
    threshold = tl.load(k + R_THRESHOLD).to(tl.float64)
    return tl.minimum(tl.maximum(r, last * (1.0 - threshold)), last * (1.0 + threshold))


@triton.jit
def _limit_range(r, k):
    """Line 19 of Algorithm 1."""
    return tl.minimum(tl.maximum(r, tl.load(k + R_MIN).to(tl.float64)), tl.load(k + R_MAX).to(tl.float64))


@triton.jit
def lamb_rescale(
    largest,  # float32 [B]
    norms,  # float64 [2, B], read where BLEND
    norms_stride,  # elements between its rows
    layer_start,  # int64 [tensors + 1], first block of each tensor, and B
    skip,  # int32 [1]
    started,  # int32 [1], written
    coef,  # float32 [tensors, COLUMNS], two columns written
    layers,  # float32 [3, tensors], read and written
    tensors,  # their number
    DEEPSPEED: tl.constexpr,
    BLEND: tl.constexpr,
    LANES: tl.constexpr,
):
    """r, clipped both ways, and c = r*c_avg. Grid: tensors."""
    t = tl.program_id(0).to(tl.int64)
    if tl.load(skip) == 0:
        begin = tl.load(layer_start + t)
        end = tl.load(layer_start + t + 1)
        k = coef + t * COLUMNS
        last = tl.load(layers + RATIO * tensors + t).to(tl.float64)
        found = _max_of(largest, begin, end, LANES).to(tl.float64)
        r = found
        if BLEND:
            adam = tl.sqrt(sum_of(norms, begin, end, LANES))
            u = tl.sqrt(sum_of(norms + norms_stride, begin, end, LANES))
            share = tl.where(u > 0, tl.minimum(adam / u, 1.0), 1.0)
            r = r * share + (1.0 - share)
        if DEEPSPEED:
            r = _limit_change(_limit_range(r, k), last, k)
        else:
            r = _limit_range(_limit_change(r, last, k), k)
        r = tl.where(found > 0, r, last).to(tl.float32)
        c = r.to(tl.float64) * tl.load(layers + AVERAGE * tensors + t).to(tl.float64)
        tl.store(layers + RATIO * tensors + t, r)
        tl.store(layers + COEFFICIENT * tensors + t, c.to(tl.float32))
        if t == 0:
            tl.store(started, 1)
        _write_step(c, k)
