"""The active mask: padding, masked coordinates and tensors without gradients do not count.

A row of ``live`` holds one bit per element of a block. Row 0 is all ones, row 1 all zeros; blocks
of those two kinds need no row of their own, so that the table stays small unless masks are used.
Kernels take the unmasked path where ``live_row`` is 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import FlatLayout

FULL_ROW = 0
EMPTY_ROW = 1
SPREAD = 0x0102040810204080  # multiplied by eight 0/1 bytes, its top byte is their bits, LSB first


class LiveTable(NamedTuple):
    """The active mask of a layout.

    Attributes:
        bits: uint8 [rows, block_size / 8], LSB first.
        row: int32 [n_blocks], each block's row in ``bits``.
        numel: int32 [n_blocks], live elements of each block.
    """

    bits: Tensor
    row: Tensor
    numel: Tensor

    def to(self, device: torch.device) -> LiveTable:
        """Returns a copy on ``device``."""
        return LiveTable(*(tensor.to(device) for tensor in self))


def live_table(
    layout: FlatLayout,
    masks: Mapping[int, Tensor] | None = None,
    excluded: Collection[int] = (),
) -> LiveTable:
    """Builds the active mask.

    Args:
        layout: The flat index space.
        masks: For some tensors, bool [size] in memory order; False keeps a coordinate still.
        excluded: Tensors that take no part at all.

    Raises:
        ValueError: if a mask's length is not that of its tensor.
    """
    block = layout.block_size
    patterns = [torch.ones(1, block, dtype=torch.bool), torch.zeros(1, block, dtype=torch.bool)]
    rows = len(patterns)
    row_of_tail: dict[int, int] = {0: FULL_ROW}
    row = torch.full((layout.n_blocks,), EMPTY_ROW, dtype=torch.int32)
    for tensor, size in enumerate(layout.sizes):
        first, end = layout.first_block[tensor : tensor + 2]
        if tensor in excluded or first == end:
            continue
        mask = (masks or {}).get(tensor)
        if mask is None:
            row[first:end] = FULL_ROW
            tail = size % block
            if tail not in row_of_tail:
                row_of_tail[tail] = rows
                patterns.append(torch.arange(block)[None] < tail)
                rows += 1
            row[end - 1] = row_of_tail[tail]
        else:
            if mask.numel() != size:
                raise ValueError(f"mask of tensor {tensor} must have {size} elements, got {mask.numel()}")
            row[first:end], pattern = _rows_of_mask(mask, end - first, block, rows)
            patterns.append(pattern)
            rows += len(pattern)
    numel = torch.cat([pattern.sum(1, dtype=torch.int32) for pattern in patterns])
    return LiveTable(torch.cat([_pack_rows(pattern) for pattern in patterns]), row, numel[row.long()])


def _rows_of_mask(mask: Tensor, blocks: int, block: int, rows: int) -> tuple[Tensor, Tensor]:
    """Each block's row, int32, where those from ``rows`` on are new; and the new ones, bool [new, block].

    No Python object per block: a mask may have as many elements as the largest tensor.
    """
    padded = torch.zeros(blocks * block, dtype=torch.bool)
    padded[: mask.numel()] = mask.reshape(-1).cpu()
    pattern = padded.view(blocks, block)
    empty = (~pattern.any(1)).nonzero().flatten()
    own = ~pattern.all(1)
    own[empty[1:]] = False  # they share the first one's; not EMPTY_ROW, where kernels leave everything as it was
    row = torch.full((blocks,), FULL_ROW, dtype=torch.int32)
    row[own] = torch.arange(rows, rows + int(own.sum()), dtype=torch.int32)
    row[empty] = row[empty[:1]]
    return row, pattern[own]


def _pack_rows(rows: Tensor) -> Tensor:
    """uint8 [n, block / 8] from bool [n, block], LSB first; a byte is the top one of a product."""
    return ((rows.contiguous().view(torch.int64) * SPREAD) >> 56).to(torch.uint8)
