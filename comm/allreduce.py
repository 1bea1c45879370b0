"""Averages at one bit per element, with error feedback: alltoall, average, allgather, all on packed uint8.

    per rank  1. compress the local tensors into W messages, one per chunk  (momentum_compress, finish)
              2. all_to_all: rank k gets every rank's chunk k
    server k  3. average the chunk, add the server's residual, compress     (server_reduce, finish)
              4. all_gather: every rank gets every chunk
    per rank  5. the result is W rows of bits and one scale per block

(1-bit Adam, Algorithm 1 and section 6; 1-bit LAMB, section 5.) Two collectives, whatever the number
of tensors; the scales, the flags and the checks ride in the messages' headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..triton_kernels import (
    SCALE_NORMS,
    Coef,
    FlatLayout,
    LiveTable,
    ScaleScope,
    live_table,
    momentum_compress,
    renew,
    server_reduce,
)
from ..triton_kernels.compress import OWN
from ..triton_kernels.headers import Flag, Word
from ..triton_kernels.nouns import Codes, Header, Places, Preconditioner, Sent, Signs, Stored
from ..triton_kernels.tables import tables_of
from .absent import absence, absent_on_all, packed
from .error_feedback import ErrorFeedback
from .feedback import FeedbackReducer, OfRank
from .message import Messages, StepContext
from .partition import Section
from .reducer import Compress
from .shards import ShardGroup
from .shared_squares import NOWHERE, Looks, Rows, SharedSquares, Unit
from .transport import LocalTransport, Transport
from .verdict import Verdict, programs_of


class CompressedAllReduce(FeedbackReducer):
    """Averages flat tensors over all ranks at one bit per element (or two), carrying the errors along.

    Stand-alone use, on any tensors that keep their sizes from call to call::

        reduce = CompressedAllReduce(FlatLayout((x.numel(),), world_size), transport)
        reduce([x])                      # every rank
        mean = reduce.result()           # float32 [P], equal on all ranks

    Optimizers call ``synchronise``, with a function that makes their momentum while it compresses it.

    Args:
        layout: The flat index space; its ``world_size`` is the transport's.
        transport: How messages travel; None for world size 1.
        device: Where everything lies.
        scale_norm: "l1", "l2", "contractive" or "relaxed"; see ``finish``.
        scale_scope: "global", "layer" or "block"; servers split scopes at chunk boundaries.
        compensated: float32, bfloat16 or codes [P] to use as the workers' c, or None to allocate zeros.
        exponents: uint8 [3, B] of these codes, of v's and of ``worker_sq``'s; None: there are none.
        server_exponents: uint8 [1, B / W] to use for those of the server's c; None allocates them, if there are codes.
        live: Which elements count; None: all but padding.
        ternary: Two bits per element: sign and zero. Zeros stay zeros, and scales are means over the others.
        measures: Whether the workers' scales, and the servers', are measured; else they are the messages' own.
        shards: The ranks that hold other shards of the same tensors, and skip a step together with this one.
        part: Which part of a longer index space ``layout`` is; None: all of it.
        worker_sq: [P] of the same dtype to use as the squares that ``compress`` follows; None: nobody wants them.
        gathered, scale, residual, served, digest: W messages, float32 [B], zeros [P / W] of ``compensated``'s dtype, a
            message and int64 [1] to use as the result's, the server's c, what it sends, and the checksum; None
            allocates them.

    Attributes:
        worker: This rank's ``ErrorFeedback`` over all P elements.
        server: That of the chunk which it serves.
        gathered: W messages; their bits are the result's signs, kept until the next call has read
            them. They then receive the alltoall before they receive the allgather.
        arrived_words: int32 [W, 8], the headers that the workers sent last.
        own: The blocks which this rank serves.
        squares: Those of this rank's own gradients, and of all ranks'; None: nobody wants them.
    """

    worker: ErrorFeedback
    server: ErrorFeedback

    def __init__(
        self,
        layout: FlatLayout,
        transport: Transport | None = None,
        *,
        device: torch.device | str = "cpu",
        scale_norm: str = "l2",
        scale_scope: ScaleScope = "global",
        compensated: Tensor | None = None,
        exponents: Tensor | None = None,
        live: LiveTable | None = None,
        ternary: bool = False,
        measures: tuple[bool, bool] = (True, True),
        shards: ShardGroup | None = None,
        part: Section | None = None,
        worker_sq: Tensor | None = None,
        server_exponents: Tensor | None = None,
        gathered: Messages | None = None,
        scale: Tensor | None = None,
        residual: Tensor | None = None,
        served: Messages | None = None,
        digest: Tensor | None = None,
    ) -> None:
        self.layout, self.part = layout, part or Section(layout)
        self.transport: Transport = transport if transport is not None else LocalTransport()
        self.shards = shards or ShardGroup()
        check_world_size(layout, self.transport)
        if scale_norm not in SCALE_NORMS:
            raise ValueError(f"scale_norm must be one of {sorted(SCALE_NORMS)}, got {scale_norm!r}")
        self.device = device = torch.device(device)
        self._launch_tables = tables_of(layout, device)  # kept: launches of others share it meanwhile
        norm, rank, world_size = SCALE_NORMS[scale_norm], self.transport.rank, layout.world_size
        slot, slots = layout.scale_slots(scale_scope)
        slots = slots if gathered is None else gathered.slots
        self.own = slice(rank * layout.blocks_per_chunk, (rank + 1) * layout.blocks_per_chunk)
        self.scale = torch.zeros(layout.n_blocks, device=device) if scale is None else scale
        self.gathered = gathered or Messages(world_size, slots, layout, device, ternary)
        self.to_servers = self.served = self.gathered
        compensated = torch.zeros(layout.numel, device=device) if compensated is None else compensated
        segments = layout.scale_segments(scale_scope)
        self.worker = ErrorFeedback(compensated, segments, norm, ternary, measures[0], exponents)
        if self.serves:
            residual = compensated.new_zeros(layout.chunk_numel) if residual is None else residual
            if server_exponents is None and exponents is not None:
                server_exponents = exponents.new_zeros(1, layout.blocks_per_chunk)
            self.server = ErrorFeedback(residual, slot[self.own], norm, ternary, measures[1], server_exponents)
            self.to_servers = Messages(world_size, slots, layout, device, ternary)
            self.served = served or Messages(1, slots, layout, device, ternary)
            digest = torch.zeros(1, dtype=torch.int64, device=device) if digest is None else digest
        for sent in (self.to_servers, self.served):
            sent.words[:, Word.SENDER] = rank
        self.squares = None
        if worker_sq is not None:
            squares = Stored.row(worker_sq, exponents, OWN)
            self.squares = SharedSquares(layout, rank, device, squares)
        self.verdict = Verdict(device, digest, programs_of(layout))
        self.arrived_words = torch.zeros_like(self.gathered.words) if self.serves else self.gathered.words
        self._missing: tuple[int, ...] = ()
        self._drawn: Tensor | None = None  # of the present step
        self.backups = []
        self.set_live(live_table(layout).to(device) if live is None else live)
        # On the device: a captured CUDA graph must count its replays.
        self.synchronisations = torch.zeros((), dtype=torch.int32, device=device)

    def set_live(self, live: LiveTable) -> None:
        self.live, self.places = live, Places.of(self.layout, self._launch_tables.tensor, live)
        self.worker.set_live(self.places, live.numel)
        for server in self.sides[1:]:
            server.set_live(self.places.at(self.own), live.numel[self.own])

    def __call__(self, tensors: Sequence[Tensor], coef: Tensor | None = None, **context: Any) -> None:
        """Average tensors.

        Args:
            tensors: Local ones, dense, any float dtype; an empty one stands for zeros.
            coef: float32 [tensors, columns of ``Coef``]; None averages the tensors themselves.
            context: The fields of ``StepContext``.

        Raises:
            CollectiveError: as ``synchronise`` does.
        """
        table = self.plain_coefficients() if coef is None else coef
        self.synchronise(lambda part: part.compress(tensors, table), StepContext(**context))

    def compress(
        self, tensors: Sequence[Tensor], coef: Tensor, exp_avg_sq: Preconditioner | None = None, looks: Looks = NOWHERE
    ) -> None:
        """Write the signs of beta1*m + (1 - beta1)*g + e to the messages: the op ``momentum_compress``.

        Args:
            tensors: g, whole tensors.
            coef: float32 [tensors, columns of ``Coef``].
            exp_avg_sq: Where the momentum is preconditioned: v of the whole index space; else None.
            looks: What besides it does with gradients.
        """
        grads, squares = self.part.gradients(tensors), self.squares
        momentum_compress(
            grads,
            self.places,
            self.worker.read_by(self._drawn),
            Signs(self.gathered.bits, self.scale),
            coef,
            self.part.of_variance(exp_avg_sq),
            self.to_servers.bits,
            self.worker.partials,
            self.verdict.found,
            self.verdict.hold,
            None if squares is None else squares.stored.numbers,
        )
        if looks.tells and squares is not None:
            squares.tell(grads, looks, self.part.blocks.start, self.places)

    @property
    def of_rank(self) -> OfRank:
        """Return what is this rank's own."""
        server = self.server.stored if self.serves else Stored(self.scale[:0])
        return OfRank(self.worker.stored, server, None if self.squares is None else self.squares.stored)

    @property
    def means(self) -> Rows:
        """Return the workers' means of squares, as messages have them."""
        assert self.squares is not None
        return self.squares.means

    def share_part(self) -> None:
        """Exchange squares with all ranks, which makes ``means``."""
        assert self.squares is not None
        self.squares.exchange(self.transport)
        self.heard(self.means.buffer)

    def renew_part(self, unit: Unit, v: Preconditioner, writes: bool = True) -> None:
        """Renew this part, as ``OnePart`` says."""
        here, means, ternary = self.part.of_variance(v), self.means.codes, self.gathered.bits.dim() == 3
        assert here is not None
        keeps, writes = writes and unit.kept is not None, writes and unit.kept is None
        if unit.divides:
            for server in self.sides[1:]:  # it keeps no momentum
                rank, blocks = self.transport.rank, self.own
                chunk = here._replace(numbers=here.numbers.view(self.layout.world_size, -1)[rank])
                chunk = chunk._replace(exponents=None if here.exponents is None else here.exponents[blocks])
                own = Codes(*(each[rank:][:1] for each in means))
                server.renew(self.places.at(blocks), None, ternary, unit, chunk, own, False)
            self.worker.renew(self.places, Signs(self.gathered.bits, self.scale), ternary, unit, here, means, writes)
        elif writes:
            renew(self.places, *(None,) * 4, ternary, unit.coef, here, means, unit.factors, writes)
        if keeps:
            unit.keep(means, self.part)
        if self.squares is not None:
            self.squares.forget()

    def exchange(self, compress: Compress, context: StepContext) -> None:
        """Do all of ``synchronise`` but ``receive``."""
        self.write(compress, context)
        self.send()
        self.serve(context)
        self.gather()

    def send(self) -> None:
        self.transport.all_to_all(self.gathered.buffer, self.to_servers.buffer)

    def gather(self) -> None:
        self.transport.all_gather(self.gathered.buffer, self.served.buffer)

    def write(self, compress: Compress, context: StepContext) -> None:
        self._keep(tuple(context.missing))
        verdict = self.verdict
        verdict.hold = verdict.none if context.hold is None else context.hold
        verdict.found = verdict.own if context.pending is None else context.pending
        self._drawn = context.drawn
        compress(self)
        if context.unite is not None:
            context.unite(verdict.found)
        self._finish(context)

    def serve(self, context: StepContext) -> None:
        verdict, server = self.verdict, self.server
        # A header damaged on its way here is seen here only: pass on what was seen.
        header = self._header(context, 0, verdict.agreed, counts=False)
        words = self.to_servers.words[self.transport.rank]
        server_reduce(
            Sent(self.gathered.bits, self.gathered.scales, self.gathered.words, words, server.segment),
            server.places,
            server.read_by(context.drawn),
            self.served.bits,
            server.partials,
            verdict.hold,
            verdict.agreed,
            self.arrived_words,
            *(() if server.measures else (self.served.words, header)),
        )
        verdict.flags, verdict.absent = verdict.agreed, None
        if self.backups:
            verdict.absent = absent_on_all(self.gathered.absent, len(self.layout.sizes), verdict.agreed)
            self.served.absent.copy_(packed(verdict.absent))
        if server.measures:
            server.finish(self.served, header, verdict)

    def receive(self, context: StepContext) -> None:
        sides, limit = (self.worker, self.server), self._limit(context)
        self.verdict.receive(self.gathered, self.served, sides, self.transport.rank, self.scale, context, limit)
        self._end(context)

    def _keep(self, missing: tuple[int, ...]) -> None:
        """Keep what a step is about to change of tensors of which this rank has no gradient."""
        on_cuda = self.device.type == "cuda"
        if missing != self._missing or (on_cuda and torch.cuda.is_current_stream_capturing()):
            self.served.absent.zero_()
            self.to_servers.absent.copy_(absence(self.layout, missing, self.device).bits)
            self._missing = missing
        self.backups = []
        if not missing:
            return
        rows = absence(self.layout, missing, self.device).rows
        squares = () if self.squares is None else (self.squares.stored.numbers,)
        self.backups = [self.worker.backup(rows, squares, bits=[self.gathered.bits], tables=[self.scale])]
        for server in self.sides[1:]:
            self.backups.append(server.backup(absence(self.layout, missing, self.device, self.own).rows))

    def _finish(self, context: StepContext) -> None:
        """Write the scales of what was compressed, whether it was finite, and the headers to the messages."""
        found = self.verdict.found
        header = self._header(context, int(Flag.ABORT) * context.abort, found, counts=context.number is None)
        self.worker.finish(self.to_servers, header, self.verdict, context.renewal)

    def _header(self, context: StepContext, flags: int, pending: Tensor, counts: bool) -> Header:
        """Return what goes into the headers of this step's messages."""
        number: int | Tensor = self.synchronisations if context.number is None else context.number
        step, counter = (0, number) if isinstance(number, Tensor) else (number, None)
        return Header(step, counter, counts, context.tag, flags, pending)

    def keep_back(self, tensors: Tensor) -> None:
        """Take ``tensors``, bool [tensors], out of the result: whoever compressed last keeps them, as its residual.

        Of a step that was skipped, or held back, nothing is there to be taken out.
        """
        goes = (~tensors)[self.places.block_tensor] | (self.flags != 0)
        self.scale *= goes
        last = self.sides[-1].scale
        last *= goes[self.own]

    def take_residuals(self, out: Tensor) -> None:
        self.settle()
        torch.mul(self.worker.values(), 1.0 / self.transport.world_size, out=out)
        rank, chunk = self.transport.rank, self.layout.chunk_numel
        for server in self.sides[1:]:
            out[rank * chunk : (rank + 1) * chunk] += server.values()
        self.transport.all_reduce(out)
        self.heard(out)
        for side in self.sides:
            side.forget()

    def squares_of_result(self) -> Tensor:
        """Return the square of the result's norm by block: float64 [B]; reads no element."""
        return self.scale.double().square() * self.live.numel

    @property
    def parts(self) -> tuple[CompressedAllReduce]:
        return (self,)

    @property
    def sides(self) -> tuple[ErrorFeedback, ...]:
        """Return the worker, and the server where there is one; what the last compresses is the result."""
        return (self.worker, self.server) if self.serves else (self.worker,)

    @property
    def sent(self) -> tuple[Messages, ...]:
        """Return what is sent."""
        return (self.to_servers, self.served) if self.serves else ()

    @property
    def scratch(self) -> tuple[Tensor, ...]:
        """Return what no later step reads, besides messages."""
        return *(tensor for side in self.sides for tensor in side.scratch), self.verdict.squares

    def plain_coefficients(self) -> Tensor:
        """Return those with which ``compress`` takes tensors as they are: beta1 = 0, c = tensor + residual."""
        # A layout without tensors still has one block, and that block a row here.
        coef = torch.zeros(max(1, len(self.layout.sizes)), len(Coef), device=self.device)
        coef[:, Coef.ONE_MINUS_BETA1] = 1.0
        coef[:, Coef.GRAD_LIMIT] = torch.inf  # tensors of any kind
        coef[:, Coef.UNIT] = 1.0
        return coef


def check_world_size(layout: FlatLayout, transport: Transport) -> None:
    """Raise ValueError unless the layout has a chunk for each rank."""
    if layout.world_size != transport.world_size:
        raise ValueError(f"layout.world_size must be the transport's {transport.world_size}, got {layout.world_size}")
