"""Divides matrices among ranks: each lies whole with one of them, its owner, which alone orthogonalises it.

Messages have blocks of the flat index space in another order than that, an owner's one behind the other, and within
an owner's those of equal shapes, so that they make one batch::

    index space   [matrix 0      ][matrix 1 ][matrix 2      ][matrix 3 ]
    messages      [matrix 0      ][matrix 3 ]     [matrix 2      ][matrix 1 ]
                  '-------- rank 0 ---------'     '-------- rank 1 ---------'
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout

Shape = tuple[int, int]
"""Rows and columns of a matrix as it lies in memory."""


class Kind(NamedTuple):
    """What all matrices have in common that are orthogonalised at once."""

    shape: Shape
    stack: int = 1
    """Of how many matrices, one above the other, each is one."""

    @property
    def work(self) -> int:
        """Return what a step of Newton-Schulz costs on one, or on each of its stack: multiplications."""
        n, m = sorted((self.shape[0] // self.stack, self.shape[1]))
        return self.stack * (2 * m * n * n + n**3)


class Matrix(NamedTuple):
    """A matrix, or the rows of one that are here."""

    shape: Shape
    whole: Kind
    """What it is with all of its rows."""

    @classmethod
    def of(cls, shape: Shape, stack: int = 1) -> Matrix:
        """Return one that is here with all of its rows."""
        return cls(shape, Kind(shape, stack))


def divide(kinds: Sequence[Kind], world_size: int) -> list[list[int]]:
    """Give each matrix an owner: the costliest first, each to whoever has least so far.

    Args:
        kinds: Of matrices.
        world_size: W.

    Returns:
        Each owner's, those of equal kinds one behind the other.
    """
    owned: list[list[int]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for i in sorted(range(len(kinds)), key=lambda i: (-kinds[i].work, i)):
        least = min(range(world_size), key=lambda k: (load[k], k))
        owned[least].append(i)
        load[least] += kinds[i].work
    return [sorted(own, key=lambda i: (*kinds[i], i)) for own in owned]


class Batch(NamedTuple):
    """Matrices of one kind that a rank owns, one behind the other in its message."""

    shape: Shape
    number: int
    first: int
    """The first one's first element."""
    step: int
    """From one's first element to the next one's."""
    whole: Kind

    def of(self, elements: Tensor) -> Tensor:
        """View ``elements`` of a message as matrices [number, rows, columns]."""
        first = elements.storage_offset() + self.first
        return elements.as_strided((self.number, *self.shape), (self.step, self.shape[1], 1), first)


class Owners:
    """Says who owns which matrix, and where messages have it.

    Args:
        layout: The flat index space, of matrices alone.
        matrices: Each of them.
        world_size: W.
        device: Where tables lie.
        others: How many tensors messages speak of besides, behind the matrices.

    Attributes:
        owned: The matrices of each owner, in the order of its message.
        layout: Of the messages, one chunk each.
        slots: Scales in each message: one for all, then of each matrix those of its rows and of its columns.
        back: Of each block of the index space the message that has it, and which it is there: int64 [B] each.
        share: The largest owner's part of the work of all.
    """

    def __init__(
        self,
        layout: FlatLayout,
        matrices: Sequence[Matrix],
        world_size: int,
        device: torch.device,
        others: int = 0,
    ) -> None:
        self.shapes, self._kinds = [each.shape for each in matrices], [each.whole for each in matrices]
        self.owned, shapes = divide(self._kinds, world_size), self.shapes
        first, block = layout.first_block, layout.block_size
        blocks = [end - start for start, end in itertools.pairwise(first)]
        length = max(1, *(sum(blocks[i] for i in own) for own in self.owned))
        # As many tensors as messages speak of: each has a bit.
        self.layout = FlatLayout((world_size * length * block, *[0] * (len(shapes) + others - 1)), world_size, block)
        self.slots = 1 + max(sum(sum(shapes[i]) for i in own) for own in self.owned)
        loads = [sum(self._kinds[i].work for i in own) for own in self.owned]
        self.share = max(loads) / max(1, sum(loads))
        # Padding of messages comes from behind the last block: from one of zeros.
        self._from = torch.full((world_size * length,), layout.n_blocks, dtype=torch.int64)
        back = torch.zeros(2, layout.n_blocks, dtype=torch.int64)
        self._at, self._slot = [0] * len(shapes), [0] * len(shapes)
        for k, own in enumerate(self.owned):
            at, slot = k * length, 1
            for i in own:
                self._from[at : at + blocks[i]] = torch.arange(first[i], first[i + 1])
                back[0, first[i] : first[i + 1]] = k
                back[1, first[i] : first[i + 1]] = torch.arange(at, at + blocks[i]) - k * length
                self._at[i], self._slot[i] = (at - k * length) * block, slot
                at, slot = at + blocks[i], slot + sum(shapes[i])
        self._from, self.back = self._from.to(device), tuple(back.to(device))

    def batches(self, rank: int) -> list[Batch]:
        """Return the batches of one owner's matrices."""
        found = []
        for kind, group in itertools.groupby(self.owned[rank], lambda i: self._kinds[i]):
            own = list(group)
            step = self._at[own[1]] - self._at[own[0]] if len(own) > 1 else 0
            found.append(Batch(self.shapes[own[0]], len(own), self._at[own[0]], step, kind))
        return found

    def scales_at(self, width: int) -> Tensor:
        """Return where scales of each matrix begin, of rows and of columns, int64 [2, matrices].

        Args:
            width: Numbers from one message's scales to the next one's; 0: within a message.
        """
        owner = {i: k for k, own in enumerate(self.owned) for i in own}
        rows = [owner[i] * width + slot for i, slot in enumerate(self._slot)]
        return torch.tensor([rows, [at + shape[0] for at, shape in zip(rows, self.shapes, strict=True)]])

    def tensor_of_slot(self) -> Tensor:
        """Return whose scale each is, int64 [W, slots]; those of nobody count as the first matrix's."""
        owners = torch.zeros(len(self.owned), self.slots, dtype=torch.int64)
        for k, own in enumerate(self.owned):
            for i in own:
                owners[k, self._slot[i] : self._slot[i] + sum(self.shapes[i])] = i
        return owners

    def to_messages(self, blocks: Tensor) -> Tensor:
        """Return rows of the index space, [B + 1, ...], the last of zeros, in the order of messages."""
        return blocks.index_select(0, self._from)
