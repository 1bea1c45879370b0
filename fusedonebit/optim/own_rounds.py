"""Rounds of 0/1 Adam whose workers have a variance each: what they compress is how far they have moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import StepContext
from ..comm.absent import Backup, absence
from ..core.options import Made
from ..core.scaling import Agreed
from ..triton_kernels import Coef
from ..triton_kernels.gradient_scaling import SQUARES
from .bit_rounds import DECAY, STEP_SIZE, BitRounds
from .local_steps import leaving_out, may_rest
from .own_variance import OwnVariance


class OwnRounds(BitRounds):
    """Rounds after which all workers have the same parameters; momentum and variance stay each worker's own.

    Args:
        own: The level of workers' variances.
        **of_rounds: As of ``BitRounds``.
    """

    owns: ClassVar = True
    weighs = SQUARES  # gradients' squares enter the level

    def __init__(self, own: OwnVariance, **of_rounds: Any) -> None:
        super().__init__(**of_rounds)
        self.own = own
        # With these what workers have added up is compressed as it is, and applied.
        self._plain = self.reducer.plain_coefficients()
        self._plain[:, Coef.STEP_SIZE] = 1.0

    def table(self) -> Tensor:
        frame = self.frame  # each step is a worker's own, and its v's bias that of so many
        return frame.coefficients(frame.hyper.taken, Made(frame.steps.of_each, rho=self.own.rho))

    def step_alone(self, grads: Sequence[Tensor], agreed: Agreed, coef: Tensor) -> None:
        self.add(grads, leaving_out(self.frame, agreed.coef), agreed.hold, moves=True, last=False)
        self.sum_up(coef)

    def synchronise(self, grads: Sequence[Tensor], agreed: Agreed, context: StepContext, coef: Tensor) -> None:
        """Take a round's last step, and compress how far this worker has moved in the round.

        All then move by the average of that, from the parameters that they had in common when the round began.
        """
        frame, exchange = self.frame, self.exchange
        # One that can't take the step has no gradient: nothing of it may count as one that is 0.
        hold = torch.ones_like(self.reducer.verdict.none) if context.abort else agreed.hold
        backups = self._back_up(context.missing)
        self.add(grads, agreed.coef, hold, moves=True, last=True)
        context = context._replace(pending=self.pending)
        none = [frame.nothing] * len(grads)
        exchange.synchronise(lambda part: part.compress(none, self._plain), context, coef)
        self.reducer.backups += backups
        left, decay, far = self._plain[:, Coef.DECAY], coef[:, Coef.DECAY], coef[:, Coef.STEP_SIZE]
        rests = may_rest(frame)
        if self.round.local == 0:
            left.copy_(decay)
        else:
            torch.mul(self.moved[DECAY], decay, out=left)
            far = self.moved[STEP_SIZE] + far if rests else far
            self.go_back()
        # What is owed is in units of parameters, which no rate multiplies any further: it waits for one above 0.
        if rests:
            self.reducer.keep_back(far == 0.0)
        exchange.apply(frame.coefficients.still(self._plain, frame.absent))
        if self.own.tells(self.plan.done.steps, self.plan.round.steps):
            self.follow(grads, agreed.factor)
        self.plan.end_round()

    def _back_up(self, missing: Sequence[int]) -> list[Backup]:
        """Save the state of tensors without a gradient here, to put it back if no other rank has one either."""
        frame, moments, worker = self.frame, self.moments, self.reducer.worker
        if not missing:
            return []
        worker.settle()
        rows = absence(frame.layout, missing, frame.device).rows
        return [Backup(rows, frame.places.block_tensor, [worker.compensated, moments.exp_avg, moments.exp_avg_sq])]

    def follow(self, grads: Sequence[Tensor], factor: Tensor | None) -> None:
        """Update rho, the ratio of the mean gradient's squares to the workers' own, from this step's gradients."""
        sent = self.own.tell(grads, factor, self.moments.exp_avg_sq)
        self.own.follow(sent, self.reducer.flags, self.frame.absent)
        self.reducer.heard(sent)

    def held(self) -> Sequence[Tensor]:
        return *super().held(), self._plain

    def take_over_variance(self) -> None:
        self.own.begin(self.frame.steps.of_each)
