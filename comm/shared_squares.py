"""Averages squares that workers keep of their own gradients, and projections of these: alltoall, mean, allgather.

Two collectives, as for bits: each rank averages its chunk, on which all others' then agree. A row is a chunk's
logarithms, the octave of each of its blocks, and numbers: projections on the way to servers, sums of blocks back.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout, average_squares, tell_squares
from ..triton_kernels.codes import keep_nearest
from ..triton_kernels.nouns import Codes, Places, Stored
from ..triton_kernels.projections import Projections
from ..triton_kernels.renewal import SUMS
from ..triton_kernels.squares import PEAKS
from .message import ALIGNMENT
from .partition import Section
from .shards import ShardGroup
from .transport import Transport


class Looks(NamedTuple):
    """Uses of gradients besides their compression, for renewals of a variance."""

    updates: Tensor | None = None
    """How many are done, int64 [], of which random signs and rounding are a function; None: nobody follows squares."""
    factor: Tensor | None = None
    """What gradients are multiplied with before: float32 [1]; None: nothing."""
    tells: bool = False
    """Whether squares are told in this step."""


NOWHERE = Looks()


class Unit(NamedTuple):
    """Denominators of coordinates before and after a renewal of their variance."""

    coef: Tensor
    """float32 [tensors, columns of ``Coef``]."""
    factors: Tensor
    """float32 [3, tensors], as ``renew_levels`` writes it."""
    divides: bool
    """Whether what is compressed is divided by the variance's root: else only that is renewed."""
    kept: Stored | None
    """Codes [P] where the mean squares are kept, of which v is made from now on; None: v stays as it is stored."""

    def keep(self, means: Codes, part: Section) -> None:
        """Keep the mean squares of a part of the index space, if they are to be."""
        if self.kept is not None and self.kept.exponents is not None:
            self.kept.numbers[part.elements].view(means.numbers.shape).copy_(means.numbers)
            self.kept.exponents[part.blocks].view(means.exponents.shape).copy_(means.exponents)


class Rows:
    """Has room for what is told of ``count`` chunks of a layout, each a row of one message.

    Args:
        layout: Whose chunks they are.
        count: How many.
        numbers: float32 numbers of each.
        device: Where they lie.

    Attributes:
        buffer: uint8 [count, width].
    """

    def __init__(self, layout: FlatLayout, count: int, numbers: int, device: torch.device) -> None:
        self._elements, self._blocks = layout.chunk_numel, layout.blocks_per_chunk
        self._first = -(-(self._elements + self._blocks) // ALIGNMENT) * ALIGNMENT
        self._behind = self._first + 4 * numbers
        width = -(-self._behind // ALIGNMENT) * ALIGNMENT
        self.buffer = torch.empty(count, width, dtype=torch.uint8, device=device)

    def like(self, buffer: Tensor) -> Rows:
        """Return rows as wide as these that lie in ``buffer``."""
        other = copy(self)
        other.buffer = buffer
        return other

    @property
    def codes(self) -> Codes:
        """Return elements' logarithms, and the exponents of blocks', a row for each chunk."""
        return Codes(*self.buffer[:, : self._elements + self._blocks].split([self._elements, self._blocks], 1))

    @property
    def numbers(self) -> Tensor:
        """Return the numbers, float32 [count, numbers]."""
        return self.buffer[:, self._first : self._behind].view(torch.float32)

    @property
    def projections(self) -> Tensor:
        """Return the numbers before ``peaks``, float32 [count, projections]."""
        return self.numbers[:, : -PEAKS * self._blocks]

    @property
    def peaks(self) -> Tensor:
        """Return the last numbers, float32 [count, 2, blocks], see ``tell_squares``."""
        return self.numbers[:, -PEAKS * self._blocks :].view(-1, PEAKS, self._blocks)

    @property
    def sums(self) -> Tensor:
        """Return servers' sums, float32 [count, 5, blocks], see ``average_squares``."""
        return self.numbers.view(-1, SUMS, self._blocks)


def by_tensor(sums: Tensor, first_block: Tensor, ranks: ShardGroup) -> tuple[Tensor, Tensor]:
    """Return sums of whole tensors as if each were a block of one chunk, float64 [1, 5, tensors], and their places.

    Args:
        sums: float32 [chunks, 5, blocks], of those blocks that are here.
        first_block: int32 [tensors + 1], where each tensor's begin.
        ranks: Who has the others.
    """
    tensors = len(first_block) - 1
    rows = sums.transpose(1, 2).reshape(-1, SUMS).double()
    whole = torch.segment_reduce(rows, "sum", offsets=first_block.long(), unsafe=True, initial=0.0)
    places = torch.arange(tensors + 1, dtype=torch.int32, device=sums.device)
    return ranks.sum(whole.T.reshape(1, SUMS, tensors)), places


class SharedSquares:
    """Tells other ranks of this one's squares, and hears of theirs; has memory for both only meanwhile.

    Args:
        layout: The flat index space, with a chunk for each rank.
        rank: Of this one, which averages the chunk of that number.
        device: Where everything lies.
        stored: The EMA of the squares of this rank's own gradients, [P].

    Attributes:
        stored: As given.
        sent: What this rank tells, a row for each server.
        served: What it tells of the chunk that it averages.
        means: The mean of what all tell, a row from each server, equal on all ranks.
    """

    sent: Rows
    served: Rows
    means: Rows

    def __init__(self, layout: FlatLayout, rank: int, device: torch.device, stored: Stored) -> None:
        self.stored = stored
        self._layout, self._device, self._projections = layout, device, Projections.of(layout).to(device)
        self._own = slice(rank * layout.blocks_per_chunk, (rank + 1) * layout.blocks_per_chunk)

    def follow(self, squares: Tensor) -> None:
        """Go on from ``squares``, float32 [P]."""
        keep_nearest(squares, *self.stored, signed=False)

    def tell(self, grads: Sequence[Tensor], looks: Looks, first_block: int, places: Places) -> None:
        """Write what is sent: arguments as of ``tell_squares``."""
        layout, projections = self._layout, self._projections
        assert looks.updates is not None
        numbers = projections.width + PEAKS * layout.blocks_per_chunk
        self.sent = sent = Rows(layout, layout.world_size, numbers, self._device)
        self._places = places.at(self._own)
        looked = grads, places, self.stored, looks.factor, looks.updates, first_block
        tell_squares(*looked, projections.share, projections.place, sent.codes, sent.projections, sent.peaks)

    def average(self, arrived: Rows) -> None:
        """Average this rank's chunk, of rows from all ranks."""
        layout, projections, own = self._layout, self._projections, self._own
        self.served = served = Rows(layout, 1, SUMS * layout.blocks_per_chunk, self._device)
        told = arrived.codes, arrived.projections, arrived.peaks, projections.share[own], projections.place[own]
        average_squares(self._places, *told, served.codes, served.sums[0])

    def exchange(self, transport: Transport) -> None:
        """Average what all ranks tell.

        Raises:
            CollectiveError: if a collective fails.
        """
        arrived = self.sent.like(torch.empty_like(self.sent.buffer))
        transport.all_to_all(arrived.buffer, self.sent.buffer)
        del self.sent
        self.average(arrived)
        del arrived
        gathered = self.served.buffer.new_empty(transport.world_size, self.served.buffer.shape[1])
        transport.all_gather(gathered, self.served.buffer)
        self.hear(gathered)

    def hear(self, gathered: Tensor) -> None:
        """Take what all servers tell, uint8 [W, width]."""
        self.means = self.served.like(gathered)
        del self.served

    def forget(self) -> None:
        """Give the memory of ``means`` back."""
        vars(self).pop("means", None)

    @property
    def held_bytes(self) -> int:
        """Return how many bytes ``means`` are: those that wait for a renewal."""
        return self.means.buffer.nbytes if "means" in vars(self) else 0
