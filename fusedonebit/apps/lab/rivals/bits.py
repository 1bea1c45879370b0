"""Small unsigned integers side by side in bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack integers in 0..2^bits - 1, [..., m], into bytes.

    Widths that divide 8 lie side by side in a byte; any other goes as so many planes of one bit.

    Returns:
        uint8 [..., ``packed_bytes(m, bits)``]; the bits that fill up a byte are 0.
    """
    if 8 % bits:
        return torch.cat([pack((values >> plane) & 1, 1) for plane in range(bits)], -1)
    fields = 8 // bits
    values = torch.nn.functional.pad(values.to(torch.uint8), (0, -values.shape[-1] % fields))
    packed = values[..., ::fields].clone()
    for field in range(1, fields):
        packed |= values[..., field::fields] << (field * bits)
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack ``count`` integers of so many bits from uint8 [..., bytes]: int64 [..., count]."""
    if 8 % bits:
        planes = packed.unflatten(-1, (bits, -1))
        return torch.stack([unpack(planes[..., plane, :], 1, count) << plane for plane in range(bits)]).sum(0)
    fields = [(packed >> (field * bits)) & (2**bits - 1) for field in range(8 // bits)]
    return torch.stack(fields, -1).flatten(-2)[..., :count].long()


def packed_bytes(count: int, bits: int) -> int:
    """Return how many bytes ``count`` integers of so many bits take."""
    return -(-count * bits // 8) if 8 % bits == 0 else bits * -(-count // 8)


def as_bytes(values: Tensor) -> Tensor:
    """View numbers [..., m] as the bytes that travel, uint8 [..., m * itemsize]."""
    return values.contiguous().view(torch.uint8)
