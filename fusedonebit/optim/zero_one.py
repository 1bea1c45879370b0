"""0/1 Adam (Lu et al., 2022) as a plain ``torch.optim.Optimizer``: rounds of bits, and of renewals where asked for.

Where all workers share a variance the momentum is, between steps, either floats, ``exp_avg``, or, after a round of
bits, those bits and their scales. Where each has its own it is floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import Flag, Told, agree
from ..comm.absent import Kept, absence
from ..core.consensus import failure
from ..core.optimizer import DistributedOptimizer
from ..core.options import Made
from ..core.scaling import Agreed
from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Params, Ranks, Wire
from ..triton_kernels import Coef, add_values, local_step
from ..triton_kernels.zero_one import LocalStep
from .own_variance import OwnVariance
from .policies import EveryStep, Progress, Round, SyncPolicy, VariancePolicy, next_round, planned
from .zero_one_state import DECAY, STEP_SIZE, ZeroOneState


class LocalAdam(ZeroOneState):
    """0/1 Adam: rounds of workers' own steps."""

    leaks: ClassVar = False
    """Whether weight decay is part of what workers add up, and each step's update is compressed apart."""

    # ---------------------------------------------------------------- rounds

    @property
    def averages_gradients(self) -> bool:
        """Tell whether the coming step averages gradients in full precision; else DDP must leave them alone."""
        if self.frame.steps.begun:
            return self.phase == "uncompressed"
        if self._local:
            return False
        self._take_back_skipped()
        return (self._plan[0] if self._plan else next_round(*self._policies, self._done)).renews

    def enter_phase(self) -> bool:
        """Begin the next planned round if the last one has ended, and enter this step's phase; alike on all ranks."""
        self._take_back_skipped()
        if self._local == 0:
            if not self._plan:
                self._plan_from(self._done)
            self.frame.steps.changing = True
            self._round = self._plan.pop(0)
            self._tag = self._round.steps
        last = self._local == self._round.steps - 1
        if last and not self._plan:
            # Now, as ranks meet anyway; what is wrong with later rounds is told where they begin.
            failure(lambda: self._plan_from(self._done.after(self._round, self._round.steps)))
        self.phase = "uncompressed" if self._round.renews else "one-bit" if last else "local"
        return False

    def _plan_from(self, done: Progress) -> None:
        """Ask for the rounds to come, on which all ranks agree; else all raise, before anything has changed."""
        frame = self.frame
        plan: list[Round] = []
        error: Exception | None = None
        try:
            plan = planned(*self._policies, done)
        except Exception as caught:
            error = caught
        facts = [(f"round {done.rounds + i}", str(each)) for i, each in enumerate(plan)]
        hint = "policies must answer alike on all ranks, as functions of their argument alone"
        agree(frame.ranks.transport, facts, frame.device, error, hint)
        self._plan = plan

    # ---------------------------------------------------------------- the step

    @property
    def renews_on_the_way(self) -> bool:
        if self.leaks or self.own is not None:
            return False
        return self.phase == "one-bit" or (self.phase == "local" and self._local == 0 and not self._as_floats)

    def coefficient_table(self) -> Tensor:
        # A renewal is AdamW's step, whose correction follows betas[1]; else it stays that of the last renewal.
        frame = self.frame
        if self.own is not None:  # each step is a worker's own, and its v's bias that of so many
            return self.frame.coefficients(frame.hyper.taken, Made(frame.steps.of_each, rho=self.own.rho))
        renews = self.phase == "uncompressed"
        made = Made(frame.steps.of_each, self._entered, renews=True) if renews else self._of_bits
        return self.frame.coefficients(frame.hyper.taken, made)

    def exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        if self.phase == "uncompressed":
            return self._renew(grads, coef, abort)
        return super().exchange(grads, coef, abort)

    def _renew(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Take a step of AdamW on averaged gradients, which also renews v (Algorithm 1, line 15)."""
        self._make_floats(coef, renews=True)
        flags = self._average(grads, coef, abort)
        self.frame.coefficients.freeze_variance(self.frame.hyper.taken)
        self._mean_sq = self._means()
        self._as_floats = True
        self._end_round(self._round)
        return flags

    def _move_alone(self, grads: Sequence[Tensor], coef: Tensor) -> Tensor:
        if self._local == 0:  # before loss scales are put into coefficients that this renews
            self._make_floats(coef, renews=False)
        return super()._move_alone(grads, coef)

    def _step_alone(self, grads: Sequence[Tensor], agreed: Agreed, coef: Tensor) -> None:
        """Take a step between two synchronisations (lines 4 to 6). Tensors without a gradient stay as they are."""
        frame = self.frame
        scaled, last = agreed.coef, self._local == self._round.steps - 2 and not self.leaks
        if self.own is not None:
            self._add(grads, self._leaving_out(scaled), agreed.hold, moves=True, last=False)
        elif not frame.missing:
            self._add(grads, scaled, agreed.hold, moves=True, last=last)
        else:
            # Their coefficients leave parameters and moments; what has been added up is put back.
            worker = self.reducer.worker
            worker.settle()
            rows = absence(frame.layout, frame.missing, frame.device).rows
            kept = Kept(rows, frame.places.block_tensor, elements=[worker.compensated])
            self._add(grads, self._leaving_out(scaled), agreed.hold, moves=True, last=False)
            kept.restore(torch.ones(len(frame.parameters), dtype=torch.bool, device=frame.device))
            if last:
                self._add(grads, scaled, agreed.hold, moves=False, last=True)
        self._sum_up(coef)

    def _add(self, grads: Sequence[Tensor], coef: Tensor, hold: Tensor | None, moves: bool, last: bool) -> None:
        worker, dense, v = self.reducer.worker, self.frame.parameters.dense, self.exp_avg_sq
        whose = (dense, grads, self.frame.places, self.exp_avg, v, worker.compensated, worker.scale)
        hold, anchor = self._no_flags if hold is None else hold, self._kept(moves, last)
        how = self._eps_inside_sqrt, self.options.precondition
        step = LocalStep(*how, moves, last, self.leaks, self.own is not None)
        local_step(*whose, coef, step, hold, anchor, self._pending)

    def _kept(self, moves: bool, last: bool) -> Tensor | None:
        """Return where a round's first step keeps the parameters, if it changes any."""
        return self._kept_now if moves and not (last and self.own is not None) else None

    def _sum_up(self, coef: Tensor) -> None:
        """Add up how far steps of the round go, and how much is left of the parameters; ``coef`` is this step's."""
        self.frame.coefficients.add_up(self._moved, self._local == 0, self._round.steps)

    def _compressed_step(self, grads: Sequence[Tensor], agreed: Agreed, told: Told, coef: Tensor) -> None:
        """Take the last step of a round: its update is compressed with those before it (lines 8 to 11)."""
        if self.own is not None:
            self._synchronise_own(self.own, grads, agreed, told, coef)
            return
        steps = self._round.steps
        if steps == 1 and self._as_floats:
            self._add(grads, coef, None, moves=False, last=True)
        v, inside = self.exp_avg_sq if self.options.precondition else None, self._eps_inside_sqrt
        told = told._replace(pending=self._pending)
        if steps > 1:
            self._sum_up(coef)
        self._synchronise(lambda part: part.compress(grads, agreed.coef, v, inside), told, coef)
        self._apply(coef, agreed.hold)

    def _synchronise_own(
        self, own: OwnVariance, grads: Sequence[Tensor], agreed: Agreed, told: Told, coef: Tensor
    ) -> None:
        """Take a round's last step where each worker has its own variance: compress how far it has moved in the round.

        All then move by the average of that, from the parameters that they had in common when the round began.
        """
        frame = self.frame
        # One that can't take the step has no gradient: nothing of it may count as one that is 0.
        hold = torch.ones_like(self._no_flags) if told.abort else agreed.hold
        kept = self._keep_own(told.missing)
        self._add(grads, agreed.coef, hold, moves=True, last=True)
        told = told._replace(pending=self._pending)
        self._synchronise(lambda part: part.compress(self._all_missing, self._plain), told, coef)
        self.reducer.kept += kept
        left, decay, far = self._plain[:, Coef.DECAY], coef[:, Coef.DECAY], coef[:, Coef.STEP_SIZE]
        may_rest = self._may_rest
        if self._local == 0:
            left.copy_(decay)
        else:
            torch.mul(self._moved[DECAY], decay, out=left)
            far = self._moved[STEP_SIZE] + far if may_rest else far
            self._go_back()
        # What is owed is in units of parameters, which no rate multiplies any further: it waits for one above 0.
        if may_rest:
            self.reducer.keep_back(far == 0.0)
        self._apply_momentum(frame.coefficients.still(self._plain, frame.absent))
        if own.tells(self._done.steps, self._round.steps):
            self._follow(own, grads, agreed.factor)
        self._end_round(self._round)

    def _keep_own(self, missing: Sequence[int]) -> list[Kept]:
        """Save the state of tensors without a gradient here, to put it back if no other rank has one either."""
        frame = self.frame
        if not missing:
            return []
        worker = self.reducer.worker
        worker.settle()
        rows = absence(frame.layout, missing, frame.device).rows
        return [Kept(rows, frame.places.block_tensor, [worker.compensated, self.exp_avg, self.exp_avg_sq])]

    def _follow(self, own: OwnVariance, grads: Sequence[Tensor], factor: Tensor | None) -> None:
        """Update rho, the ratio of the mean gradient's squares to the workers' own, from this step's gradients."""
        told = own.tell(self, grads, factor, self.exp_avg_sq)
        own.follow(self, told, self.reducer.flags, self.frame.absent)
        self.reducer.heard(told)

    def _of_gradients(self, coef: Tensor) -> Tensor:
        return coef if self.phase == "local" or self.own is not None else self._of_each_step(coef)

    def _of_each_step(self, coef: Tensor) -> Tensor:
        """Return coefficients for momentum whose bits stand for a sum over several steps: beta1 over their number."""
        if self._as_floats or self._summed_alike == 1:
            return coef
        share = coef.clone()
        share[:, Coef.BETA1] /= self._summed
        return share

    def _sum_of(self, steps: int, hold: Tensor | None) -> None:
        """Note that the bits are a sum of so many steps, but for tensors without a gradient, and a step held back."""
        frame = self.frame
        if self._summed_alike == steps:
            return
        summed = torch.full_like(self._summed, steps)
        if frame.absent is not None:
            summed = torch.where(frame.absent, self._summed, summed)
        self._summed = summed if hold is None else torch.where(hold == 0, summed, self._summed)
        self._summed_alike = steps if frame.absent is None and hold is None else None

    def _apply(self, coef: Tensor, hold: Tensor | None) -> None:
        """Move to x0 - mean step size * sum of the updates, from the x0 that all had (line 10), and end the round.

        ``coef`` has the mean step size and the product of the decays.
        """
        frame = self.frame
        steps = self._round.steps
        if steps > 1 or self.leaks:
            self._go_back()
        v = None if self.options.precondition else self.exp_avg_sq
        self._apply_momentum(frame.coefficients.still(coef, frame.absent), v, self._eps_inside_sqrt)
        self._sum_of(steps, hold)
        self._as_floats = False
        self._end_round(self._round)

    def _go_back(self) -> None:
        """Take the parameters that all had when the round began."""
        add_values(self.frame.parameters.dense, self.frame.places, self._round_start, True, self._no_flags, None)

    def _scaling(self, grads: Sequence[Tensor], coef: Tensor, alone: bool = False) -> Agreed:
        agreed = super()._scaling(grads, coef, alone)
        if agreed.hold is not None and agreed.ranks is not None:
            if alone:  # that worker keeps to itself what it has found, or scales part
                self._lost += agreed.ranks
                self.frame.scaling.overflowed.zero_()
            else:
                self._lost.zero_()
        return agreed

    def describe(self, flag: Flag) -> str:
        return self._describe_handshake() if self.phase == "uncompressed" else super().describe(flag)


class ZeroOneAdam(DistributedOptimizer):
    r"""Adam whose workers talk in some steps only, and then mostly in one bit per parameter.

    A round begins with parameters :math:`x` that are equal on all ranks. In each of its K steps every worker w moves by
    itself, as AdamW does, with a momentum and a variance of its own gradients,

    .. math::
        u_w = \frac{\hat m_w}{\sqrt{\rho \hat v_w} + \epsilon}, \quad
        x_w \leftarrow (1 - \gamma \lambda) x_w - \gamma u_w, \quad
        c_w \leftarrow (1 - \gamma \lambda) c_w + \gamma u_w

    and at its end one synchronisation averages what workers have added up, with error feedback on both sides:
    :math:`x \leftarrow (1 - \gamma \lambda)^K x -` 1-bit-allreduce(c). There is no warm-up, and nothing is renewed in
    full precision. By tensor, :math:`\rho = |\mathrm{mean}\, g|^2 / \mathrm{mean}\, |g_w|^2` brings variances to the
    mean gradient's level: workers' own are larger by their noise. It follows from some 64 numbers of each tensor
    that workers tell each other where they synchronise (``optim.own_variance``).

    With a ``variance_policy`` it is 0/1 Adam (Lu et al., 2022, Algorithm 1), whose momentum and variance are equal on
    all ranks when a round begins. Either the round renews the variance: one step of AdamW on gradients averaged in
    float32. Or its steps are workers' own with the variance that is, and momentum is rebuilt from their average:

    .. math::
        \bar u = \textrm{1-bit-allreduce}\left(\sum \frac{m_w}{\sqrt{\hat v} + \epsilon}\right), \quad
        x \leftarrow (1 - \gamma \lambda)^K x - \gamma \bar u, \quad
        m = \frac{\bar u}{K} (\sqrt{\hat v} + \epsilon)

    Do not use it where workers' data differ: with other classes on each of 4 workers it ended 66 % worse than AdamW, on
    16 workers 97 %, and a recommender on 16 workers 25 %; ``OneBitAdam`` stayed within 1.3 % (docs/choose.md).

    Do not average gradients yourself: give the optimizer local ones; with DDP call ``fusedonebit.ddp.attach``. After
    every round, when ``stats()["local_steps"]`` is 0, parameters are bit-identical on all ranks; within one they
    differ: evaluate and save models between rounds. Each rank saves and loads its own checkpoint.

    Args:
        params, lr, betas, eps, weight_decay, process_group, wire: As for ``OneBitAdam``.
        sync_policy: How long rounds are: ``policies.FixedRounds(2)``, ``policies.DoublingRounds(after=...,
            scaler=..., most=16)``, or any object with a method ``steps(done)``, a function of ``policies.Progress``
            alone. None: rounds of one step.
        variance_policy: When a variance that all workers share is renewed: ``policies.DoublingVariance()``, or any
            object with its method ``renews(done)``. None: each worker has its own, and nothing renews it.
        max_grad_norm: Clip gradients to this global norm; None: don't. Exact where the variance is renewed, by the
            mean of the ranks' norms where they synchronise, and each worker by its own norm in between.
        numerics: See ``Numerics``; ``master_weights`` are advised: workers' own steps are rounded else.
        faults: See ``Faults``. Where a ``GradScaler`` finds a NaN or Inf between two synchronisations, that worker's
            step alone is none.

    Example::

        optimizer = ZeroOneAdam(model.parameters(), lr=1e-3)
        loss.backward()
        optimizer.step()
    """

    kind = LocalAdam
    algorithm: LocalAdam

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        sync_policy: SyncPolicy | None = None,
        variance_policy: VariancePolicy | None = None,
        max_grad_norm: float | None = None,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        shared |= {"variance_policy": variance_policy, "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults, **shared, sync_policy=EveryStep() if sync_policy is None else sync_policy)

    @classmethod
    def from_deepspeed(
        cls, params: Params, config: Mapping[str, Any], process_group: Ranks = None, **options: Any
    ) -> ZeroOneAdam:
        """Make the optimizer that a DeepSpeed config describes; see ``fusedonebit.deepspeed.from_config``."""
        from ..deepspeed import from_config  # here, as it imports this module

        return from_config(params, config, process_group, kind=cls, **options)

    def worker_error(self, param: Tensor) -> Tensor:
        """Return this rank's residual of one parameter, and its updates of this round; in units of the update, float32.

        Where not ``precondition`` in units of the momentum; where workers have variances of their own in units of
        parameters: what is still to be subtracted from them.
        """
        return self.algorithm.worker_error(param)
