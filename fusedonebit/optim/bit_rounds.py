"""Rounds of 0/1 Adam (Lu et al., 2022) that end in bits: what they have in common whatever variance workers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import CompressedAllReduce, StepContext
from ..core.exchange import FeedbackExchange
from ..core.frame import Frame
from ..core.header import AMOUNT, INT, TABLE, Field, Fields, list_of, or_none
from ..core.scaling import Agreed
from ..core.stage import Stage
from ..core.state_tensor import StateTensor
from ..triton_kernels import add_values, local_step
from ..triton_kernels.headers import Word
from ..triton_kernels.local_step import LocalStep
from .bit_momentum import BitMomentum
from .local_steps import ANCHOR
from .moments import MomentBuffers
from .round_plan import RoundPlan

STEP_SIZE, DECAY = 0, 1  # rows of ``BitRounds.moved``


class BitRounds(Stage):
    """Rounds in which workers take steps of their own, and in the last one synchronise what these add up to.

    A subclass says what a worker's own step is, and what a synchronisation.

    Args:
        frame: Of the optimizer.
        exchange: What averages in bits.
        moments: Of all workers, or this one's own.
        plan: Which rounds there are.
        bits: The momentum in either form.
        anchor: Memory for the parameters that all ranks have, while each moves by itself: float32 [P + TAIL].

    Attributes:
        round: The steps of the present round.
        moved: How far steps of the round go, and how much is left of the parameters: float32 [2, tensors].
        pending: Flags that local steps of the round have set: int32 [1].
        lost: Local steps of the round that were none, as the scaler has found an inf: float32 [1].
    """

    decay_in_update: ClassVar = False
    """Whether weight decay is part of what workers add up."""

    owns: ClassVar = False
    """Whether each worker has a variance of its own."""

    header_fields: ClassVar[Fields] = {
        "settled": Field(TABLE),
        "pending": Field(INT),
        "variance_betas": Field(or_none(list_of(AMOUNT)), False, "group"),
    }
    exchange: FeedbackExchange

    def __init__(
        self,
        frame: Frame,
        exchange: FeedbackExchange,
        moments: MomentBuffers,
        plan: RoundPlan,
        bits: BitMomentum,
        anchor: Tensor,
    ) -> None:
        super().__init__(frame)
        self.exchange, self.moments, self.plan, self.bits, self.anchor = exchange, moments, plan, bits, anchor
        self.round, device = plan.count, frame.device
        self.moved = torch.zeros(2, len(frame.layout.sizes), device=device)
        self.pending = torch.zeros(1, dtype=torch.int32, device=device)
        self.lost = exchange.lost = torch.zeros(1, device=device)

    @property
    def reducer(self) -> CompressedAllReduce:
        """Return what averages in bits."""
        assert isinstance(self.exchange.reducer, CompressedAllReduce)
        return self.exchange.reducer

    # ---------------------------------------------------------------- the step

    def step(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        frame, this = self.frame, self.round
        this.begin_step()
        if self.plan.alone:
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

    def step_alone(self, grads: Sequence[Tensor], agreed: Agreed, coef: Tensor) -> None:
        """Take a step between two synchronisations (lines 4 to 6). Tensors without a gradient stay as they are."""
        raise NotImplementedError

    def synchronise(self, grads: Sequence[Tensor], agreed: Agreed, context: StepContext, coef: Tensor) -> None:
        """Take the last step of a round: its update is compressed with those before it (lines 8 to 11)."""
        raise NotImplementedError

    def of_gradients(self, coef: Tensor) -> Tensor:
        """Return the coefficients with which gradients count in this step, as yet unscaled."""
        return coef

    def agree_on_step(self, grads: Sequence[Tensor], coef: Tensor, alone: bool = False) -> Agreed:
        """Agree on the factor of gradients and on skipping; ``alone``: this rank decides, and keeps to itself how."""
        agreed = self.agree(grads, self.of_gradients(coef), alone)
        if agreed.hold is not None and agreed.ranks is not None:
            if alone:  # that worker keeps to itself what it has found, or scales part
                self.lost += agreed.ranks
                self.frame.scaling.overflowed.zero_()
            else:
                self.lost.zero_()
        return agreed

    def add(self, grads: Sequence[Tensor], coef: Tensor, hold: Tensor | None, moves: bool, last: bool) -> None:
        """Add a worker's own update to what the round has added up, in one launch."""
        worker, moments = self.reducer.worker, self.moments
        whose = (self.frame.parameters.dense, grads, self.frame.places, moments.exp_avg, moments.exp_avg_sq)
        hold, anchor = self.reducer.verdict.none if hold is None else hold, self.keeps_in(moves, last)
        precondition = self.options.numerics.precondition
        step = LocalStep(self.bits.floored, precondition, moves, last, self.decay_in_update, self.owns)
        local_step(*whose, worker.compensated, worker.scale, coef, step, hold, anchor, self.pending)

    def keeps_in(self, moves: bool, last: bool) -> Tensor | None:
        """Return where a round's first step keeps the parameters, if it changes any."""
        return self.round_start if moves and self.round.local == 0 and not (last and self.owns) else None

    def sum_up(self, coef: Tensor) -> None:
        """Add up how far steps of the round go, and how much is left of the parameters; ``coef`` is this step's."""
        self.frame.coefficients.add_up(self.moved, self.round.local == 0, self.plan.round.steps)

    @property
    def round_start(self) -> Tensor:
        """Return the parameters that all had when the round began, float32 [P], while they are kept."""
        return self.anchor[: self.frame.layout.numel]

    def go_back(self) -> None:
        """Take the parameters that all had when the round began."""
        frame = self.frame
        add_values(frame.parameters.dense, frame.places, self.round_start, True, self.reducer.verdict.none, None)

    def known(self, flags: Tensor) -> Tensor | int:
        """Return 0 of a step alone, which nobody skips: nothing is copied to the host."""
        return 0 if flags is self.reducer.verdict.none else flags

    # ---------------------------------------------------------------- what it keeps

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        m, v, owns = self.moments.exp_avg, self.moments.exp_avg_sq, self.owns
        return (
            # The momentum is mostly bits: users don't see it here.
            StateTensor("exp_avg", "element", m, of_rank=True, only="floats", optional=True),
            StateTensor("exp_avg_sq", "element", v, published=True, not_negative=True, of_rank=owns),
            StateTensor("anchor", "element", self.round_start, **ANCHOR, wanted=compressed),
            StateTensor("moved", "tensor", self.moved, optional=True),
        )

    def held(self) -> Sequence[Tensor]:
        return *self.moments.held(), self.anchor, self.pending, self.lost

    def close(self) -> None:
        self.moments.close()
        self.anchor = self.anchor[:0].clone()

    def plain_state(self) -> dict[str, Any]:
        return {
            "settled": {"precondition": self.options.numerics.precondition},
            "pending": int(self.pending),
            "variance_betas": self.frame.coefficients.variance_betas,
        }

    def resume(self, header: Mapping[str, Any]) -> None:
        if header.get("lines"):
            self.frame.coefficients.variance_betas = header.get("variance_betas")
            self.pending.fill_(header["pending"])
        else:  # AdamW's, or of a run in which nothing trained
            self.take_over_variance()

    def take_over_variance(self) -> None:
        """Go on from another optimizer's variance, once its counts are known."""

    def resumed(self, header: Mapping[str, Any]) -> None:
        if header.get("lines"):
            self.reducer.serve_again()

    # ---------------------------------------------------------------- what users look at

    def worker_error(self, param: Tensor) -> Tensor:
        """Return this rank's residual of one parameter and its updates of this round; see ``ZeroOneAdam``."""
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
