"""Makes one global update of all workers' updates: the base of Marsit, and of the baselines in ``apps.train``.

A round: each worker adds its update to what it has kept from earlier rounds; the workers agree on one
global update; each keeps what that has not taken from it. Subclasses differ in how they agree, and in
what is kept.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..triton_kernels import Coef, FlatLayout, LiveTable, close_round, live_table, local_update, rules, unpack
from ..triton_kernels.close_round import Received
from ..triton_kernels.headers import Flag, Word, agreed_flags, unfolded, union
from ..triton_kernels.local_update import ChunkHeaders, Chunks, LocalUpdate
from ..triton_kernels.nouns import Digest, Places
from ..triton_kernels.tables import tables_of
from .absent import Backup, absence, absent_on_all, packed
from .allreduce import check_world_size
from .compensation import Schedule, WorkerCompensation
from .message import OUT_OF_STEP, Messages, StepContext, describe_mismatch, describe_note
from .partition import Section
from .reducer import Compress, Reducer
from .transport import CollectiveError, LocalTransport, Transport
from .verdict import Verdict

Prepare = Callable[[slice], None]
"""Adds this worker's update to what it keeps, and writes its signs, for some chunks."""


class Said(NamedTuple):
    """What a worker says of its own update in a round."""

    number: int = 0
    """Of the round; with the others part of its headers."""
    tag: int = 0
    flags: int = 0
    misses: bool = False
    """Whether it has no gradient of some tensor."""
    share: float = 1.0
    """How much of v is written."""


class Heads(NamedTuple):
    """What ranks have said of themselves, where that did not travel from hop to hop."""

    words: Tensor | None = None
    """int32 [W, 8], all headers."""
    absent: Tensor | None = None
    """uint8 [W, bytes], bits of tensors of which each has no gradient."""
    heads: Tensor | None = None
    """uint8 [W, bytes], both, where they travel alone."""
    inside: Tensor | None = None
    """int32 [ranks of a node, 2], numbers and tags of the ranks of this node."""


class RoundAllReduce(Reducer):
    """Skeleton of a ``Reducer``: a subclass makes either ``messages`` or ``values`` in ``_round``.

    Args:
        layout: The flat index space; its ``world_size`` is the transport's.
        transport: How messages travel; None for world size 1.
        device: Where everything lies.
        live: Which elements of the whole index space count; None: all but padding.
        compensation_limit: See ``WorkerCompensation``.
        full_precision_every: See ``Schedule``.
        part: Which part of a longer index space ``layout`` is; None: all of it. Where ranks of a node have one each
            they gather the results of all: the messages, or the floats.

    Attributes:
        compensation: What this worker keeps, and its update.
        schedule: Which rounds there were.
        messages: M messages; their bits are this worker's signs, after a 1-bit round those of the global update.
        gathered: The messages of all parts.
        scale: float32 [B]: how far the last round went; 0 if it was skipped.
        values: float32 [P], the global update where it is no signs; else None.
        arrived: What the last round's exchange has told of all ranks.
    """

    def __init__(
        self,
        layout: FlatLayout,
        transport: Transport | None = None,
        *,
        device: torch.device | str = "cpu",
        live: LiveTable | None = None,
        compensation_limit: float | None = None,
        full_precision_every: int = 0,
        part: Section | None = None,
    ) -> None:
        self.layout, self.part = layout, part or Section(layout)
        whole, self.largest_gradient = self.part.whole, self.part.largest_gradient
        self.transport: Transport = transport if transport is not None else LocalTransport()
        check_world_size(layout, self.transport)
        self.device = torch.device(device)
        self._launch_tables = tables_of(layout, self.device)  # kept: launches of others share it meanwhile
        self.live = live_table(whole).to(self.device) if live is None else live
        self.places = Places.of(layout, self._launch_tables.tensor, self.part.live(self.live))
        self.compensation = WorkerCompensation(self.part, self.device, compensation_limit)
        self.schedule = Schedule(full_precision_every)
        self.scale = torch.zeros(whole.n_blocks, device=self.device)
        self.messages = Messages(layout.world_size, 0, layout, self.device)
        self._sent = self.messages  # whose headers are sent
        self._said = Said()
        self.gathered = self.messages if layout is whole else Messages(whole.world_size, 0, whole, self.device)
        self.values: Tensor | None = None
        self.verdict = Verdict(self.device, torch.zeros(1, dtype=torch.int64, device=self.device))
        self.arrived = Heads()
        self.backups: list[Backup] = []

    def __call__(self, tensors: Sequence[Tensor], step: float, *, tag: int = 0, abort: bool = False) -> Tensor:
        """Make one round on tensors themselves.

        Args:
            tensors: Of this worker: contiguous, of any float dtype and the layout's sizes; an empty one is zeros.
            step: eta_s, how far each coordinate goes in a round of signs.
            tag, abort: See ``StepContext``.

        Returns:
            The global update, float32 [P], equal on all ranks; zero if the round was skipped.

        Raises:
            TypeError, ValueError: if this rank's arguments can't be used; all other ranks skip the round.
        """
        error = self._bad_argument(tensors, step)
        if error is not None:  # the others must not wait for this rank
            tensors, step = [torch.empty(0, device=self.device)] * len(self.layout.sizes), 0.0
        coef = torch.ones(max(1, len(self.layout.sizes)), len(Coef), device=self.device)
        coef[:, Coef.GRAD_LIMIT] = torch.inf  # tensors of any kind
        coef[:, Coef.LR] = step

        def add(part: RoundAllReduce, chunks: slice) -> None:
            part.add(tensors, tensors, chunks, coef, None, None, LocalUpdate(coef[0, :1], False), self.verdict.none)

        tag = zlib.crc32(repr((tag, float(step))).encode()) & 0x7FFFFFFF
        self.synchronise(add, StepContext(tag=tag, abort=abort or error is not None, coef=coef))
        self.schedule.skip(self.flags)
        if error is not None:
            raise error
        return self.result()

    def _bad_argument(self, tensors: Sequence[Tensor], step: float) -> Exception | None:
        if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 <= step < math.inf:
            return ValueError(f"step must be a finite number >= 0, got {step!r}")
        sizes = self.layout.sizes
        if len(tensors) != len(sizes):
            return ValueError(f"tensors must be {len(sizes)}, as the layout has, got {len(tensors)}")
        for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            if tensor.numel() not in (0, size) or tensor.device != self.device or not tensor.is_contiguous():
                return ValueError(
                    f"tensor {i} must be contiguous, of {size} elements (or none) on {self.device}, got "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
                )
            if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                return TypeError(f"tensor {i} must be float32, bfloat16 or float16, got {tensor.dtype}")
        return None

    def add(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        chunks: slice,
        coef: Tensor,
        exp_avg: Tensor | None,
        exp_avg_sq: Tensor | None,
        step: LocalUpdate,
        hold: Tensor,
    ) -> None:
        """Add this worker's update to what it keeps, for some chunks: the op ``local_update``; of whole tensors."""
        here, said = self.part.elements, self._said
        local_update(
            self.part.pieces(params),
            self.part.gradients(grads),
            self.places,
            Chunks(chunks.start, chunks.stop),
            None if exp_avg is None else exp_avg[here],
            None if exp_avg_sq is None else exp_avg_sq[here],
            self.compensation.read,
            self.messages.bits,
            coef,
            step._replace(share=said.share),
            hold,
            ChunkHeaders(self._headers(step.moves), said.number, said.tag, said.flags, self.digest),
        )

    def _headers(self, moves: bool) -> Tensor:
        """Return each chunk's header, int32 [M, 8]; one for all where that is sent, or where a worker ``moves``."""
        return self._sent.words[:1].expand(self.layout.world_size, -1)

    def _keep(self, missing: Sequence[int], changed: Sequence[Tensor]) -> None:
        """Keep what a round is about to change of tensors of which this worker has no gradient."""
        self.backups = []
        if missing:
            tables = absence(self.layout, missing, self.device)
            for each in {self.messages, self._sent}:
                each.absent.copy_(tables.bits)
            elements = [self.compensation.here, *(values[self.part.elements] for values in changed)]
            bits, of_blocks = [self.messages.bits], self.compensation.tables
            self.backups = [Backup(tables.rows, self.places.block_tensor, elements, bits=bits, tables=of_blocks)]
        elif self._said.misses:  # bits of the round before
            for each in {self.messages, self._sent}:
                each.absent.zero_()

    def restore(self, absent: Tensor) -> None:
        for backup in self.backups:
            backup.restore(absent)
        self.backups = []

    def synchronise(self, compress: Compress, context: StepContext) -> None:
        assert context.coef is not None
        number = self.schedule.rounds & 0x7FFFFFFF if context.number is None else context.number
        assert isinstance(number, int)  # rounds are in no CUDA graph
        self._keep(context.missing, context.changed)
        self._said = Said(number, context.tag, int(Flag.ABORT) * context.abort, bool(context.missing))
        self.values, self.arrived = None, Heads()
        words, own = self._round(lambda chunks: compress(self, chunks), context)
        self._close(words, own, context)
        self.verdict.absent = None
        if self.backups:
            absent = self.messages.absent if self.arrived.absent is None else self.arrived.absent
            self.verdict.absent = absent_on_all(absent, len(self.layout.sizes), self.flags)
        self.part.forget()
        if self.part.inside.world_size > 1:
            self._gather_inside(bool(context.missing))
        self.schedule.end()

    def _close(self, words: Tensor, own: Tensor, context: StepContext) -> None:
        """Make ``flags`` of all headers, and note how far the global update goes: ``add`` forms the compensation."""
        assert context.coef is not None
        most, verdict = self.compensation.most, self.verdict
        summed = self.messages.front if context.sums else self.messages.buffer
        if self.values is not None:
            summed = self.values.view(self.layout.world_size, -1).view(torch.uint8)
            # After full precision nothing is kept (Algorithm 1, line 12), unless all have skipped it: then the mean is.
            most = 0.0 if self.schedule.full_precision else None
        close_round(
            Received(words, own, summed, self.arrived.heads),
            context.coef,
            self.compensation.block_tensor,
            context.steps,
            math.inf if most is None else most,
            self.values is None,
            verdict.none if context.hold is None else context.hold,
            self.compensation.left(self.scale),
            Digest(self.digest, verdict.total, context.updates),
            verdict.flags,
            verdict.ticket,
        )

    def keep_back(self, tensors: Tensor) -> None:
        """Take ``tensors``, bool [tensors], out of a round of full precision, whose mean is their compensation then."""
        assert self.values is not None
        stays = tensors[self.compensation.block_tensor]
        self.compensation.keep(stays)
        self.values = self.values.view(len(stays), -1).masked_fill(stays[:, None], 0.0).view(-1)

    def _round(self, prepare: Prepare, context: StepContext) -> tuple[Tensor, Tensor]:
        """Make the global update; return all headers, int32 [M, 8], and this rank's, [8]."""
        raise NotImplementedError

    def _step_of(self, context: StepContext) -> Tensor:
        """Return how far each coordinate goes in a round of signs (eta_s), float32 [B]."""
        assert context.coef is not None
        step: Tensor = rules.global_step(context.coef[self.places.block_tensor], context.steps, math.inf)[0]
        return step.view(-1)

    def _is_taken(self, words: Tensor, own: Tensor, context: StepContext) -> Tensor:
        """Tell whether ranks with these headers take the round, bool [1], before it is closed."""
        return agreed_flags(words, own, context.hold) == 0

    def _gather_inside(self, some_missing: bool) -> None:
        """Gather what the parts of a node's other ranks have left."""
        inside = self.part.inside
        # Ranks of a node share no other exchange: this one compares the round and the hyper-parameters as well.
        words, absent = self._sent.words[0], self._sent.head[0, len(Word) :].clone()
        if self.verdict.absent is not None:
            absent.view(torch.uint8)[: self._sent.absent.shape[1]] = packed(self.verdict.absent)
        own = torch.cat([words[Word.STEP :][:1], words[Word.TAG :][:1], self.flags, absent])
        rows = own.new_empty(inside.world_size, len(own))
        inside.all_gather(rows, own[None])
        self.heard(rows)
        self.arrived = self.arrived._replace(inside=rows[:, :2])
        self.refuse(union(rows[:, 2], rows[:, :2] != own[:2]))
        absent = rows[:, 3:].contiguous().view(torch.uint8)
        self.verdict.absent = absent_on_all(absent, len(self.layout.sizes), self.flags) if some_missing else None
        sent, gathered = self.messages.buffer, self.gathered.buffer
        if self.values is not None:
            sent, gathered = self.values, torch.empty_like(self.compensation.whole)
            self.values = gathered
        inside.all_gather(gathered.view(inside.world_size, -1), sent.view(1, -1))
        if self.values is not None:  # of bits ``apply_momentum`` adds those of all parts
            self.heard(gathered)

    @property
    def everything(self) -> slice:
        """Return all chunks."""
        return slice(0, self.layout.world_size)

    @property
    def digest(self) -> Tensor:
        """Return the checksum of what all ranks have received alike, which the next messages carry: int64 [1]."""
        assert self.verdict.digest is not None
        return self.verdict.digest

    def describe(self) -> str:
        where = ""
        words, inside = self.arrived.words, self.arrived.inside
        if inside is not None:
            where = "on some node: "
            step, tag = (inside != inside[:1]).any(0).tolist()
            if step or tag:
                steps = f"number of steps ({OUT_OF_STEP})"
                return f"{steps if step else 'hyper-parameters'} on ranks of one node"
        if words is not None:
            return where + describe_mismatch(words)
        return where + describe_note(int(union(self.messages.words[:, Word.SIGNAL])))

    def resume(self, rounds: int, digest: int, pending: int, counted: int | None = None) -> None:
        """Take up a checkpoint's counts; the compensation is filled apart."""
        self.schedule.resume(rounds, counted)
        self._sent.words[0, Word.FLAGS] = pending
        self.digest.fill_(unfolded(digest))

    @property
    def pending(self) -> int:
        """``Flag`` bits that this worker's updates have set since the last round; waits for the device."""
        return int(self._sent.words[0, Word.FLAGS])

    def _gather_headers(self) -> tuple[Tensor, Tensor]:
        """Send this rank's header, which all is in, to all, and return all and its own: 32 bytes, a bit per tensor."""
        own = self._sent.head[:1]
        arrived = torch.empty(self.layout.world_size, own.shape[1], dtype=torch.int32, device=self.device)
        self.transport.all_gather(arrived, own)
        words = arrived[:, : len(Word)]
        # Values of other lengths would follow, which ends a process or hangs. (Elsewhere, reading would wait.)
        if self.device.type == "cpu" and len(set(words[:, Word.LAYOUT].tolist())) > 1:
            raise CollectiveError(f"ranks can't average: they differ in the {describe_mismatch(words)}")
        self.arrived = Heads(words, arrived[:, len(Word) :].view(torch.uint8), arrived.view(torch.uint8))
        return words, own[0, : len(Word)]

    def refuse(self, flags: Tensor) -> None:
        known = self.flags
        kept = (known != 0) | (flags == 0)
        known |= flags
        self.scale *= kept
        self.compensation.refuse(kept)

    # ---------------------------------------------------------------- what people look at

    def settle(self) -> None:
        self.compensation.form(self.signs(), self.part.live(self.live).mask())

    @property
    def bits(self) -> Tensor:
        return self.gathered.bits

    def signs(self) -> Tensor:
        """Return the signs of the last 1-bit update, float32 [B, block_size], +1 and -1; allocates."""
        return unpack(self.messages.bits.contiguous()).view(self.layout.n_blocks, -1)

    def result(self) -> Tensor:
        if self.values is not None:
            return self.values * (self.flags == 0)
        return super().result()

    @property
    def wire_bytes(self) -> int:
        return self.part.wire_bytes

    def state(self) -> list[Tensor]:
        messages = self.messages.buffer, self.gathered.buffer
        kept = self.compensation
        return [kept.whole, *kept.tables, *messages, self.places.block_tensor, *self.live]
