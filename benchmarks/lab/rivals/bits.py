"""Small unsigned integers side by side in bytes: a stream of bits, the lowest of each integer first."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack integers in 0..2^bits - 1, [..., m], into bytes.

    Returns:
        uint8 [..., ``packed_bytes(m, bits)``]; the bits that fill up the last byte are 0.
    """
    if 8 % bits:
        values, bits = ((values[..., None] >> torch.arange(bits)) & 1).flatten(-2), 1
    fields = 8 // bits
    values = torch.nn.functional.pad(values.to(torch.uint8), (0, -values.shape[-1] % fields))
    packed = values[..., ::fields].clone()
    for field in range(1, fields):
        packed |= values[..., field::fields] << (field * bits)
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack ``count`` integers of so many bits from uint8 [..., bytes]: int64 [..., count]."""
    if 8 % bits:
        single = unpack(packed, 1, count * bits).unflatten(-1, (count, bits))
        return (single << torch.arange(bits)).sum(-1)
    fields = (packed[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8)) & (2**bits - 1)
    return fields.flatten(-2)[..., :count].long()


def packed_bytes(count: int, bits: int) -> int:
    """Return how many bytes ``count`` integers of so many bits take."""
    return -(-count * bits // 8)


def as_bytes(values: Tensor) -> Tensor:
    """View numbers [..., m] as the bytes that travel, uint8 [..., m * itemsize]."""
    return values.contiguous().view(torch.uint8)
