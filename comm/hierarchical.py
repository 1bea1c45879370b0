"""The 1-bit all-reduce in two levels: floats inside a node, where the network is fast, bits between nodes.

    inside a node   1. reduce-scatter: each rank gets one part of the node's mean gradient, float32 or bfloat16
    between nodes   2. ranks with the same part average its momentum at one bit per element (``CompressedAllReduce``)
    inside a node   3. all-gather of the parts' messages: bits and scales, not floats

Between nodes each rank sends a share of what it would without levels, as many as a node has ranks; the
algorithm is that of one worker per node, with scales of its own for each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout
from .absent import Kept, absence, told_by_all
from .message import CHECKED, Flag, Word, union
from .partition import NodeMean, PartedAllReduce
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

    def __init__(
        self,
        layout: FlatLayout,
        between: Transport,
        inside: Transport,
        *,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__(layout, inside.world_size, [inside.rank], between, **options)
        self.between, self.inside = between, inside
        self._mean = NodeMean(layout, inside, dtype, self.device)
        self._own = self._mean.own

    def __call__(
        self,
        tensors: Sequence[Tensor],
        *,
        exp_avg_sq: Tensor | None = None,
        hold: Tensor | None = None,
        missing: Sequence[int] = (),
        **more: Any,
    ) -> None:
        """See ``CompressedAllReduce``."""
        self._keep(missing)
        part, before = self.parts[0], self.scale.clone()
        v = None if exp_avg_sq is None else exp_avg_sq[self._own]
        part.served.words[:, Word.TAG] = more.get("tag", 0)  # ranks of a node meet nowhere else
        part(self._mean(tensors), exp_avg_sq=v, hold=hold, missing=missing, **more)
        self.inside.all_gather(self.gathered.buffer.view(self.count, -1), part.gathered.buffer.view(1, -1))
        differ = (self._signed() != self._signed()[:1]).any()
        flags = union(self.gathered.words[:, Word.FLAGS]) | (differ * int(Flag.MISMATCH)).to(torch.int32)
        part.refuse(flags)
        arrived = torch.gather(self.gathered.scales, 1, self._slot).view(-1)
        kept = torch.where(flags == 0, arrived, 0.0)
        self.scale.copy_(kept if hold is None else torch.where(hold == 0, kept, before))
        self.flags = flags
        self.absent = None
        if missing:
            readable = (flags & int(Flag.MISMATCH)) == 0
            self.absent = told_by_all(self.gathered.absent, len(self.layout.sizes)) & readable

    def _keep(self, missing: Sequence[int]) -> None:
        """Keeps the bits and the scales of the whole result, as parts keep theirs."""
        self._kept: Kept | None = None
        if missing:
            rows = absence(self.layout, missing, self.device).rows
            self._kept = Kept(rows, self.block_tensor, bits=[self.gathered.bits], tables=[self.scale])

    def restore(self, absent: Tensor) -> None:
        """See ``CompressedAllReduce``."""
        super().restore(absent)
        if self._kept is not None:
            self._kept.restore(absent)
        self._kept = None

    def _signed(self) -> Tensor:
        """What all parts' messages must say alike: int32 [ranks, 2], rank by rank."""
        words = self.gathered.words.view(self.count, self.between.world_size, -1)
        # By number: a list of them would be uploaded as an index in every step, and waited for.
        return torch.stack([words[..., word] for word in _ALIKE], -1).transpose(0, 1).reshape(-1, len(_ALIKE))

    @property
    def arrived_words(self) -> Tensor:
        """The headers of this rank's part if they differ, by node, else of all ranks; reads from the device."""
        words = super().arrived_words
        if bool((words[:, :CHECKED] != words[:1, :CHECKED]).any()):
            return words
        told = words[:1].repeat(self.layout.world_size, 1)
        for column, word in enumerate(_ALIKE):
            told[:, word] = self._signed()[:, column]
        return told

    def clear_elsewhere(self) -> None:
        """Drops what ``compensated`` holds of the other ranks' parts."""
        self._compensated[: self._own.start].zero_()
        self._compensated[self._own.stop :].zero_()

    @property
    def worker_residual(self) -> Tensor:
        """The node's c of the part that is here: float32 [P / ranks of a node]."""
        return self._compensated[self._own]

    def serve_again(self) -> None:
        """See ``CompressedAllReduce``; the bits of all parts were loaded."""
        part, chunks = self.parts[0], self.between.world_size
        first = self.inside.rank * chunks
        part.gathered.bits.copy_(self.gathered.bits[first : first + chunks])
        part.serve_again()

    def take_residuals(self, out: Tensor) -> None:
        """See ``CompressedAllReduce``; by one all-reduce between nodes, and one all-gather inside."""
        own = torch.empty(self.layout.numel // self.count, device=self.device)
        self.parts[0].take_residuals(own)
        self.inside.all_gather(out.view(self.count, -1), own.view(1, -1))

    @property
    def wire_bytes(self) -> int:
        """Bytes of what only serves within a step."""
        return super().wire_bytes + sum(tensor.nbytes for tensor in self._mean.scratch)
