"""What values travel in, a few bits each with a scale for each block, and the all-reduce that both ways travels so."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .bits import pack, unpack
from .blocks import Blocks
from .collectives import StackedCollectives


class Code(Protocol):
    """Codes chunks of a line for the servers that have them."""

    blocks: Blocks
    """Where blocks are."""

    def encode(self, values: Tensor) -> Tensor:
        """Code values [..., W, chunk]: uint8 [..., W, bytes], what is packed first, then a float32 for each block."""

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values [..., W, chunk] of messages, whose last but one dimension is the chunk's."""


class IntegerCode:
    """Signed integers, each times its block's largest magnitude over their largest.

    Args:
        bits: Of an integer; those of 4 bits lie in -7..7.
        blocks: See ``Code``.
    """

    def __init__(self, bits: int, blocks: Blocks) -> None:
        self.bits, self.blocks = bits, blocks
        self.largest = 2 ** (bits - 1) - 1

    def encode(self, values: Tensor) -> Tensor:
        scales = (self.blocks.reduce(values.abs(), "amax") / self.largest).float()
        divisor = self.blocks.spread(torch.where(scales > 0, scales, 1.0).to(values.dtype))
        integers = (values / divisor).round().clamp(-self.largest, self.largest) + self.largest
        return self.blocks.message(pack(integers.to(torch.uint8), self.bits), scales)

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        packed, scales = self.blocks.parts(message, dtype)
        return (unpack(packed, self.bits, self.blocks.chunk) - self.largest) * scales


class SignCode:
    """Signs, each times the mean magnitude of its block.

    Args:
        blocks: See ``Code``.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.sizes = blocks.reduce(torch.ones(blocks.workers, blocks.chunk), "sum").clamp(min=1)

    def encode(self, values: Tensor) -> Tensor:
        return self.blocks.message(pack(values >= 0, 1), self.blocks.reduce(values.abs(), "sum") / self.sizes)

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        packed, scales = self.blocks.parts(message, dtype)
        return scales * (2 * unpack(packed, 1, self.blocks.chunk) - 1)


class CodedAllReduce:
    """Averages rows [W, n] in a code both ways; what it takes away is added the next time, by workers and servers.

    Args:
        wires: Between the workers.
        code: What travels.
        like: Of the rows' dtype.
    """

    def __init__(self, wires: StackedCollectives, code: Code, like: Tensor) -> None:
        self.wires, self.blocks, self.code = wires, code.blocks, code
        self.worker_error = like.new_zeros(self.blocks.workers, self.blocks.workers, self.blocks.chunk)
        self.server_error = like.new_zeros(self.blocks.workers, self.blocks.chunk)

    def __call__(self, rows: Tensor, kept: float = 1.0) -> Tensor:
        """Return the mean [n] that all ranks decode; of earlier errors so much is ``kept``."""
        compensated = self.blocks.cut(rows) + kept * self.worker_error
        sent = self.code.encode(compensated)
        self.worker_error = compensated - self.code.decode(sent, rows.dtype)
        # By sender and server: the code goes by servers last.
        arrived = self.code.decode(self.wires.all_to_all(sent, self.blocks.unused).transpose(0, 1), rows.dtype)
        compensated = arrived.mean(0) + kept * self.server_error
        served = self.code.encode(compensated)
        self.server_error = compensated - self.code.decode(served, rows.dtype)
        return self.blocks.join(self.code.decode(self.wires.all_gather(served, self.blocks.unused), rows.dtype))
