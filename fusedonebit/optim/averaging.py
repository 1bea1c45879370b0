"""Optimizers that average gradients over the ranks by themselves.

``AveragingOptimizer`` is all of one but its update: a subclass says with ``_update`` what one update
from averaged gradients is. ``adamw.AdamW`` and ``lamb.Lamb`` are. A rank alone has nothing to average: its update
reads gradients where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..comm import Flag
from ..comm.absent import absence, absent_on_all
from ..core.averages import Averages, ElementFlags
from ..core.handshake import Handshake
from ..core.optimizer import DistributedOptimizer
from ..core.scaling import LossScale
from ..core.state.spec import Specs, StateSpec
from ..errors import OutOfStepError
from ..triton_kernels.scaling import SQUARES

DTYPE = "options.moments_dtype"


class AveragingOptimizer(DistributedOptimizer):
    """Skeleton of an optimizer on averaged gradients; see the module's docstring and ``Lamb``."""

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

    def build(self) -> None:
        self._exp_avg_sq_sums: Tensor | None = None  # by block, where somebody watches v
        if self._built:
            self.averages.drop()  # before all else is allocated anew
        super().build()
        self.averages = Averages(self.layout, self.ranks.transport, self.device)
        self.elements = ElementFlags(self.device)
        self._digest = torch.zeros(1, dtype=torch.int64, device=self.device)

    @property
    def digest(self) -> Tensor | None:
        return None if self.ranks.transport.world_size == 1 else self._digest

    @property
    def _is_alone(self) -> bool:
        """Tell whether this rank updates from gradients where they lie. Who wants errors looks at all of them first."""
        return self.reads_gradients and self.ranks.single and self.options.nonfinite == "skip"

    def _exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        return (self._update_alone if self._is_alone else self._average)(grads, coef, abort)

    def _update_alone(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Update on a rank alone, as ``_exchange`` says: the update is the only launch that reads gradients.

        But for their norm, if they are clipped. Coefficients take up what they are multiplied with.
        """
        self.elements.made = not abort
        if abort:
            return torch.full_like(self.elements.none, int(Flag.ABORT))
        agreed = self._agree(grads, coef, self.ranks.transport)
        hold = self.elements.none if agreed.hold is None else agreed.hold
        self._note_absent()
        if not self.steps.captured:
            self.elements.turn()
        found = self.elements.of_step(self.steps.captured)
        self._update(grads, self.coefficients.still(agreed.coef, self._absent), hold, *found)
        return hold

    def _note_absent(self) -> None:
        """Take note of the tensors of which this rank, alone, has no gradient."""
        if self._missing:
            bits = absence(self.layout, self._missing, self.device).bits
            self._absent = absent_on_all(bits[None], len(self.layout.sizes), self.elements.none)

    def _known(self, flags: Tensor) -> Tensor | int:
        return self.elements.known(flags) if self._is_alone else flags

    @property
    def _can_capture(self) -> bool:
        """Tell whether the coming step can be captured: averages are not, as the host divides and compares them."""
        return super()._can_capture or (self._is_alone and self._phase == "uncompressed")

    def _average(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Average, as ``_exchange`` says, by one all-reduce, or none where DDP has averaged; then update."""
        loss_scale, averages, how = LossScale.of(self), self.averages, {"abort": abort}
        how["averaged"] = self.under_ddp.averaged
        flags, absent = averages.add_up(
            grads, self._make_handshake(), loss_scale, self.steps.updates, self.digest, **how
        )
        flags, self._absent = self.ranks.shards.unite(flags, self._tag_of_shards, absent, len(self.layout.sizes))
        flags = self._united(flags)
        if loss_scale.found_inf is not None:
            self.scaling.overflowed = ((flags & int(Flag.OVERFLOW)) != 0).float()
        if self.options.max_grad_norm is not None:
            self.scaling.clip(averages.values, self.options.max_grad_norm, self.ranks.model)
        self._update(averages.of_tensors, self.coefficients.still(coef, self._absent), flags)
        return flags

    def _make_handshake(self, skips: bool = False) -> Handshake:
        tag, number = self.coefficients.tag ^ self.layout.fingerprint, self.steps.count.total + skips
        return Handshake(self.ranks.transport.world_size, number, tag, len(self.layout.sizes), self._missing, skips)

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero; averages that DDP has made are dropped on all ranks, or on none.

        Raises:
            OutOfStepError: if others take the step; no gradient was dropped.
        """
        if self.under_ddp.averaged:
            self._skip_together()
        super().zero_grad(set_to_none)

    def _skip_together(self) -> None:
        # Others may be in their step, in which they send their handshake: this is for them.
        handshake = self._make_handshake(skips=True)
        tail = self.averages.tail_of(handshake, self.digest)
        with self.steps.whole("zero_grad()"), self.steps.breaking(begun=True):
            flags = self.averages.skip(tail, handshake, self.steps.updates, self.digest)
            self.under_ddp.averaged = False
        if int(flags):
            raise OutOfStepError(
                f"ranks are out of step after {self.steps.outcomes.updates} updates: this rank throws away by "
                "zero_grad() what DDP has averaged, but others use it in their step(). No parameter was changed; every "
                "rank must call step() equally often"
            )

    def _check_repeated(self, repeated: bool) -> None:
        ddp = self.under_ddp
        if repeated and ddp.attached and not ddp.averaged and self.averages_gradients:
            raise RuntimeError(
                "step() was called again on gradients that DDP has averaged for the last one: other ranks may be in "
                "their next backward pass by now, and can't be asked. Nothing was sent or changed; call step() once "
                "after each backward pass"
            )

    def _held(self) -> list[Tensor]:
        flags = [self.elements.this] if self._is_alone else []
        sums = [] if self._exp_avg_sq_sums is None else [self._exp_avg_sq_sums]
        return [*super()._held(), *self.averages.held(), self._digest, *flags, *sums]

    def _describe(self, flag: Flag) -> str:
        return self._describe_handshake()

    def _describe_handshake(self) -> str:
        return self._say_where(self.averages.describe(self.under_ddp.attached))

    def _update(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        """Make one update from averaged gradients, one of each tensor; none where ``skip`` is set.

        ``found``: Flags of this update, for elements that do not count, and of the last one; else all do.
        """
        raise NotImplementedError
