"""Marsit's all-reduce: one bit per element on every hop (Wu et al., DAC 2022, Algorithm 1).

    ring, torus   per hop of the reduction  send a segment of sign bits on; meanwhile make the own bits of
                                            the segment that arrives; merge both: one bit again
                  per hop of the gather     send a finished segment on
    owner         one all-gather of the bits that each worker was drawn to give: no reduction

Either way the result is, coordinate by coordinate, the sign of one worker, each with probability
1/M: its expectation is the mean of all signs. All but the last header word, and the flags, travel as
in ``wire``; a hop's receiver compares what arrives with its own and passes on what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..triton_kernels import (
    Coef,
    FlatLayout,
    LiveTable,
    block_table,
    live_table,
    local_update,
    merge_signs,
    pick_owned,
    place_owned,
    unpack,
)
from ..triton_kernels.marsit_twins import hashed, threshold_of
from .hops import TOPOLOGIES, Stage, Topology, stages
from .transport import LocalTransport, Transport
from .wire import CHECKED, Flag, Messages, Word, agreed_flags, checksum_of, union

Prepare = Callable[[slice], None]
"""Adds this worker's update to ``compensated`` and writes its signs, for some chunks: see ``MarsitAllReduce.add``."""


class MarsitAllReduce:
    """Makes one global update of all workers' updates; what it lost goes into each worker's compensation.

    Stand-alone use, on tensors that keep their sizes from call to call::

        reduce = MarsitAllReduce(FlatLayout((x.numel(),), world_size), transport)
        update = reduce([x], step=0.01)  # every rank; float32 [P], equal on all ranks: 0.01 or -0.01

    Optimizers call ``synchronise``, with a function that makes their update while bits are on their way.

    Args:
        layout: The flat index space; its ``world_size`` is the transport's.
        transport: How messages travel; None for world size 1.
        device: Where everything lies.
        topology: "ring", "torus" (two rings, fewer hops) or "owner" (no hops, half the bytes).
        rows: Of a torus; None: the most that is not above the columns.
        full_precision_every: K: the rounds 0, K, 2K ... average in float32 and leave no compensation;
            0: never (K infinite).
        seed: Of the random bits; equal on all ranks.
        live: Which elements count; None: all but padding.

    Attributes:
        compensated: float32 [P], the vector v of this worker: its compensation and its update.
        messages: M messages; their bits are the signs of the last global update.
        scale: float32 [B]: how far that went, 0 if it was skipped, or was of full precision.
        full_precision: Whether the last round was.
        flags: int32 [1], ``Flag``s of the last round, equal on all ranks; not 0: skipped.
        rounds: How many there were, t of the next.
    """

    def __init__(
        self,
        layout: FlatLayout,
        transport: Transport | None = None,
        *,
        device: torch.device | str = "cpu",
        topology: Topology = "ring",
        rows: int | None = None,
        full_precision_every: int = 100,
        seed: int = 0,
        live: LiveTable | None = None,
    ) -> None:
        self.layout = layout
        self.transport: Transport = transport if transport is not None else LocalTransport()
        if layout.world_size != self.transport.world_size:
            raise ValueError(
                f"layout.world_size must be the transport's {self.transport.world_size}, got {layout.world_size}"
            )
        check_topology(topology, rows, layout.world_size, full_precision_every, seed)
        self.device = torch.device(device)
        self.topology: Topology = topology
        self.full_precision_every = full_precision_every
        self.seed = seed
        self._stages = stages(topology, layout.world_size, self.transport.rank, rows)
        self.live = live_table(layout).to(self.device) if live is None else live
        self.block_tensor = block_table(layout, self.device)
        self.compensated = torch.zeros(layout.numel, device=self.device)
        self.scale = torch.zeros(layout.n_blocks, device=self.device)
        self._keep_messages()
        self.flags = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.full_precision = False
        self.rounds = 0
        self._digest = torch.zeros((), dtype=torch.int32, device=self.device)

    def _keep_messages(self) -> None:
        layout, device, world_size = self.layout, self.device, self.layout.world_size
        self.messages = Messages(world_size, 0, layout, device)
        if self.topology == "owner":
            self._gathered = Messages(world_size, 0, layout, device)
            self._picked = Messages(1, 0, layout, device)
            self._owners = torch.zeros(world_size, layout.chunk_bytes, dtype=torch.uint8, device=device)
        else:
            widest = max((s.stop - s.start for stage in self._stages for s in stage.segments), default=0)
            self._arrived = Messages(widest, 0, layout, device)
        self._own_words = Messages(1, 0, FlatLayout((), 1), device).words

    @property
    def full_precision_is_due(self) -> bool:
        """Whether the next round is one of full precision (Algorithm 1, line 3)."""
        return self.full_precision_every > 0 and self.rounds % self.full_precision_every == 0

    def __call__(
        self, tensors: Sequence[Tensor], step: float, *, tag: int = 0, abort: bool = False
    ) -> Tensor:
        """One round on tensors themselves; see ``synchronise``.

        Args:
            tensors: g of this worker: dense, of any float dtype and the layout's sizes; an empty one is zeros.
            step: eta_s, how far each coordinate goes in a 1-bit round.
            tag: See ``synchronise``.
            abort: See ``synchronise``.

        Returns:
            g_t, float32 [P], equal on all ranks; zero if the round was skipped.
        """
        coef = torch.ones(max(1, len(self.layout.sizes)), len(Coef), device=self.device)
        nothing = torch.zeros(1, dtype=torch.int32, device=self.device)

        def prepare(chunks: slice) -> None:
            self.add(tensors, tensors, chunks, coef, None, None, coef[0, :1], nothing, False)

        self.synchronise(prepare, torch.full_like(self.scale, step), tag=tag, abort=abort)
        if not self.full_precision:
            return self.result()
        update = self.compensated * (self.flags == 0)
        self.forget()
        return update

    def add(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        chunks: slice,
        coef: Tensor,
        exp_avg: Tensor | None,
        exp_avg_sq: Tensor | None,
        factor: Tensor,
        hold: Tensor,
        decays: bool,
        moves: bool = False,
    ) -> None:
        """Adds this worker's update to ``compensated``, for some chunks: the op ``local_update``."""
        layout = self.layout
        local_update(
            params,
            grads,
            layout.sizes,
            layout.block_size,
            chunks.start,
            chunks.stop,
            exp_avg,
            exp_avg_sq,
            self.compensated,
            self.scale,
            self.messages.bits,
            coef,
            self.block_tensor,
            self.live.bits,
            self.live.row,
            factor,
            hold,
            decays,
            moves,
            self.messages.words[:, Word.FLAGS],
        )

    def synchronise(
        self,
        prepare: Prepare,
        step: Tensor,
        *,
        tag: int = 0,
        abort: bool = False,
        hold: Tensor | None = None,
    ) -> None:
        """One round. Afterwards the global update is ``scale`` * signs, or, of full precision, ``compensated``.

        Where any rank has a non-finite update or aborts, all ranks skip: there is no update, and what
        each worker has stays its compensation, so that nothing is lost.

        Args:
            prepare: Called for each chunk once, while others' bits are on their way.
            step: eta_s, float32 [B].
            tag: A 31-bit number that must be equal on all ranks; else all skip.
            abort: Makes every rank skip this round.
            hold: int32 [1], further flags, equal on all ranks.

        Raises:
            CollectiveError: if a collective fails; then this object can't be used further.
        """
        self._sign_messages(tag, abort)
        self.full_precision = self.full_precision_is_due
        if self.full_precision:
            self._average(prepare)
        elif self.topology == "owner":
            self._gather_owned(prepare)
        else:
            self._reduce(prepare)
            self._gather()
            self.flags = union(self.messages.words[:, Word.FLAGS])
        if hold is not None:
            self.flags = self.flags | hold
        self._digest = checksum_of(self.compensated if self.full_precision else self.messages.payload)
        # Skipped: s := 0 turns all of v into compensation.
        self.scale = step * ((self.flags == 0) & (not self.full_precision))
        self.rounds += 1

    def _sign_messages(self, tag: int, abort: bool) -> None:
        for words in (self.messages.words, self._own_words):
            words[:, Word.STEP] = self.rounds
            words[:, Word.LAYOUT] = self.layout.fingerprint
            words[:, Word.DIGEST] = self._digest
            words[:, Word.TAG].fill_(tag)
            words[:, Word.FLAGS] = int(Flag.ABORT) if abort else 0
            words[:, Word.SIGNAL] = 0

    # ---------------------------------------------------------------- ring and torus

    def _reduce(self, prepare: Prepare) -> None:
        """Algorithm 1, lines 4 to 7, stage by stage."""
        first = True
        prepare(self._stages[0].first if self._stages else slice(0, 1))
        for number, stage in enumerate(self._stages):
            for position, hop in enumerate(stage.reduce()):
                arrived = self._arrived.buffer[: hop.received.stop - hop.received.start]
                sent = self.messages.buffer[hop.sent]
                pending = self.transport.exchange(arrived, stage.previous, sent, stage.next)
                if first:
                    prepare(hop.received)  # line 5: in parallel with receiving
                pending.wait()
                self._merge(hop.received, number, stage, position)
            first = False

    def _merge(self, chunks: slice, number: int, stage: Stage, position: int) -> None:
        count = chunks.stop - chunks.start
        # Each operand of a stage stands for as many workers: the own one is one of position + 2.
        merge_signs(
            self.messages.bits[chunks],
            self._arrived.bits[:count],
            threshold_of(position + 2),
            self._draw(number, stage.lane, position, chunks.start),
            self.messages.words[chunks],
            self._arrived.words[:count],
            CHECKED,
            int(Word.FLAGS),
            int(Flag.MISMATCH),
        )

    def _draw(self, *where: int) -> int:
        """A seed for one draw of one round, 31 bits."""
        word = hashed(self.seed)
        for number in (self.rounds, *where):
            word = hashed(word ^ hashed(number + 1))
        return word

    def _gather(self) -> None:
        """Finished segments go round."""
        for stage in reversed(self._stages):
            for hop in stage.gather():
                received, sent = self.messages.buffer[hop.received], self.messages.buffer[hop.sent]
                self.transport.exchange(received, stage.previous, sent, stage.next).wait()

    # ---------------------------------------------------------------- owner

    def _gather_owned(self, prepare: Prepare) -> None:
        prepare(slice(0, self.layout.world_size))
        seed, rank = self._draw(0), self.transport.rank
        pick_owned(self.messages.bits, rank, seed, self._owners, self._picked.bits)
        self._picked.words.copy_(self._own_words)
        self._picked.words[:, Word.FLAGS] = union(self.messages.words[:, Word.FLAGS])
        self.transport.all_gather(self._gathered.buffer, self._picked.buffer)
        place_owned(self._gathered.bits, self._owners, self.messages.bits)
        self.flags = agreed_flags(self._gathered.words, self._picked.words[0])

    # ---------------------------------------------------------------- full precision

    def _average(self, prepare: Prepare) -> None:
        """Algorithm 1, line 11; the headers go first."""
        prepare(slice(0, self.layout.world_size))
        self._own_words[:, Word.FLAGS] = union(self.messages.words[:, Word.FLAGS])
        arrived = torch.empty(self.layout.world_size, len(Word), dtype=torch.int32, device=self.device)
        self.transport.all_gather(arrived, self._own_words)
        self.flags = agreed_flags(arrived, self._own_words[0])
        self.transport.all_reduce(self.compensated)
        self.compensated.mul_(1.0 / self.layout.world_size)

    def forget(self) -> None:
        """After a round of full precision whose update was taken: no compensation (line 12)."""
        # A skipped one keeps the mean of all, so that nothing is lost.
        self.compensated.mul_((self.flags != 0).float())

    # ---------------------------------------------------------------- what people look at

    def settle(self) -> None:
        """Forms the deferred compensation in place (line 10): then ``scale`` is 0. Changes no later round."""
        self.compensated.sub_(self.signs().mul_(self.scale[:, None]).view(-1))
        self.compensated.mul_(self._counts())
        self.scale.zero_()

    def signs(self) -> Tensor:
        """Those of the last update, float32 [B, block_size], +1 and -1; allocates."""
        return unpack(self.messages.bits.contiguous()).view(self.layout.n_blocks, -1)

    def _counts(self) -> Tensor:
        return unpack(self.live.bits[self.live.row.long()]).view(-1) > 0

    def result(self) -> Tensor:
        """The last 1-bit update, float32 [P], zero where nothing is live; allocates."""
        return (self.signs() * self.scale[:, None]).view(-1) * self._counts()

    @property
    def wire_bytes(self) -> int:
        """Bytes of what only serves within a round."""
        if self.topology == "owner":
            return self._gathered.buffer.nbytes + self._picked.buffer.nbytes + self._owners.nbytes
        return self._arrived.buffer.nbytes

    def state(self) -> list[Tensor]:
        """All that the next round needs, tables included."""
        return [self.compensated, self.scale, self.messages.buffer, self.block_tensor, *self.live]


def check_topology(topology: str, rows: int | None, world_size: int, full_precision_every: int, seed: int) -> None:
    """Raises ValueError for the first argument that makes no sense."""
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology must be one of {', '.join(map(repr, TOPOLOGIES))}, got {topology!r}")
    if rows is not None and topology != "torus":
        raise ValueError(f'rows must be None unless topology is "torus", got {rows!r}')
    for name, value in (("full_precision_every", full_precision_every), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an int >= 0, got {value!r}")
    stages(topology, world_size, 0, rows)  # type: ignore[arg-type]
