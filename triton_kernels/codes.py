"""Writes numbers in a byte each: a float32 with three bits of its mantissa, in the octaves below a block's exponent.

Of numbers that are not negative these are 32, and the rounding is to within 1/16. Where there is a sign, the highest
bit, they are 16. What is smaller is 0, or the least code there is: nothing is divided by a variance that only seems 0.
"""

from __future__ import annotations

from torch import Tensor, int32
from torch import float32 as fp32

from . import bit_rules, rules
from .bit_rules import LOGARITHMS, SIGN, SIGNED_LOGARITHMS
from .jit import jit, tl


def encode(
    x: Tensor,
    codes: Tensor,
    exponents: Tensor,
    *,
    signed: bool = False,
    nonzero: bool = False,
    bits: Tensor | None = None,
) -> None:
    """Write what ``decode`` reads, rounded to nearest, or by random bits; what it has read, exactly as it was.

    Args:
        x: float32 [blocks, n], finite.
        codes: uint8 [blocks, n], written.
        exponents: uint8 [blocks], written: of each row the octave above its largest number.
        signed: Whether numbers may be negative.
        nonzero: Whether only 0 becomes 0.
        bits: int32 [blocks, n], 16 random ones for each; None: to nearest.
    """
    u = x.abs().view(int32)
    steps = bit_rules.rounded_steps(u) if bits is None else bit_rules.drawn_steps(u, bits)
    exponent = bit_rules.exponent_above(steps.amax(1))
    code = bit_rules.below(steps, exponent[:, None], SIGNED_LOGARITHMS if signed else LOGARITHMS)
    if nonzero:
        code = bit_rules.nonzero_code(code, steps)
    codes.copy_(bit_rules.signed_code(code, (x < 0).int()) if signed else code)
    exponents.copy_(exponent)


def in_float32(kept: Tensor, exponents: Tensor | None, *, signed: bool = True) -> Tensor:
    """Return numbers kept in any form, flat [P], as float32 [P]: the same memory if they are, else another.

    ``exponents``, uint8 [blocks], belong to codes, uint8 [P]; else None.
    """
    if exponents is None or not len(exponents):
        return kept.float()
    return decode(kept.view(len(exponents), -1), exponents, signed=signed).view(-1)


def keep_nearest(x: Tensor, kept: Tensor, exponents: Tensor | None, *, signed: bool = True) -> None:
    """Write float32 x [P] where ``in_float32`` reads it, rounded to nearest."""
    blocks = 0 if exponents is None else len(exponents)
    if exponents is None or not blocks:
        kept.copy_(x)
    else:
        encode(x.view(blocks, -1), kept.view(blocks, -1), exponents, signed=signed, nonzero=not signed)


def decode(codes: Tensor, exponents: Tensor, *, signed: bool = False) -> Tensor:
    """Return what ``encode`` has written, float32 [blocks, n], of uint8 [blocks, n] and [blocks]."""
    most = SIGNED_LOGARITHMS if signed else LOGARITHMS
    x = bit_rules.bits_above(codes.int() & most, exponents.int()[:, None], most).view(fp32)
    return tl.where(codes >= SIGN, rules.negative(x), x) if signed else x


@jit()
def coded(x, bits, SIGNED: tl.constexpr, NONZERO: tl.constexpr):
    """Return what ``encode`` writes of one block [n, 8], codes and their exponent, int32."""
    u = tl.abs(x).to(tl.int32, bitcast=True)
    if bits is None:
        steps = bit_rules.rounded_steps(u)
    else:
        steps = bit_rules.drawn_steps(u, bits.to(tl.int32))
    exponent = bit_rules.exponent_above(tl.max(tl.max(steps, axis=1), axis=0))
    if SIGNED:
        code = bit_rules.signed_code(bit_rules.below(steps, exponent, SIGNED_LOGARITHMS), (x < 0).to(tl.int32))
    else:
        code = bit_rules.below(steps, exponent, LOGARITHMS)
    if NONZERO:
        code = bit_rules.nonzero_code(code, steps)
    return code, exponent


@jit()
def store_codes(x, codes, exponent_at, bits, SIGNED: tl.constexpr, NONZERO: tl.constexpr):
    """Do as ``encode`` of one block; return codes and their exponent."""
    code, exponent = coded(x, bits, SIGNED, NONZERO)
    tl.store(codes, code.to(tl.uint8))
    tl.store(exponent_at, exponent.to(tl.uint8))
    return code, exponent


@jit()
def decoded(code, exponent, SIGNED: tl.constexpr):
    """Do as ``decode`` of one block in registers, int32."""
    if SIGNED:
        x = bit_rules.bits_above(code & SIGNED_LOGARITHMS, exponent, SIGNED_LOGARITHMS).to(tl.float32, bitcast=True)
        return tl.where(code >= SIGN, rules.negative(x), x)
    else:
        return bit_rules.bits_above(code, exponent, LOGARITHMS).to(tl.float32, bitcast=True)


@jit()
def load_codes(codes, exponent_at, SIGNED: tl.constexpr):
    """Do as ``decode`` of one block."""
    return decoded(tl.load(codes).to(tl.int32), tl.load(exponent_at).to(tl.int32), SIGNED)
