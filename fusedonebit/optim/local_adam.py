"""0/1 Adam's algorithm (Lu et al., 2022): rounds of bits, and of renewals where asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import CompressedAllReduce, Flag, StepContext, make_all_reduce
from ..comm.absent import Backup, absence
from ..core.algorithm import Algorithm
from ..core.exchange import FeedbackExchange
from ..core.frame import Frame
from ..core.header import AMOUNT, INT, TABLE, Field, Fields, list_of, or_none
from ..core.options import Made, stated
from ..core.scaling import Agreed
from ..core.stage import Stage
from ..core.state_tensor import StateTensor
from ..core.traits import Traits
from ..triton_kernels import TAIL, Coef, add_values, local_step
from ..triton_kernels.gradient_scaling import SQUARES
from ..triton_kernels.headers import Word
from ..triton_kernels.local_step import LocalStep
from ..triton_kernels.nouns import Divisor
from .averaging import Averaged
from .bit_momentum import BitMomentum
from .local_steps import ANCHOR, RoundCount, leaving_out, may_rest
from .moments import AdamUpdate, MomentBuffers
from .own_variance import OwnVariance
from .policies import Progress
from .round_plan import RoundPlan
from .zero_one_options import ZeroOneOptions

STEP_SIZE, DECAY = 0, 1  # rows of ``LocalAdam.moved``


class LocalAdam(Algorithm, Stage):
    """0/1 Adam: rounds of workers' own steps.

    Attributes:
        moments: Of all workers, or this one's own.
        averaged: The stage of rounds that renew the variance.
        round, plan: The steps of the present round, and which rounds follow.
        bits: The momentum in either form.
        own: The level of workers' own variances, where they have any.
        moved: How far steps of the round go, and how much is left of the parameters: float32 [2, tensors].
        anchor: The parameters that all ranks have, while each moves by itself: float32 [P + TAIL].
        pending: Flags that local steps of the round have set: int32 [1].
        lost: Local steps of the round that were none, as the scaler has found an inf: float32 [1].
    """

    leaks: ClassVar = False
    """Whether weight decay is part of what workers add up, and each step's update is compressed apart."""

    traits: ClassVar = Traits(
        ZeroOneOptions,
        {"uncompressed": True, "one-bit": True, "local": True},
        shards=False,
        masters_of_rank=True,
    )
    options: ZeroOneOptions
    header_fields: ClassVar[Fields] = {
        "settled": Field(TABLE),
        "pending": Field(INT),
        "variance_betas": Field(or_none(list_of(AMOUNT)), False, "group"),
    }
    exchange: FeedbackExchange

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        layout, options, device = frame.layout, self.options, frame.device
        numerics = options.numerics
        self.moments = moments = MomentBuffers(frame)
        scale: dict[str, Any] = {"scale_norm": numerics.scale_norm, "scale_scope": numerics.scale_scope}
        scale |= {"serve_alone": numerics.serve_alone, "live": frame.live}
        reducer = make_all_reduce(layout, frame.ranks.transport, device=device, **scale)
        self.exchange = exchange = FeedbackExchange(frame, reducer)
        self.averaged = Averaged(frame, AdamUpdate(frame, moments), beside=exchange)
        # Serves as the parameters that all had when the round began, too: no round needs both.
        self.anchor = self.averaged.averages.make()[: layout.numel + TAIL]
        self.round = RoundCount(frame)
        self.plan = RoundPlan(frame, self.round, (options.variance_policy, options.sync_policy))
        self.bits = BitMomentum(frame, moments, exchange, waits=not options.owns)
        self.parts = (self.averaged, exchange, self.round, self.plan, self.bits)
        self.own = OwnVariance(frame) if options.owns else None
        self.weighs = SQUARES if options.owns else 1  # own variances weigh gradients' squares, too
        if self.own is not None:
            self.parts = (*self.parts, self.own)
        self.moved = torch.zeros(2, len(layout.sizes), device=device)
        self.pending = torch.zeros(1, dtype=torch.int32, device=device)
        self.lost = exchange.lost = torch.zeros(1, device=device)
        # With these what workers have added up is compressed as it is, and applied.
        self._plain = reducer.plain_coefficients()
        self._plain[:, Coef.STEP_SIZE] = 1.0

    @property
    def reducer(self) -> CompressedAllReduce:
        """Return what averages in bits."""
        assert isinstance(self.exchange.reducer, CompressedAllReduce)
        return self.exchange.reducer

    # ---------------------------------------------------------------- groups

    def check_growth(self) -> None:
        self.plan.check_growth()

    def carried(self) -> tuple[Progress, dict[Tensor, Tensor]]:
        return self.plan.progress(), {p: self.momentum(p) for p in self.frame.parameters.owners}

    def has_grown(self, carried: Any) -> None:
        frame = self.frame
        self.plan.confirmed, momenta = carried
        self.bits.entered = frame.steps.of_each.clone()
        for p, m in momenta.items():
            i = frame.index(p)
            frame.parameters.shaped(self.moments.exp_avg, i, frame.layout.offset(i)).copy_(m)
        self.bits.sum_variance()

    # ---------------------------------------------------------------- rounds

    @property
    def averages_gradients(self) -> bool:  # type: ignore[override]
        """Tell whether the coming step averages gradients in full precision; else DDP must leave them alone."""
        if self.frame.steps.begun:
            return self.phase == "uncompressed"
        if self.round.local:
            return False
        self.plan.settle_ended()
        return self.plan.next.renews

    def enter_stage(self) -> bool:
        """Begin the next planned round if the last one has ended, and enter this step's phase; alike on all ranks."""
        self.plan.enter_step()
        last = self.plan.is_last_step
        self.phase = "uncompressed" if self.plan.round.renews else "one-bit" if last else "local"
        return False

    @property
    def synchronised(self) -> bool:
        """Tell whether all ranks have the same parameters now: between two rounds, not within one."""
        return self.round.local == 0

    @property
    def round_steps(self) -> int:
        """Return the length of this round."""
        return self.plan.round.steps

    # ---------------------------------------------------------------- the step

    @property
    def renews(self) -> bool:  # type: ignore[override]
        """Tell whether launches of the coming step renew the table of coefficients on their way."""
        if self.leaks or self.own is not None:
            return False
        first = self.phase == "local" and self.round.local == 0
        return self.phase == "one-bit" or (first and not self.bits.as_floats)

    def table(self) -> Tensor:
        # A renewal is AdamW's step, whose correction follows betas[1]; else it stays that of the last renewal.
        frame = self.frame
        if self.own is not None:  # each step is a worker's own, and its v's bias that of so many
            return frame.coefficients(frame.hyper.taken, Made(frame.steps.of_each, rho=self.own.rho))
        renews = self.phase == "uncompressed"
        made = Made(frame.steps.of_each, self.bits.entered, renews=True) if renews else self.bits.made
        return frame.coefficients(frame.hyper.taken, made)

    def step(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        if self.phase == "uncompressed":
            return self._renew(grads, coef, abort)
        frame, this = self.frame, self.round
        this.begin_step()
        if this.local < self.plan.round.steps - 1:
            if this.local == 0:  # before loss scales are put into coefficients that this renews
                self.bits.make_floats(coef, renews=False)
            self.step_alone(grads, self.agree_on_step(grads, coef, alone=True), coef)
            this.end_step()
            return self.reducer.verdict.none  # nobody skips it
        steps_alone = this.local
        agreed = self.agree_on_step(grads, coef)
        context = this.of_round(self.exchange.context(abort or this.failed, agreed.hold))
        self.synchronise(grads, agreed, context, coef)
        flags = self.exchange.restore_absent()
        if frame.absent is not None:  # the round's other steps, too, were none of these tensors
            frame.steps.of_each -= frame.absent * steps_alone
        return flags

    def _renew(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Take a step of AdamW on averaged gradients, which also renews v (Algorithm 1, line 15)."""
        frame = self.frame
        self.bits.make_floats(coef, renews=True)
        flags = self.averaged.step(grads, coef, abort)
        frame.coefficients.freeze_variance(frame.hyper.taken)
        self.bits.note_means()
        self.bits.as_floats = True
        self.end_round()
        return flags

    def step_alone(self, grads: Sequence[Tensor], agreed: Agreed, coef: Tensor) -> None:
        """Take a step between two synchronisations (lines 4 to 6). Tensors without a gradient stay as they are."""
        frame = self.frame
        scaled, last = agreed.coef, self.round.local == self.plan.round.steps - 2 and not self.leaks
        if self.own is not None:
            self.add(grads, leaving_out(frame, scaled), agreed.hold, moves=True, last=False)
        elif not frame.missing:
            self.add(grads, scaled, agreed.hold, moves=True, last=last)
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

    def add(self, grads: Sequence[Tensor], coef: Tensor, hold: Tensor | None, moves: bool, last: bool) -> None:
        worker, moments = self.reducer.worker, self.moments
        whose = (self.frame.parameters.dense, grads, self.frame.places, moments.exp_avg, moments.exp_avg_sq)
        hold, anchor = self.reducer.verdict.none if hold is None else hold, self.keeps_in(moves, last)
        precondition = self.options.numerics.precondition
        step = LocalStep(self.bits.floored, precondition, moves, last, self.leaks, self.own is not None)
        local_step(*whose, worker.compensated, worker.scale, coef, step, hold, anchor, self.pending)

    def keeps_in(self, moves: bool, last: bool) -> Tensor | None:
        """Return where a round's first step keeps the parameters, if it changes any."""
        keeps = moves and self.round.local == 0 and not (last and self.own is not None)
        return self._round_start if keeps else None

    def sum_up(self, coef: Tensor) -> None:
        """Add up how far steps of the round go, and how much is left of the parameters; ``coef`` is this step's."""
        self.frame.coefficients.add_up(self.moved, self.round.local == 0, self.plan.round.steps)

    def synchronise(self, grads: Sequence[Tensor], agreed: Agreed, context: StepContext, coef: Tensor) -> None:
        """Take the last step of a round: its update is compressed with those before it (lines 8 to 11)."""
        if self.own is not None:
            self._synchronise_own(self.own, grads, agreed, context, coef)
            return
        steps = self.plan.round.steps
        if steps == 1 and self.bits.as_floats:
            self.add(grads, coef, None, moves=False, last=True)
        v = self.moments.divisor(self.bits.floored) if self.options.numerics.precondition else None
        context = context._replace(pending=self.pending)
        if steps > 1:
            self.sum_up(coef)
        self.exchange.synchronise(lambda part: part.compress(grads, agreed.coef, v), context, coef)
        self.apply(coef, agreed.hold)

    def _synchronise_own(
        self, own: OwnVariance, grads: Sequence[Tensor], agreed: Agreed, context: StepContext, coef: Tensor
    ) -> None:
        """Take a round's last step where each worker has its own variance: compress how far it has moved in the round.

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
            self._go_back()
        # What is owed is in units of parameters, which no rate multiplies any further: it waits for one above 0.
        if rests:
            self.reducer.keep_back(far == 0.0)
        exchange.apply(frame.coefficients.still(self._plain, frame.absent))
        if own.tells(self.plan.done.steps, self.plan.round.steps):
            self.follow(own, grads, agreed.factor)
        self.end_round()

    def _back_up(self, missing: Sequence[int]) -> list[Backup]:
        """Save the state of tensors without a gradient here, to put it back if no other rank has one either."""
        frame, moments, worker = self.frame, self.moments, self.reducer.worker
        if not missing:
            return []
        worker.settle()
        rows = absence(frame.layout, missing, frame.device).rows
        return [Backup(rows, frame.places.block_tensor, [worker.compensated, moments.exp_avg, moments.exp_avg_sq])]

    def follow(self, own: OwnVariance, grads: Sequence[Tensor], factor: Tensor | None) -> None:
        """Update rho, the ratio of the mean gradient's squares to the workers' own, from this step's gradients."""
        sent = own.tell(grads, factor, self.moments.exp_avg_sq)
        own.follow(sent, self.reducer.flags, self.frame.absent)
        self.reducer.heard(sent)

    def of_gradients(self, coef: Tensor) -> Tensor:
        """Return the coefficients with which gradients count in this step, as yet unscaled."""
        return coef if self.phase == "local" or self.own is not None else self.bits.shared(coef)

    def agree_on_step(self, grads: Sequence[Tensor], coef: Tensor, alone: bool = False) -> Agreed:
        agreed = self.agree(grads, self.of_gradients(coef), alone)
        if agreed.hold is not None and agreed.ranks is not None:
            if alone:  # that worker keeps to itself what it has found, or scales part
                self.lost += agreed.ranks
                self.frame.scaling.overflowed.zero_()
            else:
                self.lost.zero_()
        return agreed

    def apply(self, coef: Tensor, hold: Tensor | None) -> None:
        """Move to x0 - mean step size * sum of the updates, from the x0 that all had (line 10), and end the round.

        ``coef`` has the mean step size and the product of the decays.
        """
        frame, steps = self.frame, self.plan.round.steps
        if steps > 1 or self.leaks:
            self._go_back()
        divisor = Divisor(self.moments.exp_avg_sq, None, self.bits.floored)
        self.exchange.apply(
            frame.coefficients.still(coef, frame.absent), None if self.options.numerics.precondition else divisor
        )
        self.bits.became_bits(steps, hold)
        self.end_round()

    def _go_back(self) -> None:
        """Take the parameters that all had when the round began."""
        frame = self.frame
        add_values(frame.parameters.dense, frame.places, self._round_start, True, self.reducer.verdict.none, None)

    def end_round(self) -> None:
        self.round.end(self.plan.round)

    def known(self, flags: Tensor) -> Tensor | int:
        """Return 0 of a step alone, which nobody skips: nothing is copied to the host."""
        return 0 if flags is self.reducer.verdict.none else flags

    def error_due(self, error: Exception | None) -> Exception | None:
        """Return this rank's error when all next meet: between two synchronisations nobody hears of it."""
        return self.round.error_due(error, self.phase == "local")

    def describe(self, flag: Flag) -> str:
        return self.averaged.describe(flag) if self.phase == "uncompressed" else super().describe(flag)

    def check_repeated(self) -> None:
        if self.averages_gradients:
            self.averaged.check_repeated()

    def drop_averages(self) -> None:
        self.averaged.drop_averages()

    # ---------------------------------------------------------------- what it keeps

    @property
    def _round_start(self) -> Tensor:
        return self.anchor[: self.frame.layout.numel]

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        moments, owns = self.moments, self.own is not None
        return (
            # The momentum is mostly bits: users don't see it here.
            StateTensor("exp_avg", "element", moments.exp_avg, of_rank=True, only="floats", optional=True),
            StateTensor("exp_avg_sq", "element", moments.exp_avg_sq, published=True, not_negative=True, of_rank=owns),
            StateTensor("anchor", "element", self._round_start, **ANCHOR, wanted=compressed),
            StateTensor("moved", "tensor", self.moved, optional=True),
        )

    def held(self) -> Sequence[Tensor]:
        return *self.moments.held(), self.anchor, self.pending, self.lost, self._plain

    def close(self) -> None:
        super().close()
        self.moments.close()
        self.anchor = self.anchor[:0].clone()

    def plain_state(self) -> dict[str, Any]:
        return {
            "settled": {"precondition": self.options.numerics.precondition},
            "pending": int(self.pending),
            "variance_betas": self.frame.coefficients.variance_betas,
        }

    def resume(self, header: Mapping[str, Any]) -> None:
        frame = self.frame
        if header.get("lines"):
            frame.coefficients.variance_betas = header.get("variance_betas")
            self.pending.fill_(header["pending"])
        elif self.own is None:  # AdamW's, or of a run in which nothing trained
            frame.coefficients.freeze_variance(frame.hyper.taken)
        else:
            self.own.begin(frame.steps.of_each)

    def resumed(self, header: Mapping[str, Any]) -> None:
        if self.own is None:
            self.bits.sum_variance()
        if header.get("lines"):
            self.reducer.serve_again()

    # ---------------------------------------------------------------- what users look at

    def momentum(self, param: Tensor) -> Tensor:
        """Return the momentum of one parameter, float32 of its shape; equal on all ranks but within a round.

        Before a round's last step it is that of the step before: what is left of the newer is in ``worker_error``.
        Where workers have variances of their own, so have they momenta.
        """
        return self.bits.of_parameter(self.frame.index(param))

    def worker_error(self, param: Tensor) -> Tensor:
        """Return this rank's residual of one parameter, and its updates of this round; in units of the update, float32.

        Where not ``precondition`` in units of the momentum; where workers have variances of their own in units of
        parameters: what is still to be subtracted from them.
        """
        frame = self.frame
        i = frame.index(param)
        self.exchange.settle()
        return frame.parameters.shaped(self.reducer.worker.compensated, i, frame.layout.offset(i)).clone()

    def stats(self) -> dict[str, Any]:
        reducer = self.reducer
        compensated, _, server_error = reducer.norms()
        norm = reducer.to_servers.words[:1, Word.SIGNAL]  # within a round c has grown since
        return {
            "compensated_norm": compensated,
            "worker_error_norm": float(norm.view(torch.float32)),
            "server_error_norm": server_error,
            "residual_over_momentum": self.bits.residual_over(self.plan.only_renewed),
        }

    def owed(self) -> float:
        """Return the norm of the workers' residuals, root mean square over the ranks, over that of the last update."""
        owed = self.bits.residual_over(self.plan.only_renewed)
        return owed or (math.inf if self.reducer.norms()[1] > 0 else 0.0)

    def described(self) -> list[str]:
        options, numerics = self.options, self.options.numerics
        return [
            f"variance: {'of each worker' if options.owns else stated(options.variance_policy)}",
            f"rounds: {stated(options.sync_policy)}",
            f"scale: {numerics.scale_norm}, {numerics.scale_scope}" + ", preconditioned" * numerics.precondition,
        ]
