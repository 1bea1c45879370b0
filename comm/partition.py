"""Divides the flat index space: into buckets, or into what each rank of a node reduces for all of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..triton_kernels import LARGEST_GRADIENT, TAIL, FlatLayout, LiveTable, flatten
from ..triton_kernels.nouns import Preconditioner
from ..triton_kernels.tables import tables_of
from .transport import LocalTransport, Transport


class Section:
    """Describes a range of the flat index space: all of it, or one of ``count`` equal ranges.

    Args:
        whole: The layout of the whole index space, with as many chunks as all parts have.
        index: Which range.
        count: Of how many.
        inside: See below; None: this rank alone.

    Attributes:
        layout: Of the part alone.
        elements: Its range of the index space.
        blocks: Which blocks it has.
        chunks: Which chunks.
        inside: The ranks of a node, each of which has a part; without nodes this rank alone.
        largest_gradient: See ``Reducer``.
        wire_bytes: Bytes of what only serves within a step.
    """

    largest_gradient = LARGEST_GRADIENT
    wire_bytes = 0

    def __init__(self, whole: FlatLayout, index: int = 0, count: int = 1, inside: Transport | None = None) -> None:
        self.whole = whole
        self.inside: Transport = LocalTransport() if inside is None else inside
        self.layout = whole if count == 1 else whole.part(index, count)
        self.elements, self.blocks, self.chunks = (
            slice(index * n // count, (index + 1) * n // count) for n in (whole.numel, whole.n_blocks, whole.world_size)
        )
        self._spans = list(whole.spans(self.elements.start, self.elements.stop))

    def pieces(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what of each tensor lies here, flat, in memory order, as views; an empty one where nothing does."""
        if self.layout is self.whole:
            return tensors
        pieces = [tensors[0].new_empty(0)] * len(self.whole.sizes)
        for tensor, start, stop, _ in self._spans:
            given = tensors[tensor]
            if given.numel() and stop - start < self.whole.sizes[tensor]:
                given = given.as_strided((stop - start,), (1,), given.storage_offset() + start)
            pieces[tensor] = given
        return pieces

    gradients = pieces
    """What is compressed here of the gradients."""

    def of_variance(self, whole: Preconditioner | None) -> Preconditioner | None:
        """Return what of a variance lies here."""
        if whole is None or self.layout is self.whole:
            return whole
        exponents = None if whole.exponents is None else whole.exponents[self.blocks]
        return whole._replace(numbers=whole.numbers[self.elements], exponents=exponents)

    def forget(self) -> None:
        """Forget the last gradients' mean: the next ones are averaged anew."""

    def live(self, live: LiveTable) -> LiveTable:
        """Return which elements of the part count, of those of the whole."""
        return LiveTable(live.bits, live.row[self.blocks], live.numel[self.blocks])


class NodeSection(Section):
    """Describes what one rank of a node reduces for all of its ranks: the node's mean gradients, by a reduce-scatter.

    Args:
        whole: The layout of the whole index space.
        inside: The ranks of this node.
        dtype: In which gradients travel: float32 or bfloat16.
        device: Where they lie.
    """

    largest_gradient = torch.finfo(torch.float32).max  # what drops out are elements of means, which may be larger

    def __init__(self, whole: FlatLayout, inside: Transport, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(whole, inside.rank, inside.world_size, inside)
        self._launch_tables = tables_of(whole, device)  # kept: launches of others share it meanwhile
        self._flat = torch.zeros(whole.numel + TAIL, device=device)
        self._sent = torch.zeros(whole.numel if dtype != torch.float32 else 0, dtype=dtype, device=device)
        self._arrived = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        self._means: list[Tensor] | None = None
        self.wire_bytes = self._flat.nbytes + self._sent.nbytes + self._arrived.nbytes

    def gradients(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what of each tensor's mean over the node lies here; of one step, until ``forget``."""
        if self._means is None:
            self._average(tensors)
            self._means = [self._arrived[:0]] * len(self.whole.sizes)
            for tensor, start, stop, flat in self._spans:
                at = flat - self.elements.start
                self._means[tensor] = self._arrived[at : at + stop - start]
        return self._means

    def _average(self, tensors: Sequence[Tensor]) -> None:
        whole, sent = self.whole, self._flat[: self.whole.numel]
        flatten(tensors, whole.sizes, whole.block_size, 1.0 / self.inside.world_size, None, self._flat)
        if self._sent.numel():
            sent = self._sent.copy_(sent)
        self.inside.reduce_scatter(self._arrived, sent)

    def forget(self) -> None:
        self._means = None
