"""0/1 Adam's algorithm (Lu et al., 2022): rounds of bits, and of renewals where asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from ..comm import make_all_reduce
from ..core.algorithm import Algorithm
from ..core.exchange import FeedbackExchange
from ..core.frame import Frame
from ..core.options import stated
from ..core.stage import Stage
from ..core.traits import Traits
from ..triton_kernels import TAIL
from .averaging import Averaged
from .bit_momentum import BitMomentum
from .bit_rounds import BitRounds
from .local_steps import RoundCount
from .moments import AdamUpdate, MomentBuffers
from .own_rounds import OwnRounds
from .own_variance import OwnVariance
from .policies import Progress
from .round_plan import RoundPlan
from .shared_rounds import SharedRounds
from .zero_one_options import ZeroOneOptions


class Renewal:
    """AdamW's update from averaged gradients, which also renews v (Algorithm 1, line 15): a round of one step.

    Args:
        frame: Of the optimizer.
        moments: Which it updates.
        bits: The momentum, which becomes floats.
        plan: Whose round it ends.
    """

    def __init__(self, frame: Frame, moments: MomentBuffers, bits: BitMomentum, plan: RoundPlan) -> None:
        self._frame, self._update, self._bits, self._plan = frame, AdamUpdate(frame, moments), bits, plan

    def table(self) -> Tensor:
        """Return the coefficients of the coming step, whose correction follows betas[1] as AdamW's does."""
        return self._bits.table(renews=True)

    def __call__(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        """Make one update, as ``averaging.Update``."""
        coefficients, bits = self._frame.coefficients, self._bits
        bits.make_floats(coef, renews=True)
        self._update(grads, coef, skip, *found)
        coefficients.freeze_variance(self._frame.hyper.taken)
        bits.note_means()
        bits.as_floats = True
        self._plan.end_round()


class LocalAdam(Algorithm):
    """0/1 Adam: rounds of workers' own steps.

    Attributes:
        moments: Of all workers, or this one's own.
        round, plan: The steps of the present round, and which rounds follow.
        bits: The momentum in either form.
        averaged: The stage of rounds that renew the variance.
        own: The level of workers' own variances, where they have any.
        rounds: The stage of all others.
    """

    traits: ClassVar = Traits(
        ZeroOneOptions, {"uncompressed": True, "one-bit": True, "local": True}, shards=False, masters_of_rank=True
    )
    options: ZeroOneOptions
    exchange: FeedbackExchange

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        options, numerics = self.options, self.options.numerics
        self.moments = MomentBuffers(frame)
        scale: dict[str, Any] = {"scale_norm": numerics.scale_norm, "scale_scope": numerics.scale_scope}
        scale |= {"serve_alone": numerics.serve_alone, "live": frame.live}
        reducer = make_all_reduce(frame.layout, frame.ranks.transport, device=frame.device, **scale)
        self.exchange = FeedbackExchange(frame, reducer)
        self.round = RoundCount(frame)
        self.plan = RoundPlan(frame, self.round, (options.variance_policy, options.sync_policy))
        self.bits = BitMomentum(frame, self.moments, self.exchange, waits=not options.owns)
        renewal = Renewal(frame, self.moments, self.bits, self.plan)
        self.averaged = Averaged(frame, renewal, beside=self.exchange, table=renewal.table)
        self.own = OwnVariance(frame) if options.owns else None
        # Serves as the parameters that all had when the round began, too: no round needs both.
        anchor = self.averaged.averages.make()[: frame.layout.numel + TAIL]
        of_rounds: dict[str, Any] = {"frame": frame, "exchange": self.exchange, "moments": self.moments}
        self.rounds = self.make_rounds(of_rounds | {"plan": self.plan, "bits": self.bits, "anchor": anchor})
        parts = (self.averaged, self.exchange, self.round, self.plan, self.bits)
        self.parts = (*parts, *(() if self.own is None else (self.own,)), self.rounds)

    def make_rounds(self, of_rounds: dict[str, Any]) -> BitRounds:
        """Make the stage of rounds that renew nothing, of these arguments."""
        return SharedRounds(**of_rounds) if self.own is None else OwnRounds(self.own, **of_rounds)

    @property
    def stage(self) -> Stage:
        return self.averaged if self.phase == "uncompressed" else self.rounds

    def enter_stage(self) -> bool:
        """Begin the next planned round if the last one has ended, and enter this step's phase; alike on all ranks."""
        self.plan.enter_step()
        self.phase = "uncompressed" if self.plan.round.renews else "local" if self.plan.alone else "one-bit"
        return False

    @property
    def coming_stage(self) -> Stage:
        return self.averaged if self.plan.averages_gradients else self.rounds

    @property
    def synchronised(self) -> bool:
        """Tell whether all ranks have the same parameters now: between two rounds, not within one."""
        return self.round.local == 0

    @property
    def round_steps(self) -> int:
        """Return the length of this round."""
        return self.plan.round.steps

    def error_due(self, error: Exception | None) -> Exception | None:
        """Return this rank's error when all next meet: between two synchronisations nobody hears of it."""
        return self.round.error_due(error, self.plan.alone)

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

    # ---------------------------------------------------------------- what users look at

    def momentum(self, param: Tensor) -> Tensor:
        """Return the momentum of one parameter, float32 of its shape; equal on all ranks but within a round.

        Before a round's last step it is that of the step before: what is left of the newer is in ``worker_error``.
        Where workers have variances of their own, so have they momenta.
        """
        return self.bits.of_parameter(self.frame.index(param))

    def worker_error(self, param: Tensor) -> Tensor:
        """Return this rank's residual of one parameter, and its updates of this round; see ``ZeroOneAdam``."""
        return self.rounds.worker_error(param)

    def owed(self) -> float:
        """Return the norm of the workers' residuals, root mean square over the ranks, over that of the last update."""
        owed = self.bits.residual_over(self.plan.only_renewed)
        return owed or (math.inf if self.exchange.reducer.norms()[1] > 0 else 0.0)

    def described(self) -> list[str]:
        options, numerics = self.options, self.options.numerics
        return [
            f"variance: {'of each worker' if options.owns else stated(options.variance_policy)}",
            f"rounds: {stated(options.sync_policy)}",
            f"scale: {numerics.scale_norm}, {numerics.scale_scope}" + ", preconditioned" * numerics.precondition,
        ]
