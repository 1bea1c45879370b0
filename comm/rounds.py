"""Makes one global update of all workers' updates: the base of Marsit, and of the baselines in ``apps.lab``.

A round: each worker adds its update to what it has kept from earlier rounds; the workers agree on one
global update; each keeps what that has not taken from it. Subclasses differ in how they agree, and in
what is kept.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..triton_kernels import Coef, FlatLayout, LiveTable, close_round, live_table, local_update, rules, unpack
from ..triton_kernels.headers import Flag, Word, agreed_flags, unfolded, union
from ..triton_kernels.marsit import ChunkHeaders, Chunks, Compensation, LocalUpdate
from ..triton_kernels.nouns import Digest, Places
from ..triton_kernels.rounds import Left, Received
from ..triton_kernels.tables import tables_of
from .absent import Backup, absence, absent_on_all, packed
from .allreduce import check_world_size
from .message import OUT_OF_STEP, Messages, StepContext, describe_mismatch, describe_note
from .partition import Section
from .reducer import Compress, Reducer
from .transport import CollectiveError, LocalTransport, Transport
from .verdict import Verdict

Prepare = Callable[[slice], None]
"""Adds this worker's update to ``compensated`` and writes its signs, for some chunks."""


class RoundAllReduce(Reducer):
    """Skeleton of a ``Reducer``: a subclass makes either ``messages`` or ``values`` in ``_round``.

    Args:
        layout: The flat index space; its ``world_size`` is the transport's.
        transport: How messages travel; None for world size 1.
        device: Where everything lies.
        live: Which elements of the whole index space count; None: all but padding.
        compensation_limit: Largest compensation of a coordinate after a 1-bit round, in steps (eta_s); None:
            the paper's, without limit.
        part: Which part of a longer index space ``layout`` is; None: all of it. Where ranks of a node have one each
            they gather the results of all: the messages, or the floats.

    Attributes:
        compensated: float32 [P], the vector v of this worker: what it has kept, and its update; 0 where others have it.
        messages: M messages; their bits are this worker's signs, after a 1-bit round those of the global update.
        gathered: The messages of all parts.
        everything: All chunks.
        scale: float32 [B]: how far the last round went; 0 if it was skipped.
        values: float32 [P], the global update where it is no signs; else None.
        full_precision: Whether the last round sent float32.
        rounds: How many there were, t of the next.
        counted: Those of them that were not taken back.
    """

    def __init__(
        self,
        layout: FlatLayout,
        transport: Transport | None = None,
        *,
        device: torch.device | str = "cpu",
        live: LiveTable | None = None,
        compensation_limit: float | None = None,
        part: Section | None = None,
    ) -> None:
        self.layout, self.part = layout, part or Section(layout)
        whole, self.largest_gradient = self.part.whole, self.part.largest_gradient
        self.transport: Transport = transport if transport is not None else LocalTransport()
        check_world_size(layout, self.transport)
        self.device, self.everything = torch.device(device), slice(0, layout.world_size)
        self._launch_tables = tables_of(layout, self.device)  # kept: launches of others share it meanwhile
        self.live = live_table(whole).to(self.device) if live is None else live
        self._live = self.part.live(self.live)
        self.places = Places.of(layout, self._launch_tables.tensor, self._live)
        self.compensated = torch.zeros(whole.numel, device=self.device)
        self._own = self.compensated[self.part.elements]
        self.scale = torch.zeros(whole.n_blocks, device=self.device)
        self._tensor_of_all = tables_of(whole, self.device).tensor
        # Of v, and its bound, until the compensation is formed.
        self._taken_of_all = torch.zeros_like(self.scale)
        self._limit_of_all = torch.full_like(self.scale, torch.inf)
        self._taken, self._limit = self._taken_of_all[self.part.blocks], self._limit_of_all[self.part.blocks]
        if compensation_limit is not None and not 0 <= compensation_limit < math.inf:
            raise ValueError(f"compensation_limit must be a finite number >= 0 or None, got {compensation_limit!r}")
        self.compensation_limit = compensation_limit
        self.messages = Messages(layout.world_size, 0, layout, self.device)
        self._sent = self.messages  # whose headers are sent
        self._header = 0, 0, 0
        self._share = 1.0  # of v, that is written
        self.gathered = self.messages if layout is whole else Messages(whole.world_size, 0, whole, self.device)
        self.values: Tensor | None = None
        self.full_precision = False
        self.rounds = 0
        self.counted = 0
        self._skipped: Tensor | int = 0  # 1-bit rounds of ``__call__`` that are counted still
        self.verdict = Verdict(self.device, torch.zeros(1, dtype=torch.int64, device=self.device))
        self.arrived_words: Tensor | None = None
        self._arrived_absent: Tensor | None = None
        self.arrived_heads: Tensor | None = None  # of all ranks, where headers travel alone
        self._words_inside: Tensor | None = None
        self._had_missing = False
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
        if not self.full_precision:
            self._skipped = self._skipped + (self.flags != 0)  # read when it matters: no round waits for its flags
        elif bool(self.flags):
            self.take_back(full_precision=True)
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
        """Add this worker's update to ``compensated``, for some chunks: the op ``local_update``; of whole tensors."""
        here = self.part.elements
        local_update(
            self.part.pieces(params),
            self.part.gradients(grads),
            self.places,
            Chunks(chunks.start, chunks.stop),
            None if exp_avg is None else exp_avg[here],
            None if exp_avg_sq is None else exp_avg_sq[here],
            Compensation(self._own, self._taken, self._limit),
            self.messages.bits,
            coef,
            step._replace(share=self._share),
            hold,
            ChunkHeaders(self._headers(step.moves), *self._header, self.digest),
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
            elements = [self._own, *(values[self.part.elements] for values in changed)]
            bits, of_blocks = [self.messages.bits], [self._taken, self._limit]
            self.backups = [Backup(tables.rows, self.places.block_tensor, elements, bits=bits, tables=of_blocks)]
        elif self._had_missing:  # bits of the round before
            for each in {self.messages, self._sent}:
                each.absent.zero_()
        self._had_missing = bool(missing)

    def restore(self, absent: Tensor) -> None:
        for backup in self.backups:
            backup.restore(absent)
        self.backups = []

    def synchronise(self, compress: Compress, context: StepContext) -> None:
        assert context.coef is not None
        number = self.rounds & 0x7FFFFFFF if context.number is None else context.number
        assert isinstance(number, int)  # rounds are in no CUDA graph
        self._keep(context.missing, context.changed)
        self._header = number, context.tag, int(Flag.ABORT) * context.abort
        self.values = self.arrived_words = None
        self._arrived_absent = self.arrived_heads = None
        words, own = self._round(lambda chunks: compress(self, chunks), context)
        self._close(words, own, context)
        self.verdict.absent = None
        if self.backups:
            absent = self.messages.absent if self._arrived_absent is None else self._arrived_absent
            self.verdict.absent = absent_on_all(absent, len(self.layout.sizes), self.flags)
        self.part.forget()
        if self.part.inside.world_size > 1:
            self._gather_inside(bool(context.missing))
        self.rounds += 1
        self.counted += 1

    def take_back(self, full_precision: bool) -> None:
        """Take a round back, maybe one of full precision, that is known to have been skipped: it does not count."""
        self.counted -= 1

    def _take_back_skipped(self) -> None:
        """Take back what ``__call__`` has left to be; waits for the device where it has made a 1-bit round since."""
        self.counted -= int(self._skipped)
        self._skipped = 0

    def _close(self, words: Tensor, own: Tensor, context: StepContext) -> None:
        """Make ``flags`` of all headers, and note how far the global update goes: ``add`` forms the compensation."""
        assert context.coef is not None
        most, verdict = self.compensation_limit, self.verdict
        summed = self.messages.front if context.sums else self.messages.buffer
        if self.values is not None:
            summed = self.values.view(self.layout.world_size, -1).view(torch.uint8)
            # After full precision nothing is kept (Algorithm 1, line 12), unless all have skipped it: then the mean is.
            most = 0.0 if self.full_precision else None
        close_round(
            Received(words, own, summed, self.arrived_heads),
            context.coef,
            self._tensor_of_all,
            context.steps,
            math.inf if most is None else most,
            self.values is None,
            verdict.none if context.hold is None else context.hold,
            Left(self.scale, self._taken_of_all, self._limit_of_all),
            Digest(self.digest, verdict.total, context.updates),
            verdict.flags,
            verdict.ticket,
        )

    def keep_back(self, tensors: Tensor) -> None:
        """Take ``tensors``, bool [tensors], out of a round of full precision, whose mean is their compensation then."""
        assert self.values is not None
        stays = tensors[self._tensor_of_all]
        self._limit_of_all.masked_fill_(stays, torch.inf)
        self.values = self.values.view(len(stays), -1).masked_fill(stays[:, None], 0.0).view(-1)

    def formed(self) -> None:
        """Note that the compensation of the last round has been formed."""
        self._taken.zero_()
        self._limit.fill_(torch.inf)

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
        self._words_inside = rows[:, :2]
        self.refuse(union(rows[:, 2], rows[:, :2] != own[:2]))
        absent = rows[:, 3:].contiguous().view(torch.uint8)
        self.verdict.absent = absent_on_all(absent, len(self.layout.sizes), self.flags) if some_missing else None
        sent, gathered = self.messages.buffer, self.gathered.buffer
        if self.values is not None:
            sent, gathered = self.values, torch.empty_like(self.compensated)
            self.values = gathered
        inside.all_gather(gathered.view(inside.world_size, -1), sent.view(1, -1))
        if self.values is not None:  # of bits ``apply_momentum`` adds those of all parts
            self.heard(gathered)

    @property
    def digest(self) -> Tensor:
        """Return the checksum of what all ranks have received alike, which the next messages carry: int64 [1]."""
        assert self.verdict.digest is not None
        return self.verdict.digest

    def describe(self) -> str:
        where = ""
        if self._words_inside is not None:
            where = "on some node: "
            step, tag = (self._words_inside != self._words_inside[:1]).any(0).tolist()
            if step or tag:
                steps = f"number of steps ({OUT_OF_STEP})"
                return f"{steps if step else 'hyper-parameters'} on ranks of one node"
        if self.arrived_words is not None:
            return where + describe_mismatch(self.arrived_words)
        return where + describe_note(int(union(self.messages.words[:, Word.SIGNAL])))

    def resume(self, rounds: int, digest: int, pending: int, counted: int | None = None) -> None:
        """Take up a checkpoint's counts; ``compensated`` is filled apart."""
        self.rounds = rounds
        self._sent.words[0, Word.FLAGS] = pending
        self.counted, self._skipped = rounds if counted is None else counted, 0
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
        self.arrived_words, self._arrived_absent = words, arrived[:, len(Word) :].view(torch.uint8)
        self.arrived_heads = arrived.view(torch.uint8)
        return words, own[0, : len(Word)]

    def refuse(self, flags: Tensor) -> None:
        known = self.flags
        kept = (known != 0) | (flags == 0)
        known |= flags
        self.scale *= kept
        self._taken_of_all *= kept
        self._limit_of_all.masked_fill_(~kept, torch.inf)

    # ---------------------------------------------------------------- what people look at

    def settle(self) -> None:
        sent = self.signs().mul_(self._taken[:, None])
        left = rules.compensation(self._own.view_as(sent), sent, self._limit[:, None]).view(-1)
        self._own.copy_(torch.where(self._live.mask(), left, 0.0))
        self.formed()

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
        return [self.compensated, self._taken, self._limit, *messages, self.places.block_tensor, *self.live]
