"""Sends each matrix's gradients to its owner, at a bit each, and back to all the signs of what that makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..triton_kernels import Coef, FlatLayout, LiveTable, finish, outer_compress, outer_mean, outer_scales, pack
from ..triton_kernels.finish import Segments
from ..triton_kernels.headers import Flag, Word
from ..triton_kernels.nouns import Header, Places
from ..triton_kernels.outer import Outer, SentSigns
from ..triton_kernels.tables import tables_of
from .absent import Backup, absence, absent_on_all, packed
from .carried import Carried
from .message import Messages, StepContext, describe_mismatch
from .owners import Batch, Matrix, Owners
from .reducer import Compress, Reducer
from .transport import Transport
from .verdict import Scaled, Verdict, programs_of

Update = Callable[[Sequence[tuple[Batch, Tensor]]], None]
"""Makes of directions of matrices, one batch [count, rows, columns] each, in place, what all shall move along."""


class Shares(NamedTuple):
    """How the momentum and the direction are made."""

    momentum: float
    """Mu: the momentum's share of itself, the mean of what has arrived has the rest."""
    newest: float
    """a: that mean's share of the direction, the momentum has the rest."""


class _Counted(Scaled):
    """Has a scale for each block of messages: 1 where what a message says counts."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        self.segment = torch.zeros(blocks, dtype=torch.int32, device=device)
        self.measured = torch.ones(1, device=device)
        self.scale, self.settled = (torch.zeros(blocks, device=device) for _ in range(2))


class OwnedSigns(Reducer):
    """Averages matrices on their owners, with error feedback of workers, and sends signs of their update to all.

    A message to an owner has a bit for each element of its matrices, and scales of rows and columns; the one that it
    sends has bits alone. Owners keep the momentum, and nobody what is lost on the way back: it may be lost, since the
    update is made anew in each step.

    Args:
        layout: The flat index space, of matrices alone.
        matrices: Each of them.
        transport: Connects the ranks.
        update: What an owner does with the direction of its matrices.
        shares: Tells those of the step that is taken.
        compensated: c, float32 or bfloat16 [P], of which e is what is left.
        live: Which elements count.
        carried: What messages carry besides: gradients of tensors that are no matrices; None: nothing.
        drawn: The updates done, with which c is rounded where it is in bfloat16; None: it is in float32.
        senders: From how many ranks messages arrive; 0: from all. A simulation serves more than it sends to.

    Attributes:
        owners: Who owns what.
        momentum: Of this rank's matrices, float32 [elements of a message].
        direction: What ``update`` gets; scratch.
        places: Where matrices lie.
        outer: Scales of what this rank sends, as ``compress`` writes them.
        skipped: Not 0 where the last message has not counted: int32 [1].
    """

    def __init__(
        self,
        layout: FlatLayout,
        matrices: Sequence[Matrix],
        transport: Transport,
        update: Update,
        shares: Callable[[], Shares],
        compensated: Tensor,
        live: LiveTable,
        carried: Carried | None = None,
        drawn: Tensor | None = None,
        senders: int = 0,
    ) -> None:
        self.layout, self.transport, self._update, self.compensated = layout, transport, update, compensated
        self._shares, self.carried, self._drawn = shares, carried, drawn
        self.device = device = compensated.device
        world_size, rank = transport.world_size, transport.rank
        others, nbytes = (0, 0) if carried is None else (len(carried.layout.sizes), carried.nbytes)
        self.owners = owners = Owners(layout, matrices, world_size, device, others)
        own = owners.layout
        counts = (world_size, owners.slots), (senders or world_size, owners.slots), (world_size, 1), (1, 1)
        made = [Messages(*each, own, device, carried=nbytes) for each in counts]
        self.to_owners, self.arrived, self.gathered, self.served = made
        for sent in (self.to_owners, self.served):
            sent.words[:, Word.SENDER] = rank
        self.served.scales[:, 0] = 1.0
        self.momentum, self.direction = (torch.zeros(own.chunk_numel, device=device) for _ in range(2))
        # What this rank has compressed, and what all are told, a row for each block.
        self._signs, self._told = (
            torch.zeros(layout.n_blocks, layout.block_size // 8, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self.scale = torch.ones(layout.n_blocks, device=device)
        self.partials = torch.zeros(layout.n_blocks, dtype=torch.float64, device=device)
        self._launch_tables = tables_of(layout, device)
        self.live, self.places = live, Places.of(layout, self._launch_tables.tensor, live)
        # What was sent lies in the messages: rows of floats, of which the first one's scales begin at ``front``.
        width = self.to_owners.nbytes // 4
        front = int(self.to_owners.scales.storage_offset())
        columns = torch.tensor([[each.shape[1] for each in matrices]])
        table = torch.cat([owners.scales_at(width) + front, columns]).to(device, torch.int32)
        floats, start = self.to_owners.buffer.view(torch.float32).view(1, -1), Outer.starts(layout).to(device)
        self.outer = Outer(floats, table, start)
        self._tiles = Outer.tiles(layout.sizes, [each.shape[1] for each in matrices]).to(device)
        within = torch.cat([owners.scales_at(0), columns]).to(device, torch.int32)
        starts = owners.to_messages(torch.cat([start, start.new_zeros(1)]))
        mine = slice(rank * own.blocks_per_chunk, (rank + 1) * own.blocks_per_chunk)
        self._arrived = Outer(self.arrived.scales, within, starts[mine].contiguous())
        self._tensor_of_slot = owners.tensor_of_slot().to(device)
        self._place_batches(rank, mine)
        digest = torch.zeros(1, dtype=torch.int64, device=device)
        self.verdict = Verdict(device, digest, programs_of(own))
        self._worker, self._server = _Counted(own.n_blocks, device), _Counted(own.blocks_per_chunk, device)
        self._unmeasured = Segments.of(self._worker.segment[:0], self._worker.measured)
        self._no_partials = torch.zeros(2, own.n_blocks, dtype=torch.float64, device=device)
        self._result_scale = torch.zeros(own.n_blocks, device=device)
        self.skipped = self.verdict.of_all
        self.arrived_words = torch.zeros_like(self.arrived.words)
        self._missing: tuple[int, ...] = ()
        self.backups: list[Backup] = []

    def _place_batches(self, rank: int, mine: slice) -> None:
        """Make tables of this owner's chunk."""
        block_tensor, live_row = self.places.block_tensor, self.places.live_row
        of_padding = block_tensor.new_zeros(1), live_row.new_ones(1)  # no element counts
        each = [torch.cat(pair) for pair in zip((block_tensor, live_row), of_padding, strict=True)]
        owner, row = (self.owners.to_messages(table)[mine].contiguous() for table in each)
        self._chunk = self.places._replace(sizes=(), block_tensor=owner, live_row=row)
        self._batches = [(batch, batch.of(self.direction)) for batch in self.owners.batches(rank)]

    @property
    def bits(self) -> Tensor:
        """Return the signs of the update, uint8 [1, P / 8]."""
        return self._told.view(1, -1)

    @property
    def wire_bytes(self) -> int:
        """Count the bytes of what only serves within a step."""
        sent = self.to_owners, self.arrived, self.served, self.gathered
        scratch = (
            *(each.buffer for each in sent),
            self.direction,
            self.partials,
            self._no_partials,
            self._signs,
            self._told,
        )
        return sum(tensor.nbytes for tensor in scratch)

    # ---------------------------------------------------------------- a step

    def synchronise(self, compress: Compress, context: StepContext) -> None:
        """Compress, average on owners, update there, and leave the update's signs in ``bits``."""
        self.write(compress, context)
        self.transport.all_to_all(self.arrived.buffer, self.to_owners.buffer)
        self.serve(context)
        self.transport.all_gather(self.gathered.buffer, self.served.buffer)
        self.receive(context)

    def compress(self, grads: Sequence[Tensor], coef: Tensor) -> None:
        """Add gradients to what is left, and write signs and scales of that to the messages: two launches."""
        verdict, places = self.verdict, self.places
        how = self.skipped, self._signs.view(1, -1), self.partials, verdict.found, verdict.hold
        outer_compress(grads, places, self.compensated, self.outer, coef, *how, self._drawn)
        outer_scales(self.compensated, places, self.outer, self.partials, self._tiles, verdict.hold)

    def carry(self, grads: Sequence[Tensor], by: Tensor | None) -> None:
        """Write what is carried, times ``by`` or 1; an empty tensor stands for zeros."""
        if self.carried is not None:
            self.carried.write(grads, by, self.to_owners, self.verdict.found)

    def write(self, compress: Compress, context: StepContext) -> None:
        """Compress, and write the messages to owners."""
        self._keep(tuple(context.missing))
        verdict = self.verdict
        verdict.hold = verdict.none if context.hold is None else context.hold
        verdict.found = verdict.own if context.pending is None else context.pending
        compress(self)
        if context.unite is not None:
            context.unite(verdict.found)
        self._by_block(self.to_owners).index_put_(self.owners.back, self._signs)
        header = self._header(context, int(Flag.ABORT) * context.abort, verdict.found)
        scales, words = self.to_owners.scales, self.to_owners.words
        assert verdict.digest is not None
        work, segment = self._unmeasured, self._worker.segment
        finish(
            self._no_partials, work, 0, segment, scales, words, header, verdict.digest, verdict.hold, context.renewal
        )

    def serve(self, context: StepContext) -> None:
        """Average what has arrived, update this owner's matrices, and write the message to all."""
        verdict, own = self.verdict, self.to_owners.words[self.transport.rank]
        arrived = SentSigns(self.arrived.bits, self.arrived.words, own)
        answer = self.served.words, self._header(context, 0, verdict.agreed)
        of_chunk = self._chunk, self._arrived, self.momentum, self.direction
        outer_mean(arrived, *of_chunk, *self._shares(), verdict.hold, verdict.agreed, self.arrived_words, *answer)
        self._update(self._batches)
        pack(self.direction, self.served.bits[0])
        verdict.flags, verdict.absent = verdict.agreed, None
        if self._missing:
            verdict.absent = absent_on_all(self.arrived.absent, len(self.owners.layout.sizes), verdict.agreed)
            self.served.absent.copy_(packed(verdict.absent))
        if self.carried is not None:
            self.carried.serve(self.arrived, self.served)

    def receive(self, context: StepContext) -> None:
        """Take the signs of what owners have sent."""
        verdict, before = self.verdict, self.skipped if context.hold is None else self.skipped.clone()
        sides, scale = (self._worker, self._server), self._result_scale
        verdict.receive(self.gathered, self.served, sides, self.transport.rank, scale, context, None)
        verdict.flags, verdict.hold = verdict.of_all, verdict.none
        if context.hold is None:
            self.skipped = verdict.of_all
        else:  # what is held back stays as it was, what it was sent with too
            self.skipped = torch.where(context.hold != 0, before, verdict.of_all)
        self._told = self._by_block(self.gathered)[self.owners.back]
        if self.carried is not None:
            self.carried.receive(self.gathered)

    def _by_block(self, messages: Messages) -> Tensor:
        """Return the bits of messages, [W, blocks, bytes]."""
        return messages.bits.view(len(messages.bits), -1, self.layout.block_size // 8)

    def _header(self, context: StepContext, flags: int, pending: Tensor) -> Header:
        """Return what goes into the headers of this step's messages."""
        number = context.number
        assert number is not None
        step, counter = (0, number) if isinstance(number, Tensor) else (number, None)
        return Header(step, counter, False, context.tag, flags, pending)

    def _keep(self, missing: tuple[int, ...]) -> None:
        """Keep what a step is about to change of tensors of which this rank has no gradient."""
        if missing != self._missing:
            self.served.absent.zero_()
            self.to_owners.absent.copy_(absence(self.owners.layout, missing, self.device).bits)
            self._missing = missing
        self.backups, matrices = [], tuple(i for i in missing if i < len(self.layout.sizes))
        if matrices:
            self.settle()  # so that what is put back needs no scales
            rows = absence(self.layout, matrices, self.device).rows
            kept = Backup(rows, self.places.block_tensor, [self.compensated])
            own = torch.isin(self._chunk.block_tensor, torch.tensor(matrices, device=self.device)).nonzero().view(-1)
            self.backups = [kept, Backup(own, self._chunk.block_tensor, [self.momentum])]

    # ---------------------------------------------------------------- between steps

    def refuse(self, flags: Tensor) -> None:
        known = self.verdict.flags
        known |= flags
        if self.skipped is not known:
            self.skipped = self.skipped | flags

    def restore(self, absent: Tensor) -> None:
        for backup in self.backups:
            backup.restore(absent[: len(self.layout.sizes)])
        self.backups = []
        self.to_owners.scales.mul_(~absent[self._tensor_of_slot])

    def settle(self) -> None:
        """Form what is left in place: from now on the last message does not count."""
        nothing, none = [self.compensated[:0]] * len(self.layout.sizes), self.verdict.none
        coef = torch.ones(max(1, len(nothing)), len(Coef), device=self.device)
        signs, found = torch.empty_like(self._told).view(1, -1), none.clone()
        of_last = self.outer, coef, self.skipped, signs, torch.empty_like(self.partials)
        outer_compress(nothing, self.places, self.compensated, *of_last, found, none, self._drawn)
        self.keep_all()

    def keep_all(self) -> None:
        """Take c for what is left: it was settled."""
        self.skipped = torch.ones_like(self.verdict.none)

    def of_all(self, own: Tensor) -> Tensor:
        """Return what owners have of elements like ``momentum``, of all matrices, float32 [P]; all ranks call it."""
        rows = torch.zeros(self.transport.world_size, len(own), device=self.device)
        self.transport.all_gather(rows, own[None])
        return rows.view(len(rows), -1, self.layout.block_size)[self.owners.back].view(-1)

    def of_owner(self, whole: Tensor) -> Tensor:
        """Return this owner's part of what ``of_all`` returned."""
        padded = torch.nn.functional.pad(whole, (0, self.layout.block_size)).view(self.layout.n_blocks + 1, -1)
        return self.owners.to_messages(padded).view(self.transport.world_size, -1)[self.transport.rank]

    def describe(self) -> str:
        return describe_mismatch(self.arrived_words)

    def state(self) -> list[Tensor]:
        held = [self.verdict, self, self._worker, self._server, *([] if self.carried is None else [self.carried])]
        tensors = [v for each in held for v in vars(each).values() if isinstance(v, Tensor)]
        return [*tensors, *self.live]
