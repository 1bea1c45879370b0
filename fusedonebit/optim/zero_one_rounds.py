"""How 0/1 Adam works (Lu et al., 2022, Algorithm 1): rounds that renew the variance, and rounds that send bits.

A round is one step in which gradients are averaged in full precision, and which is AdamW's; or some steps after
the last of which the workers synchronise: before it each moves by itself, and nothing is sent. What they then
average, at one bit per element, is the sum of their updates, so that the mean of the parameters is followed. All
take it from the parameters that they had in common, and rebuild the momentum from it.

Between steps the momentum is either floats, ``_exp_avg``, or, after a round of bits, those bits and their scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Flag, LocalTransport, agree
from ..comm.absent import Kept, absence
from ..core.consensus import failure
from ..core.scaling import Agreed, LossScale, agree_on_scaling
from ..triton_kernels import Coef, add_values, apply_momentum, flatten, local_step
from .policies import Progress, Round, next_round, planned
from .zero_one_state import DECAY, STEP_SIZE, ZeroOneState


class ZeroOneOptimizer(ZeroOneState):
    """All of 0/1 Adam but its constructor; see the module's docstring and ``ZeroOneAdam``."""

    def check_levels(self) -> None:
        raise ValueError("hierarchy must be None: between two synchronisations ranks of a node would move apart")

    # ---------------------------------------------------------------- rounds

    @property
    def averages_gradients(self) -> bool:
        """Whether the coming step averages gradients in full precision; else DDP must leave them alone."""
        if self._begun:
            return self._phase == "uncompressed"
        if self._local:
            return False
        self._take_back_skipped()
        return (self._plan[0] if self._plan else next_round(*self._policies, self._done)).renews

    def _enter_phase(self) -> None:
        """Takes up the next round where one begins; the same on all ranks."""
        self._take_back_skipped()
        if self._local == 0:
            if not self._plan:
                self._plan_from(self._done)
            self._round = self._plan.pop(0)
        last = self._local == self._round.steps - 1
        if last and not self._plan:
            # Now, as ranks meet anyway; what is wrong with later rounds is told where they begin.
            failure(lambda: self._plan_from(self._done.after(self._round, 1)))
        self._phase = "uncompressed" if self._round.renews else "one-bit" if last else "local"

    def _plan_from(self, done: Progress) -> None:
        """Asks for the rounds to come, on which all ranks agree; else all raise, before anything has changed."""
        plan: list[Round] = []
        error: Exception | None = None
        try:
            plan = planned(*self._policies, done)
        except Exception as caught:
            error = caught
        facts = [(f"round {done.rounds + i}", str(each)) for i, each in enumerate(plan)]
        hint = "policies must answer alike on all ranks, as functions of their argument alone"
        agree(self.transport, facts, self.device, error, hint)
        self._plan = plan

    def _end_round(self) -> None:
        self._unsettled.append((self.outcomes.attempts, self._round))
        self._done = self._done.after(self._round, 1)
        self._as_floats = self._round.renews
        self._local = self._tag = 0

    # ---------------------------------------------------------------- the step

    def coefficient_table(self) -> Tensor:
        if self._phase != "uncompressed":
            return self._floored(self.coefficients(self._taken, self.own_steps, self._entered))
        # AdamW's step, whose correction follows betas[1]; in other steps it stays that of the last renewal.
        kept, self.coefficients.variance_betas = self.coefficients.variance_betas, None
        coef = self.coefficients(self._taken, self.own_steps, self._entered + 1)
        self.coefficients.variance_betas = kept
        return coef

    def _exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        if self._phase == "uncompressed":
            return self._renew(grads, coef, abort)
        if self._phase == "local":
            return self._move_alone(grads, coef)
        return self._synchronise(grads, coef, abort or self._held_error is not None)

    def _renew(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """A step of AdamW on averaged gradients, which also renews v (Algorithm 1, line 15)."""
        self._make_floats(renews=True)
        flags = super()._exchange(grads, coef, abort)
        taken = flags[0] == 0
        self._entered += taken if self._absent is None else taken & ~self._absent
        self.coefficients.freeze_variance(self._taken)
        self._mean_sq = self._means()
        self._end_round()
        return flags

    def _begin_round(self) -> None:
        """Keeps the parameters that all ranks have, and has the momentum as floats."""
        self._make_floats(renews=False)
        flatten(self.parameters.dense, self.layout.sizes, self.layout.block_size, 1.0, None, self._anchor)
        self._moved[STEP_SIZE], self._moved[DECAY] = 0.0, 1.0

    def _move_alone(self, grads: Sequence[Tensor], coef: Tensor) -> Tensor:
        """A step between two synchronisations (lines 4 to 6)."""
        self.parameters.before_update()
        if self._local == 0:
            self._begin_round()
        self._note_missing(first=self._local == 0)
        agreed = self._rescaling(grads, alone=True)
        last = self._local == self._round.steps - 2
        self._add_alone(grads, agreed.scaled(coef), agreed.hold, last)
        self.parameters.after_update()
        self._sum_up(coef)
        self._tag = self._mixed_tag()
        self._local += 1
        self._done = self._done._replace(steps=self._done.steps + 1)
        return self._none.clone()

    def _sum_up(self, coef: Tensor) -> None:
        """How far a step of the round goes, and how much is left of the parameters."""
        self._moved[STEP_SIZE] += coef[:, Coef.STEP_SIZE]
        self._moved[DECAY] *= coef[:, Coef.DECAY]

    def _add_alone(
        self, grads: Sequence[Tensor], coef: Tensor, hold: Tensor | None, last: bool, leaks: bool = False
    ) -> None:
        """A step of this worker's own, which leaves tensors without a gradient as they are."""
        if not self._missing:
            self._add(grads, coef, hold, moves=True, last=last, leaks=leaks)
            return
        # Their coefficients leave parameters and moments; what has been added up is put back.
        worker = self.reducer.worker
        worker.settle()
        rows = absence(self.layout, self._missing, self.device).rows
        kept = Kept(rows, self._block_tensor, lines=[worker.compensated])
        self._add(grads, self._leaving_out(coef, self._missing), hold, moves=True, last=False, leaks=leaks)
        kept.restore(torch.ones(len(self.parameters), dtype=torch.bool, device=self.device))
        if last:
            self._add(grads, coef, hold, moves=False, last=True)

    def _add(
        self, grads: Sequence[Tensor], coef: Tensor, hold: Tensor | None, moves: bool, last: bool, leaks: bool = False
    ) -> None:
        layout, worker = self.layout, self.reducer.worker
        local_step(
            self.parameters.dense,
            grads,
            layout.sizes,
            layout.block_size,
            self.exp_avg,
            self.exp_avg_sq,
            self._eps_inside_sqrt,
            self.options.precondition,
            worker.compensated,
            worker.scale,
            coef,
            self._block_tensor,
            self.live.bits,
            self.live.row,
            self._none if hold is None else hold,
            moves,
            last,
            leaks,
            self._pending,
        )
        worker.scale.zero_()

    def _synchronise(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """The last step of a round: its update is compressed with those before it (lines 8 to 11)."""
        agreed = self._rescaling(grads, alone=False)
        steps, reduce = self._round.steps, self.reducer
        if steps == 1 and self._as_floats:
            self._add(grads, coef, None, moves=False, last=True)
        self._note_missing(first=steps == 1)
        compressed = agreed.scaled(coef.clone())
        compressed[:, Coef.BETA1] /= self._summed  # of no account where the momentum is in ``compensated`` already
        v, inside = self.exp_avg_sq if self.options.precondition else None, self._eps_inside_sqrt
        more = {"hold": agreed.hold, "pending": self._pending}
        told = self.told(abort, self._step_number, self._missed, **more)._replace(tag=self._mixed_tag())
        reduce.synchronise(lambda part: part.compress(grads, compressed, v, inside), told)
        self._leave_absent()
        if steps > 1:
            self._sum_up(coef)
        self._apply(coef, agreed.hold, moved=steps > 1)
        return reduce.flags

    def _leave_absent(self) -> None:
        """Puts back what belongs to tensors of which no worker has had a gradient in this round."""
        self._absent = self.reducer.absent
        if self._absent is not None:
            self.reducer.restore(self._absent)
            self.own_steps -= self._absent * self._local

    def _apply(self, coef: Tensor, hold: Tensor | None, moved: bool) -> None:
        """x = x0 - mean step size * sum of the updates, from the x0 that all had (line 10); and the round ends."""
        layout, reduce, live, steps = self.layout, self.reducer, self.live, self._round.steps
        where = layout.sizes, layout.block_size
        self.parameters.before_update()
        if moved:
            coef[:, Coef.STEP_SIZE] = self._moved[STEP_SIZE] / steps
            coef[:, Coef.DECAY] = self._moved[DECAY]
            anchor = self._anchor[: layout.numel]
            add_values(self.parameters.dense, *where, anchor, True, live.bits, live.row, self._none, None)
        apply_momentum(
            self.parameters.dense,
            *where,
            reduce.bits,
            reduce.scale,
            None if self.options.precondition else self.exp_avg_sq,
            self._eps_inside_sqrt,
            self.coefficients.still(coef, self._absent),
            self._block_tensor,
            live.bits,
            live.row,
            reduce.flags,
            None,
        )
        self.parameters.after_update()
        summed = torch.full_like(self._summed, steps)
        if self._absent is not None:
            summed = torch.where(self._absent, self._summed, summed)
        self._summed = summed if hold is None else torch.where(hold == 0, summed, self._summed)
        self._pending.zero_()
        self._end_round()

    def _rescaling(self, grads: Sequence[Tensor], alone: bool) -> Agreed:
        """What gradients are multiplied with, and flags for which this worker has no update; of all ranks, or alone."""
        transport = LocalTransport() if alone else self.transport
        scale, most = LossScale.of(self), self.options.max_grad_norm
        earlier = None if alone else self._lost
        agreed = agree_on_scaling(grads, scale, most, transport, self.shards, self.layout, earlier=earlier)
        if agreed.hold is not None:
            self._tell_scaler(agreed.overflowed, alone)
        if agreed.grad_norm is not None:
            self.last_grad_norm = agreed.grad_norm
        return agreed

    def _tell_scaler(self, ranks: Tensor | None, alone: bool) -> None:
        """That ``ranks`` of all have found an inf; while a worker is alone it keeps that to itself, or scales part."""
        assert ranks is not None
        if alone:
            self._lost += ranks
            self.overflowed.zero_()
        else:
            self.overflowed = (ranks > 0).float().reshape(1)
            self._lost.zero_()

    def _mixed_tag(self) -> int:
        """A hash of the round's length and of the hyper-parameters of all of its steps so far."""
        return (1_000_003 * (self._tag or self._round.steps) + self.coefficients.tag) & 0x7FFFFFFF

    def _error_due(self, error: Exception | None) -> Exception | None:
        """Between two synchronisations nobody hears of an error: it is raised when all next meet."""
        held = self._held_error or error
        self._held_error = held if self._phase == "local" else None
        return None if self._phase == "local" else held

    def _describe(self, flag: Flag) -> str:
        if self._phase == "uncompressed":
            return super()._describe(flag)
        return self._say_where(self.reducer.describe())
