"""Declares what an optimizer needs of whatever averages, or votes, over the ranks.

An optimizer is handed a ``Reducer`` and never asks which: one piece, in buckets, in two levels, over the shards of a
model, by a ring, or by votes. It says with a function how this rank's messages are compressed, and with ``Told`` what
else goes with them::

    reducer.synchronise(compress, Told(tag=tag, number=number))     # compress, exchange, serve
    apply(reducer.bits, reducer.scale, skip=reducer.flags)

A step is skipped on all ranks where ``flags`` is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..triton_kernels import LARGEST_GRADIENT, FlatLayout, LiveTable, unpack
from .absent import Kept
from .message import CHECKED, Messages, Told, Word, describe_mismatch
from .shards import ShardGroup

if TYPE_CHECKING:
    from .allreduce import CompressedAllReduce

Compress = Callable[..., None]
"""Writes this rank's bits into the messages of its first argument, the reducer of one part.

That is called once for each part; by ``RoundAllReduce`` for each range of chunks, its second argument."""


class Reducer(Protocol):
    """Averages, or votes on, what all ranks have compressed."""

    layout: FlatLayout
    live: LiveTable
    """Which elements count."""
    scale: Tensor
    """The result's magnitude: float32 [B]."""
    flags: Tensor
    """int32 [1], the last step's ``Flag`` bits, equal on all ranks; it was skipped where any is set."""
    absent: Tensor | None = None
    """Of which tensors no rank had a gradient, bool [tensors]; None where this rank had all: then there are none."""
    error: Exception | None = None
    """An error of this rank, found while gradients were under way; every rank has skipped the step for it."""
    largest_gradient: float = LARGEST_GRADIENT
    """The largest element of this rank's gradients, unscaled, that does not count as infinite."""

    @property
    def bits(self) -> Tensor:
        """The result's signs: uint8 [chunks, bytes], or [chunks, 2, bytes] where ternary."""

    @property
    def wire_bytes(self) -> int:
        """Bytes of what only serves within a step: messages on their way, and partial sums."""

    def synchronise(self, compress: Compress, told: Told) -> None:
        """Compress, exchange, and leave the result in ``bits`` and ``scale``.

        Where any rank has a non-finite element or aborts, all ranks skip: the result is zero, and each rank keeps all
        it had, gradient included, as residual, so that nothing is lost.

        Raises:
            CollectiveError: if a collective fails; then this object can't be used further.
        """

    def refuse(self, flags: Tensor) -> None:
        """Add ``flags`` int32 [1], equal on all ranks, to those of the last step: where any is set it is skipped.

        The result becomes zero, and nothing is lost. A step that is skipped already stays as it is.
        """

    def restore(self, absent: Tensor) -> None:
        """Leave ``absent`` bool [tensors], equal on all ranks, as they were before the last step.

        Called after all else that may change them, such as ``refuse``.
        """

    def settle(self) -> None:
        """Form deferred residuals in place. Changes no later step; only checkpoints and people who look need it."""

    def describe(self) -> str:
        """Name what ranks differ in after a step with ``Flag.MISMATCH``; waits for the device."""

    def state(self) -> list[Tensor]:
        """Return all that the next step needs, tables included."""

    def result(self) -> Tensor:
        """Return the last result, float32 [P], by flat index, zero where nothing is live; allocates."""
        bits = self.bits
        values = unpack(bits[:, 0] if bits.dim() == 3 else bits).view(len(self.scale), -1) * self.scale[:, None]
        if bits.dim() == 3:
            values = torch.where(unpack(bits[:, 1]).view_as(values) > 0, values, 0.0)
        return torch.where(self.live.mask(), values.view(-1), 0.0)


class FeedbackReducer(Reducer, Protocol):
    """Declares a reducer whose servers compress as well, with error feedback: what freezes and checkpoints need.

    Attributes:
        gathered: Messages whose bits are the result's signs.
        block_tensor: int32 [B], each block's tensor.
        shards: The ranks that hold other shards of the same tensors.
        worker_residual: This rank's c, after ``settle`` its residual e, of what is here: float32.
        server_residual: That of the chunks which it serves: float32.
        kept: What ``restore`` puts back.
    """

    gathered: Messages
    block_tensor: Tensor
    shards: ShardGroup
    worker_residual: Tensor
    server_residual: Tensor
    kept: list[Kept]

    @property
    def parts(self) -> Sequence[CompressedAllReduce]:
        """The all-reduce of each part that is here."""

    @property
    def bits(self) -> Tensor:
        return self.gathered.bits

    @property
    def digests(self) -> list[int]:
        """The checksums of the last messages that the next ones carry, by part; waits for the device."""
        return [int(part.served.words[0, Word.DIGEST]) for part in self.parts]

    def set_live(self, live: LiveTable) -> None:
        """Say which elements count. No other may be non-zero in ``worker_residual``."""

    def take_residuals(self, out: Tensor) -> None:
        """Take all residuals out, by an all-reduce of each part; they are zero then.

        Args:
            out: float32 [P], written: the mean of the workers' residuals plus the servers', by flat
                index, equal on all ranks.

        Raises:
            CollectiveError: as ``synchronise`` does.
        """

    def begin(self) -> None:
        """Take up a warm-up's momentum, in the memory of residuals: drop that of parts which other ranks have."""
        return

    def resume(self, digests: Sequence[int]) -> None:
        """Take up a checkpoint's ``digests``; residuals, bits and ``scale`` are filled apart."""
        for part, digest in zip(self.parts, digests, strict=False):
            part.served.words[:, Word.DIGEST] = digest

    def serve_again(self) -> None:
        """Put the loaded result into this rank's messages, from which a step that is held back gathers it."""
        for part in self.parts:
            part.served.bits.copy_(part.gathered.bits[part.transport.rank :][:1])

    def restore(self, absent: Tensor) -> None:
        for each in (self, *self.parts):
            for kept in each.kept:
                kept.restore(absent)
            each.kept = []
        self.serve_again()

    def settle(self) -> None:
        for part in self.parts:
            part.worker.settle()
            part.server.settle()

    def norms(self) -> tuple[float, float, float]:
        """Return |c| and |e| of this rank, and |E| of what it serves, of the last step; waits for the device."""
        norms = [(*part.worker.norms(), part.server.norms()[1]) for part in self.parts]
        compensated, worker, server = (math.hypot(*column) for column in zip(*norms, strict=True))
        return compensated, worker, server

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

    def _skip_with_shards(self, told: Told) -> None:
        """Skip the step just made where any shard skips it; leave out what all leave out."""
        if self.shards.count > 1:
            tag = (told.tag ^ (0 if told.number is None else told.number)) & 0x7FFFFFFF
            flags, absent = self.shards.unite(self.flags, tag, self.absent, len(self.layout.sizes))
            self.absent = absent
            self.refuse(flags)

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
            scratch = (part.to_servers.buffer, part.served.buffer, *part.worker.scratch, *part.server.scratch)
            nbytes += part.part.wire_bytes + sum(tensor.nbytes for tensor in scratch)
        return nbytes

    def state(self) -> list[Tensor]:
        held = [self, *self.parts, *(side for part in self.parts for side in (part.worker, part.server))]
        scratch = {id(each) for part in self.parts for each in (*part.worker.scratch, *part.server.scratch)}
        tensors = [v for each in held for v in vars(each).values() if isinstance(v, Tensor) and id(v) not in scratch]
        return [*tensors, *self.live, *(each.gathered.buffer for each in (self, *self.parts))]
