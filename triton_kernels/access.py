"""What the kernels are made of: how a program reaches its block, its bits and the users' tensors.

A block is laid out as [BLOCK / 8, 8]: a row is the eight elements of one byte of bits, so that
packing is a sum along a row. Users' tensors are reached through a table of pointers, one per
tensor; full blocks take a path without masks, whose loads are 128 bits wide.
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
LR = tl.constexpr(9)
UNBIAS1 = tl.constexpr(10)
WEIGHT_DECAY = tl.constexpr(11)
C_MIN = tl.constexpr(12)
C_MAX = tl.constexpr(13)
BETA3 = tl.constexpr(14)
R_MIN = tl.constexpr(15)
R_MAX = tl.constexpr(16)
R_THRESHOLD = tl.constexpr(17)
GLOBAL_RATIO = tl.constexpr(18)
GRAD_LIMIT = tl.constexpr(19)
COLUMNS = tl.constexpr(20)

# Rows of LAMB's table of layers; ``coefficients.Layer`` names them for the host.
AVERAGE = tl.constexpr(0)
RATIO = tl.constexpr(1)
COEFFICIENT = tl.constexpr(2)

LARGEST = tl.constexpr(3.4028234663852886e38)  # of the finite float32 numbers
NAN = tl.constexpr(float("nan"))
GOLDEN = tl.constexpr(0x9E3779B9)


@triton.jit
def elements(BLOCK: tl.constexpr):
    """Index within the block, int32 [BLOCK / 8, 8]."""
    return tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def tensor_of(b, block_tensor, block_start, pointers, tensors, coef):
    """The tensor of block ``b``: address, pointer to its dtype, the block's place in it, its row of ``coef``."""
    t = tl.load(block_tensor + b)
    base = tl.load(pointers + t)
    start = tl.multiple_of(tl.load(block_start + b), 16)
    return base, pointers + tensors + t, start, coef + t * COLUMNS


@triton.jit
def bits_of(bits):
    """0 or 1, int32 [n, 8], from bytes uint8 [n], LSB first."""
    return (bits.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1


@triton.jit
def bytes_of(positive):
    """uint8 [n] from bool [n, 8]; int32 until the end (summing uint8 has crashed the compiler)."""
    return tl.sum(positive.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def load_bits(pointer, plane, TERNARY: tl.constexpr):
    """The bytes of a block's signs and, ``plane`` bytes on where TERNARY, of what is not zero: uint8 [n] each."""
    signs = tl.load(pointer)
    nonzero = signs
    if TERNARY:
        nonzero = tl.load(pointer + plane)
    return signs, nonzero


@triton.jit
def negative(x):
    """-x; Triton's own is 0 - x, which makes 0 of 0 where all other backends make -0."""
    return x * -1.0


@triton.jit
def scaled(signs, nonzero, scale, TERNARY: tl.constexpr):
    """What bits stand for, float32 [n, 8]: scale and -scale, and 0 for zeros where TERNARY."""
    x = tl.where(bits_of(signs) != 0, scale, negative(scale))
    if TERNARY:
        x = tl.where(bits_of(nonzero) != 0, x, 0.0)
    return x


@triton.jit
def store_bits(pointer, plane, c, TERNARY: tl.constexpr):
    """Writes a block of c where ``load_bits`` reads."""
    tl.store(pointer, bytes_of(c >= 0))
    if TERNARY:
        tl.store(pointer + plane, bytes_of(c != 0))


@triton.jit
def live_elements(live, row, BLOCK: tl.constexpr):
    """Which elements of a block count, bool [BLOCK / 8, 8]."""
    bits = tl.load(live + row.to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8))
    return bits_of(bits) != 0


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
def load_user(base, kinds, start, i, mask, DTYPE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
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
def counted(g, k):
    """A gradient, NaN where it is too large to count: nothing that is made of it is finite then."""
    return tl.where(tl.abs(g) <= tl.load(k + GRAD_LIMIT), g, NAN)


@triton.jit
def mixed(word):
    """The twins' hash of 32-bit words, here uint32."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15)) * 0x735A2D97
    return word ^ (word >> 15)


@triton.jit
def random_words(rounding, b, i, BLOCK: tl.constexpr):
    """What ``mixed`` makes a block's random bits of, uint32 [BLOCK / 8, 8]; ``rounding`` points at the updates done."""
    first = b * BLOCK
    lower = rounding.to(tl.pointer_type(tl.int32), bitcast=True)  # of a number of 64 bits, little-endian
    done = tl.load(lower).to(tl.uint32, bitcast=True)
    seed = mixed(mixed((first >> 32).to(tl.uint32) + GOLDEN) ^ done)
    return (first.to(tl.uint32) + i.to(tl.uint32)) ^ seed


@triton.jit
def _rounded(x, words, dtype: tl.constexpr, ROUNDING: tl.constexpr):
    """Rounds to nearest even, or bfloat16 stochastically where ROUNDING.

    By hand for bfloat16: Triton's interpreter would cut the bits off.
    """
    if dtype == tl.bfloat16:
        u = x.to(tl.uint32, bitcast=True)
        if ROUNDING:
            up = (u + (mixed(words) >> 16)) >> 16
        else:
            up = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        return tl.where(x == x, up, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _store_as(
    base,
    start,
    i,
    x,
    words,
    mask,
    dtype: tl.constexpr,
    ROUNDING: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    pointer = base.to(tl.pointer_type(dtype)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if FULL:
        tl.store(pointer + i, _rounded(x, words, dtype, ROUNDING))
    else:
        tl.store(pointer + i, _rounded(x, words, dtype, ROUNDING), mask=mask)


@triton.jit
def store_user(
    base,
    kinds,
    start,
    i,
    x,
    words,
    mask,
    DTYPE: tl.constexpr,
    ROUNDING: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Writes float32 ``x`` where ``load_user`` reads, rounded to the tensor's dtype, with ``words`` where ROUNDING."""
    if DTYPE == FP32:
        _store_as(base, start, i, x, words, mask, tl.float32, ROUNDING, FULL, ALIGNED)
    elif DTYPE == BF16:
        _store_as(base, start, i, x, words, mask, tl.bfloat16, ROUNDING, FULL, ALIGNED)
    elif DTYPE == FP16:
        _store_as(base, start, i, x, words, mask, tl.float16, ROUNDING, FULL, ALIGNED)
    else:
        kind = tl.load(kinds)
        if kind == FP32:
            _store_as(base, start, i, x, words, mask, tl.float32, ROUNDING, FULL, ALIGNED)
        elif kind == BF16:
            _store_as(base, start, i, x, words, mask, tl.bfloat16, ROUNDING, FULL, ALIGNED)
        else:
            _store_as(base, start, i, x, words, mask, tl.float16, ROUNDING, FULL, ALIGNED)


@triton.jit
def denom(v, k, EPS_INSIDE: tl.constexpr):
    """sqrt(v)/sqrt(1 - beta2^t) + eps, or eps inside the root; ``k`` is the tensor's row of coefficients."""
    root = tl.load(k + RSQRT_BIAS2)
    eps = tl.load(k + EPS)
    if EPS_INSIDE:
        return tl.sqrt_rn(v * root * root + eps)
    else:
        return tl.sqrt_rn(v) * root + eps


@triton.jit
def residual(c, s, TERNARY: tl.constexpr):
    """The deferred error e = c - s*sign(c); sign(0) is 0 where TERNARY, else 1."""
    signed = tl.where(c >= 0, s, negative(s))
    if TERNARY:
        signed = tl.where(c != 0, signed, 0.0)
    return c - signed


@triton.jit
def count(mask):
    """How many are set, float64, from [n, 8]."""
    return tl.sum(tl.sum(mask.to(tl.int32), axis=1), axis=0).to(tl.float64)


@triton.jit
def store_partials(partials, stride, b, c, dropped, TERNARY: tl.constexpr):
    """Sums of |c| and c^2 over a block, in float64, where squares are exact; dropped and non-zero elements."""
    wide = c.to(tl.float64)
    tl.store(partials + b, tl.sum(tl.sum(tl.abs(wide), axis=1), axis=0))
    tl.store(partials + stride + b, tl.sum(tl.sum(wide * wide, axis=1), axis=0))
    tl.store(partials + 2 * stride + b, count(dropped))
    if TERNARY:
        tl.store(partials + 3 * stride + b, count(c != 0))


@triton.jit
def sum_of(row, begin, end, LANES: tl.constexpr):
    """Sum of row[begin:end], float64: each lane adds in order, then the lanes are added."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    for at in range(begin, end, LANES):
        total += tl.load(row + at + lane, mask=at + lane < end, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def store_norm(norm, b, x):
    """The sum of squares of a block, in float64."""
    wide = x.to(tl.float64)
    tl.store(norm + b, tl.sum(tl.sum(wide * wide, axis=1), axis=0))
