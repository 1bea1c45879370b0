"""Blocks of a line that share a scale: none reaches over the end of a tensor, or of a server's part of the line."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .bits import as_bytes


class Blocks:
    """Cuts lines [..., n] into chunks of W servers, and these into blocks, of which a tensor's last may be shorter.

    Args:
        numels: Elements of each tensor in the line.
        workers: W.
        largest: Elements of a block at most; None: as many as a tensor has.

    Attributes:
        chunk: Elements of a chunk; zeros fill up the last one.
        of: Which of its chunk's blocks each element is in, int64 [W, chunk].
        count: Blocks of the chunk that has most, and so scales that each message has room for.
        unused: Bytes of scales in a message to each server that no element has: they need not travel.
    """

    def __init__(self, numels: Sequence[int], workers: int, largest: int | None = None) -> None:
        pieces = [torch.arange(numel) // (largest or numel) for numel in numels]
        starts = torch.cat([piece.diff(prepend=torch.tensor([-1])) for piece in pieces])
        self.numel, self.workers = len(starts), workers
        self.chunk = -(-self.numel // workers)
        padded = torch.nn.functional.pad(starts.cumsum(0), (0, workers * self.chunk - self.numel)).view(workers, -1)
        self.of = (padded.diff(dim=-1, prepend=padded[:, :1]) != 0).long().cumsum(-1)
        self.count = int(self.of.max()) + 1
        used = sum(len(chunk[chunk > 0].unique()) for chunk in padded)  # what fills the line up is block 0
        self.unused = 4 * (workers * self.count - used)

    def cut(self, lines: Tensor) -> Tensor:
        """Return lines [..., n] as chunks [..., W, chunk]."""
        missing = self.workers * self.chunk - self.numel
        return torch.nn.functional.pad(lines, (0, missing)).unflatten(-1, (self.workers, self.chunk))

    def join(self, chunks: Tensor) -> Tensor:
        """Return the lines [..., n] of chunks."""
        return chunks.flatten(-2)[..., : self.numel]

    def reduce(self, chunks: Tensor, how: str) -> Tensor:
        """Return the "sum" or the "amax" of each block of chunks [..., W, chunk] of magnitudes: [..., W, count]."""
        empty = chunks.new_zeros(*chunks.shape[:-1], self.count)
        return empty.scatter_reduce_(-1, self.of.expand(chunks.shape), chunks, how)

    def spread(self, scales: Tensor) -> Tensor:
        """Return scales [..., W, count] by element: [..., W, chunk]."""
        return scales.gather(-1, self.of.expand(*scales.shape[:-1], self.chunk))

    def message(self, packed: Tensor, scales: Tensor) -> Tensor:
        """Return messages: packed uint8 [..., W, bytes], and behind them scales [..., W, count] in float32."""
        return torch.cat([packed, as_bytes(scales.float())], -1)

    def parts(self, message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what is packed in messages, and their scales by element."""
        packed, scales = message.split([message.shape[-1] - 4 * self.count, 4 * self.count], -1)
        return packed, self.spread(scales.contiguous().view(torch.float32).to(dtype))
