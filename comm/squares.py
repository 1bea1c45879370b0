"""Averages squares that workers keep of their own gradients, as logarithms of 8 bits: alltoall, mean, allgather.

Two collectives, as for bits: each rank averages its chunk, on which all others' then agree. A block's largest octave
travels beside its elements' logarithms, so that no rank needs to know how large another's squares are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout
from ..triton_kernels.squares import average_logs, encode
from .transport import Transport


class Logarithms:
    """Has room for the logarithms of ``chunks`` chunks of a layout, each a row of one message.

    Attributes:
        rows: uint8 [chunks, elements and blocks of a chunk].
    """

    def __init__(self, layout: FlatLayout, chunks: int, device: torch.device) -> None:
        self._layout, self._elements = layout, layout.chunk_numel
        width = layout.chunk_numel + layout.blocks_per_chunk
        self.rows = torch.empty(chunks, width, dtype=torch.uint8, device=device)

    @property
    def logs(self) -> Tensor:
        """Return those of elements, uint8 [chunks, elements]."""
        return self.rows[:, : self._elements]

    @property
    def tops(self) -> Tensor:
        """Return those of blocks, uint8 [chunks, blocks]."""
        return self.rows[:, self._elements :]

    def take(self, squares: Tensor) -> None:
        """Encode float32 [chunks * elements]."""
        for logs, tops, own in zip(self.logs, self.tops, squares.view(len(self.rows), -1), strict=True):
            encode(own, tops, logs)

    def mean(self, arrived: Tensor) -> None:
        """Encode the mean of one chunk's rows, uint8 [W, width], added in the order of ranks: the only chunk here."""
        elements = self._elements
        average_logs(arrived[:, :elements], arrived[:, elements:], self.tops[0], self.logs[0])


def average_squares(layout: FlatLayout, transport: Transport, squares: Tensor) -> Logarithms:
    """Return the mean over the ranks of ``squares`` float32 [P], equal on all ranks.

    Raises:
        CollectiveError: if a collective fails.
    """
    sent = Logarithms(layout, layout.world_size, squares.device)
    sent.take(squares)
    gathered, served = torch.empty_like(sent.rows), Logarithms(layout, 1, squares.device)
    transport.all_to_all(gathered, sent.rows)
    served.mean(gathered)
    transport.all_gather(sent.rows, served.rows)
    return sent
