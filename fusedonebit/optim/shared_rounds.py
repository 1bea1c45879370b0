"""Rounds of 0/1 Adam whose workers share a variance: Algorithm 1 of Lu et al. (2022) but for its renewals of v."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import StepContext
from ..comm.absent import Backup, absence
from ..core.scaling import Agreed
from ..triton_kernels.nouns import Divisor
from .bit_rounds import BitRounds
from .local_steps import leaving_out


class SharedRounds(BitRounds):
    """Rounds after which all workers have the same momentum, which is rebuilt from the average of their updates.

    Lines are the paper's. Its buffer u is ``compensated`` here, and has the updates without their learning rate.
    """

    @property
    def renews(self) -> bool:  # type: ignore[override]
        """Tell whether launches of the coming step renew the table of coefficients on their way."""
        return not self.plan.alone or (self.round.local == 0 and not self.bits.as_floats)

    @property
    def ends_next(self) -> bool:
        """Tell whether the next step ends the round, with whose gradient this step's momentum is compressed."""
        return self.round.local == self.plan.round.steps - 2

    def table(self) -> Tensor:
        return self.bits.table(renews=False)

    def of_gradients(self, coef: Tensor) -> Tensor:
        return coef if self.plan.alone else self.bits.shared(coef)

    def step_alone(self, grads: Sequence[Tensor], agreed: Agreed, coef: Tensor) -> None:
        frame = self.frame
        scaled, last = agreed.coef, self.ends_next
        if not frame.missing:
            self.add(grads, scaled, agreed.hold, moves=True, last=last)  # lines 4 to 6: m, x and u
        else:
            # Their coefficients leave parameters and moments; what has been added up is put back.
            worker = self.reducer.worker
            worker.settle()
            rows = absence(frame.layout, frame.missing, frame.device).rows
            backup = Backup(rows, frame.places.block_tensor, elements=[worker.compensated])
            self.add(grads, leaving_out(frame, scaled), agreed.hold, moves=True, last=False)
            backup.restore(torch.ones(len(frame.parameters), dtype=torch.bool, device=frame.device))
            if last:
                self.add(grads, scaled, agreed.hold, moves=False, last=True)
        self.sum_up(coef)

    def synchronise(self, grads: Sequence[Tensor], agreed: Agreed, context: StepContext, coef: Tensor) -> None:
        steps = self.plan.round.steps
        if steps == 1 and self.bits.as_floats:
            self.add(grads, coef, None, moves=False, last=True)
        v = self.moments.preconditioner(self.bits.floored) if self.options.numerics.precondition else None
        context = context._replace(pending=self.pending)
        if steps > 1:
            self.sum_up(coef)
        # Lines 4, 6 and 8: the last gradient enters u, which all average. Of u stays what that has left out (line 11):
        # it is formed when the next step reads u.
        self.exchange.synchronise(lambda part: part.compress(grads, agreed.coef, v), context, coef)
        self.apply(coef, agreed.hold)

    def apply(self, coef: Tensor, hold: Tensor | None) -> None:
        """Move to x0 - mean step size * sum of the updates, from the x0 that all had (line 10), and end the round.

        The bits of that sum are m from now on (line 9). ``coef`` has the mean step size and the product of the decays.
        """
        frame, steps = self.frame, self.plan.round.steps
        if steps > 1:
            self.go_back()
        divisor = Divisor(self.moments.exp_avg_sq, None, self.bits.floored)
        self.exchange.apply(
            frame.coefficients.still(coef, frame.absent), None if self.options.numerics.precondition else divisor
        )
        self.bits.became_bits(steps, hold)
        self.plan.end_round()

    def take_over_variance(self) -> None:
        self.frame.coefficients.freeze_variance(self.frame.hyper.taken)

    def resumed(self, header: Mapping[str, Any]) -> None:
        self.bits.sum_variance()
        super().resumed(header)
