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
    finish,
    live_table,
    momentum_compress,
    server_reduce,
    settle,
)
from ..triton_kernels.tables import tables_of
from .absent import Kept, absence, absent_on_all, packed
from .message import Messages, Told, Word, agreed_flags, checksum_of
from .partition import Part
from .reducer import Compress, FeedbackReducer
from .shards import ShardGroup
from .transport import LocalTransport, Transport


class ErrorFeedback:
    """Keeps what a worker, or a server, could not send: e = c - s*sign(c), of compensated values c and scales s.

    e is formed when it is next read. sign(0) is 0 where ternary.

    Args:
        compensated: float32 [n], c; zeros at the start.
        segment: int64 [blocks], the scale that each block shares; rising without gaps.
        norm: One of ``SCALE_NORMS``' values.
        ternary: Whether zeros stay zeros.

    Attributes:
        scale: float32 [blocks], s.
        settled: float32 [blocks], the s with which ``settle`` has formed e since the last step; else 0.
        segment: int32 [blocks], as given.
        partials: float64 [3, blocks], or [4, blocks] where ternary, for the op that compresses.
    """

    def __init__(self, compensated: Tensor, segment: Tensor, norm: int, ternary: bool = False) -> None:
        device, blocks = compensated.device, len(segment)
        self.compensated = compensated
        self.scale, self.settled = torch.zeros(blocks, device=device), torch.zeros(blocks, device=device)
        self.partials = torch.zeros(4 if ternary else 3, blocks, dtype=torch.float64, device=device)
        self._norm = norm
        self._ternary = ternary
        lengths = torch.unique_consecutive(segment, return_counts=True)[1]
        self.segment = segment.to(device, torch.int32)
        self._segment_start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)
        self._count = torch.zeros(len(lengths), dtype=torch.float64, device=device)

    def set_live(self, live: LiveTable) -> None:
        """Say which elements of this side count."""
        self._live = live
        self._count.zero_().index_add_(0, self.segment, live.numel.double())

    def finish(self, messages: Messages) -> None:
        """Make the scales from ``partials`` and write them, and the flag, into the messages."""
        self.settled.zero_()
        finish(
            self.partials,
            self.segment,
            self._segment_start,
            self._count,
            self._norm,
            self.scale,
            messages.scales,
            messages.words[:, Word.FLAGS],
        )

    def settle(self) -> None:
        """Form the deferred residual in place: ``compensated`` holds e, and the scales are 0."""
        if not self.compensated.numel():  # nothing is kept
            return
        self.settled += self.scale
        settle(self.compensated, self.scale, self._ternary, self._live.bits, self._live.row)

    def forget(self) -> None:
        """Drop the residual, settled before, which ``take_residuals`` has taken."""
        for tensor in (self.compensated, self.settled, self.partials):
            tensor.zero_()

    @property
    def scratch(self) -> tuple[Tensor, Tensor]:
        """Return what no later step reads."""
        return self.partials, self.settled

    def norms(self) -> tuple[float, float]:
        """Return |c| and |e| of the last step; waits for the device."""
        return float(self.squares()[0].sum().sqrt()), float(self.error_norm())

    def error_norm(self) -> Tensor:
        """Return |e| of the last step, float64 []: from the sums of |c| and c^2 alone."""
        return self.squares()[1].sum().clamp(min=0).sqrt()

    def squares(self) -> tuple[Tensor, Tensor]:
        """Return c^2 and |e|^2 of each block in the last step, float64 [blocks] each; also after ``settle``.

        Reads no element. Rounding errors are included: |e|^2 may be below 0.
        """
        absolute, square, _, *nonzero = self.partials.unbind(0)
        s, numel = (self.scale + self.settled).double(), nonzero[0] if self._ternary else self._live.numel
        return square, square - s * (2 * absolute - s * numel)


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
        scale_norm: "l1", "l2" or "contractive"; see ``finish``.
        scale_scope: "global", "layer" or "block"; servers split scopes at chunk boundaries.
        compensated: float32 [P] to use as the workers' c, or None to allocate zeros.
        live: Which elements count; None: all but padding.
        ternary: Two bits per element: sign and zero. Zeros stay zeros, and scales are means over the others.
        shards: The ranks that hold other shards of the same tensors, and skip a step together with this one.
        part: Which part of a longer index space ``layout`` is; None: all of it.
        gathered, scale, served: W messages, float32 [B], and zeros float32 [P / W] to use as the result's and the
            server's c; None allocates them.

    Attributes:
        worker: This rank's ``ErrorFeedback`` over all P elements.
        server: That of the chunk which it serves.
        gathered: W messages; their bits are the result's signs, kept until the next call has read
            them. They then receive the alltoall before they receive the allgather.
        arrived_words: int32 [W, 8], the headers that the workers sent last.
        hold: int32 [1], flags for which the present step changes nothing.
    """

    def __init__(
        self,
        layout: FlatLayout,
        transport: Transport | None = None,
        *,
        device: torch.device | str = "cpu",
        scale_norm: str = "l2",
        scale_scope: ScaleScope = "global",
        compensated: Tensor | None = None,
        live: LiveTable | None = None,
        ternary: bool = False,
        shards: ShardGroup | None = None,
        part: Part | None = None,
        gathered: Messages | None = None,
        scale: Tensor | None = None,
        served: Tensor | None = None,
    ) -> None:
        self.layout, self.part = layout, part or Part(layout)
        self.transport: Transport = transport if transport is not None else LocalTransport()
        self.shards = shards or ShardGroup()
        check_world_size(layout, self.transport)
        if scale_norm not in SCALE_NORMS:
            raise ValueError(f"scale_norm must be one of {sorted(SCALE_NORMS)}, got {scale_norm!r}")
        self.device = device = torch.device(device)
        self._launch_tables = tables_of(layout, device)  # kept: launches of others share it meanwhile
        norm, rank, blocks = SCALE_NORMS[scale_norm], self.transport.rank, layout.blocks_per_chunk
        slot, slots = layout.scale_slots(scale_scope)
        slots = slots if gathered is None else gathered.slots
        self._own = slice(rank * blocks, (rank + 1) * blocks)
        self.block_tensor = self._launch_tables.tensor
        self.scale = torch.zeros(layout.n_blocks, device=device) if scale is None else scale
        compensated = torch.zeros(layout.numel, device=device) if compensated is None else compensated
        served = torch.zeros(layout.chunk_numel, device=device) if served is None else served
        self.worker_residual, self.server_residual = compensated, served
        self.worker = ErrorFeedback(compensated, layout.scale_segments(scale_scope), norm, ternary)
        self.server = ErrorFeedback(served, slot[self._own], norm, ternary)
        self.to_servers = Messages(layout.world_size, slots, layout, device, ternary)
        self.gathered = gathered or Messages(layout.world_size, slots, layout, device, ternary)
        self.served = Messages(1, slots, layout, device, ternary)
        for sent in (self.to_servers, self.served):
            sent.words[:, Word.SENDER] = rank
        self.flags = torch.zeros(1, dtype=torch.int32, device=device)
        self.hold = self._no_flags = torch.zeros_like(self.flags)
        self.arrived_words = self.gathered.words.clone()
        self._missing: tuple[int, ...] = ()
        self.kept = []
        self.set_live(live_table(layout).to(device) if live is None else live)
        # On the device: a captured CUDA graph must count its replays.
        self.synchronisations = torch.zeros((), dtype=torch.int64, device=device)

    def set_live(self, live: LiveTable) -> None:
        self.live = live
        self.worker.set_live(live)
        self.server.set_live(LiveTable(live.bits, live.row[self._own], live.numel[self._own]))

    def __call__(self, tensors: Sequence[Tensor], coef: Tensor | None = None, **told: Any) -> None:
        """Average tensors.

        Args:
            tensors: Local ones, dense, any float dtype; an empty one stands for zeros.
            coef: float32 [tensors, columns of ``Coef``]; None averages the tensors themselves.
            told: The fields of ``Told``.

        Raises:
            CollectiveError: as ``synchronise`` does.
        """
        table = self.plain_coefficients() if coef is None else coef
        self.synchronise(lambda part: part.compress(tensors, table), Told(**told))

    def compress(
        self,
        tensors: Sequence[Tensor],
        coef: Tensor,
        exp_avg_sq: Tensor | None = None,
        eps_inside_sqrt: bool = False,
    ) -> None:
        """Write the signs of beta1*m + (1 - beta1)*g + e to the messages: the op ``momentum_compress``.

        Args:
            tensors: g, whole tensors.
            coef: float32 [tensors, columns of ``Coef``].
            exp_avg_sq: Where the momentum is preconditioned: v of the whole index space, float32 [P]; else None.
            eps_inside_sqrt: Of its denominator.
        """
        momentum_compress(
            self.part.gradients(tensors),
            self.layout.sizes,
            self.layout.block_size,
            self.worker.compensated,
            self.worker.scale,
            self.gathered.bits,
            self.scale,
            coef,
            self.block_tensor,
            None if exp_avg_sq is None else exp_avg_sq[self.part.elements],
            eps_inside_sqrt,
            self.live.bits,
            self.live.row,
            self.to_servers.bits,
            self.worker.partials,
            self.hold,
        )

    def synchronise(self, compress: Compress, told: Told) -> None:
        self._keep(tuple(told.missing))
        self.hold = self._no_flags if told.hold is None else told.hold
        before = None if told.hold is None else [scale.clone() for scale in self._scales()]
        compress(self)  # 1-bit Adam, lines 6 and 7
        self._finish()
        self._write_headers(told)
        self.transport.all_to_all(self.gathered.buffer, self.to_servers.buffer)  # line 8
        self.arrived_words = self.gathered.words.clone()
        self.flags = agreed_flags(self.arrived_words, self.to_servers.words[self.transport.rank], told.hold)
        self.absent = absent_on_all(self.gathered.absent, len(self.layout.sizes), self.flags) if self.kept else None
        if self.absent is not None:
            self.served.absent.copy_(packed(self.absent))
        self._serve()  # line 10
        # Where this step is held back the bits of the last result are here again: servers have kept them.
        self.transport.all_gather(self.gathered.buffer, self.served.buffer)  # line 11
        self._receive()  # m of line 13
        if before is not None:
            for scale, old in zip(self._scales(), before, strict=True):
                scale.copy_(torch.where(self.hold == 0, scale, old))
        self.hold = self._no_flags
        self._skip_with_shards(told)

    def _keep(self, missing: tuple[int, ...]) -> None:
        """Keep what a step is about to change of tensors of which this rank has no gradient."""
        on_cuda = self.device.type == "cuda"
        if missing != self._missing or (on_cuda and torch.cuda.is_current_stream_capturing()):
            self.to_servers.absent.copy_(absence(self.layout, missing, self.device).bits)
            self.served.absent.zero_()
            self._missing = missing
        self.kept = []
        if not missing:
            return
        worker, server = self.worker, self.server
        rows = absence(self.layout, missing, self.device).rows
        served = absence(self.layout, missing, self.device, self._own).rows
        of_worker = [worker.scale, worker.settled, worker.partials, self.scale]
        own = [server.compensated] if server.compensated.numel() else []  # a majority's servers keep nothing
        self.kept = [
            Kept(rows, self.block_tensor, [worker.compensated], bits=[self.gathered.bits], tables=of_worker),
            Kept(served, self.block_tensor[self._own], own, tables=[server.scale, server.settled, server.partials]),
        ]

    def _scales(self) -> tuple[Tensor, ...]:
        return self.scale, self.worker.scale, self.worker.settled, self.server.scale, self.server.settled

    def _finish(self) -> None:
        """Write the scales of what was compressed to the messages, and whether it was finite."""
        self.worker.finish(self.to_servers)

    def _write_headers(self, told: Told) -> None:
        number = told.number
        if number is None:
            self.synchronisations += 1
            number = self.synchronisations
        self.to_servers.write_headers(told, number, self.served.words[0, Word.DIGEST])
        self.served.words[:, Word.STEP] = number
        self.to_servers.signal[:] = self.worker.error_norm()

    def _serve(self) -> None:
        server_reduce(
            self.gathered.bits,
            self.gathered.scales,
            self.server.segment,
            self.flags,
            self.layout.block_size,
            self.server.compensated,
            self.server.scale,
            self.live.bits,
            self.live.row[self._own],
            self.served.bits,
            self.server.partials,
            self.hold,
        )
        self.server.finish(self.served)
        # A header damaged on its way here is seen here only: pass on what was seen.
        self.served.words[:, Word.FLAGS] = self.flags

    def _receive(self) -> None:
        # All ranks know the same flags, unless a server's message is of another step or length: then those that
        # have got it skip, and the next step's digests tell the others.
        self.flags = agreed_flags(self.gathered.words, self.served.words[0])
        # The servers split the workers' segments at chunk boundaries; see ``FlatLayout.scale_slots``.
        by_message = self.worker.segment.view(self.layout.world_size, -1)
        slot = (by_message - by_message[:, :1]).long()
        torch.gather(self.gathered.scales, 1, slot, out=self.scale.view_as(by_message))
        self.served.words[:, Word.DIGEST] = checksum_of(self.gathered.payload)
        # Skipped: s := 0 turns all of c into residual, which already contains the momentum. A server that has seen
        # nothing wrong has averaged what arrived, and keeps that: workers don't keep it as well.
        kept, averaged = self.flags == 0, self.gathered.words[:, Word.FLAGS] == 0
        for scale in (self.scale, self.server.scale):
            scale *= kept
        self.worker.scale.view(self.layout.world_size, -1).mul_(averaged[:, None])

    def refuse(self, flags: Tensor) -> None:
        kept = ((self.flags != 0) | (flags == 0)).float()
        self.flags = self.flags | flags
        for scale in (self.scale, self.server.scale):
            scale *= kept

    def take_residuals(self, out: Tensor) -> None:
        self.settle()
        torch.mul(self.worker.compensated, 1.0 / self.transport.world_size, out=out)
        rank, chunk = self.transport.rank, self.layout.chunk_numel
        out[rank * chunk : (rank + 1) * chunk] += self.server.compensated
        self.transport.all_reduce(out)
        for side in (self.worker, self.server):
            side.forget()

    def squares_of_result(self) -> Tensor:
        """Return the square of the result's norm by block: float64 [B]; reads no element."""
        return self.scale.double().square() * self.live.numel

    @property
    def parts(self) -> tuple[CompressedAllReduce]:
        return (self,)

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
