"""Means in float32 of what travels in few bits: bfloat16, or integers with a scale for every few hundred elements.

``BFloat16`` is DDP's ``bf16_compress_hook``: cast, divided by W, summed by a ring that rounds at each hop.
``Quantised`` is of the kind of torchft's ``allreduce_quantized`` and ZeRO++'s qgZ (Wang et al., 2023, section 3.3):
quantised all-to-all, mean in float32, quantised all-gather. Here errors are kept on both sides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..setting import Params, Setting
from .bits import as_bytes, pack, packed_bytes, unpack
from .collectives import StackedCollectives
from .frame import AveragingRival

BLOCK = 512
"""Elements that share a scale at most, as in torchft."""


class BFloat16(AveragingRival):
    """AdamW on gradients that were averaged in bfloat16."""

    def mean(self, gradients: Tensor) -> Tensor:
        """See ``AveragingRival``."""
        halves = gradients.to(torch.bfloat16).div_(self.workers)
        return self.wires.all_reduce(halves).to(gradients.dtype)


class BlockCode:
    """Codes blocks of equal size as signed integers, each times its block's largest magnitude over their largest.

    Args:
        bits: Of an integer; those of 4 bits lie in -7..7.
        blocks: Number of blocks in a message.
        size: Elements of a block.
    """

    def __init__(self, bits: int, blocks: int, size: int) -> None:
        self.bits, self.blocks, self.size = bits, blocks, size
        self.largest = 2 ** (bits - 1) - 1

    def encode(self, values: Tensor) -> Tensor:
        """Code values [..., blocks, size]: uint8 [..., bytes], integers first, then a float32 for each block."""
        scale = (values.abs().amax(-1) / self.largest).float()
        divisor = torch.where(scale > 0, scale, 1.0).to(values.dtype)
        integers = (values / divisor[..., None]).round().clamp(-self.largest, self.largest) + self.largest
        return torch.cat([pack(integers.to(torch.uint8).flatten(-2), self.bits), as_bytes(scale)], -1)

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values [..., blocks, size] of a message."""
        end = packed_bytes(self.blocks * self.size, self.bits)
        scale = message[..., end:].contiguous().view(torch.float32).to(dtype)
        integers = unpack(message[..., :end], self.bits, self.blocks * self.size) - self.largest
        return integers.unflatten(-1, (self.blocks, self.size)) * scale[..., None]


def blocks_of_chunk(numel: int, world_size: int) -> tuple[int, int]:
    """Return number and size of the equal blocks, of ``BLOCK`` elements at most, of each of W servers' chunks."""
    blocks = max(1, math.ceil(numel / world_size / BLOCK))
    return blocks, math.ceil(numel / world_size / blocks)


def in_chunks(rows: Tensor, world_size: int, blocks: int, size: int) -> Tensor:
    """Return rows [..., n] as [..., W, blocks, size], filled up with zeros."""
    missing = world_size * blocks * size - rows.shape[-1]
    return torch.nn.functional.pad(rows, (0, missing)).unflatten(-1, (world_size, blocks, size))


class QuantisedAllReduce:
    """Average rows [W, n] in integers of ``bits`` both ways; what rounding takes away is added the next time."""

    def __init__(self, wires: StackedCollectives, like: Tensor, bits: int) -> None:
        self.wires, self.numel, self.world_size = wires, like.numel(), wires.world_size
        self.shape = blocks_of_chunk(self.numel, self.world_size)
        self.code = BlockCode(bits, *self.shape)
        self.worker_error = like.new_zeros(self.world_size, self.world_size, *self.shape)
        self.server_error = like.new_zeros(self.world_size, *self.shape)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the mean [n] that all ranks decode."""
        compensated = in_chunks(rows, self.world_size, *self.shape) + self.worker_error
        sent = self.code.encode(compensated)
        self.worker_error = compensated - self.code.decode(sent, rows.dtype)
        arrived = self.code.decode(self.wires.all_to_all(sent), rows.dtype)
        compensated = arrived.mean(1) + self.server_error
        served = self.code.encode(compensated)
        self.server_error = compensated - self.code.decode(served, rows.dtype)
        return self.code.decode(self.wires.all_gather(served), rows.dtype).flatten()[: self.numel]


class Quantised(AveragingRival):
    """AdamW on gradients that were averaged in integers of ``bits``."""

    def __init__(self, params: Params, of: Setting, bits: int) -> None:
        super().__init__(params, of, bits=bits, block=BLOCK)
        self.mean_of = QuantisedAllReduce(self.wires, self.x, bits)

    def mean(self, gradients: Tensor) -> Tensor:
        """See ``AveragingRival``."""
        return self.mean_of(gradients)
