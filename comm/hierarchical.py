"""Reduces in two levels: floats inside a node, where the network is fast, bits between nodes.

    inside a node   1. reduce-scatter: each rank gets one part of the node's mean gradient, float32 or bfloat16
    between nodes   2. ranks with the same part average its momentum at one bit per element (``CompressedAllReduce``)
    inside a node   3. all-gather of the parts' messages: bits and scales, not floats

Between nodes each rank sends a share of what it would without levels, as many as a node has ranks; the
algorithm is that of one worker per node, with scales of its own for each part. Rounds (``RoundAllReduce``, on a
``NodePart``) go the same way: each rank keeps moments and compensation of its part alone, and in step 3 signs are
gathered, or floats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout
from .absent import Kept, absence, told_by_all
from .buckets import PartedAllReduce
from .message import CHECKED, Word, union
from .partition import NodePart
from .reducer import Compress, Told
from .transport import Transport

_ALIKE = (Word.STEP, Word.TAG)


class HierarchicalAllReduce(PartedAllReduce):
    """A ``CompressedAllReduce`` whose workers are nodes.

    Args:
        layout: The whole line; its ``world_size`` is that of both transports, multiplied.
        between: The ranks of all nodes that have the same place in theirs.
        inside: The ranks of this node.
        dtype: In which gradients travel inside: float32 or bfloat16.
        options: See ``CompressedAllReduce``.
    """

    shares_messages = False  # what one rank of a node sends the others is not to lie where they put it
    largest_gradient = NodePart.largest_gradient

    def __init__(
        self,
        layout: FlatLayout,
        between: Transport,
        inside: Transport,
        *,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.between, self.inside = between, inside
        self._part = NodePart(layout, inside, dtype, options["device"])
        super().__init__(layout, inside.world_size, [self._part], between, **options)
        self._compensated = self.worker_residual
        self.worker_residual = self._compensated[self._part.elements]  # the node's

    def synchronise(self, compress: Compress, told: Told) -> None:
        self.kept = []
        if told.missing:  # the bits and the scales of the whole result, as parts keep theirs
            rows = absence(self.layout, told.missing, self.device).rows
            self.kept = [Kept(rows, self.block_tensor, bits=[self.gathered.bits], tables=[self.scale])]
        part, before = self.parts[0], self.scale.clone()
        part.served.words[:, Word.TAG] = told.tag  # ranks of a node meet nowhere else
        part.synchronise(compress, told)
        self._part.forget()
        self.inside.all_gather(self.gathered.buffer.view(self.count, -1), part.gathered.buffer.view(1, -1))
        signed = self._signed()
        flags = union(self.gathered.words[:, Word.FLAGS], signed != signed[:1])
        part.refuse(flags)
        arrived = torch.gather(self.gathered.scales, 1, self._slot).view(-1)
        kept = torch.where(flags == 0, arrived, 0.0)
        self.scale.copy_(kept if told.hold is None else torch.where(told.hold == 0, kept, before))
        self.flags = flags
        told_by = self.gathered.absent, len(self.layout.sizes)
        self.absent = told_by_all(*told_by, flags) if told.missing else None

    def _signed(self) -> Tensor:
        """Return what all parts' messages must say alike: int32 [ranks, 2], rank by rank."""
        words = self.gathered.words.view(self.count, self.between.world_size, -1)
        # By number: a list of them would be uploaded as an index in every step, and waited for.
        return torch.stack([words[..., word] for word in _ALIKE], -1).transpose(0, 1).reshape(-1, len(_ALIKE))

    def _disputed(self) -> Tensor:
        """Return the headers of this rank's part if they differ, by node, else of all ranks; reads from the device."""
        words = super()._disputed()
        if bool((words[:, :CHECKED] != words[:1, :CHECKED]).any()):
            return words
        told = words[:1].repeat(self.layout.world_size, 1)
        for column, word in enumerate(_ALIKE):
            told[:, word] = self._signed()[:, column]
        return told

    def begin(self) -> None:
        self._compensated[: self._part.elements.start].zero_()
        self._compensated[self._part.elements.stop :].zero_()

    def serve_again(self) -> None:
        part, chunks = self.parts[0], self.between.world_size
        first = self.inside.rank * chunks
        part.gathered.bits.copy_(self.gathered.bits[first : first + chunks])
        part.serve_again()

    def take_residuals(self, out: Tensor) -> None:
        own = torch.empty(self.layout.numel // self.count, device=self.device)
        self.parts[0].take_residuals(own)
        self.inside.all_gather(out.view(self.count, -1), own.view(1, -1))
