"""The error-compensated 1-bit all-reduce: alltoall, average, allgather, all on packed uint8.

    per rank  1. compress the local tensors into W messages, one per chunk  (momentum_compress, finish)
              2. all_to_all: rank k gets every rank's chunk k
    server k  3. average the chunk, add the server's residual, compress     (server_reduce, finish)
              4. all_gather: every rank gets every chunk
    per rank  5. the result is W rows of bits and one scale per block

(1-bit Adam, Algorithm 1 and section 6; 1-bit LAMB, section 5.) Two collectives, whatever the number
of tensors; the scales, the flags and the checks ride in the messages' headers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..triton_kernels import (
    SCALE_NORMS,
    Coef,
    FlatLayout,
    LiveTable,
    ScaleScope,
    block_table,
    live_table,
    momentum_compress,
    server_reduce,
    unpack,
)
from ..triton_kernels.launch import tables_of
from .absent import Kept, absence, packed, told_by_all
from .error_feedback import ErrorFeedback
from .message import Flag, Messages, Word, agreed_flags, digest
from .transport import LocalTransport, Transport


class CompressedAllReduce:
    """Averages flat tensors over all ranks at one bit per element (or two), carrying the errors along.

    Stand-alone use, on any tensors that keep their sizes from call to call::

        reduce = CompressedAllReduce(FlatLayout((x.numel(),), world_size), transport)
        reduce([x])                      # every rank
        mean = reduce.result()           # float32 [P], equal on all ranks

    Optimizers fuse the momentum into step 1 by ``beta1``, ``unit`` in the ``coef`` table.

    Args:
        layout: The flat index space; its ``world_size`` is the transport's.
        transport: How messages travel; None for world size 1.
        device: Where everything lies.
        scale_norm: "l1", "l2" or "contractive"; see ``finish``.
        scale_scope: "global", "layer" or "block"; servers cut scopes at chunk boundaries.
        compensated: float32 [P] to use as the workers' c, or None to allocate zeros.
        live: Which elements count; None: all but padding.
        ternary: Two bits per element: sign and zero. Zeros stay zeros, and scales are means over the others.
        gathered: W messages to use, or None to allocate them: a part of a larger whole (``parts``).
        scale: float32 [B] to use, or None to allocate zeros.
        served: float32 [P / W], zeros, to use as the server's c, or None to allocate it.

    Attributes:
        worker: This rank's ``ErrorFeedback`` over all P elements.
        server: That of the chunk which it serves.
        gathered: W messages; their bits are the result's signs, kept until the next call has read
            them. They then receive the alltoall before they receive the allgather.
        scale: float32 [B], the result's magnitude per block.
        arrived_words: int32 [W, 8], the headers that the workers sent last.
        flags: int32 [1], the last step's ``Flag`` bits, equal on all ranks; skipped where it is not 0.
        absent: Of which tensors no rank had a gradient in the last step, bool [tensors]; None where this rank had all
            gradients, so that there are none.
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
        gathered: Messages | None = None,
        scale: Tensor | None = None,
        served: Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.transport: Transport = transport if transport is not None else LocalTransport()
        if layout.world_size != self.transport.world_size:
            raise ValueError(
                f"layout.world_size must be the transport's {self.transport.world_size}, got {layout.world_size}"
            )
        if scale_norm not in SCALE_NORMS:
            raise ValueError(f"scale_norm must be one of {sorted(SCALE_NORMS)}, got {scale_norm!r}")
        self.device = torch.device(device)
        self._launch_tables = tables_of(layout, self.device)  # kept, because launches share what somebody keeps
        self.scale = torch.zeros(layout.n_blocks, device=self.device) if scale is None else scale
        self._build(scale_scope, SCALE_NORMS[scale_norm], compensated, ternary, gathered, served)
        self.set_live(live_table(layout).to(self.device) if live is None else live)
        # On the device: a captured CUDA graph must count its replays.
        self.synchronisations = torch.zeros((), dtype=torch.int64, device=self.device)

    def _build(
        self,
        scope: ScaleScope,
        norm: int,
        compensated: Tensor | None,
        ternary: bool,
        gathered: Messages | None,
        served_part: Tensor | None,
    ) -> None:
        layout, device, rank = self.layout, self.device, self.transport.rank
        served = layout.blocks_per_chunk
        slot, slots = layout.scale_slots(scope)
        slots = slots if gathered is None else gathered.slots
        self._own = slice(rank * served, (rank + 1) * served)
        self.block_tensor = block_table(layout, device)
        if compensated is None:
            compensated = torch.zeros(layout.numel, device=device)
        self.worker = ErrorFeedback(compensated, layout.scale_segments(scope), norm, ternary)
        served_part = torch.zeros(layout.chunk_numel, device=device) if served_part is None else served_part
        self.server = ErrorFeedback(served_part, slot[self._own], norm, ternary)
        self.agreement = torch.zeros(2, served, dtype=torch.float64, device=device)
        self.to_servers = Messages(layout.world_size, slots, layout, device, ternary)
        self.gathered = gathered or Messages(layout.world_size, slots, layout, device, ternary)
        self.served = Messages(1, slots, layout, device, ternary)
        for sent in (self.to_servers, self.served):
            sent.words[:, Word.SENDER] = rank
        self.flags = torch.zeros(1, dtype=torch.int32, device=device)
        self._going_on = torch.zeros_like(self.flags)
        self.arrived_words = self.gathered.words.clone()
        self.absent: Tensor | None = None
        self._told: tuple[int, ...] = ()
        self._kept: list[Kept] = []

    def set_live(self, live: LiveTable) -> None:
        """Says which elements count. No other may be non-zero in ``worker.compensated``."""
        self.live = live
        self.worker.set_live(live)
        self.server.set_live(LiveTable(live.bits, live.row[self._own], live.numel[self._own]))

    def __call__(
        self,
        tensors: Sequence[Tensor],
        *,
        coef: Tensor | None = None,
        exp_avg_sq: Tensor | None = None,
        eps_inside_sqrt: bool = False,
        tag: int = 0,
        abort: bool = False,
        hold: Tensor | None = None,
        pending: Tensor | None = None,
        number: int | Tensor | None = None,
        missing: Sequence[int] = (),
    ) -> None:
        """Compresses, exchanges, and leaves the average in ``gathered.bits`` and ``scale``.

        Where any rank has a non-finite element or aborts, all ranks skip: the result is zero,
        servers keep their residual, and each worker keeps all it had, gradient included, as
        residual, so that nothing is lost.

        Args:
            tensors: Local tensors, dense, any float dtype; an empty one stands for zeros.
            coef: float32 [tensors, columns of ``Coef``]; None averages the tensors themselves.
            exp_avg_sq: See ``momentum_compress``.
            eps_inside_sqrt: See ``momentum_compress``.
            tag: A 31-bit number that must be equal on all ranks; else all skip.
            abort: Makes every rank skip this step.
            hold: int32 [1], flags that are equal on all ranks: where any is set nothing at all changes,
                the last result included, but for the count of synchronisations. None: none.
            pending: int32 [1], flags of this rank alone, such as earlier steps of a round have set. None: none.
            number: Of the step, an int32 that must be equal on all ranks; else all skip. None: of the synchronisation.
            missing: Tensors of which this rank has no gradient. They count as zeros, unless all ranks miss them and
                ``restore`` follows.

        Raises:
            CollectiveError: if a collective fails; then this object can't be used further.
        """
        self.keep(missing)
        going_on = self._going_on if hold is None else hold

        def compress() -> None:
            momentum_compress(
                tensors,
                self.layout.sizes,
                self.layout.block_size,
                self.worker.compensated,
                self.worker.scale,
                self.gathered.bits,
                self.scale,
                self._plain_coef() if coef is None else coef,
                self.block_tensor,
                exp_avg_sq,
                eps_inside_sqrt,
                self.live.bits,
                self.live.row,
                self.to_servers.bits,
                self.worker.partials,
                going_on,
            )
            self.worker.finish(self.to_servers)

        self._exchange(compress, tag, abort, hold, pending, number)

    def keep(self, missing: Sequence[int]) -> None:
        """Takes note of what a step is about to change of tensors of which this rank has no gradient."""
        missing = tuple(missing)
        on_cuda = self.device.type == "cuda"
        if missing != self._told or (on_cuda and torch.cuda.is_current_stream_capturing()):
            self.to_servers.absent.copy_(absence(self.layout, missing, self.device).bits)
            self.served.absent.zero_()
            self._told = missing
        self._kept = []
        if not missing:
            return
        worker, server = self.worker, self.server
        rows = absence(self.layout, missing, self.device).rows
        blocks = (self._own.start, self._own.stop)
        served = absence(self.layout, missing, self.device, blocks).rows
        of_worker = [worker.scale, worker.partials, self.scale]
        of_server = [server.scale, server.partials]
        lines, bits = [worker.compensated], [self.gathered.bits]
        own = [server.compensated] if server.compensated.numel() else []  # a majority's servers keep nothing
        self._kept = [
            Kept(rows, self.block_tensor, lines=lines, bits=bits, tables=of_worker),
            Kept(served, self.block_tensor[self._own], lines=own, tables=of_server),
        ]

    def restore(self, absent: Tensor) -> None:
        """Leaves ``absent`` bool [tensors], equal on all ranks, as they were before the last step; see ``missing``.

        Called after all else that may change them, such as ``refuse``.
        """
        for kept in self._kept:
            kept.restore(absent)
        self._kept = []
        self.serve_again()

    def _exchange(
        self,
        compress: Callable[[], None],
        tag: int,
        abort: bool,
        hold: Tensor | None,
        pending: Tensor | None,
        number: int | Tensor | None,
    ) -> None:
        """Fills ``to_servers`` by ``compress()``, sends it, serves and receives; scales stay where ``hold`` is set."""
        going_on = self._going_on if hold is None else hold
        before = None if hold is None else [scale.clone() for scale in self._scales()]
        compress()
        self._sign_messages(tag, abort, pending, number)
        self.transport.all_to_all(self.gathered.buffer, self.to_servers.buffer)
        self.arrived_words = self.gathered.words.clone()
        self.flags = agreed_flags(self.arrived_words, self.to_servers.words[self.transport.rank])
        if hold is not None:
            self.flags = self.flags | hold
        self.absent = self._told_by_all() if self._kept else None
        if self.absent is not None:
            self.served.absent.copy_(packed(self.absent))
        self._serve(going_on)
        # Where this step is held back the bits of the last result are here again: servers have kept them.
        self.transport.all_gather(self.gathered.buffer, self.served.buffer)
        self._receive()
        if before is not None:
            for scale, old in zip(self._scales(), before, strict=True):
                scale.copy_(torch.where(going_on == 0, scale, old))

    def _told_by_all(self) -> Tensor:
        # Of messages that can't be read no bit counts.
        readable = (self.flags & int(Flag.MISMATCH)) == 0
        return told_by_all(self.gathered.absent, len(self.layout.sizes)) & readable

    def _scales(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.scale, self.worker.scale, self.server.scale

    def _sign_messages(self, tag: int, abort: bool, pending: Tensor | None, number: int | Tensor | None) -> None:
        words = self.to_servers.words
        if number is None:
            self.synchronisations += 1
            number = self.synchronisations
        words[:, Word.STEP] = self.served.words[:, Word.STEP] = number
        words[:, Word.DIGEST] = self.served.words[:, Word.DIGEST]
        words[:, Word.TAG].fill_(tag)
        self.to_servers.signal[:] = self.worker.error_norm()
        if abort:
            words[:, Word.FLAGS] |= int(Flag.ABORT)
        if pending is not None:
            words[:, Word.FLAGS] |= pending

    def _serve(self, hold: Tensor) -> None:
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
            self.agreement,
            hold,
        )
        self.server.finish(self.served)
        # A header damaged on its way here is seen here only: pass on what was seen.
        self.served.words[:, Word.FLAGS] = self.flags

    def _receive(self) -> None:
        # All ranks know the same flags, unless a server's message is of another step or length: then those that
        # have got it skip, and the next step's digests tell the others.
        self.flags = agreed_flags(self.gathered.words, self.served.words[0])
        # The servers cut the workers' segments at chunk boundaries; see ``FlatLayout.scale_slots``.
        by_message = self.worker.segment.view(self.layout.world_size, -1)
        slot = (by_message - by_message[:, :1]).long()
        torch.gather(self.gathered.scales, 1, slot, out=self.scale.view_as(by_message))
        self.served.words[:, Word.DIGEST] = digest(self.gathered)
        # Skipped: s := 0 turns all of c into residual, which already contains the momentum.
        kept = (self.flags == 0).float()
        for scale in self._scales():
            scale *= kept

    def refuse(self, flags: Tensor) -> None:
        """Adds ``flags`` int32 [1], equal on all ranks, to those of the last step: where any is set it is skipped.

        The average becomes zero. Nothing is lost: servers, which already have all messages, keep it as
        residual. A step that is skipped already stays as it is.
        """
        kept = ((self.flags != 0) | (flags == 0)).float()
        self.flags = self.flags | flags
        for scale in (self.scale, self.server.scale):
            scale *= kept

    def take_residuals(self, out: Tensor) -> None:
        """Takes all residuals out, by one all-reduce: they are zero then.

        Args:
            out: float32 [P], written: the mean of the workers' residuals plus the servers', by flat
                index, equal on all ranks.

        Raises:
            CollectiveError: as a call does.
        """
        self.settle()
        torch.mul(self.worker.compensated, 1.0 / self.transport.world_size, out=out)
        rank, chunk = self.transport.rank, self.layout.chunk_numel
        out[rank * chunk : (rank + 1) * chunk] += self.server.compensated
        self.transport.all_reduce(out)
        for side in (self.worker, self.server):
            side.forget()

    def residual_ratio(self) -> float:
        """Return the workers' residuals (root mean square of their norms) over the norm of the last result.

        Equal on all ranks, for no extra collective; waits for the device.
        """
        errors = self.arrived_words[:, Word.SIGNAL].view(torch.float32).double()
        result = (self.scale.double().square() * self.live.numel).sum().sqrt()
        ratio = errors.square().mean().sqrt() / result if result > 0 else result  # a skipped step has no result
        return float(ratio)

    def squares_by_block(self) -> Tensor:
        """|e|^2 of this rank's residual and of the result in the last step: float64 [2, B]. Reads no element."""
        result = self.scale.double().square() * self.live.numel
        return torch.stack([self.worker.error_squares(), result])

    @property
    def bits(self) -> Tensor:
        """The result's signs: uint8 [W, P / 8W], or [W, 2, P / 8W] where ternary."""
        return self.gathered.bits

    @property
    def worker_residual(self) -> Tensor:
        """This rank's c, after ``settle`` e: float32 [P]."""
        return self.worker.compensated

    @property
    def server_residual(self) -> Tensor:
        """That of the chunk which it serves: float32 [P / W]."""
        return self.server.compensated

    @property
    def digests(self) -> list[int]:
        """What the next messages tell of the last; waits for the device."""
        return [int(self.served.words[0, Word.DIGEST])]

    def resume(self, digests: Sequence[int]) -> None:
        """Takes up a checkpoint's ``digests``; residuals, bits and ``scale`` are filled apart."""
        self.served.words[:, Word.DIGEST] = digests[0]

    def serve_again(self) -> None:
        """Puts the loaded result into this rank's message, from which a step that is held back gathers it."""
        self.served.bits.copy_(self.gathered.bits[self.transport.rank :][:1])

    @property
    def wire_bytes(self) -> int:
        """Bytes of what only serves within a step: messages on their way, and partial sums."""
        sums = (self.worker.partials, self.server.partials, self.agreement)
        scratch = (self.to_servers.buffer, self.served.buffer, *sums)
        return sum(tensor.nbytes for tensor in scratch)

    def state(self) -> list[Tensor]:
        """All that the next step needs, tables included; ``gathered`` too, it is the momentum."""
        held = [v for v in vars(self).values() if isinstance(v, Tensor) and v is not self.agreement]
        return [*held, *self.live, self.gathered.buffer, *self.worker.state(), *self.server.state()]

    def norms(self) -> tuple[float, float, float]:
        """|c| and |e| of this rank, and |E| of what it serves, of the last step; waits for the device."""
        return *self.worker.norms(), self.server.norms()[1]

    def settle(self) -> None:
        """Forms both deferred residuals in place: then ``compensated`` holds e, its scales 0.

        Changes no later step. Only checkpoints and people who look need it.
        """
        self.worker.settle()
        self.server.settle()

    def result(self) -> Tensor:
        """The last average, float32 [P], by flat index, zero where nothing is live; allocates."""
        return result_of(self.bits, self.scale, self.live)

    def _plain_coef(self) -> Tensor:
        # beta1 = 0: c = tensor + residual.
        # A layout without tensors still has one block, and that block a row here.
        coef = torch.zeros(max(1, len(self.layout.sizes)), len(Coef), device=self.device)
        coef[:, Coef.ONE_MINUS_BETA1] = 1.0
        coef[:, Coef.GRAD_LIMIT] = torch.inf  # tensors of any kind
        coef[:, Coef.UNIT] = 1.0
        return coef


def result_of(bits: Tensor, scale: Tensor, live: LiveTable) -> Tensor:
    """The values that bits and scales stand for: float32 [P], zero where nothing is live."""
    values = unpack(bits[:, 0] if bits.dim() == 3 else bits).view(len(scale), -1) * scale[:, None]
    if bits.dim() == 3:
        values = torch.where(unpack(bits[:, 1]).view_as(values) > 0, values, 0.0)
    alive = unpack(live.bits[live.row.long()]).view_as(values) > 0
    return torch.where(alive, values, 0.0).view(-1)
