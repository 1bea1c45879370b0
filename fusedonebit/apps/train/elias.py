"""Whole numbers as bits: of fixed width, or in Elias' gamma code (Elias, 1975), which is short for small ones."""

from __future__ import annotations

import torch
from torch import Tensor

from ...triton_kernels import pack, unpack


def pack_bits(bits: Tensor) -> Tensor:
    """Pack bool [n] to uint8 [ceil(n / 8)], LSB first."""
    return pack(torch.nn.functional.pad(bits.float() - 0.5, (0, -len(bits) % 8), value=-1.0))


def unpack_bits(packed: Tensor) -> Tensor:
    """Return the inverse of ``pack_bits``: bool [8 n]."""
    return unpack(packed) > 0


def encode_fixed(numbers: Tensor, width: int) -> Tensor:
    """Pack numbers int64 [n] in [0, 2^width), plane by plane: uint8 [width * ceil(n / 8)]."""
    return torch.cat([pack_bits((numbers >> digit) & 1 > 0) for digit in range(width)])


def decode_fixed(packed: Tensor, width: int, count: int) -> Tensor:
    """Return the inverse of ``encode_fixed``: int64 [count]."""
    planes = unpack_bits(packed).view(width, -1)[:, :count].to(torch.int64)
    return (planes << torch.arange(width, device=packed.device)[:, None]).sum(0)


def encode_gamma(numbers: Tensor) -> Tensor:
    """Elias' gamma code of int64 [n], all >= 1: as many zeros as the number has digits behind its first, then those.

    Returns:
        uint8 [bytes], padded with zeros.
    """
    digits = torch.frexp(numbers.double()).exponent.to(torch.int64)
    ends = torch.cumsum(2 * digits - 1, 0)
    bits = torch.zeros(int(ends[-1]) if len(ends) else 0, dtype=torch.bool, device=numbers.device)
    for digit in range(int(digits.max()) if len(digits) else 0):
        there = digits > digit
        bits[ends[there] - 1 - digit] = (numbers[there] >> digit) & 1 > 0
    return pack_bits(bits)


def decode_gamma(packed: Tensor, count: int) -> Tensor:
    """Return the inverse of ``encode_gamma``: int64 [count].

    A code's length is told by its zeros, so where the next begins is known from where this one does.
    Following that chain by doubling, 1, 2, 4 ... codes at a time, takes log2(count) steps.
    """
    bits = unpack_bits(packed)
    n = len(bits)
    if count == 0:
        return torch.zeros(0, dtype=torch.int64, device=packed.device)
    place = torch.arange(n, device=packed.device)
    # The first one at or behind each place; zeros behind the last code have none.
    one = torch.where(bits, place, n).flip(0).cummin(0).values.flip(0)
    after = torch.cat([(2 * one - place + 1).clamp(max=n), place.new_tensor([n])])
    starts = place.new_zeros(1)
    while len(starts) < count:
        starts = torch.cat([starts, after[starts]])
        after = after[after]
    starts = starts[:count]
    zeros = one[starts] - starts
    numbers = torch.zeros_like(starts)
    for digit in range(int(zeros.max()) + 1):
        there = digit <= zeros
        numbers = torch.where(there, numbers * 2 + bits[(starts + zeros + digit).clamp(max=n - 1)], numbers)
    return numbers
