"""Rounds in two levels: floats inside a node, between nodes one global update of all nodes' updates.

As ``hierarchy`` does it for averaged momenta: each rank of a node gets one part of the node's mean
gradient, keeps moments and compensation of that part alone, and agrees on it with the ranks of the other
nodes that have it too; inside the node the parts' signs are gathered (after a round of full precision
floats).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout, LiveTable
from .absent import told_by_all
from .message import OUT_OF_STEP, Flag, Messages, Word, union
from .partition import NodeMean
from .rounds import Prepare, RoundAllReduce
from .transport import Transport

Make = Callable[[FlatLayout, Transport, LiveTable], RoundAllReduce]


class HierarchicalRounds:
    """A ``RoundAllReduce`` whose workers are nodes; has what an optimizer needs of one, under the same names.

    Args:
        layout: The whole line; its ``world_size`` is that of both transports, multiplied.
        between: The ranks of all nodes that have the same place in theirs.
        inside: The ranks of this node.
        make: Makes the ``RoundAllReduce`` of a part of the line, over a transport.
        live: Which elements count.
        dtype: In which gradients travel inside: float32 or bfloat16.

    Attributes:
        part: That of the part which is here.
        own: Where it lies on the line.
        messages: Those of all parts; after a 1-bit round their bits are the signs of the global update.
        scale: As of ``RoundAllReduce``, for all parts; so are the next two.
        values: The global update where it is no signs.
        flags: Of the last round.
        compensated: float32 [P]; zero where other ranks have it.
    """

    def __init__(
        self, layout: FlatLayout, between: Transport, inside: Transport, make: Make, live: LiveTable, dtype: torch.dtype
    ) -> None:
        self.layout, self.between, self.inside, self.live = layout, between, inside, live
        device = live.row.device
        self._mean = NodeMean(layout, inside, dtype, device)
        self.own, blocks = self._mean.own, self._mean.blocks
        part_live = LiveTable(live.bits, live.row[blocks], live.numel[blocks])
        self.part = make(layout.part(inside.rank, inside.world_size), between, part_live)
        self.compensated = torch.zeros(layout.numel, device=device)
        self.part.compensated = self.compensated[self.own]
        self.messages = Messages(layout.world_size, 0, layout, device)
        self.scale = torch.zeros(layout.n_blocks, device=device)
        self.values: Tensor | None = None
        self.flags = torch.zeros(1, dtype=torch.int32, device=device)
        self._blocks = blocks
        self._grads: list[Tensor] | None = None
        self._told = torch.zeros(inside.world_size, 3, dtype=torch.int32, device=device)
        self.absent: Tensor | None = None
        self._missing = False

    def add(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        chunks: slice,
        coef: Tensor,
        exp_avg: Tensor | None,
        exp_avg_sq: Tensor | None,
        *more: Any,
    ) -> None:
        """See ``RoundAllReduce``; all of a node's ranks average their gradients the first time in a round."""
        if self._grads is None:
            self._grads = self._mean(grads)
        m, v = (None if flat is None else flat[self.own] for flat in (exp_avg, exp_avg_sq))
        self.part.add(self._mean.pieces(params), self._grads, chunks, coef, m, v, *more)

    def keep(self, missing: Sequence[int], moments: Sequence[Tensor]) -> None:
        """See ``RoundAllReduce``."""
        self.part.keep(missing, [moment[self.own] for moment in moments])
        self._missing = bool(missing)

    def restore(self, absent: Tensor) -> None:
        """See ``RoundAllReduce``."""
        self.part.restore(absent)

    def synchronise(self, prepare: Prepare, step: Tensor, *, hold: Tensor | None = None, **more: Any) -> None:
        """See ``RoundAllReduce``."""
        part = self.part
        part.synchronise(prepare, step[self._blocks], hold=hold, **more)
        self._grads = None
        # Ranks of a node meet nowhere else: they tell each other the round and the hyper-parameters as well.
        head = part.messages.head[0]
        told = torch.cat([head[Word.STEP :][:1], head[Word.TAG :][:1], part.flags, head[len(Word) :]])
        rows = told.new_empty(self.inside.world_size, len(told))
        self.inside.all_gather(rows, told[None])
        self._told = rows[:, :3]
        differ = (rows[:, :2] != told[:2]).any()
        self.flags = union(rows[:, 2]) | (differ * int(Flag.MISMATCH)).to(torch.int32)
        self.absent = None
        if self._missing:
            readable = (self.flags & int(Flag.MISMATCH)) == 0
            absent = rows[:, 3:].contiguous().view(torch.uint8)
            self.absent = told_by_all(absent, len(self.layout.sizes)) & readable
        part.refuse(self.flags)
        self.scale = step * (self.flags == 0)
        if part.values is None:
            self.values = None
            sent, gathered = part.messages.buffer, self.messages.buffer
        else:
            self.values = torch.empty_like(self.compensated)
            sent, gathered = part.values, self.values
        self.inside.all_gather(gathered.view(self.inside.world_size, -1), sent.view(1, -1))

    def __getattr__(self, name: str) -> Any:
        """Counts and the like are those of the part."""
        if name == "part":  # before it was made
            raise AttributeError(name)
        return getattr(self.part, name)

    def describe(self) -> str:
        """In what ranks differ, after a round with ``Flag.MISMATCH``; waits for the device."""
        step, tag = (self._told[:, :-1] != self._told[:1, :-1]).any(0).tolist()
        if step or tag:
            steps = f"number of steps ({OUT_OF_STEP})"
            return f"{steps if step else 'hyper-parameters'} on ranks of one node"
        return f"on some node: {self.part.describe()}"

    @property
    def pending(self) -> int:
        """See ``RoundAllReduce``."""
        return self.part.pending

    @property
    def wire_bytes(self) -> int:
        """Bytes of what only serves within a round."""
        return self.part.wire_bytes + sum(tensor.nbytes for tensor in self._mean.scratch)

    def state(self) -> list[Tensor]:
        """All that the next round needs, tables included."""
        return [self.compensated, self.scale, self.messages.buffer, *self.part.state()]
