"""Declares what an optimizer needs of whatever averages, or votes, over the ranks.

An optimizer is handed a ``Reducer`` and never asks which: one piece, in buckets, in two levels, over the shards of a
model, by a ring, or by votes. It says with a function how this rank's messages are compressed, and with a
``StepContext`` what else goes with them::

    reducer.synchronise(compress, StepContext(tag=tag, number=number))     # compress, exchange, serve
    apply(reducer.bits, reducer.scale, skip=reducer.flags)

A step is skipped on all ranks where ``flags`` is not 0.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ..triton_kernels import LARGEST_GRADIENT, FlatLayout, LiveTable, unpack
from .agreement import sum_of_words
from .message import StepContext
from .verdict import Verdict

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
    verdict: Verdict
    """What ranks have made of the last step. Its digests lack bits with ``StepContext.sums``, until ``apply_momentum``
    adds them; ``heard`` adds what comes between two steps."""
    error: Exception | None = None
    """An error of this rank, found while gradients were under way; every rank has skipped the step for it."""
    largest_gradient: float = LARGEST_GRADIENT
    """The largest element of this rank's gradients, unscaled, that does not count as infinite."""

    @property
    def flags(self) -> Tensor:
        """Return the last step's ``Flag`` bits, int32 [1], equal on all ranks; it was skipped where any is set."""
        return self.verdict.flags

    @property
    def bits(self) -> Tensor:
        """Return the result's signs: uint8 [chunks, bytes], or [chunks, 2, bytes] where ternary."""

    @property
    def wire_bytes(self) -> int:
        """Count the bytes of what only serves within a step: messages on their way, and partial sums."""

    def synchronise(self, compress: Compress, context: StepContext) -> None:
        """Compress, exchange, and leave the result in ``bits`` and ``scale``.

        Where any rank has a non-finite element or aborts, all ranks skip: the result is zero, and each rank keeps all
        it had, gradient included, as residual, so that nothing is lost.

        Raises:
            CollectiveError: if a collective fails; then this object can't be used further.
        """

    def heard(self, *received: Tensor) -> None:
        """Add to what the next messages compare what all ranks have ``received`` alike, or have made of it."""
        digest = self.verdict.digest
        if digest is not None:
            for tensor in received:
                digest += sum_of_words(tensor)

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

    def paused(self) -> AbstractContextManager[None]:
        """Let backward passes in this context only accumulate gradients, where they would send them."""
        return nullcontext()

    def wait(self) -> None:
        """Wait until no thread of this one works: whoever looks at all objects would meet some that are half made."""
        return

    def close(self) -> None:
        """End what watches gradients, where something does, before another reducer takes this one's place."""
        return

    def result(self) -> Tensor:
        """Return the last result, float32 [P], by flat index, zero where nothing is live; allocates."""
        bits = self.bits
        values = unpack(bits[:, 0] if bits.dim() == 3 else bits).view(len(self.scale), -1) * self.scale[:, None]
        if bits.dim() == 3:
            values = torch.where(unpack(bits[:, 1]).view_as(values) > 0, values, 0.0)
        return torch.where(self.live.mask(), values.view(-1), 0.0)
