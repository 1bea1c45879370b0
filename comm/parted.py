"""Averages in parts: in buckets, each sent as soon as its gradients are there, or in two levels, for nodes.

Each part has a ``CompressedAllReduce`` of its own. All parts' results are rows of one buffer, so that later kernels
read them as if there were one part.

A backward pass fills the flat index space from its end, so that bucket k travels while bucket k - 1 is still being
computed. Only bucket 0, which is complete last, waits for ``step``: it tells every rank whether all can take the step.

With two levels gradients travel as floats inside a node, where the network is fast, and as bits between nodes:

    inside a node   1. reduce-scatter: each rank gets one part of the node's mean gradient, float32 or bfloat16
    between nodes   2. ranks with the same part average its momentum at one bit per element (``CompressedAllReduce``)
    inside a node   3. all-gather of the parts' messages: bits and scales, not floats

With n ranks in a node, each sends an n-th as much between nodes as without levels. The algorithm is that of one worker
per node, with scales of its own for each part. Marsit's rounds (``RoundAllReduce``, on a ``NodeSection``) go the same
way: each rank keeps moments and compensation of its part alone, and step 3 gathers signs, or floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout, LiveTable, ScaleScope, close_parts, live_table, renew
from ..triton_kernels.compress import OWN
from ..triton_kernels.headers import CHECKED, Word, union
from ..triton_kernels.nouns import Places, Preconditioner, Stored
from ..triton_kernels.parts import programs_of as programs_to_close
from ..triton_kernels.tables import tables_of
from .absent import Backup, absence, absent_on_all
from .allreduce import CompressedAllReduce
from .alone import make_all_reduce
from .error_feedback import SideOfParts
from .feedback import FeedbackReducer, OfRank
from .message import Messages, StepContext
from .partition import NodeSection, Section
from .reducer import Compress
from .shards import ShardGroup
from .shared_squares import Unit
from .transport import LocalTransport, Transport
from .verdict import Scaled, Verdict, programs_of


class PartedAllReduce(FeedbackReducer):
    """Base class of reducers that average in parts, each by a ``CompressedAllReduce`` of its own.

    Args:
        layout: Layout of the whole flat index space, with as many chunks as all parts together.
        count: Number of parts.
        here: The parts that this rank averages.
        transport: Connects the ranks that average the same part.
        serve_alone: Whether one rank alone has a server, too.
        worker_sq: The moving averages of squared gradients of the parts in ``here``, one behind the other. None: the
            variance is not shared.
        device, scale_norm, scale_scope, compensated, exponents, live, ternary, shards: See ``CompressedAllReduce``.
    """

    def __init__(
        self,
        layout: FlatLayout,
        count: int,
        here: Sequence[Section],
        transport: Transport,
        *,
        device: torch.device,
        scale_norm: str,
        scale_scope: ScaleScope,
        compensated: Tensor,
        live: LiveTable | None = None,
        ternary: bool = False,
        shards: ShardGroup | None = None,
        serve_alone: bool = True,
        worker_sq: Tensor | None = None,
        exponents: Tensor | None = None,
    ) -> None:
        self.layout, self.device, self.count = layout, device, count
        self.serves = serve_alone or transport.world_size > 1
        self.shards = shards or ShardGroup()
        slots = [Section(layout, i, count).layout.scale_slots(scale_scope) for i in range(count)]
        self._slot = torch.cat([slot for slot, _ in slots]).view(layout.world_size, -1).to(device)
        most = max(n for _, n in slots)
        self.gathered = Messages(layout.world_size, most, layout, device, ternary)
        self._launch_tables = tables_of(layout, device)  # kept: launches of others share it meanwhile
        self.scale = torch.zeros(layout.n_blocks, device=device)
        served = compensated.new_zeros(len(here), layout.chunk_numel if self.serves else 0)
        exponents_served, digest = None, None
        if self.serves:
            self.served = Messages(len(here), most, layout, device, ternary)
            digest = torch.zeros(len(here), dtype=torch.int64, device=device)
            if exponents is not None:
                exponents_served = exponents.new_zeros(len(here), layout.blocks_per_chunk)
        whole = len(here) == count  # else each part's verdict measures the result
        self.verdict = Verdict(device, digest, programs_of(layout) if whole else 0)
        squares = None if worker_sq is None else Stored.row(worker_sq, exponents, OWN)
        of_served = None if exponents_served is None else exponents_served.view(-1)
        self._of_rank = OfRank(Stored.row(compensated, exponents, 0), Stored(served, of_served), squares)
        self._parts = [
            make_all_reduce(
                part.layout,
                transport,
                serve_alone=serve_alone,
                device=device,
                scale_norm=scale_norm,
                scale_scope=scale_scope,
                compensated=compensated[part.elements],
                exponents=None if exponents is None else exponents[:, part.blocks],
                server_exponents=None if exponents_served is None else exponents_served[i : i + 1],
                ternary=ternary,
                part=part,
                worker_sq=None if worker_sq is None else worker_sq.view(len(here), -1)[i],
                gathered=self.gathered.rows(part.chunks, part.layout)
                if whole
                # Sent inside the node: it must not lie in the buffer that receives those of all its ranks.
                else Messages(transport.world_size, most, part.layout, device, ternary),
                scale=self.scale[part.blocks],
                residual=residual,
                served=self.served.rows(slice(i, i + 1), part.layout) if self.serves else None,
                digest=None if digest is None else digest[i : i + 1],
            )
            for i, (part, residual) in enumerate(zip(here, served, strict=True))
        ]
        self.backups = []
        self.set_live(live_table(layout).to(device) if live is None else live)

    def set_live(self, live: LiveTable) -> None:
        self.live, self.places = live, Places.of(self.layout, self._launch_tables.tensor, live)
        for each in self.parts:
            each.set_live(each.part.live(live))

    @property
    def parts(self) -> list[CompressedAllReduce]:
        return self._parts

    @property
    def of_rank(self) -> OfRank:
        """Return what is this rank's own, of all parts that are here."""
        return self._of_rank


class BucketedAllReduce(PartedAllReduce):
    """A reducer of equal ranges ("buckets"), each of which can be sent before the others are there.

    Args:
        layout: Layout of the whole; its ``world_size`` is ``count`` times the transport's.
        count: Number of buckets.
        transport: Connects the ranks. None: there is one.
        options: Keywords of ``PartedAllReduce``.

    Attributes:
        under_way: Buckets that ``start`` has sent since the last step.
    """

    worker: SideOfParts
    server: SideOfParts

    def __init__(self, layout: FlatLayout, count: int, transport: Transport | None = None, **options: Any) -> None:
        self.transport: Transport = transport if transport is not None else LocalTransport()
        super().__init__(layout, count, [Section(layout, i, count) for i in range(count)], self.transport, **options)
        self.under_way: set[int] = set()
        self.worker = SideOfParts([part.worker for part in self.parts])
        if self.serves:
            self.server = SideOfParts([part.server for part in self.parts])
            if self.together:
                # All buckets' messages, as they are sent and as they arrive: [ranks, buckets, bytes].
                messages = torch.stack([part.to_servers.buffer for part in self.parts], 1)
                self._together = messages, torch.empty_like(messages)
            return
        self._part_flags = torch.zeros(count, dtype=torch.int32, device=self.device)
        for part, found in zip(self.parts, self._part_flags.split(1), strict=True):
            part.verdict.share(found)

    def start(self, bucket: int, compress: Compress, context: StepContext) -> None:
        """Average one bucket; ``synchronise`` averages the others. All ranks start buckets in the same order."""
        self.under_way.add(bucket)
        part = self.parts[bucket]
        part.exchange(compress, self._context_of(part, context))

    @staticmethod
    def _context_of(part: CompressedAllReduce, context: StepContext) -> StepContext:
        # Of its own tensors alone: a bucket that was sent earlier could not know of others'.
        return context._replace(missing=[i for i in context.missing if part.layout.sizes[i]], limit=None)

    @property
    def together(self) -> bool:
        """Tell whether all buckets travel in two collectives, because no rank starts one before the step."""
        return self.serves

    def write(self, compress: Compress, context: StepContext) -> None:
        """Write all buckets' messages, the last one's first; or average those that have not been started."""
        for bucket, part in reversed(list(enumerate(self.parts))):
            if self.together:
                part.write(compress, self._context_of(part, context))
            elif bucket not in self.under_way:
                self.start(bucket, compress, context)
        self.under_way.clear()

    def send(self) -> None:
        if self.together:
            sent, arrived = self._together
            torch.stack([part.to_servers.buffer for part in self.parts], 1, out=sent)
            self.transport.all_to_all(arrived.view(len(arrived), -1), sent.view(len(sent), -1))
            self._of_parts().copy_(arrived.transpose(0, 1))

    def serve(self, context: StepContext) -> None:
        for part in self.parts if self.together else ():
            part.serve(self._context_of(part, context))

    def gather(self) -> None:
        if self.together:
            _, arrived = self._together
            self.transport.all_gather(arrived.view(len(arrived), -1), self.served.buffer.view(1, -1))
            self._of_parts().copy_(arrived.transpose(0, 1))

    def _of_parts(self) -> Tensor:
        """Return all buckets' messages as they lie in ``gathered``: [buckets, ranks, bytes]."""
        return self.gathered.buffer.view(self.count, self.transport.world_size, -1)

    def receive(self, context: StepContext) -> None:
        """Receive all buckets together: headers, scales and the verdict. The step skips all buckets or none.

        One rank alone without a server has no messages: it combines the buckets' flags and checks the guard's limit.
        """
        verdict, absent = self.verdict, [part.verdict.absent for part in self.parts if part.verdict.absent is not None]
        verdict.absent = torch.stack(absent).any(0) if absent else None
        verdict.hold = verdict.none if context.hold is None else context.hold
        limit = self._limit(context)
        if self.serves:
            sides = self.worker, self.server
            verdict.receive(self.gathered, self.served, sides, self.transport.rank, self.scale, context, limit)
        else:
            squares = None if limit is None else verdict.squares[: programs_to_close(self.scale)]
            close_parts(self._part_flags, self.scale, self.worker.scale, verdict.of_all, verdict.ticket, limit, squares)
        self._end(context)

    @property
    def wire_bytes(self) -> int:
        """Count the bytes of messages and partial sums, which only serve within a step."""
        return super().wire_bytes + (sum(messages.nbytes for messages in self._together) if self.together else 0)

    @property
    def sides(self) -> tuple[SideOfParts, ...]:
        """Return the sides of error feedback that this rank has."""
        return (self.worker, self.server) if self.serves else (self.worker,)

    def state(self) -> list[Tensor]:
        return [*super().state(), *(side.segment for side in self.sides)]

    def check_idle(self) -> None:
        """Raise RuntimeError if the backward pass has sent buckets: until ``step`` there is no complete state."""
        if self.under_way:
            raise RuntimeError(
                f"{len(self.under_way)} of {self.count} buckets have been sent by the backward pass: between it and "
                "step() there is no state that could be saved, loaded or looked at; do that after step()"
            )

    def settle(self) -> None:
        self.check_idle()
        super().settle()

    def take_residuals(self, out: Tensor) -> None:
        for each in self.parts:
            each.take_residuals(out[each.part.elements])


def _rows(exponents: Tensor | None, blocks: slice) -> Tensor | None:
    return None if exponents is None else exponents[blocks]


_COMPARED = (Word.STEP, Word.TAG)


class HierarchicalAllReduce(PartedAllReduce):
    """A reducer of two levels: ``CompressedAllReduce`` with nodes as workers.

    Args:
        layout: Layout of the whole; its ``world_size`` is the product of both transports'.
        between: Connects the ranks of all nodes that have the same place in their node.
        inside: Connects the ranks of this node.
        dtype: Dtype of gradients inside a node: float32 or bfloat16.
        options: Keywords of ``PartedAllReduce``.
    """

    largest_gradient = NodeSection.largest_gradient

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
        self._part = NodeSection(layout, inside, dtype, options["device"])
        super().__init__(layout, inside.world_size, [self._part], between, **options)
        worker, _, squares = self._of_rank
        self._compensated, blocks = worker, self._part.blocks
        here = Stored(worker.numbers[self._part.elements], _rows(worker.exponents, blocks))  # the node's
        squares = None if squares is None else squares._replace(exponents=_rows(squares.exponents, blocks))
        self._of_rank = self._of_rank._replace(worker=here, squares=squares)

    def write(self, compress: Compress, context: StepContext) -> None:
        self.backups = []
        if context.missing:  # the bits and the scales of the whole result, as parts keep theirs
            rows = absence(self.layout, context.missing, self.device).rows
            self.backups = [Backup(rows, self.places.block_tensor, bits=[self.gathered.bits], tables=[self.scale])]
        self.parts[0].write(compress, context)

    def send(self) -> None:
        self.parts[0].send()

    def serve(self, context: StepContext) -> None:
        self.parts[0].serve(context)

    def gather(self) -> None:
        self.parts[0].gather()

    def receive(self, context: StepContext) -> None:
        part, before = self.parts[0], self.scale.clone()
        part.receive(context._replace(limit=None))
        self._part.forget()
        self.inside.all_gather(self.gathered.buffer.view(self.count, -1), part.gathered.buffer.view(1, -1))
        self.heard(self.gathered.front if context.sums else self.gathered.buffer)
        compared = self._compared_words()
        flags, verdict = union(self.gathered.words[:, Word.FLAGS], compared != compared[:1]), self.verdict
        part.refuse(flags)
        arrived = torch.gather(self.gathered.scales, 1, self._slot).view(-1)
        kept = torch.where(flags == 0, arrived, 0.0)
        self.scale.copy_(kept if context.hold is None else torch.where(context.hold == 0, kept, before))
        verdict.flags, verdict.absent = flags, None
        if context.missing:
            verdict.absent = absent_on_all(self.gathered.absent, len(self.layout.sizes), flags)
        self._refuse_beyond(context.limit)

    def refuse(self, flags: Tensor) -> None:
        self.parts[0].refuse(flags)
        self.scale *= ((self.flags != 0) | (flags == 0)).float()
        self.verdict.flags = self.flags | flags

    def _compared_words(self) -> Tensor:
        """Return what all parts' messages must say alike: int32 [ranks, 2], rank by rank."""
        words = self.gathered.words.view(self.count, self.between.world_size, -1)
        # By number: a list of them would be uploaded as an index in every step, and waited for.
        return torch.stack([words[..., word] for word in _COMPARED], -1).transpose(0, 1).reshape(-1, len(_COMPARED))

    def _disputed(self) -> Tensor:
        """Return the headers of this rank's part if they differ, by node, else of all ranks; reads from the device."""
        words = super()._disputed()
        if bool((words[:, :CHECKED] != words[:1, :CHECKED]).any()):
            return words
        compared = words[:1].repeat(self.layout.world_size, 1)
        for column, word in enumerate(_COMPARED):
            compared[:, word] = self._compared_words()[:, column]
        return compared

    def begin(self) -> None:
        self._compensated.numbers[: self._part.elements.start].zero_()
        self._compensated.numbers[self._part.elements.stop :].zero_()

    def serve_again(self) -> None:
        part, chunks = self.parts[0], self.between.world_size
        first = self.inside.rank * chunks
        part.gathered.bits.copy_(self.gathered.bits[first : first + chunks])
        part.serve_again()

    def take_residuals(self, out: Tensor) -> None:
        own = torch.empty(self.layout.numel // self.count, device=self.device)
        self.parts[0].take_residuals(own)
        self.inside.all_gather(out.view(self.count, -1), own.view(1, -1))
        # A warm-up follows, in which all ranks compare: also those of which the last messages were other parts'.
        digest = self.verdict.digest
        assert digest is not None
        digests = digest.new_empty(self.count, 1)
        self.inside.all_gather(digests, digest.view(1, 1))
        torch.sum(digests, 0, out=digest)
        self.heard(out)

    def _gathered_sums(self) -> Tensor:
        own = self.parts[0].means
        whole = own.buffer.new_empty(self.layout.world_size, own.buffer.shape[1])
        self.inside.all_gather(whole.view(self.count, -1), own.buffer.view(1, -1))
        self.heard(whole)
        self._means = own.like(whole)
        return self._means.sums

    def renew(self, unit: Unit, v: Preconditioner) -> None:
        if unit.divides:
            self.parts[0].renew_part(unit, v, False)
            self.scale.zero_()
        if unit.kept is None:
            ternary = self.gathered.bits.dim() == 3
            renew(self.places, *(None,) * 4, ternary, unit.coef, v, self._means.codes, unit.factors, True)
        unit.keep(self._means.codes, Section(self.layout))
        del self._means, self.sums
        for part in self.parts:
            if part.squares is not None:
                part.squares.forget()

    @property
    def sides(self) -> Sequence[Scaled]:
        return self.parts[0].sides
