"""Agrees on one bit per element on every hop: Marsit's all-reduce (Wu et al., DAC 2022, Algorithm 1).

    ring, torus   per hop of the reduction  send a segment of sign bits on; meanwhile make the own bits of
                                            the segment that arrives; merge both: one bit again
                  per hop of the gather     send a finished segment on
    owner         one all-gather of the bits that each worker was drawn to give: no reduction

Either way the result is, coordinate by coordinate, the sign of one worker, each with probability
1/M: its expectation is the mean of all signs. Headers travel along (see ``message``): a hop's receiver
compares what arrives with its own, and passes on what it finds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ring_topology import TOPOLOGIES, Topology, stages
from ..triton_kernels import FlatLayout, merge_signs, pick_owned, place_owned
from ..triton_kernels.headers import CHECKED, Flag, Word
from ..triton_kernels.marsit_signs import hashed, threshold_of
from .message import Messages, StepContext, layout_word
from .rounds import Heads, Prepare, RoundAllReduce
from .transport import Transport


class MarsitAllReduce(RoundAllReduce):
    """Makes one global update of all workers' updates, at one bit per element and hop.

    Each worker keeps what its own update differs by from the global one: its compensation.
    Stand-alone use, on tensors that keep their sizes from call to call::

        reduce = MarsitAllReduce(FlatLayout((x.numel(),), world_size), transport)
        update = reduce([x], step=0.01)  # every rank; float32 [P], equal on all ranks: 0.01 or -0.01

    Optimizers call ``synchronise``, with a function that makes their update while bits are on their way.

    Args:
        layout, transport, where: As for ``RoundAllReduce``, whose attributes it has.
        topology: "ring", "torus" (two rings, fewer hops) or "owner" (no hops, half the bytes).
        rows: Of a torus; None: the most that is not above the columns.
        full_precision_every: K: the rounds 0, K, 2K ..., not counting those that were skipped, average in float32
            and leave no compensation; 0: never (K infinite).
        seed: Of the random bits; equal on all ranks.
    """

    def __init__(
        self,
        layout: FlatLayout,
        transport: Transport | None = None,
        *,
        topology: Topology = "ring",
        rows: int | None = None,
        full_precision_every: int = 100,
        seed: int = 0,
        **where: Any,
    ) -> None:
        check_topology(topology, rows, layout.world_size, full_precision_every, seed)
        super().__init__(layout, transport, full_precision_every=full_precision_every, **where)
        self.topology: Topology = topology
        self.seed = seed
        self.messages.words[:, Word.LAYOUT] = layout_word(layout, self.messages.nbytes, topology, rows, seed)
        world_size, device = layout.world_size, self.device
        self._stages = stages(topology, world_size, self.transport.rank, rows)
        widest = max((s.stop - s.start for stage in self._stages for s in stage.segments), default=0)
        owners = int(topology == "owner")
        self._arrived = Messages(world_size if owners else widest, 0, layout, device)
        self._picked = Messages(owners, 0, layout, device)
        if owners:
            self._picked.words[:, Word.LAYOUT] = self.messages.words[:1, Word.LAYOUT]
            self._sent = self._picked
        self._owners = torch.zeros(world_size * owners, layout.chunk_bytes, dtype=torch.uint8, device=device)

    def _round(self, prepare: Prepare, context: StepContext) -> tuple[Tensor, Tensor]:
        if self.schedule.begin():  # Algorithm 1, line 3
            return self._average(prepare)
        if self.topology == "owner":
            return self._gather_owned(prepare)
        self._reduce_scatter(prepare)
        self._all_gather()
        # Each segment has its finisher's header now; this worker's own is still on what it has finished.
        own = self._stages[-1].finished.start if self._stages else 0
        return self.messages.words, self.messages.words[own]

    def _headers(self, moves: bool) -> Tensor:
        alike = moves or self.schedule.full_precision or self.topology == "owner"
        return super()._headers(moves) if alike else self.messages.words

    # ---------------------------------------------------------------- ring and torus

    def _reduce_scatter(self, prepare: Prepare) -> None:
        """Algorithm 1, lines 4 to 7, stage by stage."""
        prepare(self._stages[0].first if self._stages else self.everything)
        for number, stage in enumerate(self._stages):
            for position, hop in enumerate(stage.reduce()):
                arrived = self._arrived.buffer[: hop.received.stop - hop.received.start]
                sent = self.messages.buffer[hop.sent]
                pending = self.transport.exchange(arrived, stage.previous, sent, stage.next)
                if number == 0:
                    prepare(hop.received)  # line 5: in parallel with receiving
                pending.wait()
                self._merge(hop.received, number, position)

    def _merge(self, chunks: slice, number: int, position: int) -> None:
        count = chunks.stop - chunks.start
        if self.backups:  # else this worker has all gradients, and its bits are zeros already
            self.messages.absent[chunks] &= self._arrived.absent[:count]
        merge_signs(
            self.messages.bits[chunks],
            self._arrived.bits[:count],
            # All operands of a stage stand for equally many workers, and this is the one after position + 1 others.
            threshold_of(position + 2),
            self._draw(number, self._stages[number].lane, position, chunks.start),
            self.messages.words[chunks],
            self._arrived.words[:count],
            CHECKED,
            int(Word.FLAGS),
            int(Flag.MISMATCH),
        )

    def _draw(self, *where: int) -> int:
        """Return a seed for one draw of one round, 31 bits."""
        word = hashed(self.seed)
        for number in (self.schedule.rounds, *where):
            word = hashed(word ^ hashed(number + 1))
        return word

    def _all_gather(self) -> None:
        """Send finished segments round the rings."""
        for stage in reversed(self._stages):
            for hop in stage.gather():
                received, sent = self.messages.buffer[hop.received], self.messages.buffer[hop.sent]
                self.transport.exchange(received, stage.previous, sent, stage.next).wait()

    # ---------------------------------------------------------------- owner

    def _gather_owned(self, prepare: Prepare) -> tuple[Tensor, Tensor]:
        prepare(self.everything)
        pick_owned(self.messages.bits, self.transport.rank, self._draw(), self._owners, self._picked.bits)
        self.transport.all_gather(self._arrived.buffer, self._picked.buffer)
        arrived = self._arrived
        self.arrived = Heads(arrived.words, arrived.absent)
        if self.backups:
            for bits in arrived.absent:
                self.messages.absent &= bits
        place_owned(arrived.bits, self._owners, self.messages.bits)
        return arrived.words, self._picked.words[0]

    # ---------------------------------------------------------------- full precision

    def _average(self, prepare: Prepare) -> tuple[Tensor, Tensor]:
        """Algorithm 1, line 11; the headers go first."""
        said = self._said
        self._said = said._replace(share=1.0 / self.layout.world_size)  # before the sum: it can't overflow then
        prepare(self.everything)
        self._said = said
        words, own = self._gather_headers()
        self.values = self.compensation.here
        self.transport.all_reduce(self.values)
        return words, own

    @property
    def wire_bytes(self) -> int:
        return super().wire_bytes + self._arrived.buffer.nbytes + self._picked.buffer.nbytes + self._owners.nbytes


def check_topology(topology: str, rows: int | None, world_size: int, full_precision_every: int, seed: int) -> None:
    """Raise ValueError for the first argument that makes no sense."""
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology must be one of {', '.join(map(repr, TOPOLOGIES))}, got {topology!r}")
    if rows is not None and topology != "torus":
        raise ValueError(f'rows must be None unless topology is "torus", got {rows!r}')
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int)):
        raise ValueError(f"rows must be an int or None, got {rows!r}")
    for name, value in (("full_precision_every", full_precision_every), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an int >= 0, got {value!r}")
    if topology == "torus":
        stages("torus", world_size, 0, rows)
