"""Which elements count: padding, masked coordinates and tensors without gradients do not.

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


class LiveTable(NamedTuple):
    """Live elements of a layout.

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
    """Builds the table of live elements.

    Args:
        layout: The flat index space.
        masks: For some tensors, bool [size] in memory order; False keeps a coordinate still.
        excluded: Tensors that take no part at all.

    Raises:
        ValueError: if a mask's length is not that of its tensor.
    """
    block = layout.block_size
    rows = [torch.ones(block, dtype=torch.bool), torch.zeros(block, dtype=torch.bool)]
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
                row_of_tail[tail] = len(rows)
                rows.append(torch.arange(block) < tail)
            row[end - 1] = row_of_tail[tail]
        else:
            if mask.numel() != size:
                raise ValueError(f"mask of tensor {tensor} must have {size} elements, got {mask.numel()}")
            padded = torch.zeros((end - first) * block, dtype=torch.bool)
            padded[:size] = mask.reshape(-1).cpu()
            row[first:end] = torch.arange(len(rows), len(rows) + end - first, dtype=torch.int32)
            rows.extend(padded.view(-1, block))
    table = torch.stack(rows)
    return LiveTable(_pack_rows(table), row, table.sum(1, dtype=torch.int32)[row.long()])


def _pack_rows(rows: Tensor) -> Tensor:
    weights = 2 ** torch.arange(8)
    return (rows.view(len(rows), -1, 8) * weights).sum(2).to(torch.uint8)
