"""Averages gradients over the ranks.

``Averaging`` is all of an algorithm but its update: a subclass says with ``_update`` what one update
from averaged gradients is; ``AdamW`` and ``Lamb`` have such. A rank alone has nothing to average: its update
reads gradients where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..comm import Flag
from ..comm.absent import absence, absent_on_all
from ..core.algorithm import Algorithm
from ..core.averages import Averages, ElementFlags
from ..core.frame import Frame
from ..core.handshake import Handshake
from ..core.spec import Specs, StateSpec
from ..errors import OutOfStepError
from ..triton_kernels.scaling import SQUARES

DTYPE = "options.moments_dtype"


class Averaging(Algorithm):
    """Skeleton of an algorithm on averaged gradients; see the module's docstring."""

    kept: ClassVar[Specs] = (
        StateSpec("exp_avg", "element", "exp_avg", published=True, kept_in=DTYPE),
        StateSpec("exp_avg_sq", "element", "exp_avg_sq", published=True, not_negative=True, kept_in=DTYPE),
    )
    exp_avg_sq: Tensor
    averages: Averages
    weighs: ClassVar = SQUARES
    reads_gradients: ClassVar[bool] = False
    """Whether a rank alone updates from gradients where they lie, and leaves out elements that do not count; else it
    flattens them first, and skips a step of which any does not count."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self._exp_avg_sq_sums: Tensor | None = None  # by block, where somebody watches v
        self.averages = Averages(frame.layout, frame.ranks.transport, frame.device)
        self.elements = ElementFlags(frame.device)
        self._digest = torch.zeros(1, dtype=torch.int64, device=frame.device)

    def close(self) -> None:
        super().close()
        self.averages.drop()

    @property
    def digest(self) -> Tensor | None:
        return None if self.frame.ranks.transport.world_size == 1 else self._digest

    @property
    def _is_alone(self) -> bool:
        """Tell whether this rank updates from gradients where they lie. Who wants errors looks at all of them first."""
        return self.reads_gradients and self.frame.ranks.single and self.options.nonfinite == "skip"

    def exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        return (self._update_alone if self._is_alone else self._average)(grads, coef, abort)

    def _update_alone(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Update on a rank alone, as ``exchange`` says: the update is the only launch that reads gradients.

        But for their norm, if they are clipped. Coefficients take up what they are multiplied with.
        """
        frame = self.frame
        self.elements.made = not abort
        if abort:
            return torch.full_like(self.elements.none, int(Flag.ABORT))
        agreed = self.agree(grads, coef, frame.ranks.transport)
        hold = self.elements.none if agreed.hold is None else agreed.hold
        self._note_absent()
        if not frame.steps.captured:
            self.elements.turn()
        found = self.elements.of_step(frame.steps.captured)
        self._update(grads, frame.coefficients.still(agreed.coef, frame.absent), hold, *found)
        return hold

    def _note_absent(self) -> None:
        """Take note of the tensors of which this rank, alone, has no gradient."""
        frame = self.frame
        if frame.missing:
            bits = absence(frame.layout, frame.missing, frame.device).bits
            frame.absent = absent_on_all(bits[None], len(frame.layout.sizes), self.elements.none)

    def known(self, flags: Tensor) -> Tensor | int:
        return self.elements.known(flags) if self._is_alone else flags

    @property
    def can_capture(self) -> bool:
        """Tell whether the coming step can be captured: averages are not, as the host divides and compares them."""
        return super().can_capture or (self._is_alone and self.phase == "uncompressed")

    def _average(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Average, as ``exchange`` says, by one all-reduce, or none where DDP has averaged; then update."""
        frame = self.frame
        loss_scale, averages, how = frame.loss_scale, self.averages, {"abort": abort}
        how["averaged"] = frame.under_ddp.averaged
        flags, absent = averages.add_up(
            grads, self._make_handshake(), loss_scale, frame.steps.updates, self.digest, **how
        )
        flags, frame.absent = frame.ranks.shards.unite(flags, frame.tag_of_shards, absent, len(frame.layout.sizes))
        flags = frame.united(flags)
        if loss_scale.found_inf is not None:
            frame.scaling.overflowed = ((flags & int(Flag.OVERFLOW)) != 0).float()
        if self.options.max_grad_norm is not None:
            frame.scaling.clip(averages.values, self.options.max_grad_norm, frame.ranks.model)
        self._update(averages.of_tensors, frame.coefficients.still(coef, frame.absent), flags)
        return flags

    def _make_handshake(self, skips: bool = False) -> Handshake:
        frame = self.frame
        tag, number = frame.coefficients.tag ^ frame.layout.fingerprint, frame.steps.count.total + skips
        return Handshake(frame.ranks.transport.world_size, number, tag, len(frame.layout.sizes), frame.missing, skips)

    def drop_averages(self) -> None:
        """Throw away what DDP has averaged, on all ranks; OutOfStepError if others take the step."""
        frame = self.frame
        # Others may be in their step, in which they send their handshake: this is for them.
        handshake = self._make_handshake(skips=True)
        tail = self.averages.tail_of(handshake, self.digest)
        with frame.steps.whole("zero_grad()"), frame.steps.breaking(begun=True):
            flags = self.averages.skip(tail, handshake, frame.steps.updates, self.digest)
            frame.under_ddp.averaged = False
        if int(flags):
            raise OutOfStepError(
                f"ranks are out of step after {frame.steps.outcomes.updates} updates: this rank throws away by "
                "zero_grad() what DDP has averaged, but others use it in their step(). No parameter was changed; every "
                "rank must call step() equally often"
            )

    def check_repeated(self, repeated: bool) -> None:
        ddp = self.frame.under_ddp
        if repeated and ddp.attached and not ddp.averaged and self.averages_gradients:
            raise RuntimeError(
                "step() was called again on gradients that DDP has averaged for the last one: other ranks may be in "
                "their next backward pass by now, and can't be asked. Nothing was sent or changed; call step() once "
                "after each backward pass"
            )

    def held(self) -> list[Tensor]:
        flags = [self.elements.this] if self._is_alone else []
        sums = [] if self._exp_avg_sq_sums is None else [self._exp_avg_sq_sums]
        return [*super().held(), *self.averages.held(), self._digest, *flags, *sums]

    def describe(self, flag: Flag) -> str:
        return self._describe_handshake()

    def _describe_handshake(self) -> str:
        return self.frame.say_where(self.averages.describe(self.frame.under_ddp.attached))

    def _update(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        """Make one update from averaged gradients, one of each tensor; none where ``skip`` is set.

        ``found``: Flags of this update, for elements that do not count, and of the last one; else all do.
        """
        raise NotImplementedError
