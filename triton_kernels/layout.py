"""Lays out the flat index space: many tensors, one row of blocks, one chunk of it per rank.

Every tensor starts on a block boundary, so that a block belongs to one tensor and one program of a
kernel needs one row of each table. It is padded to a multiple of ``world_size`` blocks: chunk
``k``, the contiguous part that rank ``k`` serves, is ``blocks_per_chunk`` blocks long.

    tensor 0            tensor 1   tensor 2              padding
    [block][block][bl..][bl.....]  [block][block][b....] [......]
    '------ chunk 0 ------''------ chunk 1 ------''--- chunk 2 ---'
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

BLOCK_SIZES = (1024, 512, 256, 128)
"""Elements per block that kernels are built for. The smallest still packs to 16 bytes."""

ScaleScope = Literal["global", "bucket", "layer", "block"]
"""What shares a scale: all there is, a bucket, a tensor, or ``SCALE_BLOCK`` elements of one."""

SCALE_BLOCK = 4096
"""Elements that share a scale where ``scale_scope="block"``: 0.8 % of the bits (one per 1024: 3.1 %)."""


class Span(NamedTuple):
    """Elements ``start:stop`` of tensor ``tensor``, lying at flat index ``flat``."""

    tensor: int
    start: int
    stop: int
    flat: int


def choose_block_size(sizes: Sequence[int], world_size: int) -> int:
    """Return the largest block size whose padding stays below 1 %, else the one that pads least.

    Args:
        sizes: Number of elements of each tensor.
        world_size: W.
    """
    layouts = [FlatLayout(tuple(sizes), world_size, block) for block in BLOCK_SIZES]
    for layout in layouts:
        if layout.numel - layout.real_numel <= layout.real_numel // 100:
            return layout.block_size
    return min(layouts, key=lambda layout: (layout.numel, -layout.block_size)).block_size


@dataclass(frozen=True)
class FlatLayout:
    """Where each tensor lies in the flat index space. Pure data; every index is a Python int.

    Args:
        sizes: Number of elements of each tensor; zeros are legal.
        world_size: Number of chunks.
        block_size: Elements per block, one of ``BLOCK_SIZES``.
        least_blocks: The index space is at least so long: where ranks hold different shards, as long as the longest.

    Raises:
        ValueError: if an argument is out of range.
    """

    sizes: tuple[int, ...]
    world_size: int = 1
    block_size: int = BLOCK_SIZES[0]
    least_blocks: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be an int >= 1, got {self.world_size!r}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {self.block_size!r}")
        if any(size < 0 for size in self.sizes):
            raise ValueError(f"sizes must be >= 0, got {min(self.sizes)}")

    @cached_property
    def first_block(self) -> tuple[int, ...]:
        """Index of each tensor's first block, and behind the last the number of blocks in use."""
        first = [0]
        for size in self.sizes:
            first.append(first[-1] + -(-size // self.block_size))
        return tuple(first)

    @cached_property
    def blocks_per_chunk(self) -> int:
        """Blocks that each rank serves; at least one, so that no buffer is ever empty."""
        return max(1, -(-max(self.first_block[-1], self.least_blocks) // self.world_size))

    @property
    def n_blocks(self) -> int:
        """Blocks in all, padding included."""
        return self.blocks_per_chunk * self.world_size

    @property
    def chunk_numel(self) -> int:
        """Elements per chunk, padding included."""
        return self.blocks_per_chunk * self.block_size

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk at one bit per element."""
        return self.chunk_numel // 8

    @property
    def numel(self) -> int:
        """P, the length of the flat index space, padding included."""
        return self.n_blocks * self.block_size

    @cached_property
    def real_numel(self) -> int:
        """Elements that belong to a tensor."""
        return sum(self.sizes)

    @cached_property
    def fingerprint(self) -> int:
        """Return a 31-bit hash that differs between layouts; it travels in every message's header."""
        text = f"{self.sizes}/{self.world_size}/{self.block_size}/{self.least_blocks}"
        return zlib.crc32(text.encode()) & 0x7FFFFFFF

    def offset(self, tensor: int) -> int:
        """Flat index of a tensor's first element."""
        return self.first_block[tensor] * self.block_size

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Return views of a line [>= P] of the index space, one of each tensor's elements, [size]."""
        firsts = map(self.offset, range(len(self.sizes)))
        return [flat[first : first + size] for first, size in zip(firsts, self.sizes, strict=True)]

    def part(self, index: int, count: int) -> FlatLayout:
        """Return the ``index``-th of ``count`` equal ranges of the index space, as a layout of its own.

        It has all tensors, each with those of its elements that lie in the range, maybe none, and
        ``world_size / count`` chunks: those of this layout that lie in the range.

        Raises:
            ValueError: if ``count`` does not divide ``world_size``.
        """
        if self.world_size % count:
            raise ValueError(f"count must divide world_size {self.world_size}, got {count}")
        length = self.numel // count
        sizes = [0] * len(self.sizes)
        for span in self.spans(index * length, (index + 1) * length):
            sizes[span.tensor] = span.stop - span.start
        return FlatLayout(tuple(sizes), self.world_size // count, self.block_size, self.n_blocks // count)

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Yield the parts of tensors inside the flat range ``start:stop``, in order."""
        for tensor in self.tensors_in(start, stop):
            offset = self.offset(tensor)
            lo = max(start, offset)
            hi = min(stop, offset + self.sizes[tensor])
            if lo < hi:
                yield Span(tensor, lo - offset, hi - offset, lo)

    def tensors_in(self, start: int, stop: int) -> range:
        """Return the indices of the tensors with a block in the flat range ``start:stop``."""
        first, last = start // self.block_size, -(-stop // self.block_size) - 1
        last = min(last, self.first_block[-1] - 1)
        if first > last:
            return range(0)
        return range(bisect_right(self.first_block, first) - 1, bisect_right(self.first_block, last))

    def block_tensor(self) -> Tensor:
        """Index of the tensor that each block belongs to: int64 [n_blocks].

        Padding blocks behind the last tensor count as its own; no element of theirs is live.
        """
        blocks = torch.tensor(self.first_block, dtype=torch.int64).diff()
        owner = torch.repeat_interleave(blocks)
        last = max(len(self.sizes) - 1, 0)
        return torch.nn.functional.pad(owner, (0, self.n_blocks - len(owner)), value=last)

    def scale_segments(self, scope: ScaleScope) -> Tensor:
        """Index of the scale that each block shares on the worker's side: int64 [n_blocks].

        Rising and without gaps. ``"global"`` and ``"bucket"``: one scale; ``"layer"``: one per tensor;
        ``"block"``: one per 4096 elements of a tensor, 0.8 % of their bits.

        Raises:
            ValueError: if ``scope`` is none of these.
        """
        if scope in ("global", "bucket"):  # of a bucket: one each
            return torch.zeros(self.n_blocks, dtype=torch.int64)
        if scope == "layer":
            return torch.unique_consecutive(self.block_tensor(), return_inverse=True)[1]
        if scope == "block":
            within = torch.arange(self.n_blocks) - torch.tensor(self.first_block)[self.block_tensor()]
            return (within % (SCALE_BLOCK // self.block_size) == 0).long().cumsum(0) - 1
        raise ValueError(f"scale_scope must be 'global', 'bucket', 'layer' or 'block', got {scope!r}")

    def scale_slots(self, scope: ScaleScope) -> tuple[Tensor, int]:
        """Return each block's slot among the scales of its chunk's message, and the slots needed.

        The server cuts segments at chunk boundaries: slot = segment - first segment of the chunk.

        Returns:
            int64 [n_blocks], and the number of slots of the message that needs most.
        """
        segments = self.scale_segments(scope).view(self.world_size, self.blocks_per_chunk)
        slots = segments - segments[:, :1]
        return slots.reshape(-1), int(slots.max()) + 1
