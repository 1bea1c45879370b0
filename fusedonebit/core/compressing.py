"""The frame of a step in bits, which all optimizers that compress share.

A step agrees on clipping and loss scales, lets a reducer compress and exchange, and applies what comes back. A subclass
says in ``_compressed_step`` what is compressed. ``Feedback``'s servers compress as well, and keep residuals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from ..comm import BucketedAllReduce, FeedbackReducer, Flag, LocalTransport, Reducer, Told
from ..comm.reducer import Compress
from ..triton_kernels import apply_momentum
from ..triton_kernels.nouns import Divisor, Signs
from .algorithm import Algorithm, Phase
from .header import COMPRESSED, Fields, is_compressed
from .scaling import Agreed
from .spec import Specs, StateSpec


class Compressing(Algorithm):
    """Skeleton of an algorithm that hands a ``Reducer`` what is to be compressed; a subclass makes ``reducer``."""

    reducer: Reducer
    _lost: Tensor | None = None
    """Above 0 where this rank's scaler has found an inf since ranks have last met: float32 [1]."""

    @property
    def digest(self) -> Tensor | None:
        return self.reducer.digest

    def exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        frame = self.frame
        agreed = self._scaling(grads, coef)
        told = self.told(abort, frame.steps.number, frame.missing, hold=agreed.hold)
        self._compressed_step(grads, agreed, told, coef)
        if frame.absent is not None:
            self.reducer.restore(frame.absent)
        return self.reducer.flags

    def _compressed_step(self, grads: Sequence[Tensor], agreed: Agreed, told: Told, coef: Tensor) -> None:
        """Synchronise what this rank makes of its gradients, and move the parameters.

        Args:
            grads: This rank's.
            agreed: What all ranks multiply theirs with, and the coefficients with that in them.
            told: What else goes with the messages.
            coef: float32 [tensors, columns of ``Coef``].
        """
        raise NotImplementedError

    def _of_gradients(self, coef: Tensor) -> Tensor:
        """Return the coefficients with which gradients count in this step, as yet unscaled."""
        return coef

    def _scaling(self, grads: Sequence[Tensor], coef: Tensor, alone: bool = False) -> Agreed:
        """Agree with all ranks on what gradients are multiplied with, and on holding still; or decide that alone."""
        transport, earlier = (LocalTransport(), None) if alone else (self.frame.ranks.transport, self._lost)
        how: dict[str, Any] = {"largest": self.reducer.largest_gradient, "earlier": earlier}
        how["digest"] = None if alone else self.digest
        return self.agree(grads, self._of_gradients(coef), transport, **how)

    def told(self, abort: bool, number: int | Tensor, missing: Sequence[int], **more: Any) -> Told:
        """Return what this rank tells the others; one that aborts says that it has all gradients."""
        absent = () if abort else missing
        more |= {"sums": True, "drawn": self._drawn, "updates": self.frame.steps.updates}
        return Told(self.frame.coefficients.tag, number, abort, missing=absent, **more)

    @property
    def _drawn(self) -> Tensor | None:
        """Return the updates done where residuals or squares are rounded by random bits; else None."""
        return None

    @property
    def renews_on_the_way(self) -> bool:
        return self.compressed

    def _synchronise(self, compress: Compress, told: Told, coef: Tensor) -> Tensor:
        """Compress and exchange; return coefficients that leave tensors as they are of which no rank has a gradient."""
        frame = self.frame
        told = told._replace(renewal=frame.coefficients.renewal())
        if frame.ranks.model_parallel.count > 1:
            told = told._replace(unite=partial(self._unite, told.abort))
        self.reducer.synchronise(compress, told)
        if frame.ranks.model_parallel.count > 1:  # what was found on the way, such as a veto
            self.reducer.refuse(frame.united(self.reducer.flags))
        frame.absent, frame.late_error = self.reducer.absent, self.reducer.error
        return frame.coefficients.still(coef, frame.absent)

    def _unite(self, abort: bool, found: Tensor) -> None:
        """Add to the flags ``found`` here those of the ranks that hold the model's other parts."""
        found.copy_(self.frame.united(found | int(Flag.ABORT) if abort else found))

    def _apply_momentum(
        self,
        coef: Tensor,
        exp_avg_sq: Tensor | None = None,
        eps_inside_sqrt: bool = False,
        x_squares: Tensor | None = None,
    ) -> None:
        """Move by the synchronised m: x = x - lr * m / (sqrt(v) + eps) - lr * lambda * x; no v: undivided.

        ``x_squares``, float32 [B], becomes the sums of the squares of x by block, if given.
        """
        frame = self.frame
        dense, reducer = frame.parameters.dense, self.reducer
        divisor = None if exp_avg_sq is None else Divisor(exp_avg_sq, None, eps_inside_sqrt)
        m, skip, rounding = Signs(reducer.bits, reducer.scale), reducer.flags, frame.rounding
        counting = frame.coefficients.count(*frame.counters()) if frame.coefficients.renews else (None, None)
        where = (coef, skip, rounding, reducer.digest, x_squares, *counting, frame.parameters.correction)
        apply_momentum(dense, frame.places, m, divisor, *where)

    def describe(self, flag: Flag) -> str:
        return self.frame.say_where(self.reducer.describe())

    def settle(self) -> None:
        if isinstance(self.reducer, BucketedAllReduce):
            self.reducer.check_idle()
        with self.frame.steps.whole("a look at residuals"):
            self.reducer.settle()

    def held(self) -> list[Tensor]:
        return [*super().held(), *self.reducer.state()]

    def stats(self) -> dict[str, Any]:
        """Return what all optimizers tell, and wire_bytes (what only serves within a step)."""
        scratch = sum(t.nbytes for t in [*self.scratch(), *self.frame.scaling.scratch()])
        return super().stats() | {"wire_bytes": self.reducer.wire_bytes + scratch}


class Feedback(Compressing):
    """Skeleton of an algorithm whose reducer's servers compress as well."""

    kept: ClassVar[Specs] = (
        StateSpec("exp_avg_bits", "bit", "reducer.bits", stage="compressed"),
        StateSpec("exp_avg_nonzero", "bit", "reducer.bits", plane=1, stage="compressed", when="options.ternary"),
        StateSpec("exp_avg_scale", "block", "reducer.scale", stage="compressed", not_negative=True),
        # In the memory that exp_avg has in the warm-up.
        StateSpec("worker_error", "part", "reducer.worker_residual", stage="compressed", of_rank=True),
        StateSpec(
            *("server_error", "chunk", "reducer.server_residual"),
            stage="compressed",
            of_rank=True,
            when="reducer.serves",
            taken_by="worker_error",
        ),
    )
    phases: ClassVar[dict[Phase, bool]] = {"one-bit": True}
    header_fields: ClassVar[Fields] = COMPRESSED
    follows_squares: bool = False
    """Whether workers keep squares of their own gradients."""
    reducer: FeedbackReducer

    @property
    def octaves(self) -> Tensor | None:
        """Return where codes of c, v and squares lie, by block, uint8 [3, B]; None: there are no codes."""
        return None

    def owed(self) -> float:
        """Return the norm of residuals, root mean square over the ranks, over that of the last update."""
        if not self.compressed:
            return 0.0
        return self.reducer.residual_ratio() or (math.inf if any(self.reducer.norms()[1:]) else 0.0)

    def compressing(self, grads: Sequence[Tensor], coef: Tensor) -> Compress:
        """Return what compresses this rank's momentum, with these gradients in it."""
        raise NotImplementedError

    def plain_state(self) -> dict[str, Any]:
        return super().plain_state() | {"digests": self.reducer.digests}

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        frame = self.frame
        own = is_compressed(header) and frame.wrote(header) and frame.cut_alike(header)
        if own and len(header["digests"]) != (count := len(self.reducer.digests)):
            raise ValueError(
                f"the checkpoint's header is damaged: it must have {count} digests, got {len(header['digests'])}; "
                "load another checkpoint"
            )

    def resume(self, header: Mapping[str, Any]) -> None:
        super().resume(header)
        if not is_compressed(header):
            return
        digests, count = header["digests"], self.options.bucket_count
        self.reducer.resume(digests if self.frame.cut_alike(header) else digests[:1] * count)
