"""The stage that averages gradients over the ranks: all that ``AdamW`` and ``Lamb`` do, and the warm-up of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..comm import Flag
from ..comm.absent import absence, absent_on_all
from ..core.averages import Averages, ElementFlags
from ..core.exchange import Exchange
from ..core.frame import Frame
from ..core.handshake import Handshake
from ..core.stage import Stage
from ..errors import OutOfStepError
from ..triton_kernels.gradient_scaling import SQUARES


class Update(Protocol):
    """Is an update from averaged gradients."""

    def __call__(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        """Make one update, from one gradient of each tensor; none where ``skip`` is set.

        ``found``: Flags of this update, for elements that do not count, and of the last one; else all do.
        """


class Averaged(Stage):
    """Averages by one all-reduce, or lets DDP do so, then updates.

    A rank alone has nothing to average: its update may read gradients where they lie.

    Args:
        frame: Of the optimizer.
        update: What follows.
        in_place: Whether a rank alone updates from gradients where they lie, and leaves out elements that do not count;
            else it flattens them first, and skips a step of which any does not count.
        beside: What other steps exchange with, whose checksums go on in these, and from them; None: there are none.
        table: Makes the coefficients of these steps as of others; None: they have a table of their own.

    Attributes:
        averages: The memory of averaged gradients.
        elements: Flags of a rank alone.
        alone: Whether this rank updates from gradients where they lie. Who wants errors looks at all of them first.
    """

    weighs = SQUARES
    averages_gradients = True

    def __init__(
        self,
        frame: Frame,
        update: Update,
        *,
        in_place: bool = False,
        beside: Exchange | None = None,
        table: Callable[[], Tensor] | None = None,
    ) -> None:
        super().__init__(frame)
        self.update, self._beside, self._table = update, beside, table
        self.averages = Averages(frame.layout, frame.ranks.transport, frame.device)
        self.elements = ElementFlags(frame.device)
        self.alone = self.can_capture = in_place and frame.ranks.single and frame.options.faults.nonfinite == "skip"
        self._digest = torch.zeros(1, dtype=torch.int64, device=frame.device)

    @property
    def digest(self) -> Tensor | None:
        if self._beside is not None:
            return self._beside.reducer.verdict.digest
        return None if self.frame.ranks.transport.world_size == 1 else self._digest

    def table(self) -> Tensor:
        return super().table() if self._table is None else self._table()

    def step(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        return (self._update_alone if self.alone else self.average)(grads, coef, abort)

    def _update_alone(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Update on a rank alone, as ``step`` says: the update is the only launch that reads gradients.

        But for their norm, if they are clipped. Coefficients take up what they are multiplied with.
        """
        frame = self.frame
        self.elements.made = not abort
        if abort:
            return torch.full_like(self.elements.none, int(Flag.ABORT))
        agreed = self.agree(grads, coef)
        hold = self.elements.none if agreed.hold is None else agreed.hold
        self.note_absent()
        if not frame.steps.captured:
            self.elements.turn()
        found = self.elements.of_step(frame.steps.captured)
        self.update(grads, frame.coefficients.still(agreed.coef, frame.absent), hold, *found)
        return hold

    def note_absent(self) -> None:
        """Take note of the tensors of which this rank, alone, has no gradient."""
        frame = self.frame
        if frame.missing:
            bits = absence(frame.layout, frame.missing, frame.device).bits
            frame.absent = absent_on_all(bits[None], len(frame.layout.sizes), self.elements.none)

    def known(self, flags: Tensor) -> Tensor | int:
        return self.elements.known(flags) if self.alone else flags

    def average(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Average, as ``step`` says, by one all-reduce, or none where DDP has averaged; then update."""
        frame = self.frame
        loss_scale, averages = frame.loss_scale, self.averages
        how = {"abort": abort, "averaged": frame.under_ddp.averaged}
        flags, absent = averages.add_up(grads, self._handshake(), loss_scale, frame.steps.updates, self.digest, **how)
        flags, frame.absent = frame.ranks.shards.unite(flags, frame.tag_of_shards, absent, len(frame.layout.sizes))
        flags = frame.united(flags)
        if loss_scale.found_inf is not None:
            frame.scaling.overflowed = ((flags & int(Flag.OVERFLOW)) != 0).float()
        if self.options.max_grad_norm is not None:
            frame.scaling.clip(averages.values, self.options.max_grad_norm, frame.ranks.model)
        self.update(averages.of_tensors, frame.coefficients.still(coef, frame.absent), flags)
        return flags

    def _handshake(self, skips: bool = False) -> Handshake:
        frame = self.frame
        tag, number = frame.coefficients.tag ^ frame.layout.fingerprint, frame.steps.count.total + skips
        return Handshake(frame.ranks.transport.world_size, number, tag, len(frame.layout.sizes), frame.missing, skips)

    def drop_averages(self) -> None:
        """Throw away what DDP has averaged, on all ranks; OutOfStepError if others take the step."""
        frame = self.frame
        # Others may be in their step, in which they send their handshake: this is for them.
        handshake = self._handshake(skips=True)
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

    def check_repeated(self) -> None:
        ddp = self.frame.under_ddp
        if ddp.attached and not ddp.averaged:
            raise RuntimeError(
                "step() was called again on gradients that DDP has averaged for the last one: other ranks may be in "
                "their next backward pass by now, and can't be asked. Nothing was sent or changed; call step() once "
                "after each backward pass"
            )

    def describe(self, flag: Flag) -> str:
        return self.frame.say_where(self.averages.describe(self.frame.under_ddp.attached))

    def held(self) -> Sequence[Tensor]:
        return [*self.averages.held(), self._digest, *([self.elements.this] if self.alone else [])]

    def close(self) -> None:
        self.averages.drop()
