"""Every formula, once, in the elementwise part of Triton.

Called from Python a rule computes on torch tensors: it is the arithmetic of the eager ops, and the specification.
Called from a kernel it is the kernel's; the C kernels include what ``native.generate`` prints from this file. Each
operation rounds once, in the order of the text: nothing is contracted or reassociated, so that all three have the
same bits. ``k`` is a tensor's row of the table of coefficients; annotations are for C alone, which knows no dtypes.

``c`` is the compensated momentum (momentum + residual), ``s`` its scale, ``e = c - s*sign(c)`` the residual, ``m``
the momentum, ``v`` the variance.
"""

from __future__ import annotations

from .coefficients import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    GRAD_LIMIT,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    RSQRT_BIAS2,
    STEP_SIZE,
)
from .jit import of, rule, tl

LARGEST = 3.4028234663852886e38  # of the finite float32 numbers
NAN = float("nan")
GOLDEN = 0x9E3779B9  # makes the hash of nothing something: it maps 0 to 0
WORD = 0xFFFFFFFF  # the 32 bits of a random word


# ---------------------------------------------------------------- what counts


@rule
def finite(x) -> bool:
    """Neither infinite nor NaN."""
    return tl.abs(x) <= LARGEST


@rule
def counted(g, k):
    """A gradient, NaN where it is too large to count: nothing that is made of it is finite then."""
    return tl.where(tl.abs(g) <= of(k, GRAD_LIMIT), g, NAN)


# ---------------------------------------------------------------- bits and residuals


@rule
def negative(x):
    """-x; Triton's own is 0 - x, which makes 0 of 0 where all other backends make -0."""
    return x * -1.0


@rule
def residual(c, s, TERNARY: tl.constexpr):
    """The deferred error e = c - s*sign(c) (1-bit Adam, Algorithm 1, lines 7 and 9).

    sign(0) is 1, or 0 where TERNARY (Tarasov & Ershov, section 4).
    """
    sent = tl.where(c >= 0, s, negative(s))
    if TERNARY:
        sent = tl.where(c != 0, sent, 0.0)
    return c - sent


# ---------------------------------------------------------------- denominators and moments


@rule
def denominator(v, k, EPS_INSIDE_SQRT: tl.constexpr):
    """sqrt(v)/sqrt(1 - beta2^t) + eps, or eps inside the root (Fixing 1-bit Adam, eq. 2; 1-bit LAMB, eq. 2)."""
    if EPS_INSIDE_SQRT:
        return tl.sqrt_rn(v * of(k, RSQRT_BIAS2) * of(k, RSQRT_BIAS2) + of(k, EPS))
    else:
        return tl.sqrt_rn(v) * of(k, RSQRT_BIAS2) + of(k, EPS)


@rule
def momentum(m, g, k):
    """m_t = beta1 * m_{t-1} + (1 - beta1) * g_t."""
    return m * of(k, BETA1) + g * of(k, ONE_MINUS_BETA1)


@rule
def variance(v, g, k):
    """v_t = beta2 * v_{t-1} + (1 - beta2) * g_t^2."""
    return v * of(k, BETA2) + g * of(k, ONE_MINUS_BETA2) * g


@rule
def moved(x, update, k):
    """x_t = (1 - lr * wd) * x_{t-1} - step_size * update (AdamW; 1-bit Adam, Algorithm 1, line 11)."""
    return x * of(k, DECAY) - update * of(k, STEP_SIZE)


# ---------------------------------------------------------------- distributed Lion (Liu et al., 2024, Algorithm 1)


@rule
def lion(m, g, k):
    """c_t = beta1 * m_{t-1} + (1 - beta1) * g_t, whose sign is sent; m_t = beta2 * m_{t-1} + (1 - beta2) * g_t."""
    c = m * of(k, BETA1) + g * of(k, ONE_MINUS_BETA1)
    m = m * of(k, BETA2) + g * of(k, ONE_MINUS_BETA2)
    return c, m


# ---------------------------------------------------------------- random bits


@rule
def mixed(word: int) -> int:
    """A hash that permutes 32-bit words; of tensors, words are int64 in [0, 2^32).

    The two rounds of shift and multiplication of C. Wellons' hash-prospector, with the constants that
    TheIronBorn found, the second without its top bit: below 2^31, so that no product leaves 63 bits.
    """
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & WORD
    word = ((word ^ (word >> 15)) * 0x735A2D97) & WORD
    return word ^ (word >> 15)


@rule
def block_seed(high: int, done: int) -> int:
    """The seed of a block: of the upper half of its first index in the flat line, and of the updates done."""
    return mixed(mixed(high + GOLDEN) ^ done)


@rule
def random_bits(low: int, seed: int) -> int:
    """16 bits of the lower half of an element's index, and of its block's seed: alike on all ranks and backends."""
    return mixed(low ^ seed) >> 16


@rule
def half(u: int) -> int:
    """What rounds the 32 bits of a number to the nearest bfloat16, to even where two are as near."""
    return 0x7FFF + ((u >> 16) & 1)


@rule
def bfloat16(u: int, carry: int) -> int:
    """The upper 16 bits of a number; 16 bits of ``carry`` round up in magnitude with the odds of what is cut off.

    Uniform ones (``random_bits``) do so without bias. What bfloat16 can represent stays as it is. Above the largest
    finite bfloat16 the upper neighbour is infinity.
    """
    return (u + carry) >> 16
