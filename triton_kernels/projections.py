"""Places projections of gradients on random signs: how many elements each is the sum of, and where it lies."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import FlatLayout

SHARE = 16
"""Elements of which a projection is the sum, in tensors with as many projections as are wanted."""

LEAST, MOST = 64, 2048
"""Projections of a tensor: fewer are sums of fewer elements, since their squares' sum is too noisy; more, of more."""


class Projections(NamedTuple):
    """Says where the projections of a layout's blocks lie, in a row for each chunk.

    Attributes:
        shares: Elements of which one is the sum, by tensor: a power of two, at most a block.
        share: The same by block, int32 [B]; of padding a block.
        place: Where each block's begin in the row of its chunk, int32 [B].
        width: Of a row, the longest chunk's.
    """

    shares: tuple[int, ...]
    share: Tensor
    place: Tensor
    width: int

    @classmethod
    def of(cls, layout: FlatLayout) -> Projections:
        """Place them."""
        few, many = (
            [1 << max(0, (size // wanted).bit_length() - 1) for size in layout.sizes] for wanted in (LEAST, MOST)
        )
        shares = tuple(min(layout.block_size, max(min(SHARE, f), m)) for f, m in zip(few, many, strict=True))
        share = torch.tensor([*shares, layout.block_size])[layout.block_tensor()]
        share[layout.first_block[-1] :] = layout.block_size
        counts = (layout.block_size // share).view(layout.world_size, -1)
        ends = counts.cumsum(1)
        place = (ends - counts).view(-1).int()
        return cls(shares, share.int(), place, int(ends[:, -1].max()))

    def to(self, device: torch.device) -> Projections:
        """Return the same with tables on ``device``."""
        return self._replace(share=self.share.to(device), place=self.place.to(device))
