"""Reads and writes a kernel's block: its bits, what is kept of it, its sums; formulas are in ``rules``.

A block is laid out as [BLOCK_SIZE / 8, 8]: a row is the eight elements of one byte of bits, so that packing is a sum
along a row. Row 0 of the table of active masks is all ones, row 1 all zeros (``tables``).

What is not there is returned by a bare ``return``: Triton 3.6 does not compile ``return None``.
"""

from __future__ import annotations

from . import bit_rules, headers, rules
from .codes import coded, decoded, load_codes, store_codes
from .jit import jit, tl
from .rules import COLUMNS, FACTOR, LEAST, USUAL

NONFINITE = headers.NONFINITE  # the flag that an element sets whose gradient or update does not count
PARTLY = headers.PARTLY  # the same, where that costs no other element its step
SUM_LANES = 128  # of ``ordered_sum``
SUM_LEVELS = 7  # halvings of them


@jit()
def elements(BLOCK_SIZE: tl.constexpr):
    """Index within the block, int32 [BLOCK_SIZE / 8, 8]."""
    return tl.arange(0, BLOCK_SIZE // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@jit()
def place_in_whole(b, first):
    """Return where block ``b`` is in an index space of which a part begins at block ``first``, if that is given."""
    if first is None:
        return b
    else:
        return b + tl.load(first)


@jit()
def tensor_of(b, block_tensor, coef):
    """Return the tensor of block ``b``, and its row of coefficients."""
    t = tl.load(block_tensor + b)
    return t, coef + t * COLUMNS


# ---------------------------------------------------------------- packed bits, LSB first


@jit()
def bits_of(bits):
    """0 or 1, int32 [n, 8], from bytes uint8 [n], LSB first."""
    return (bits.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1


@jit()
def bytes_of(positive):
    """uint8 [n] from bool [n, 8]; int32 until the end (summing uint8 has crashed the compiler)."""
    return tl.sum(positive.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@jit()
def bytes_by_halves(positive):
    """Do as ``bytes_of``, in fewer operations where a thread has half a byte: most shifts are constants then."""
    ones = tl.reshape(positive.to(tl.int32), [positive.shape[0], 2, 4])
    halves = tl.sum(ones << tl.arange(0, 4)[None, None, :], axis=2)
    return tl.sum(halves << (4 * tl.arange(0, 2)[None, :]), axis=1).to(tl.uint8)


@jit()
def bytes_at(bits, stride, b, blocks_per_chunk, BLOCK_SIZE: tl.constexpr):
    """Return where a block's bits lie: rows of a chunk each, ``stride`` bytes apart."""
    chunk = b // blocks_per_chunk
    return bits + chunk * stride + (b - chunk * blocks_per_chunk) * (BLOCK_SIZE // 8) + tl.arange(0, BLOCK_SIZE // 8)


@jit()
def load_bits(pointer, plane, TERNARY: tl.constexpr):
    """Load the bytes of a block's signs and, ``plane`` bytes on where TERNARY, of what is not zero: uint8 [n] each."""
    signs = tl.load(pointer)
    nonzero = signs
    if TERNARY:
        nonzero = tl.load(pointer + plane)
    return signs, nonzero


@jit()
def sum_of_bytes(bits):
    """Sum bytes uint8 [n] as the little-endian 8-byte numbers that they are; wraps, int64."""
    return tl.sum(bits.to(tl.int64) << (8 * (tl.arange(0, bits.shape[0]) % 8)))


@jit()
def scaled(signs, nonzero, scale, TERNARY: tl.constexpr):
    """Return what bits stand for, float32 [n, 8]: scale and -scale, and 0 for zeros where TERNARY."""
    x = tl.where(bits_of(signs) != 0, scale, rules.negative(scale))
    if TERNARY:
        x = tl.where(bits_of(nonzero) != 0, x, 0.0)
    return x


@jit()
def store_bits(pointer, plane, c, TERNARY: tl.constexpr, HALVES: tl.constexpr = False):
    """Write a block of c where ``load_bits`` reads; HALVES: by ``bytes_by_halves``."""
    tl.store(pointer, bytes_by_halves(c >= 0) if HALVES else bytes_of(c >= 0))
    if TERNARY:
        tl.store(pointer + plane, bytes_by_halves(c != 0) if HALVES else bytes_of(c != 0))


# ---------------------------------------------------------------- the active mask


@jit()
def active(live, row, BLOCK_SIZE: tl.constexpr):
    """Tell which elements of a block count, bool [BLOCK_SIZE / 8, 8]."""
    bits = tl.load(live + row.to(tl.int64) * (BLOCK_SIZE // 8) + tl.arange(0, BLOCK_SIZE // 8))
    return bits_of(bits) != 0


@jit()
def counting(live, row, i, BLOCK_SIZE: tl.constexpr):
    """Do as ``active``; where all elements count, nothing is read."""
    mask = i >= 0
    if row != 0:
        mask = active(live, row, BLOCK_SIZE)
    return mask


@jit()
def only_active(x, mask, row):
    """``x``, zero where an element does not count."""
    if row != 0:
        x = tl.where(mask, x, 0.0)
    return x


# ---------------------------------------------------------------- rounding


@jit()
def random_words(rounding, b, i, BLOCK_SIZE: tl.constexpr):
    """Return what ``bit_rules.random_bits`` takes for a block; ``rounding`` points at the updates done, or is None."""
    if rounding is None:
        return  # noqa: RET502
    else:
        first = b * BLOCK_SIZE
        lower = rounding.to(tl.pointer_type(tl.int32), bitcast=True)  # of a number of 64 bits, little-endian
        done = tl.load(lower).to(tl.uint32, bitcast=True)
        return first.to(tl.uint32) + i.to(tl.uint32), bit_rules.block_seed((first >> 32).to(tl.uint32), done)


@jit()
def rounded(x, words, dtype: tl.constexpr):
    """Round to nearest even, or bfloat16 stochastically where there are ``words``.

    By hand for bfloat16: Triton's interpreter would cut the bits off.
    """
    if dtype == tl.bfloat16:
        if words is None:
            carry = bit_rules.half(x.to(tl.uint32, bitcast=True))
        else:
            carry = bit_rules.random_bits(words[0], words[1])
        return carried(x, carry, dtype)
    else:
        return x.to(dtype)


@jit()
def carried(x, carry, dtype: tl.constexpr):
    """Round to bfloat16 by what carries into the bits that are kept; float32 stays as it is."""
    if dtype == tl.bfloat16:
        up = bit_rules.bfloat16(x.to(tl.uint32, bitcast=True), carry)
        return tl.where(x == x, up, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x


# ---------------------------------------------------------------- what is stored in float32, bfloat16 or codes


@jit()
def moment_bits(drawn, b, i, BLOCK_SIZE: tl.constexpr):
    """16 random bits for each element's moments, of the updates done; ``drawn`` points at them, or is None."""
    if drawn is None:
        return  # noqa: RET502
    else:
        half = BLOCK_SIZE // 2
        words = random_words(drawn, b, i % half, BLOCK_SIZE)
        return bit_rules.half_of(bit_rules.moments_word(words[0], words[1]), (i // half).to(tl.uint32))


@jit()
def load(stored, b, i, SIGNED: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Load a block of what is stored in any form (``nouns.Stored``), float32."""
    if stored.exponents is None:
        return tl.load(stored.numbers + b * BLOCK_SIZE + i).to(tl.float32)
    else:
        return load_codes(stored.numbers + b * BLOCK_SIZE + i, stored.exponents + b, SIGNED)


@jit()
def renewed(mean_sq, factors, stride, t):
    """Make v of mean squares by tensor ``t``'s column of ``Factor``."""
    factor, usual = tl.load(factors + FACTOR * stride + t), tl.load(factors + USUAL * stride + t)
    return rules.renewed(mean_sq, factor, usual, tl.load(factors + LEAST * stride + t))


@jit()
def load_variance(of, t, b, i, BLOCK_SIZE: tl.constexpr):
    """Load a block of what ``nouns.Preconditioner`` has, float32."""
    v = load(of, b, i, False, BLOCK_SIZE)
    if of.factors is not None:
        v = renewed(v, of.factors, of.factors_stride, t)
    return v


@jit()
def store(stored, bits, b, i, x, SIGNED: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Store a block of x, rounded by random bits unless in float32; return what ``load`` reads then."""
    if stored.exponents is not None:
        at = stored.numbers + b * BLOCK_SIZE + i
        code, exponent = store_codes(x, at, stored.exponents + b, bits, SIGNED, not SIGNED)
        return decoded(code, exponent, SIGNED)
    elif stored.numbers.dtype.element_ty == tl.bfloat16:
        narrow = carried(x, bits, tl.bfloat16)
        tl.store(stored.numbers + b * BLOCK_SIZE + i, narrow)
        return narrow.to(tl.float32)
    else:
        tl.store(stored.numbers + b * BLOCK_SIZE + i, x)
        return x


@jit()
def nearest(stored, x, SIGNED: tl.constexpr):
    """Round a block of x to the nearest that can be stored; return that, its codes and their exponent.

    Where there are none, the number as it is stored stands for codes.
    """
    if stored.exponents is None:
        rounded_x = rounded(x, None, stored.numbers.dtype.element_ty)
        return rounded_x.to(tl.float32), rounded_x, 0
    else:
        code, exponent = coded(x, None, SIGNED, not SIGNED)
        return decoded(code, exponent, SIGNED), code, exponent


@jit()
def store_nearest(stored, b, i, code, exponent, BLOCK_SIZE: tl.constexpr):
    """Store what ``nearest`` has returned behind the number."""
    tl.store(stored.numbers + b * BLOCK_SIZE + i, code.to(stored.numbers.dtype.element_ty))
    if stored.exponents is not None:
        tl.store(stored.exponents + b, exponent.to(tl.uint8))


# ---------------------------------------------------------------- sums


@jit()
def count(mask):
    """Count those that are set, float64, from [n, 8]."""
    return tl.sum(tl.sum(mask.to(tl.int32), axis=1), axis=0).to(tl.float64)


@jit()
def any_of(mask):
    """Tell whether any is set, int32, from [n, 8]."""
    return tl.max(tl.max(mask.to(tl.int32), axis=1), axis=0)


@jit()
def total_of(x):
    """Sum a block, in float64: a thread all that it has, and only then threads with each other."""
    return tl.sum(x.to(tl.float64))


@jit()
def squares_of(x):
    """Sum the squares of a block of float64 [n, 8] that were float32: these products and sums round once, fused."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 4, 2]))
    first, third = tl.split(tl.reshape(even, [x.shape[0], 2, 2]))
    second, fourth = tl.split(tl.reshape(odd, [x.shape[0], 2, 2]))
    return tl.sum(tl.fma(fourth, fourth, tl.fma(third, third, tl.fma(second, second, first * first))))


@jit()
def store_norm(norm, b, x):
    """Store the sum of squares of a block, in float64, where they are exact."""
    wide = x.to(tl.float64)
    tl.store(norm + b, total_of(wide * wide))


@jit()
def store_partials(partials, stride, b, c, TERNARY: tl.constexpr):
    """Sum of |c| and c^2 over a block, and, where ternary, how many elements are not zero."""
    size = tl.abs(c).to(tl.float64)  # once: conversions are slower than sums
    tl.store(partials + b, total_of(size))
    tl.store(partials + stride + b, squares_of(size))
    if TERNARY:
        tl.store(partials + 2 * stride + b, count(c != 0))


@jit()
def sum_of(row, begin, end, LANES: tl.constexpr):
    """Sum of row[begin:end], float64: each lane adds in order, then the lanes are added."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    for at in range(begin, end, LANES):
        total += tl.load(row + at + lane, mask=at + lane < end, other=0.0)
    return tl.sum(total, axis=0)


@jit()
def tree_sum(x):
    """Add neighbouring lanes of x float64 [SUM_LANES], again and again, until one is left."""
    for half in tl.static_range(1, SUM_LEVELS + 1):
        x = tl.sum(tl.reshape(x, [SUM_LANES >> half, 2]), axis=1)
    return tl.sum(x, axis=0)


@jit()
def ordered_sum(row, begin, end):
    """Sum row[begin:end], float64: each lane adds in order, then ``tree_sum``."""
    lane = tl.arange(0, SUM_LANES)
    total = tl.zeros([SUM_LANES], tl.float64)
    for at in range(begin, end, SUM_LANES):
        total += tl.load(row + at + lane, mask=at + lane < end, other=0.0)
    return tree_sum(total)


# ---------------------------------------------------------------- the last program


@jit()
def is_last(ticket, programs):
    """Tell whether all other programs have come by ``ticket`` int32 [1], which then is 0 again.

    What they have stored before is seen by what loads afterwards.
    """
    tl.debug_barrier()
    before = tl.atomic_add(ticket, 1, sem="acq_rel")
    if before == programs - 1:
        tl.store(ticket, 0)
    tl.debug_barrier()
    return before == programs - 1
