"""AdamW (Loshchilov & Hutter, 2019), uncompressed: for one GPU, or several over a network that is fast enough."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import Flag
from ..core.algorithm import Algorithm
from ..core.frame import Frame
from ..core.optimizer import DistributedOptimizer
from ..core.resolved import Options
from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Params, Ranks, Wire
from ..core.traits import Traits
from ..triton_kernels import adam_update
from .averaging import Averaged
from .moments import AdamUpdate, MomentBuffers
from .release import Bucket, Release


@dataclass(frozen=True, kw_only=True)
class AdamWOptions(Options):
    """Settings of ``AdamW``."""

    takes: ClassVar[frozenset[str]] = Options.takes - {"eps_inside_sqrt"} | {"state", "release_gradients"}
    usual: ClassVar[dict[str, Any]] = {"bias_correction": True}
    recorded: ClassVar[tuple[str, ...]] = (*Options.recorded, "state")

    def check(self) -> None:
        """Raise ValueError for the first bad setting, also for what needs gradients that are released early."""
        super().check()
        if not self.wire.release_gradients:
            return
        others, values = {"max_grad_norm": None, "nonfinite": "skip", "capturable": False}, self.values()
        for name, usual in others.items():
            if (given := values[name]) != usual:
                raise ValueError(
                    f"{name} must be {usual!r} with Wire(release_gradients=True), got {given!r}: gradients are used "
                    "and freed before all of them are there; leave out one of the two"
                )


class Released(Averaged):
    """Updates, on a rank alone, in the backward pass, and frees gradients.

    Args:
        frame: Of the optimizer.
        moments: Which it updates.

    Attributes:
        release: What watches gradients arrive.
    """

    def __init__(self, frame: Frame, moments: MomentBuffers) -> None:
        super().__init__(frame, AdamUpdate(frame, moments), in_place=True)
        self._moments, self._released_with = moments, 0  # the tag of hyper-parameters
        self.release = Release(frame, self.update_early)

    def close(self) -> None:
        self.release.close()
        super().close()

    def update_early(self, bucket: Bucket) -> None:
        """Update a bucket in the backward pass; with the first one of a step that begins."""
        frame = self.frame
        owner = frame.owner()
        assert owner is not None
        frame.steps.refuse_if_broken()
        grads = frame.parameters.usable_of(bucket.members, frame.nothing)
        first = not self.release.done
        if first:
            owner.begin_step()
            owner.take_hyper_parameters()
            frame.coefficients.begin(renews=False)
            frame.parameters.before_update()
        coef = self.table()
        if first:
            self._released_with = frame.coefficients.tag
        with frame.steps.whole("a backward pass that updates parameters"):
            self._update_bucket(bucket, grads, coef, first)
            frame.parameters.after_update(bucket.members)
            self.release.use_up(frame.parameters.owners, bucket)

    def _update_bucket(self, bucket: Bucket, grads: Sequence[Tensor], coef: Tensor, first: bool) -> None:
        """Do for one bucket what ``update`` does for all of them; it is the ``first`` of its step, or not."""
        frame = self.frame
        members, blocks, elements, tables, at = bucket
        if first:
            self.elements.turn()
        places = frame.places.at(blocks)._replace(sizes=frame.layout.sizes[members], block_tensor=tables.tensor)
        correction = frame.parameters.corrections.table
        correction = None if correction is None else correction[elements]
        found = self.elements.of_step(captured=False)
        how: tuple[Any, ...] = (None, frame.rounding, *found, correction, at)
        dense, moments = frame.parameters.dense[members], self._moments.stored.at(elements, blocks)
        adam_update(dense, grads, places, moments, coef[members], self.elements.none, *how)

    def _update_alone(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Update the parameters that the backward pass has left."""
        frame, release = self.frame, self.release
        done = release.done
        if done and frame.coefficients.tag != self._released_with:
            frame.late_error = RuntimeError(
                "hyper-parameters have changed between the backward pass and step(): with "
                f"Wire(release_gradients=True) {len(done)} of {len(frame.parameters)} parameters were updated with the "
                "old ones. The step was taken; set them before the backward pass"
            )
        frame.missing = tuple(i for i in frame.missing if i not in done)
        self.note_absent()
        self.elements.made = bool(done)
        for bucket in () if abort else release.buckets:
            theirs = grads[bucket.members]
            if bucket.members.start not in done and any(map(Tensor.numel, theirs)):
                still = frame.coefficients.still(coef, frame.absent)
                self._update_bucket(bucket, theirs, still, not self.elements.made)
                self.elements.made = True
        release.forget()
        none = self.elements.none
        return torch.full_like(none, int(Flag.ABORT)) if abort else none


class AveragedAdam(Algorithm):
    """AdamW on averaged gradients, or on those of a rank alone."""

    traits: ClassVar = Traits(AdamWOptions, compresses=False, corrects=True)

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        moments = self.moments = MomentBuffers(frame)
        early = self._early = Released(frame, moments) if self.options.wire.release_gradients else None
        self._averaged = early or Averaged(frame, AdamUpdate(frame, moments), in_place=True)
        self.parts = (moments, self._averaged)

    @property
    def stage(self) -> Averaged:
        return self._averaged

    @classmethod
    def check(cls, frame: Frame) -> None:
        super().check(frame)
        ranks = max(frame.ranks.transport.world_size, frame.ranks.model.count)
        if frame.options.wire.release_gradients and ranks > 1:
            raise ValueError(
                f"release_gradients must be False on several ranks, got True on {ranks}: they average gradients of all "
                "parameters at once, in step(); leave the option out"
            )

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes in this context only accumulate, where gradients are released; the one after it does."""
        return nullcontext() if self._early is None else self._early.release.paused()

    def check_idle(self, what: str) -> None:
        if self._early is not None:
            self._early.release.check_idle(what)

    def check_step(self) -> None:
        if self._early is not None and any(value is not None for value in self.frame.loss_scale):
            raise RuntimeError(
                "a GradScaler can't be used with Wire(release_gradients=True): gradients were used, and parameters "
                "moved, before it has unscaled them; train in bfloat16 without one, or leave the option out"
            )


class AdamW(DistributedOptimizer):
    r"""AdamW as ``torch.optim.AdamW``, in two launches, whatever the number of tensors.

    .. math::
        m = \beta_1 m + (1 - \beta_1) g, \quad v = \beta_2 v + (1 - \beta_2) g^2, \quad
        x \leftarrow (1 - \gamma \lambda) x - \gamma \frac{\hat m}{\sqrt{\hat v} + \epsilon}

    It is the warm-up of ``OneBitAdam``. One rank alone reads gradients where they lie, and takes them as they are: an
    element that is not finite, or larger than 1.8e19, stays as it is with its moments (in codes, as far as their
    block's range allows), and all others move; ``stats()["partial_steps"]`` counts such steps.
    ``Faults(nonfinite="raise")`` looks at all of them first. Several ranks average gradients in float32 by one
    all-reduce, skip a step in which any is not finite, and have bit-identical parameters after each step; give it local
    gradients, or call ``fusedonebit.ddp.attach``.

    bfloat16 parameters, their gradients and all state are 5.1 bytes of a parameter on one rank alone, with
    ``Numerics(state="8bit", master_weights="8bit")`` and ``Wire(release_gradients=True)``, which updates parameters in
    the backward pass; a step then moves 12.1 bytes.

    Of torch's keywords ``maximize`` is in ``Numerics``, and ``capturable`` in ``Wire``; ``foreach`` and ``fused`` have
    nothing to choose here, and there is no ``amsgrad``.

    Args:
        params, lr, betas, eps, process_group, numerics, wire, faults: As for ``OneBitAdam``.
        weight_decay: Decoupled.
        max_grad_norm: Clip gradients to this global norm, which is exact, for one more read of them; None: don't.

    Example::

        optimizer = AdamW(model.parameters(), lr=1e-3)
        loss.backward()
        optimizer.step()
    """

    kind = AveragedAdam
    algorithm: AveragedAdam

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        super().__init__(params, defaults, **shared, max_grad_norm=max_grad_norm)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes in this context only accumulate, where gradients are released; the one after it does."""
        return self.algorithm.no_sync()
