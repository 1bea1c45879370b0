"""Chunks of tensors of which only the largest elements travel, with their places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .bits import pack, packed_bytes, unpack

CHUNK = 4096
"""Elements of a chunk in SparseLoCo, and of DeMo's chunks of 64 x 64; smaller ones keep the same share of elements."""


def kept_of(k: int, size: int) -> int:
    """Return how many elements of a chunk of ``size`` travel, where ``k`` of ``CHUNK`` do; one at least."""
    return max(1, round(k * size / CHUNK))


@dataclass
class Chunks:
    """All chunks of one shape.

    Attributes:
        where: Places of their elements in the line [n], int64 [tensors, chunks of each, size]; n for what fills one up.
        kept: How many elements of each travel.
    """

    where: Tensor
    kept: int

    @property
    def index_bits(self) -> int:
        """Bits of a place in a chunk: 12 in a full one."""
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
        numel: n.
    """

    def __init__(self, shapes: Sequence[Chunks], numel: int) -> None:
        self.shapes = [tuple(chunks.where.shape) for chunks in shapes]
        self._places = torch.cat([chunks.where.flatten() for chunks in shapes])
        self._back = torch.empty(numel + 1, dtype=torch.int64)
        self._back[self._places] = torch.arange(len(self._places))
        self._back = self._back[:numel]

    def apart(self, lines: Tensor) -> list[Tensor]:
        """Return the chunks [..., tensors, chunks, size] of lines [..., n], of each shape."""
        flat = torch.nn.functional.pad(lines, (0, 1)).index_select(-1, self._places)
        parts = flat.split([tensors * chunks * size for tensors, chunks, size in self.shapes], -1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def together(self, chunks: Sequence[Tensor]) -> Tensor:
        """Return the lines [..., n] of chunks."""
        return torch.cat([each.flatten(-3) for each in chunks], -1).index_select(-1, self._back)


def flat_chunks(tensors: Sequence[Tensor], numel: int, k: int) -> list[Chunks]:
    """Cut tensors of places in the line [n] into equal chunks of at most ``CHUNK``, of which ``k`` in it travel."""
    alike: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        chunks = -(-tensor.numel() // CHUNK)
        size = -(-tensor.numel() // chunks)
        padded = torch.nn.functional.pad(tensor.flatten(), (0, chunks * size - tensor.numel()), value=numel)
        alike[chunks, size].append(padded.view(chunks, size))
    return [Chunks(torch.stack(where), kept_of(k, size)) for (_, size), where in alike.items()]
