"""Some of an optimizer's parameters, which lie one behind the other: an index space within the flat one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, overload

from torch import Tensor

from ..triton_kernels import FlatLayout, LiveTable
from ..triton_kernels.nouns import Places
from ..triton_kernels.tables import tables_of
from .frame import Frame

T = TypeVar("T")


class Members:
    """Parameters ``which`` of a frame's.

    Attributes:
        which: Their numbers.
        layout: Theirs alone, in one chunk.
        live: Which of its elements count.
        places: Where they lie in it.
        elements: Their range of the whole index space.
    """

    def __init__(self, frame: Frame, which: range) -> None:
        whole = frame.layout
        self._frame, self.which, self._slice = frame, which, slice(which.start, which.stop)
        self.layout = FlatLayout(whole.sizes[self._slice], 1, whole.block_size)
        first = whole.first_block[which.start]
        blocks = slice(first, first + self.layout.n_blocks)
        self.elements = slice(blocks.start * whole.block_size, blocks.stop * whole.block_size)
        self.live = LiveTable(frame.live.bits, frame.live.row[blocks], frame.live.numel[blocks])
        self._tables = tables_of(self.layout, frame.device)  # kept, because launches share what somebody keeps
        self.places = Places.of(self.layout, self._tables.tensor, self.live)

    @overload
    def of(self, each: Tensor) -> Tensor: ...

    @overload
    def of(self, each: Sequence[T]) -> Sequence[T]: ...

    def of(self, each: Tensor | Sequence[T]) -> Tensor | Sequence[T]:
        """Return what they have of something that there is for each parameter."""
        return each[self._slice]

    @property
    def dense(self) -> Sequence[Tensor]:
        """Return them as ops write them."""
        return self._frame.parameters.dense[self._slice]

    @property
    def correction(self) -> Tensor | None:
        """Return what they lack of their masters, as ops write it."""
        table = self._frame.parameters.corrections.table
        return None if table is None else table[self.elements]

    @property
    def missing(self) -> tuple[int, ...]:
        """Return those of which this rank has no gradient, counted from the first."""
        return tuple(i - self.which.start for i in self._frame.missing if i in self.which)
