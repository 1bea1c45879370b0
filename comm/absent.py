"""Leaves tensors of which no rank has a gradient as they are.

Each message has a bit for each tensor, 1 where its sender has no gradient of it. Where all ranks say so, the tensor
must stay as it is, which is known only when messages have arrived. So a rank keeps what it has of tensors without
a gradient before anything writes it, and puts it back afterwards. A rank that has all gradients knows that there is
no such tensor, and does nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout
from ..triton_kernels.headers import Flag


class Absence(NamedTuple):
    """Names tensors without a gradient, on the device."""

    bits: Tensor
    """One for each tensor, packed: uint8 [bytes]."""
    rows: Tensor
    """Their blocks: int64 [n]."""
    pinned: tuple[Tensor, ...]
    """From where the two are uploaded."""


_captured: list[Absence] = []  # CUDA graphs read these again whenever they are replayed


def absence(layout: FlatLayout, absent: Sequence[int], device: torch.device, blocks: slice | None = None) -> Absence:
    """Return the tables of ``absent`` tensors; they are uploaded only where they are others than the last times.

    Where only some ``blocks`` are meant, rows count from the first of them.
    """
    first, last, _ = (blocks or slice(None)).indices(layout.n_blocks)
    what = (layout, tuple(absent), device, first, last)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return _absence(*what)
    # What is uploaded within a graph is there only when that is replayed: for nobody else.
    _captured.append(_absence.__wrapped__(*what))
    return _captured[-1]


@lru_cache(maxsize=64)
def _absence(layout: FlatLayout, absent: tuple[int, ...], device: torch.device, first: int, last: int) -> Absence:
    chosen = torch.zeros(-(-len(layout.sizes) // 8) * 8, dtype=torch.bool)
    chosen[list(absent)] = True
    spans = [(max(layout.first_block[i], first), min(layout.first_block[i + 1], last)) for i in absent]
    rows = [torch.arange(start, stop) - first for start, stop in spans if start < stop]
    bits, blocks = packed(chosen), torch.cat([torch.zeros(0, dtype=torch.int64), *rows])
    if device.type == "cuda":
        bits, blocks = bits.pin_memory(), blocks.pin_memory()
    return Absence(bits.to(device, non_blocking=True), blocks.to(device, non_blocking=True), (bits, blocks))


def packed(chosen: Tensor) -> Tensor:
    """Pack bits, LSB first: uint8 [n / 8], from bool [n]; n is padded to whole bytes."""
    chosen = torch.nn.functional.pad(chosen, (0, -len(chosen) % 8))
    weights = 1 << torch.arange(8, device=chosen.device)
    return (chosen.view(-1, 8) * weights).sum(1).to(torch.uint8)


def absent_on_all(arrived: Tensor, tensors: int, flags: Tensor) -> Tensor:
    """Return which tensors have no gradient in any message: bool [tensors], from uint8 [messages, bytes].

    Where ``flags`` int32 [1] say that messages can't be read no bit counts.
    """
    bits = arrived[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=arrived.device) & 1
    all_say = bits.view(len(arrived), -1)[:, :tensors].bool().all(0)
    return all_say & ((flags & int(Flag.MISMATCH)) == 0)


class Backup:
    """Keeps some blocks; ``restore`` puts back what belongs to tensors that no rank has a gradient of.

    Args:
        rows: The blocks, int64 [n].
        block_tensor: Each block's tensor, int32 [B].
        elements: Values of elements, of B blocks each; of these only ``rows`` are kept.
        bits: Planes of bits, uint8 [chunks, bytes], or [chunks, 2, bytes] where ternary; as the elements.
        tables: Values of blocks, [..., B]; kept whole.
    """

    def __init__(
        self,
        rows: Tensor,
        block_tensor: Tensor,
        elements: Sequence[Tensor] = (),
        *,
        bits: Sequence[Tensor] = (),
        tables: Sequence[Tensor] = (),
    ) -> None:
        self._rows, self._block_tensor = rows, block_tensor
        blocks = len(block_tensor)
        places: list[tuple[Tensor, tuple[Tensor, ...]]] = [(each.view(blocks, -1), (rows,)) for each in elements]
        for plane in bits:
            chunks = len(plane)
            per_chunk = blocks // chunks
            by_block = plane.view(chunks, plane.shape[1:-1].numel(), per_chunk, -1).transpose(1, 2)
            places.append((by_block, (rows // per_chunk, rows % per_chunk)))
        self._places = [(values, where, values[where]) for values, where in places]
        self._tables = [(table, table.clone()) for table in tables]

    def restore(self, absent: Tensor) -> None:
        """Put back what belongs to tensors that are ``absent`` bool [tensors]."""
        blocks = absent[self._block_tensor]
        still = blocks[self._rows]
        for values, where, before in self._places:
            chosen = still.view(-1, *[1] * (before.dim() - 1))
            values[where] = torch.where(chosen, before, values[where])
        for table, before in self._tables:
            table.copy_(torch.where(blocks, before, table))
