"""Holds what all 1-bit optimizers share: the two stages and the freeze between them.

An algorithm with a full-precision warm-up and an error-compensated 1-bit stage is a subclass with
two short methods: ``_update`` (one warm-up update from averaged gradients) and ``_compressed_step`` (one
update from synchronised momentum bits). ``adam.CompressedAdam`` is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..comm import Flag, Told
from ..comm.reducer import Compress
from ..comm.squares import NOWHERE, Looks
from ..errors import warn
from ..triton_kernels import Coef, freeze, rewarm
from ..triton_kernels.scaling import SQUARES
from .freezing import UNSETTLED, DeadCoordinates, quantile_floor, warn_text
from .two_stage_state import TwoStageState


class TwoStage(TwoStageState):
    """Skeleton of a 1-bit algorithm; see the module's docstring."""

    # ---------------------------------------------------------------- the step

    def exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        if self.phase == "warmup":
            return self._average(grads, coef, abort)
        return super().exchange(grads, coef, abort)

    @property
    def _divisor(self) -> Tensor | None:
        """Return v, by whose root updates are divided at the end; None where gradients were, before compression."""
        return None if self.options.precondition else self.exp_avg_sq

    @property
    def weighs(self) -> int:  # type: ignore[override]
        """Return how many columns of coefficients weigh gradients; a shared variance weighs their squares, too."""
        return 1 if self.living is None else SQUARES

    @property
    def _drawn(self) -> Tensor | None:
        options = self.options
        rounds_squares = self.follows_squares and options.variance_dtype is not torch.float32
        return self.frame.steps.updates if options.state != "fp32" or rounds_squares else None

    def compressing(self, grads: Sequence[Tensor], coef: Tensor, factor: Tensor | None = None) -> Compress:
        v, inside = self.exp_avg_sq if self.options.precondition else None, self.options.eps_inside_sqrt
        looks = NOWHERE if self.living is None else Looks(self.frame.steps.updates, factor, self._tells)
        return lambda part: part.compress(grads, coef, v, inside, looks)

    def _synchronise(self, compress: Compress, told: Told, coef: Tensor) -> Tensor:
        """Synchronise with the guard's limit, and share squares if a renewal is due."""
        if self.options.guard != "off":
            told = told._replace(limit=self._guard.limit_of(coef, self.frame.places.block_tensor))
        still = super()._synchronise(compress, told, coef)
        if self.living is not None and self._tells:
            self.living.share(self)
        return still

    @property
    def _tells(self) -> bool:
        """Tell whether ranks share squares in this step; a captured one would in each replay."""
        return self.living is not None and self.living.due and not self.frame.steps.captured

    def check_capture(self) -> None:
        super().check_capture()
        if self.living is not None:
            self.living.check_capture()

    def after_step(self) -> None:
        frame = self.frame
        if self.living is not None and self._tells and self.options.capturable:
            self.living.settle(self)  # the next step may be a replay, and no graph does
            self.coefficient_table()
        watch = self.warm_up.watch
        if self.phase == "warmup" and watch is not None and self._exp_avg_sq_sums is not None:
            watch.observe(frame.ranks.model.sum(self._exp_avg_sq_sums.sum()), frame.steps.updates)

    def describe(self, flag: Flag) -> str:
        if flag & Flag.VETO:
            options = self.options
            return self._guard.describe(options.guard == "rewarm", options.rewarm_steps, options.lives)
        if self.phase == "warmup":
            return self._describe_handshake()
        return super().describe(flag)

    # ---------------------------------------------------------------- freeze and re-warm-up

    def enter_phase(self) -> bool:
        """Freeze the variance, or warm up again after a veto, if it is time; the same on all ranks."""
        before = self.phase
        watched = self.warm_up.watch if self.warm_up.again == 0 else None
        if self.phase == "compression":
            if self.options.guard == "rewarm" and self.frame.steps.outcomes.veto_is_due():
                self._rewarm()
            elif self.living is not None:
                self.frame.steps.changing = True
                self.living.begin_step(self)
        elif watched is not None and watched.due():
            self._freeze()
        elif self._has_updates(self.warm_up.due):
            if watched is not None:
                warn(UNSETTLED.format(self.warm_up.due))
            self._freeze()
        return self.phase != before

    def _has_updates(self, due: int) -> bool:
        """Return whether so many are done."""
        if self.frame.steps.outcomes.updates >= due:
            self.catch_up()  # skips may still be under way from the device: then it is exact
        return self.frame.steps.outcomes.updates >= due

    @torch.no_grad()
    def _freeze(self) -> None:
        """End the warm-up, in place: nothing of full size is allocated until a re-warm-up, but by rounding."""
        frame = self.frame
        self._check_what_freezes()
        keep = self.options.dead_coordinates == "keep"
        frame.steps.changing = True
        with self._moments_in_float32():
            dead, last = self._change_moments(keep)
        self.exp_avg_sq = self.exp_avg_sq.to(self.options.variance_dtype)
        self.reducer.begin()
        self.phase = "compression"
        self.warm_up.ended_at = frame.steps.outcomes.updates
        self.warm_up.dead_coordinates = dead.count
        if dead.tensors and self.living is None:  # else they wait for their first gradient
            warn(warn_text(dead, frame.parameters.called, keep))
            if not keep:
                self._exclude(dead.tensors)
        if self.living is not None:
            self.living.begin_step(self)
        self._arm_guard(last)

    def _check_what_freezes(self) -> None:
        """Raise RuntimeError, before anything is changed, if the warm-up has left nothing that could be frozen."""
        if self.frame.steps.outcomes.updates == 0 and not self.warm_up.is_corrected:
            raise RuntimeError(
                "freeze_step=0 needs a variance to freeze: pass Freeze(step=0, warm_start=...), call load_state_dict() "
                "with the state of an earlier run before the first step, or set freeze_step >= 1"
            )

    def _change_moments(self, keep: bool) -> tuple[DeadCoordinates, Tensor]:
        """Make the compression stage's c and v of moments; ``keep``: dead coordinates stay.

        Returns:
            What is dead, and the norm of the last uncompressed update, float64 [].
        """
        frame = self.frame
        options = self.options
        dead = DeadCoordinates(frame.places, self.exp_avg_sq, frame.live.numel, frame.ranks.shards)
        self._before_compression()
        self.averages.drop()
        self.warm_up.follows = False
        frame.coefficients.freeze_variance(frame.hyper.taken)
        if self.living is not None:
            self.living.begin(self, dead.mean)
            dead.mean.copy_(self.living.mean_sq)
        coef = self.coefficient_table()
        factor = (self._layer_factor() * coef[:, Coef.UNBIAS1]).double().square()[frame.places.block_tensor]
        last = frame.ranks.shards.sum((self._update_sums(self.exp_avg, coef) * factor).sum()).sqrt()
        least = dead.mean * options.least_share
        if options.precondition and self.living is None:
            floor = quantile_floor(frame.places, self.exp_avg_sq, coef, options.eps_inside_sqrt, frame.ranks.model)
            least = torch.maximum(least, floor)
        m, v, inside, precondition = self.exp_avg, self.exp_avg_sq, options.eps_inside_sqrt, options.precondition
        filled, half = None if keep else dead.mean, options.variance_dtype is torch.bfloat16
        freeze(frame.places, m, v, inside, precondition, coef, filled, least, half)
        return dead, last

    def _moments_in_float32(self) -> AbstractContextManager[None]:
        """Let moments that are kept otherwise be float32 while stages change."""
        return nullcontext()

    @torch.no_grad()
    def _rewarm(self) -> None:
        """Begin a re-warm-up: all residuals go back into the momentum, and v follows the gradients again.

        They may hold a gradient that v has never seen, which was refused: what goes beyond a step of Adam's is dropped.
        """
        frame = self.frame
        self.catch_up()
        frame.steps.changing = True
        if self.living is not None:
            self.living.settle(self)
        frame.steps.outcomes.veto_at = None  # also one that was still under way: this is what it asks for
        layout, options, reduce = frame.layout, self.options, self.reducer
        coef = self.coefficient_table()
        backlog = self.averages.make()[: layout.numel]
        reduce.take_residuals(backlog)
        # m = b1*m + (1 - b1)*g + e: residuals do not decay in the step that takes them up, momentum does.
        backlog.view(layout.n_blocks, -1).div_(coef[:, Coef.BETA1][frame.places.block_tensor, None])
        self.exp_avg_sq = self.exp_avg_sq.to(options.moments_dtype)
        with self._moments_in_float32():
            self.exp_avg.copy_(reduce.result().add_(backlog))
            m, v, inside, precondition = self.exp_avg, self.exp_avg_sq, options.eps_inside_sqrt, options.precondition
            rewarm(frame.places, m, v, inside, precondition, coef)
        reduce.scale.zero_()
        self.warm_up.correct(None if self.living is None else frame.steps.of_each == 0)  # but for what has none yet
        self.warm_up.begin_again(frame.steps.outcomes.updates)
        frame.coefficients.variance_betas = None
        self.phase = "warmup"
        self._exp_avg_sq_sums = None
        self._exclude([])

    def _before_compression(self) -> None:
        """Take from the warm-up what a subclass needs later: momentum and gradient buffer are still there."""
