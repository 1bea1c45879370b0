"""Declares what an optimizer needs of whatever averages, or votes, over the ranks.

An optimizer is handed a ``Reducer`` and never asks which: one piece, in buckets, in two levels, over the shards of a
model, by a ring, or by votes. It says with a function how this rank's messages are compressed, and with ``Told`` what
else goes with them::

    reducer.synchronise(compress, Told(tag=tag, number=number))     # compress, exchange, serve
    apply(reducer.bits, reducer.scale, skip=reducer.flags)

A step is skipped on all ranks where ``flags`` is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..triton_kernels import FlatLayout, LiveTable

Compress = Callable[..., None]
"""Writes this rank's bits into the messages of its first argument, the reducer of a part of the line.

That is called once for each part; by ``RoundAllReduce`` for each range of chunks, its second argument."""


class Told(NamedTuple):
    """What a rank tells the others of a step, and what it keeps, besides what it compresses.

    Args:
        tag: A 31-bit number that must be equal on all ranks, such as a hash of the hyper-parameters; else all skip.
        number: Of the step, an int32 that must be equal on all ranks; else all skip. None: of the synchronisation.
        abort: Makes every rank skip this step.
        hold: int32 [1], flags equal on all ranks: where any is set nothing changes, the last result included, but for
            the count of synchronisations. None: none.
        pending: int32 [1], flags of this rank alone, such as earlier steps of a round have set. None: none.
        missing: Tensors of which this rank has no gradient: zeros, unless all ranks miss them and ``restore`` follows.
        changed: float32 [P] each: what ``compress`` changes besides residuals, and ``restore`` puts back.
        goes: float32 [B]: how far each coordinate goes in a round of signs (eta_s). None where scales are measured.
    """

    tag: int = 0
    number: int | Tensor | None = None
    abort: bool = False
    hold: Tensor | None = None
    pending: Tensor | None = None
    missing: Sequence[int] = ()
    changed: Sequence[Tensor] = ()
    goes: Tensor | None = None


class Reducer(Protocol):
    """Averages, or votes on, what all ranks have compressed."""

    layout: FlatLayout
    flags: Tensor
    """int32 [1], the last step's ``Flag`` bits, equal on all ranks; it was skipped where any is set."""
    absent: Tensor | None
    """Of which tensors no rank had a gradient, bool [tensors]; None where this rank had all: then there are none."""
    error: Exception | None
    """What this rank has found wrong while gradients were on their way; every rank has skipped the step for it."""
    largest_gradient: float
    """What an element of this rank's gradients may be at most, unscaled, before it counts as infinite."""

    @property
    def bits(self) -> Tensor:
        """The result's signs: uint8 [chunks, bytes], or [chunks, 2, bytes] where ternary."""

    @property
    def scale(self) -> Tensor:
        """The result's magnitude: float32 [B]."""

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

    def result(self) -> Tensor:
        """Return the last result, float32 [P], by flat index, zero where nothing is live; allocates."""

    def describe(self) -> str:
        """Name what ranks differ in after a step with ``Flag.MISMATCH``; waits for the device."""

    def state(self) -> list[Tensor]:
        """Return all that the next step needs, tables included."""


class FeedbackReducer(Reducer, Protocol):
    """One whose servers compress as well, and carry their errors along: what the freeze and checkpoints need."""

    block_tensor: Tensor
    """int32 [B], each block's tensor."""

    @property
    def worker_residual(self) -> Tensor:
        """This rank's c, after ``settle`` its residual e, of what is here: float32."""

    @property
    def server_residual(self) -> Tensor:
        """That of the chunks which it serves: float32."""

    @property
    def digests(self) -> list[int]:
        """What the next messages tell of the last; waits for the device."""

    def set_live(self, live: LiveTable) -> None:
        """Say which elements count. No other may be non-zero in ``worker_residual``."""

    def begin(self) -> None:
        """Take up a warm-up's momentum, in the memory of residuals: drop that of parts which other ranks have."""

    def resume(self, digests: Sequence[int]) -> None:
        """Take up a checkpoint's ``digests``; residuals, bits and ``scale`` are filled apart."""

    def serve_again(self) -> None:
        """Put the loaded result into this rank's message, from which a step that is held back gathers it."""

    def take_residuals(self, out: Tensor) -> None:
        """Take all residuals out; they are zero then.

        Args:
            out: float32 [P], written: the mean of the workers' residuals plus the servers', by flat
                index, equal on all ranks.
        """

    def norms(self) -> tuple[float, float, float]:
        """Return |c| and |e| of this rank, and |E| of what it serves, of the last step; waits for the device."""

    def residual_ratio(self) -> float:
        """Return the workers' residuals (root mean square of their norms) over the norm of the last result.

        Equal on all ranks, for no extra collective; waits for the device.
        """

    def squares_by_block(self) -> Tensor:
        """Return |e|^2 of this rank's residual and of the result: float64 [2, B], 0 where a part is not here."""
