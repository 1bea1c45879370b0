"""Chunks of tensors of which only the largest elements travel, with their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .bits import pack, packed_bytes, unpack

SIDE = 64
"""Rows and columns of a matrix's tile at most."""


def tiles_of(tensor: Tensor, run: int) -> Tensor:
    """Cut a tensor as DeMo's authors do, and SparseLoCo's: by sides that divide its own.

    Args:
        tensor: Places of its elements in the line; with more than one dimension a matrix of the first by all others.
        run: Elements of a vector's tiles at most.

    Returns:
        Places, int64 [tiles, height, width].
    """
    matrix, most = (tensor.view(1, -1), (1, run)) if tensor.dim() < 2 else (tensor.flatten(1), (SIDE, SIDE))
    height, width = (
        max(d for d in range(1, limit + 1) if side % d == 0) for side, limit in zip(matrix.shape, most, strict=True)
    )
    tiles = matrix.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2)
    return tiles.reshape(-1, height, width)


@dataclass
class Chunks:
    """All chunks of one shape.

    Attributes:
        where: Places of their elements in the line [n], int64 [tensors, chunks of each, size].
        kept: How many elements of each travel.
    """

    where: Tensor
    kept: int

    @property
    def index_bits(self) -> int:
        """Bits of a place in a chunk: 12 in a full one, of 4096."""
        return max(1, (self.where.shape[-1] - 1).bit_length())

    @property
    def count(self) -> int:
        """Elements that travel."""
        return self.where.shape[:2].numel() * self.kept

    @property
    def index_bytes(self) -> int:
        """Bytes of their places."""
        return packed_bytes(self.count, self.index_bits)

    def largest(self, chunks: Tensor) -> Tensor:
        """Return the places [..., kept] of the elements of largest magnitude of chunks [..., size]."""
        return chunks.abs().topk(self.kept, dim=-1, sorted=False).indices

    def pack_places(self, places: Tensor) -> Tensor:
        """Pack places [..., tensors, chunks, kept]: uint8 [..., index_bytes]."""
        return pack(places.flatten(-3), self.index_bits)

    def unpack_places(self, packed: Tensor) -> Tensor:
        """Return what was packed, int64 [..., tensors, chunks, kept]."""
        return unpack(packed, self.index_bits, self.count).unflatten(-1, (*self.where.shape[:2], self.kept))


class Cut:
    """Takes lines [..., n] apart into chunks of several shapes, and puts them together again.

    Args:
        shapes: All chunks, which have every place in the line once.
    """

    def __init__(self, shapes: Sequence[Chunks]) -> None:
        self.shapes = [tuple(chunks.where.shape) for chunks in shapes]
        self._places = torch.cat([chunks.where.flatten() for chunks in shapes])
        self._back = self._places.argsort()

    def apart(self, lines: Tensor) -> list[Tensor]:
        """Return the chunks [..., tensors, chunks, size] of lines [..., n], of each shape."""
        flat = lines.index_select(-1, self._places)
        parts = flat.split([tensors * chunks * size for tensors, chunks, size in self.shapes], -1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def together(self, chunks: Sequence[Tensor]) -> Tensor:
        """Return the lines [..., n] of chunks."""
        return torch.cat([each.flatten(-3) for each in chunks], -1).index_select(-1, self._back)
