"""Reduces in two levels: floats inside a node, where the network is fast, bits between nodes.

    inside a node   1. reduce-scatter: each rank gets one part of the node's mean gradient, float32 or bfloat16
    between nodes   2. ranks with the same part average its momentum at one bit per element (``CompressedAllReduce``)
    inside a node   3. all-gather of the parts' messages: bits and scales, not floats

Between nodes each rank sends a share of what it would without levels, as many as a node has ranks; the
algorithm is that of one worker per node, with scales of its own for each part. Rounds go the same way: each rank
keeps moments and compensation of its part alone, and in step 3 signs are gathered, or a round's floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout, LiveTable
from .absent import Kept, absence, told_by_all
from .buckets import PartedAllReduce
from .message import CHECKED, OUT_OF_STEP, Flag, Messages, Word, union
from .partition import NodePart
from .reducer import Compress, Reducer, Told
from .rounds import RoundAllReduce
from .transport import Transport

ANY = torch.finfo(torch.float32).max
"""What drops out are not elements of a rank's gradients, but those of a node's means."""

Make = Callable[[FlatLayout, Transport, LiveTable], RoundAllReduce]

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
    largest_gradient = ANY

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
        self._keep(told)
        part, before = self.parts[0], self.scale.clone()
        part.served.words[:, Word.TAG] = told.tag  # ranks of a node meet nowhere else
        part.synchronise(compress, told)
        self._part.forget()
        self.inside.all_gather(self.gathered.buffer.view(self.count, -1), part.gathered.buffer.view(1, -1))
        differ = (self._signed() != self._signed()[:1]).any()
        flags = union(self.gathered.words[:, Word.FLAGS]) | (differ * int(Flag.MISMATCH)).to(torch.int32)
        part.refuse(flags)
        arrived = torch.gather(self.gathered.scales, 1, self._slot).view(-1)
        kept = torch.where(flags == 0, arrived, 0.0)
        self.scale.copy_(kept if told.hold is None else torch.where(told.hold == 0, kept, before))
        self.flags = flags
        told_by = self.gathered.absent, len(self.layout.sizes)
        self.absent = told_by_all(*told_by, flags) if told.missing else None

    def _keep(self, told: Told) -> None:
        """Keep the bits and the scales of the whole result, as parts keep theirs."""
        self._kept: Kept | None = None
        if told.missing:
            rows = absence(self.layout, told.missing, self.device).rows
            self._kept = Kept(rows, self.block_tensor, bits=[self.gathered.bits], tables=[self.scale])

    def restore(self, absent: Tensor) -> None:
        super().restore(absent)
        if self._kept is not None:
            self._kept.restore(absent)
        self._kept = None

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


class HierarchicalRounds(Reducer):
    """A ``RoundAllReduce`` whose workers are nodes; has what an optimizer needs of one, under the same names.

    Args:
        layout: The whole line; its ``world_size`` is that of both transports, multiplied.
        between: The ranks of all nodes that have the same place in theirs.
        inside: The ranks of this node.
        make: Makes the ``RoundAllReduce`` of a part of the line, over a transport.
        live: Which elements count.
        dtype: In which gradients travel inside: float32 or bfloat16.

    Attributes:
        here: That of the part which is here.
        messages: Those of all parts; after a 1-bit round their bits are the signs of the global update.
        scale: As of ``RoundAllReduce``, for all parts; so are the next two.
        values: The global update where it is no signs.
        flags: Of the last round.
        compensated: float32 [P]; zero where other ranks have it.
    """

    largest_gradient = ANY

    def __init__(
        self, layout: FlatLayout, between: Transport, inside: Transport, make: Make, live: LiveTable, dtype: torch.dtype
    ) -> None:
        self.layout, self.inside, self.live = layout, inside, live
        device = live.row.device
        self._part = NodePart(layout, inside, dtype, device)
        self.here = make(self._part.layout, between, self._part.live(live))
        self.compensated = torch.zeros(layout.numel, device=device)
        self.here.part, self.here.compensated = self._part, self.compensated[self._part.elements]
        self.messages = Messages(layout.world_size, 0, layout, device)
        self.scale = torch.zeros(layout.n_blocks, device=device)
        self.values: Tensor | None = None
        self.flags = torch.zeros(1, dtype=torch.int32, device=device)
        self._told = torch.zeros(inside.world_size, 3, dtype=torch.int32, device=device)

    def synchronise(self, compress: Compress, told: Told) -> None:
        here = self.here
        here.synchronise(compress, told)
        self._part.forget()
        # Ranks of a node meet nowhere else: they tell each other the round and the hyper-parameters as well.
        head = here.messages.head[0]
        own = torch.cat([head[Word.STEP :][:1], head[Word.TAG :][:1], here.flags, head[len(Word) :]])
        rows = own.new_empty(self.inside.world_size, len(own))
        self.inside.all_gather(rows, own[None])
        self._told = rows[:, :3]
        differ = (rows[:, :2] != own[:2]).any()
        self.flags = union(rows[:, 2]) | (differ * int(Flag.MISMATCH)).to(torch.int32)
        absent = rows[:, 3:].contiguous().view(torch.uint8)
        self.absent = told_by_all(absent, len(self.layout.sizes), self.flags) if told.missing else None
        here.refuse(self.flags)
        assert told.goes is not None
        self.scale = told.goes * (self.flags == 0)
        self.values = None if here.values is None else torch.empty_like(self.compensated)
        sent = here.messages.buffer if here.values is None else here.values
        gathered = self.messages.buffer if self.values is None else self.values
        self.inside.all_gather(gathered.view(self.inside.world_size, -1), sent.view(1, -1))

    def __getattr__(self, name: str) -> Any:
        """Look up in the part what is its alone: counts, ``restore``, ``settle`` and the like."""
        if name == "here":  # before it was made
            raise AttributeError(name)
        return getattr(self.here, name)

    def restore(self, absent: Tensor) -> None:
        self.here.restore(absent)

    def settle(self) -> None:
        self.here.settle()

    @property
    def bits(self) -> Tensor:
        return self.messages.bits

    def refuse(self, flags: Tensor) -> None:
        self.here.refuse(flags)
        self.flags = self.flags | flags
        self.scale = self.scale * (self.flags == 0)

    def result(self) -> Tensor:
        if self.values is not None:
            return self.values * (self.flags == 0)
        return super().result()

    def describe(self) -> str:
        step, tag = (self._told[:, :-1] != self._told[:1, :-1]).any(0).tolist()
        if step or tag:
            steps = f"number of steps ({OUT_OF_STEP})"
            return f"{steps if step else 'hyper-parameters'} on ranks of one node"
        return f"on some node: {self.here.describe()}"

    @property
    def wire_bytes(self) -> int:
        return self.here.wire_bytes + self._part.wire_bytes

    def state(self) -> list[Tensor]:
        return [self.compensated, self.scale, self.messages.buffer, *self.here.state()]
