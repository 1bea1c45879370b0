"""Exchanges over a reducer what a stage has compressed, and applies what comes back: all that such stages share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from ..comm import BucketedAllReduce, FeedbackReducer, Flag, Reducer, SignVote, StepContext
from ..comm.reducer import Compress
from ..comm.sign_vote import Aggregation
from ..triton_kernels import apply_momentum
from ..triton_kernels.nouns import Divisor, Limit, Signs
from .frame import Frame
from .header import COMPRESSED, Fields, is_compressed
from .part import Part
from .state_tensor import StateTensor


class Exchange(Part):
    """Exchanges with the other ranks what this one compresses, and moves the parameters by the result.

    Args:
        frame: Of the optimizer.
        reducer: What averages, or votes.

    Attributes:
        lost: Above 0 if this rank has found an inf in a local step of which no other has heard: float32 [1]; or None.
    """

    reducer: Reducer

    def __init__(self, frame: Frame, reducer: Reducer) -> None:
        self.frame, self.reducer = frame, reducer
        self.lost: Tensor | None = None

    def context(
        self, abort: bool, hold: Tensor | None = None, drawn: Tensor | None = None, limit: Limit | None = None
    ) -> StepContext:
        """Return the context of this step; a rank that aborts misses no gradient, so that no tensor is left out."""
        frame = self.frame
        missing: Sequence[int] = () if abort else frame.missing
        how: dict[str, Any] = {
            "missing": missing,
            "limit": limit,
            "sums": True,
            "drawn": drawn,
            "updates": frame.steps.updates,
        }
        return StepContext(frame.coefficients.tag, frame.steps.number, abort, hold, **how)

    def synchronise(self, compress: Compress, context: StepContext, coef: Tensor) -> Tensor:
        """Compress and exchange; return ``coef``, neutral for tensors of which no rank has a gradient."""
        self.reducer.synchronise(compress, self.completed(context))
        return self.take_verdict(coef)

    def completed(self, context: StepContext) -> StepContext:
        """Add the coefficients that are renewed on the way, and the union of flags with model-parallel ranks."""
        frame = self.frame
        context = context._replace(renewal=frame.coefficients.renewal())
        if frame.ranks.model_parallel.groups:
            context = context._replace(unite=partial(self.unite, frame.united, context.abort))
        return context

    def take_verdict(self, coef: Tensor) -> Tensor:
        """Note what the exchange has found; return ``coef``, neutral for tensors of which no rank has a gradient."""
        frame, reducer = self.frame, self.reducer
        if frame.ranks.model_parallel.groups:  # what was found on the way, such as a veto
            reducer.refuse(frame.united(reducer.flags))
        frame.absent, frame.late_error = reducer.verdict.absent, reducer.error
        return frame.coefficients.still(coef, frame.absent)

    @staticmethod
    def unite(united: Callable[[Tensor], Tensor], abort: bool, found: Tensor) -> None:
        """Add to the flags ``found`` here those of the ranks that hold the model's other parts."""
        found.copy_(united(found | int(Flag.ABORT) if abort else found))

    def apply(self, coef: Tensor, divisor: Divisor | None = None, x_squares: Tensor | None = None) -> None:
        """Move by the synchronised m: x = x - lr * m / (sqrt(v) + eps) - lr * lambda * x.

        Without a ``divisor`` m is applied as it is. ``x_squares``, float32 [B], if given, becomes the sums of the
        squares of x by block.
        """
        frame, reducer = self.frame, self.reducer
        m, verdict = Signs(reducer.bits, reducer.scale), reducer.verdict
        counting = frame.coefficients.count(*frame.counters()) if frame.coefficients.renews else (None, None)
        how = (
            coef,
            verdict.flags,
            frame.rounding,
            verdict.digest,
            x_squares,
            *counting,
            frame.parameters.corrections.table,
        )
        apply_momentum(frame.parameters.dense, frame.places, m, divisor, *how)

    def restore_absent(self) -> Tensor:
        """Leave alone what no rank has a gradient of; return the step's flags, int32 [1]."""
        if self.frame.absent is not None:
            self.reducer.restore(self.frame.absent)
        return self.reducer.flags

    def owed(self) -> float:
        """Return the norm of what compression has left out so far, over that of the last update."""
        return 0.0

    def describe(self) -> str:
        """Return details of why a step was skipped; waits for the device."""
        return self.frame.say_where(self.reducer.describe())

    def held(self) -> Sequence[Tensor]:
        return self.reducer.state()

    def settle(self, compressed: bool = True) -> None:
        if isinstance(self.reducer, BucketedAllReduce):
            self.reducer.check_idle()
        with self.frame.steps.whole("a look at residuals"):
            self.reducer.settle()

    def close(self) -> None:
        self.reducer.close()


class FeedbackExchange(Exchange):
    """Exchanges with error feedback on both sides: workers and servers keep what compression has left out.

    Args:
        frame: Of the optimizer.
        reducer: What averages.
    """

    header_fields: ClassVar[Fields] = COMPRESSED
    reducer: FeedbackReducer

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        """Return the result, in bits, and the residuals; the worker's is where the momentum was in the warm-up."""
        if not compressed:
            return ()
        reducer, bits = self.reducer, self.reducer.bits
        of_rank, ternary = reducer.of_rank, bits.dim() == 3
        how: dict[str, Any] = {"of_rank": True, "wanted": reducer.serves, "taken_by": "worker_error"}
        return (
            StateTensor("exp_avg_bits", "bit", bits[:, 0] if ternary else bits),
            StateTensor("exp_avg_nonzero", "bit", bits[:, -1] if ternary else bits, wanted=ternary),
            StateTensor("exp_avg_scale", "block", reducer.scale, not_negative=True),
            StateTensor("worker_error", "part", *of_rank.worker, of_rank=True),
            StateTensor("server_error", "chunk", *of_rank.server, **how),
        )

    def owed(self) -> float:
        """Return the norm of residuals, root mean square over the ranks, over that of the last update."""
        return self.reducer.residual_ratio() or (math.inf if any(self.reducer.norms()[1:]) else 0.0)

    def settle(self, compressed: bool = True) -> None:
        if compressed:  # else the warm-up's momentum is there
            super().settle()

    def plain_state(self) -> dict[str, Any]:
        return {"digests": self.reducer.digests}

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        frame = self.frame
        own = is_compressed(header) and frame.wrote(header) and frame.cut_alike(header)
        if own and len(header["digests"]) != (count := len(self.reducer.digests)):
            raise ValueError(
                f"the checkpoint's header is damaged: it must have {count} digests, got {len(header['digests'])}; "
                "load another checkpoint"
            )

    def resume(self, header: Mapping[str, Any]) -> None:
        if not is_compressed(header):
            return
        digests, count = header["digests"], self.frame.options.bucket_count
        self.reducer.resume(digests if self.frame.cut_alike(header) else digests[:1] * count)


class VoteExchange(FeedbackExchange):
    """Exchanges votes: workers keep no residual, and servers have one where votes are averaged.

    Args:
        frame: Of the optimizer.
        aggregation: Of votes, see ``SignVote``.
        exp_avg: Workers' momenta, float32 [P].
    """

    reducer: SignVote

    def __init__(self, frame: Frame, aggregation: Aggregation, exp_avg: Tensor) -> None:
        how: dict[str, Any] = {"device": frame.device, "live": frame.live, "compensated": exp_avg}
        super().__init__(frame, SignVote(frame.layout, frame.ranks.transport, aggregation=aggregation, **how))

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        """Return the servers' residuals, where votes are averaged."""
        reducer = self.reducer
        how: dict[str, Any] = {"of_rank": True, "wanted": reducer.server.measures}
        return (StateTensor("server_error", "chunk", *reducer.of_rank.server, **how),)
