"""Formulas on the 32 bits of a number: codes of a byte, random bits, and how bfloat16 is rounded and restored.

Rules as in ``rules``, of ``int``: uint32 in kernels and in C, int32 or int64 on torch tensors.
"""

from __future__ import annotations

from .jit import rule, tl

GOLDEN = 0x9E3779B9  # makes the hash of nothing something: it maps 0 to 0
WORD = 0xFFFFFFFF  # the 32 bits of a random word
MANTISSA = 20  # bits of a float32 that a logarithm has none of: three are left of 23
HALF_STEP = 0x80000  # of these
INFINITE_STEP = 0x7F800000
LARGEST_STEP = 0x7F700000  # of finite numbers
LOGARITHMS = 255  # codes above zero; 8 of them are an octave
SIGNED_LOGARITHMS = 127  # the same, beside a sign
SIGN = 128  # of a byte
ROUNDER = 12582912.0  # 1.5 * 2^23: floats there are whole numbers
ROUNDED = 0x4B400000  # its bits, to which whole numbers are added
DRAW = 1.52587890625e-05  # 2^-16
UNTOLD = 2.384185791015625e-07  # 2^-22: of a summand, more than what a sum rounds


# ---------------------------------------------------------------- codes of 8 bits


@rule
def rounded_steps(u: int) -> int:
    """Round the 32 bits of a number that is not negative to an eighth of an octave, but not to infinity."""
    return tl.where(u + HALF_STEP < INFINITE_STEP, u + HALF_STEP, LARGEST_STEP) >> MANTISSA


@rule
def exponent_above(steps: int) -> int:
    """Return the exponent of a block: the octave above its largest number."""
    return (steps + 7) >> 3


@rule
def below(steps: int, exponent: int, most: int) -> int:
    """Tell where a number lies in the octaves below the block's exponent: 1 to ``most``, or 0 if it is smaller."""
    return tl.where(steps + most > exponent * 8, steps + most - exponent * 8, 0)


@rule
def bits_above(code: int, exponent: int, most: int) -> int:
    """Return the 32 bits of the number of which ``below`` is ``code``."""
    inside = (code > 0) & (code + exponent * 8 > most)
    return tl.where(inside, (code + exponent * 8 - most) << MANTISSA, 0)


@rule
def drawn_steps(u: int, bits: int) -> int:
    """Round as ``rounded_steps``, up or down with the odds of what is cut off, by 16 random bits."""
    return tl.where(u < LARGEST_STEP, u + bits * 16 + 8, LARGEST_STEP) >> MANTISSA


@rule
def nonzero_code(code: int, steps: int) -> int:
    """Make ``below`` 1 where it is 0 and the number is not."""
    return tl.where((steps > 0) & (code < 1), 1, code)


@rule
def signed_code(code: int, negative: int) -> int:
    """Return a code with a sign, which 0 has not: ``negative`` is 0 or 1."""
    return tl.where(code > 0, code + negative * SIGN, code)


# ---------------------------------------------------------------- linear codes


@rule
def level(x, s, shift):
    """Round x/s + shift to a whole number; ROUNDER is added, so that the number is in the last bits."""
    return tl.where(s > 0.0, tl.div_rn(x, s), 0.0) + shift + ROUNDER


@rule
def shift_of(bits):
    """Return what rounds up with the odds of what is cut off, of 16 random bits; within a half, and never a half."""
    return (bits + 0.5) * DRAW - 0.5


@rule
def value(q, s):
    """Return what a level stands for."""
    return q * s


@rule
def left(x, q, s):
    """Return what a number of ``q`` levels leaves of x: the error that feedback carries."""
    return x - q * s


@rule
def told_apart(e, kept, s, g, rounded):
    """Return e, or 0 where it can't be told from what a sum with g has rounded, or ``kept`` was when it was stored."""
    return tl.where(tl.abs(e) > rounded * (tl.abs(kept) + s), tl.where(tl.abs(e) > tl.abs(g) * UNTOLD, e, 0.0), 0.0)


@rule
def scale_bits(u: int) -> int:
    """Return the 16 bits of the bfloat16 that is not below a positive number: no quotient by it grows too large."""
    return (u + 0xFFFF) >> 16


@rule
def linear_code(u: int, most: int) -> int:
    """Return the code, in two's complement, of the level of which ``level`` has made the bits ``u``."""
    return (u - ROUNDED) & most


# ---------------------------------------------------------------- random bits


@rule
def mixed(word: int) -> int:
    """Hashe 32-bit words by a permutation; of tensors, words are int64 in [0, 2^32).

    The two rounds of shift and multiplication of C. Wellons' hash-prospector, with the constants that
    TheIronBorn found, the second without its top bit: below 2^31, so that no product leaves 63 bits.
    """
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & WORD
    word = ((word ^ (word >> 15)) * 0x735A2D97) & WORD
    return word ^ (word >> 15)


@rule
def block_seed(high: int, done: int) -> int:
    """Make the seed of a block: of the upper half of its first flat index, and of the updates done."""
    return mixed(mixed(high + GOLDEN) ^ done)


@rule
def random_bits(low: int, seed: int) -> int:
    """16 bits of the lower half of an element's index, and of its block's seed: alike on all ranks and backends."""
    return mixed(low ^ seed) >> 16


@rule
def moments_word(low: int, seed: int) -> int:
    """32 bits that are no parameter's, for two elements' moments half a block apart: m and v have 16 in common."""
    return mixed(low ^ mixed(seed))


@rule
def half_of(word: int, second: int) -> int:
    """Return the 16 bits of one of the two: ``second`` is 0 or 1."""
    return (word >> (second * 16)) & 0xFFFF


@rule
def half(u: int) -> int:
    """Return what rounds the 32 bits of a number to the nearest bfloat16, to even where two are as near."""
    return 0x7FFF + ((u >> 16) & 1)


@rule
def bfloat16(u: int, carry: int) -> int:
    """Keep the upper 16 bits of a number; 16 bits of ``carry`` round up in magnitude with the odds of what is cut off.

    Uniform ones (``random_bits``) do so without bias. What bfloat16 can represent stays as it is. Above the largest
    finite bfloat16 the upper neighbour is infinity.
    """
    return (u + carry) >> 16


# ---------------------------------------------------------------- masters of bfloat16 parameters


@rule
def with_24_bits(u: int, bits: int) -> int:
    """Keep the upper 24 bits of a number, rounded up in magnitude with the odds of the others, by 16 random bits."""
    return ((u + (bits >> 8)) >> 8) << 8


@rule
def nearest(u: int) -> int:
    """Return the upper 16 bits of the nearest bfloat16; of two the larger in magnitude, so that ``lost`` fits."""
    return (u + 0x8000) >> 16


@rule
def lost(u: int, upper: int) -> int:
    """Return what ``nearest`` has left of the 32 bits of a number, in [-2^15, 2^15): 0 of infinity."""
    return u - (upper << 16)


@rule
def restored(u: int, low: int) -> int:
    """Return the 32 bits of which ``lost`` was ``low``, of those of the bfloat16.

    Of 0 nothing negative is lost: where that is found somebody has written the 0, and it stays one.
    """
    return tl.where(((u & 0x7FFFFFFF) == 0) & ((low & 0x8000) != 0), u, u + low)
