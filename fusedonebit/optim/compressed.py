"""1-bit Adam's compression stage; 1-bit LAMB's (``compressed_lamb``) have another ``update`` after the exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import Flag, StepContext
from ..comm.reducer import Compress
from ..comm.shared_squares import NOWHERE, Looks
from ..core.averages import Averages
from ..core.exchange import FeedbackExchange
from ..core.frame import Frame
from ..core.options import Made
from ..core.overlap import make_reducer
from ..core.stage import Stage
from ..core.state_tensor import StateTensor
from ..triton_kernels import Coef, update_sums
from ..triton_kernels.gradient_scaling import SQUARES
from ..triton_kernels.nouns import Divisor, Limit
from .guard import LEAST_SQUARE, DivergenceGuard
from .moments import MomentBuffers
from .onebit_options import OneBitOptions
from .variance import FrozenVariance, SharedVariance
from .warm_up import WarmUp


class Compressed(Stage):
    """1-bit Adam's compression stage.

    Args:
        frame: Of the optimizer.
        moments: The warm-up's m and v; residuals take over the memory of m.
        warm_up: Its counts.

    Attributes:
        variance: v, by whose root updates are divided.
        guard: What refuses updates that are far too large.
        unit: float32 [tensors], the unit in which each tensor's momentum is compressed; None: 1.
        running: Whether this is the present stage.
    """

    can_capture = True
    renews = True
    options: OneBitOptions
    exchange: FeedbackExchange

    def __init__(self, frame: Frame, moments: MomentBuffers, warm_up: WarmUp) -> None:
        super().__init__(frame)
        self.moments, self.warm_up, options = moments, warm_up, self.options
        self.running = False
        self.unit: Tensor | None = None
        formats = options.formats
        squares = formats.squares.dtype if options.shares_variance else None
        self._draws = formats.moments.random or (formats.squares.random and options.shares_variance)
        reducer = make_reducer(self, moments.exp_avg, moments.exponents, squares)
        self.exchange = FeedbackExchange(frame, reducer)
        self.variance = FrozenVariance()
        if options.shares_variance:
            self.variance = SharedVariance(frame, moments, self.exchange, warm_up)
        self.weighs = SQUARES if options.shares_variance else 1  # a shared variance weighs gradients' squares, too
        coarse = not options.numerics.precondition and options.numerics.scale_scope != "block"
        self.guard = DivergenceGuard(frame.device, coarse, options.faults.guard != "off")

    # ---------------------------------------------------------------- the step

    def step(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Take a step of the compression stage; lines are 1-bit Adam's, as 1-bit LAMB's Algorithm 1 numbers them.

        LAMB's own line 13 only sets m; its line 21 moves x. With ``precondition``, the default of ``OneBitAdam``, the
        division by sqrt(v) + eps is in line 6: gradients are divided before anything is compressed, and m, e and E are
        in units of the update.
        """
        exchange, reducer = self.exchange, self.exchange.reducer
        agreed = self.agree(grads, coef)  # on clipping and loss scales, where there are any
        limit = self.guard.limit_of(coef, self.frame.places.block_tensor) if self.guard.on else None
        context = exchange.completed(self.context(abort, agreed.hold, limit))
        # Lines 6 and 7: m_i = beta1*m + (1 - beta1)*g_i; C(m_i + e_i) is written. What that loses, the next e_i, is
        # formed when the next step reads m_i + e_i.
        reducer.write(self.compressing(grads, agreed.coef, agreed.factor), context)
        reducer.send()  # line 8: chunk k goes to server k
        reducer.serve(context)  # line 10, as server k: averages what has arrived, adds E, compresses; the same of E
        reducer.gather()  # line 11
        reducer.receive(context)  # line 13: m, the same on all ranks
        coef = exchange.take_verdict(coef)
        if self.shares_squares:  # the next step renews v
            self.variance.share()
        self.update(coef)
        return exchange.restore_absent()

    def update(self, coef: Tensor) -> None:
        """Move the parameters by m, as line 13 says: x = x - lr * m / (sqrt(v) + eps), with the variance as it is."""
        self.exchange.apply(coef, self.divisor)

    @property
    def shares_squares(self) -> bool:
        """Tell whether ranks share squares in this step; never in a captured one, whose replays would repeat that."""
        return self.variance.due and not self.frame.steps.captured

    def context(self, abort: bool, hold: Tensor | None = None, limit: Limit | None = None) -> StepContext:
        """Return what this rank tells the others."""
        return self.exchange.context(abort, hold, self.frame.steps.updates if self._draws else None, limit)

    def compressing(self, grads: Sequence[Tensor], coef: Tensor, factor: Tensor | None = None) -> Compress:
        """Return what writes the bits of beta1*m + (1 - beta1)*g + e.

        ``coef`` scales g already; ``factor``, float32 [1] or None, does so where its squares are followed.
        """
        numerics = self.options.numerics
        v = self.moments.preconditioner(numerics.eps_inside_sqrt) if numerics.precondition else None
        looks = (
            Looks(self.frame.steps.updates, factor, self.shares_squares) if self.options.shares_variance else NOWHERE
        )
        return lambda part: part.compress(grads, coef, v, looks)

    @property
    def divisor(self) -> Divisor | None:
        """Return what updates are divided by at the end; None where gradients were, before compression."""
        numerics, v = self.options.numerics, self.moments.exp_avg_sq
        return None if numerics.precondition else Divisor(v, None, numerics.eps_inside_sqrt)

    def table(self) -> Tensor:
        """Return the coefficients of the coming step, in either stage: the warm-up has no table of its own."""
        frame, warm_up = self.frame, self.warm_up
        frame.coefficients.memory = warm_up.memory
        mean_sq = self.variance.mean_sq if self.running and not self.options.numerics.precondition else None
        made = Made(frame.steps.of_each, warm_up.entered, warm_up.follows, self.unit, mean_sq)
        return frame.coefficients(frame.hyper.taken, made)

    def describe(self, flag: Flag) -> str:
        if flag & Flag.VETO:
            faults = self.options.faults
            return self.guard.describe(faults.guard == "rewarm", faults.rewarm_steps, self.options.shares_variance)
        return self.exchange.describe()

    def check_capture(self) -> None:
        self.variance.check_capture()

    # ---------------------------------------------------------------- from one stage to the other

    def check_what_freezes(self) -> None:
        """Raise RuntimeError, before anything is changed, if the warm-up has left nothing that could be frozen."""
        if self.frame.steps.outcomes.updates == 0 and not self.warm_up.any_corrected:
            raise RuntimeError(
                "freeze_step=0 needs a variance to freeze: pass Freeze(step=0, warm_start=...), call load_state_dict() "
                "with the state of an earlier run before the first step, or set freeze_step >= 1"
            )

    def take_over(self, averages: Averages) -> None:
        """Take from the warm-up what is needed later, at the freeze, before m and ``averages`` are overwritten."""

    def leave(self) -> None:
        """Take note that the warm-up begins again."""
        self.running = False

    # ---------------------------------------------------------------- what the guard knows

    def update_factor(self) -> Tensor:
        """Return what an update is multiplied with besides the learning rate: float32 [tensors]."""
        return torch.ones(len(self.frame.layout.sizes), device=self.frame.device)

    def update_sums(self, x: Tensor | None, coef: Tensor) -> Tensor:
        """Return the sum of (x/denom)^2 by block, float64 [B]; ``x`` None is 1."""
        return update_sums(self.frame.places, x, self.moments.exp_avg_sq, self.options.numerics.eps_inside_sqrt, coef)

    def arm_guard(self, last: Tensor) -> None:
        """Set the guard's weights, and its reference from the norm of the ``last`` uncompressed update, float64 []."""
        if not self.guard.on:
            return
        frame = self.frame
        owner, live = frame.places.block_tensor, frame.live.numel.double()
        factor = self.update_factor().double().square()[owner]
        beta1 = self.table()[:, Coef.BETA1].double()[owner]
        # Momentum of pure noise has this norm; a training run at rest may have less.
        share = ((1 - beta1) / (1 + beta1)).clamp(min=LEAST_SQUARE)
        noise = frame.ranks.shards.sum((live * factor * share).sum()).sqrt()
        self.guard.arm(last, noise, self._update_weights())

    def renew(self) -> None:
        """Renew v now, of what ranks have shared in the last step, if they have."""
        if self.variance.renew():
            self.weigh_guard()

    def settle(self, compressed: bool = True) -> None:
        if compressed and self.options.shares_variance:
            with self.frame.steps.whole("a renewal of the variance"):
                self.renew()

    def weigh_guard(self) -> None:
        """Tell the guard of a variance that was renewed; preconditioned updates are divided already."""
        if self.guard.on and not self.options.numerics.precondition:
            self.guard.weigh(self._update_weights())

    def _update_weights(self) -> Tensor:
        """Return each block's squared norm of an update whose scales are all 1: float64 [B]."""
        frame = self.frame
        owner, coef = frame.places.block_tensor, self.table()
        weight = frame.live.numel.double() if self.options.numerics.precondition else self.update_sums(None, coef)
        factor = self.update_factor().double().square()[owner]
        return weight / coef[:, Coef.UNIT].double()[owner].square() * factor

    # ---------------------------------------------------------------- what it keeps, and tells

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        """Return the squares of this worker's gradients, where the variance is renewed of them."""
        if not compressed:
            return ()
        squares = self.exchange.reducer.of_rank.squares
        how: dict[str, Any] = {"of_rank": True, "not_negative": True, "wanted": squares is not None}
        return (StateTensor("worker_sq", "part", *(squares or (torch.empty(0),)), **how),)

    def settled(self) -> dict[str, Any]:
        """Return options that say in which unit, or with what, the stage goes on."""
        own, dtype = self.options.numerics, self.options.formats.variance.dtype
        chosen: dict[str, Any] = {"variance": self.options.variance}
        chosen |= {"precondition": own.precondition, "ternary": own.ternary, "frozen_dtype": str(dtype)}
        return chosen | ({"eps_inside_sqrt": own.eps_inside_sqrt} if own.precondition else {})

    def begin_warm(self, tables: Mapping[str, Tensor]) -> None:
        """Take up the tables of a warm start: what an earlier run has kept of each tensor, by name."""

    def layer_stats(self) -> dict[str, list[Any]]:
        """Return the ratio of this rank's residual to the momentum; 0 in the warm-up and where a step was skipped.

        From the sums over blocks that the last step has made anyway: no element is read, nothing of full size made.
        """
        frame = self.frame
        squares = torch.zeros(2, len(frame.layout.sizes), dtype=torch.float64, device=frame.device)
        if self.running:
            squares.index_add_(1, frame.places.block_tensor, self.exchange.reducer.squares_by_block())
        error, momentum = squares
        return {"residual_over_momentum": torch.where(momentum > 0, error / momentum, 0.0).sqrt().tolist()}

    def stats(self) -> dict[str, Any]:
        reducer = self.exchange.reducer
        compensated, worker_error, server_error = reducer.norms()
        return {
            "residual_over_momentum": reducer.residual_ratio() if self.running else 0.0,
            "compensated_norm": compensated,
            "worker_error_norm": worker_error,
            "server_error_norm": server_error,
        }

    def described(self) -> list[str]:
        """Return more lines for ``repr``."""
        return []
