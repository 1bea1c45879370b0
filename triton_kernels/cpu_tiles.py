"""Walks the flat index space in cache-sized tiles, and moves tensors' elements in and out of them.

Eager ops are memory-bound on a CPU. A tile's operands stay in cache from the first line of the
arithmetic to the last, and no temporary is larger than a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import FlatLayout, Span, flat_layout

TILE_NUMEL = {"cpu": 1 << 16}
"""Elements per tile by device type; elsewhere 2^22, where launches cost more than temporaries."""


class Tile(NamedTuple):
    """Some consecutive blocks of one chunk.

    Attributes:
        chunk: Index of the chunk.
        blocks: Slice of the block tables.
        bytes: Slice of the chunk's packed bits.
        numel: Elements, padding included.
        start: Flat index of the first element.
        spans: Parts of tensors in the tile.
    """

    chunk: int
    blocks: slice
    bytes: slice
    numel: int
    start: int
    spans: tuple[Span, ...]


def tiles(
    sizes: Sequence[int], chunks: int, block_size: int, device: torch.device, blocks: int = 0
) -> tuple[Tile, ...]:
    """Returns the tiles of a layout, in order; none crosses a chunk boundary.

    ``blocks`` is how many it has where it may be longer than its tensors need: boundaries follow from that.
    """
    numel = TILE_NUMEL.get(device.type, 1 << 22)
    return _tiles(flat_layout(tuple(sizes), chunks, block_size, blocks), numel)


@lru_cache(maxsize=16)
def _tiles(layout: FlatLayout, tile_numel: int) -> tuple[Tile, ...]:
    block, per_chunk = layout.block_size, layout.blocks_per_chunk
    step = max(1, tile_numel // block)
    result = []
    for chunk in range(layout.world_size):
        for lo in range(0, per_chunk, step):
            hi = min(lo + step, per_chunk)
            start, stop = (chunk * per_chunk + lo) * block, (chunk * per_chunk + hi) * block
            spans = tuple(layout.spans(start, stop))
            blocks = slice(chunk * per_chunk + lo, chunk * per_chunk + hi)
            packed = slice(lo * block // 8, hi * block // 8)
            result.append(Tile(chunk, blocks, packed, stop - start, start, spans))
    return tuple(result)


def memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as a 1-D view in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def gather(tensors: Sequence[Tensor], tile: Tile, block_size: int) -> Tensor:
    """Copies a tile of the tensors' elements to float32 [blocks, block_size]; the rest is zero.

    An empty tensor where the layout has elements stands for zeros.
    """
    only = tile.spans[0] if len(tile.spans) == 1 else None
    if only and only.stop - only.start == tile.numel and tensors[only.tensor].numel():
        values = memory_order(tensors[only.tensor])[only.start : only.stop]
        return values.to(torch.float32, copy=True).view(-1, block_size)
    out = torch.zeros(tile.numel, dtype=torch.float32, device=_device(tensors))
    for span in tile.spans:
        tensor = tensors[span.tensor]
        if tensor.numel():
            at = span.flat - tile.start
            out[at : at + span.stop - span.start] = memory_order(tensor)[span.start : span.stop]
    return out.view(-1, block_size)


def scatter(values: Tensor, tensors: Sequence[Tensor], tile: Tile) -> None:
    """Copies a tile's values back into the tensors, rounding to their dtype."""
    flat = values.view(-1)
    for span in tile.spans:
        at = span.flat - tile.start
        memory_order(tensors[span.tensor])[span.start : span.stop] = flat[at : at + span.stop - span.start]


def _device(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")
