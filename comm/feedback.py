"""Holds what all-reduces with error feedback have in common, in one part or more: norms, checks, what is saved."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..triton_kernels import SCALE_NORMS, FlatLayout, LiveTable
from ..triton_kernels.headers import CHECKED, Word, folded, unfolded
from ..triton_kernels.limit import judged, squares_by_block
from ..triton_kernels.nouns import Limit, Places, Preconditioner, Stored
from ..triton_kernels.tables import BlockTables
from .absent import Backup
from .error_feedback import ErrorFeedback
from .message import Messages, StepContext, describe_mismatch
from .partition import Section
from .reducer import Compress, Reducer
from .shards import ShardGroup
from .shared_squares import Rows, SharedSquares, Unit, by_tensor
from .transport import Transport
from .verdict import Scaled, Verdict


class OfRank(NamedTuple):
    """All that is one rank's own, of what is here."""

    worker: Stored
    """c, after ``settle`` the residual e, [P]."""
    server: Stored
    """The same of the chunks which it serves; empty where it is no server."""
    squares: Stored | None
    """The EMA of the squares of its own gradients, [P]; None: nobody wants it."""


class OnePart(Protocol):
    """Is what averages one part: ``CompressedAllReduce``, which says what these are."""

    part: Section
    transport: Transport
    worker: ErrorFeedback
    gathered: Messages
    served: Messages
    arrived_words: Tensor
    backups: list[Backup]
    squares: SharedSquares | None
    verdict: Verdict

    @property
    def sides(self) -> tuple[ErrorFeedback, ...]:
        """Return who keeps residuals."""

    @property
    def sent(self) -> tuple[Messages, ...]:
        """Return what is sent."""

    @property
    def scratch(self) -> tuple[Tensor, ...]:
        """Return what no later step reads, besides messages."""

    def squares_of_result(self) -> Tensor:
        """Return the square of the result's norm by block: float64 [B]."""

    @property
    def means(self) -> Rows:
        """Return the mean of what all ranks have sent of their squares."""

    def share_part(self) -> None:
        """Make ``means``."""

    def renew_part(self, unit: Unit, v: Preconditioner, writes: bool = True) -> None:
        """Renew this part, as ``FeedbackReducer.renew``; v, or what it is made of, is written if ``writes``."""


class FeedbackReducer(Reducer):
    """Skeleton of an all-reduce with error feedback on workers and servers, in one part or more.

    Attributes:
        gathered: Messages whose bits are the result's signs.
        places: Where tensors lie, and what of them counts.
        shards: The ranks that hold other shards of the same tensors.
        backups: What ``restore`` puts back.
        sums: What ``share_squares`` has found, equal on all ranks: ``renew_levels``' first two arguments.
        serves: Whether this rank is a server besides, with residuals of its own.
    """

    gathered: Messages
    places: Places
    shards: ShardGroup
    backups: list[Backup]
    layout: FlatLayout
    sums: tuple[Tensor, Tensor]
    serves: bool = True
    _launch_tables: BlockTables

    @property
    @abstractmethod
    def parts(self) -> Sequence[OnePart]:
        """Return the all-reduce of each part that is here."""

    @property
    @abstractmethod
    def sides(self) -> Sequence[Scaled]:
        """Return the worker, and the server where there is one; what the last compresses is the result."""

    @property
    @abstractmethod
    def of_rank(self) -> OfRank:
        """Return what is this rank's own."""

    @property
    def bits(self) -> Tensor:
        return self.gathered.bits

    @property
    def digests(self) -> list[int]:
        """Return the checksums of the last messages that the next ones carry, by part; waits for the device."""
        digest = self.verdict.digest
        return [0] * len(self.parts) if digest is None else folded(digest).tolist()

    def synchronise(self, compress: Compress, context: StepContext) -> None:
        """Compress, exchange, and leave the result in ``bits`` and ``scale``; lines as in 1-bit LAMB's Algorithm 1."""
        self.write(compress, context)  # lines 6 and 7
        self.send()  # line 8
        self.serve(context)  # line 10
        self.gather()  # line 11
        self.receive(context)  # line 13: m

    @abstractmethod
    def write(self, compress: Compress, context: StepContext) -> None:
        """Write this rank's messages to the servers: ``compress`` makes their bits and keeps residuals, then scales."""

    @abstractmethod
    def send(self) -> None:
        """Send to each server its message, and receive those to this one."""

    @abstractmethod
    def serve(self, context: StepContext) -> None:
        """Average what has arrived, and write this server's message: its bits, what it keeps, then scales."""

    @abstractmethod
    def gather(self) -> None:
        """Receive all servers' messages."""

    @abstractmethod
    def receive(self, context: StepContext) -> None:
        """Take up the servers' messages: the result's scales, and the verdict on the step.

        Where this step is held back the bits of the last result are here again: servers have kept them.
        """

    @abstractmethod
    def set_live(self, live: LiveTable) -> None:
        """Say which elements count. No other may be non-zero in what workers keep."""

    @abstractmethod
    def take_residuals(self, out: Tensor) -> None:
        """Move all residuals into ``out`` float32 [P], by an all-reduce of each part; they are zero then.

        ``out`` becomes the mean of the workers' plus the servers', by flat index, equal on all ranks.

        Raises:
            CollectiveError: as ``synchronise`` does.
        """

    def begin(self) -> None:
        """Take up a warm-up's momentum, in the memory of residuals: drop that of parts which other ranks have."""

    def set_norm(self, name: str) -> None:
        """Measure scales by another of ``SCALE_NORMS`` from the next step on."""
        for part in self.parts:
            for side in part.sides:
                side.norm = SCALE_NORMS[name]

    def follow(self, squares: Tensor) -> None:
        """Follow the squares of this rank's gradients from ``squares`` on, float32 [P], equal on all ranks."""
        for part in self.parts:
            assert part.squares is not None
            part.squares.follow(squares[part.part.elements])

    def share_squares(self) -> None:
        """Average over the ranks their squares and the projections of gradients that ``compress`` was asked to make.

        Raises:
            CollectiveError: if a collective fails.
        """
        for part in self.parts:
            part.share_part()
        sums, first = self._gathered_sums(), self._launch_tables.first_block
        self.sums = (sums, first) if self.shards.count == 1 else by_tensor(sums, first, self.shards)

    def _gathered_sums(self) -> Tensor:
        """Return servers' sums of all parts, float32 [chunks, 3, blocks of a chunk]."""
        sums = [part.means.sums for part in self.parts]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def renew(self, unit: Unit, v: Preconditioner) -> None:
        """Write the next v, [P], or keep what it is made of, and bring momentum and residuals to its unit.

        The momentum becomes part of the workers' residuals: the result is zero until the next step.
        """
        for part in self.parts:
            part.renew_part(unit, v)
        del self.sums  # views of what is freed

    def resume(self, digests: Sequence[int]) -> None:
        """Take up a checkpoint's ``digests``; residuals, bits and ``scale`` are filled apart."""
        digest = self.verdict.digest
        if digest is not None:
            digest.copy_(torch.tensor([unfolded(n) for n in digests[: len(digest)]]))

    def serve_again(self) -> None:
        """Put the loaded result into this rank's messages, from which a step that is held back gathers it."""
        for part in self.parts:
            part.served.bits.copy_(part.gathered.bits[part.transport.rank :][:1])

    def restore(self, absent: Tensor) -> None:
        holders: Sequence[FeedbackReducer | OnePart] = (self, *self.parts)
        for each in holders:
            for backup in each.backups:
                backup.restore(absent)
            each.backups = []
        self.serve_again()

    def settle(self) -> None:
        for part in self.parts:
            for side in part.sides:
                side.settle()

    def norms(self) -> tuple[float, float, float]:
        """Return |c| and |e| of this rank, and |E| of what it serves, of the last step; waits for the device."""
        workers = [part.worker.norms() for part in self.parts]
        servers = [side.norms()[1] for part in self.parts for side in part.sides[1:]]
        compensated, worker = (math.hypot(*column) for column in zip(*workers, strict=True))
        return compensated, worker, math.hypot(*servers)

    def residual_ratio(self) -> float:
        """Return the workers' residuals (root mean square of their norms) over the norm of the last result.

        The mean over the parts that are here, so equal on all ranks that have the same part: on all, but
        for hierarchy and shards. Costs no extra collective; waits for the device.
        """
        ratios = []
        for part in self.parts:
            errors = part.arrived_words[:, Word.SIGNAL].view(torch.float32).double()
            result = part.squares_of_result().sum().sqrt()
            # A skipped step has no result.
            ratios.append(float(errors.square().mean().sqrt() / result if result > 0 else result))
        return sum(ratios) / len(ratios)

    def squares_by_block(self) -> Tensor:
        """Return |e|^2 of this rank's residual and of the result: float64 [2, B], 0 where a part is not here."""
        squares = torch.zeros(2, self.layout.n_blocks, dtype=torch.float64, device=self.scale.device)
        for part in self.parts:
            squares[0, part.part.blocks] = part.worker.squares()[1].clamp(min=0)
            squares[1, part.part.blocks] = part.squares_of_result()
        return squares

    def _end(self, context: StepContext) -> None:
        """Take note of what the last launch of a synchronisation has found."""
        self.verdict.flags, self.verdict.hold = self.verdict.of_all, self.verdict.none
        if self.shards.count > 1:
            self._skip_with_shards(context)
            self._refuse_beyond(context.limit)

    def refuse(self, flags: Tensor) -> None:
        known = self.verdict.flags
        still = ((known != 0) | (flags == 0)).float()
        known |= flags
        for scale in (self.scale, self.sides[-1].scale):
            scale *= still

    def _skip_with_shards(self, context: StepContext) -> None:
        """Skip the step just made where any shard skips it; leave out what all leave out."""
        if self.shards.count > 1:
            tag = (context.tag ^ (0 if context.number is None else context.number)) & 0x7FFFFFFF
            verdict = self.verdict
            united = self.shards.unite(verdict.flags, tag, verdict.absent, len(self.layout.sizes))
            flags, verdict.absent = united
            self.refuse(flags)

    def _limit(self, context: StepContext) -> Limit | None:
        """Return what a launch judges by; what lies in several shards is judged when all are known."""
        limit, absent = context.limit, self.verdict.absent
        if limit is None or self.shards.count > 1:
            return None
        return limit if absent is None else limit.without(absent)

    def _refuse_beyond(self, limit: Limit | None) -> None:
        """Refuse the result of all parts and shards beyond a limit; of what is in one piece ``receive`` does."""
        if limit is None:
            return
        squares = squares_by_block(self.scale, limit.without(self.verdict.absent))
        self.refuse(judged(self.shards.sum(squares.sum()).sqrt(), limit).reshape(1))

    def describe(self) -> str:
        elsewhere = "ranks with another shard differ, or " if self.shards.count > 1 else ""
        return describe_mismatch(self._disputed(), elsewhere + "a message arrived damaged")

    def _disputed(self) -> Tensor:
        """Return the headers of the part in which ranks differ; reads from the device."""
        words = [part.arrived_words for part in self.parts]
        return next((w for w in words if bool((w[:, :CHECKED] != w[:1, :CHECKED]).any())), words[0])

    @property
    def wire_bytes(self) -> int:
        nbytes = 0
        for part in self.parts:
            scratch = (*(sent.buffer for sent in part.sent), *part.scratch)
            nbytes += part.part.wire_bytes + sum(tensor.nbytes for tensor in scratch)
            nbytes += 0 if part.squares is None else part.squares.held_bytes
        return nbytes

    def state(self) -> list[Tensor]:
        verdicts = [self.verdict, *(part.verdict for part in self.parts)]
        held: list[object] = [self, *self.parts, *verdicts, *(side for part in self.parts for side in part.sides)]
        scratch = {id(each) for part in self.parts for each in part.scratch}
        tensors = [v for each in held for v in vars(each).values() if isinstance(v, Tensor) and id(v) not in scratch]
        tables = [table for part in self.parts for side in part.sides for table in side.tables]
        return [*tensors, *tables, *self.live, self.gathered.buffer, *(part.gathered.buffer for part in self.parts)]
