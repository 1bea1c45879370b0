"""The passage from the warm-up to the compression stage, in place, and back after a veto."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..core.frame import Frame
from ..core.header import AMOUNT, COUNT, TABLE, Field, Fields, list_of, or_none
from ..core.part import Part
from ..errors import warn
from ..triton_kernels import Coef, freeze, rewarm
from .averaging import Averaged
from .compressed import Compressed
from .freezing import UNSETTLED, DeadCoordinates, quantile_floor, warn_text
from .moments import MomentBuffers
from .onebit_options import OneBitOptions
from .warm_up import WarmUp

_BEFORE = {"frozen_dtype": str(torch.float32), "variance": "frozen"}
"""What is assumed of options that old checkpoints do not record; of others False."""


class Transition(Part):
    """Ends a stage when it is time, and turns what that has kept into what the other goes on from.

    Args:
        frame: Of the optimizer.
        moments: m and v, in whose memory residuals are later.
        warm_up: When the warm-up ends, and begins again.
        averaged: The first stage.
        compression: The second.
    """

    header_fields: ClassVar[Fields] = {
        "settled": Field(TABLE),
        "variance_betas": Field(or_none(list_of(AMOUNT)), False, "group"),
        "vetoed": Field(COUNT, False),
        "veto_at": Field(or_none(COUNT), False),
    }

    def __init__(
        self, frame: Frame, moments: MomentBuffers, warm_up: WarmUp, averaged: Averaged, compression: Compressed
    ) -> None:
        self.frame, self.moments, self.warm_up = frame, moments, warm_up
        self.averaged, self.compression = averaged, compression
        options = frame.options
        assert isinstance(options, OneBitOptions)
        self.options = options

    def enter_stage(self) -> None:
        """Freeze v, warm up again after a veto, or renew a shared v, if it is time; alike on all ranks."""
        outcomes, watched = self.frame.steps.outcomes, self.warm_up.watch if self.warm_up.again == 0 else None
        if self.compression.running:
            vetoed = outcomes.veto_at is not None and outcomes.veto_is_due()
            if vetoed and self.options.faults.guard == "rewarm":
                self._rewarm()
            elif self.compression.variance.begin_step():
                self.compression.weigh_guard()
        elif watched is not None and watched.due():
            self._freeze()
        elif self._has_updates(self.warm_up.due):
            if watched is not None:
                warn(UNSETTLED.format(self.warm_up.due))
            self._freeze()

    def _has_updates(self, due: int) -> bool:
        """Return whether ``due`` updates are done."""
        outcomes = self.frame.steps.outcomes
        if outcomes.updates >= due:
            outcomes.catch_up(self.averaged.describe)  # skips may still be under way from the device: then it is exact
        return outcomes.updates >= due

    @torch.no_grad()
    def _freeze(self) -> None:
        """End the warm-up, in place; where moments are stored in fewer bits, they are float32 meanwhile."""
        frame, compression, moments = self.frame, self.compression, self.moments
        compression.check_what_freezes()
        keep = self.options.numerics.dead_coordinates == "keep"
        frame.steps.changing = True
        with moments.in_float32():
            dead, last = self._change_moments(keep)
        moments.exp_avg_sq = moments.exp_avg_sq.to(self.options.formats.variance.dtype)
        compression.exchange.reducer.begin()
        compression.running = True
        self.warm_up.ended_at = frame.steps.outcomes.updates
        self.warm_up.dead_coordinates = dead.count
        if (
            dead.tensors and not self.options.shares_variance
        ):  # a shared variance lets them wait for their first gradient
            warn(warn_text(dead, frame.parameters.called, keep))
            if not keep:
                self._exclude(dead.tensors)
        compression.variance.begin_step()
        compression.arm_guard(last)

    def _change_moments(self, keep: bool) -> tuple[DeadCoordinates, torch.Tensor]:
        """Turn m and v into the compression stage's c and v; ``keep``: v == 0 stays as it is.

        Returns:
            What is dead, and the norm of the last uncompressed update, float64 [].
        """
        frame, options, compression, moments = self.frame, self.options, self.compression, self.moments
        dead = DeadCoordinates(frame.places, moments.exp_avg_sq, frame.live.numel, frame.ranks.shards)
        compression.take_over(self.averaged.averages)
        self.averaged.averages.drop()
        self.warm_up.end()
        frame.coefficients.freeze_variance(frame.hyper.taken)
        compression.variance.begin(dead.mean, self.compression.table())
        numerics, coef = options.numerics, self.compression.table()
        inside, precondition = numerics.eps_inside_sqrt, numerics.precondition
        factor = (compression.update_factor() * coef[:, Coef.UNBIAS1]).double().square()[frame.places.block_tensor]
        last = frame.ranks.shards.sum((compression.update_sums(moments.exp_avg, coef) * factor).sum()).sqrt()
        least = dead.mean * options.least_share
        if precondition and not options.shares_variance:
            floor = quantile_floor(frame.places, moments.exp_avg_sq, coef, inside, frame.ranks.model)
            least = torch.maximum(least, floor)
        filled, half = None if keep else dead.mean, options.formats.variance.dtype is torch.bfloat16
        how = (inside, precondition, coef, filled, least, half)
        freeze(frame.places, moments.exp_avg, moments.exp_avg_sq, *how)
        return dead, last

    @torch.no_grad()
    def _rewarm(self) -> None:
        """Begin a re-warm-up: all residuals go back into the momentum, and v follows the gradients again.

        Residuals may hold the gradient that was refused, which v has never seen: so m is bounded to a step of Adam's.
        """
        frame, options, moments = self.frame, self.options, self.moments
        frame.steps.outcomes.catch_up(self.compression.describe)
        frame.steps.changing = True
        self.compression.renew()
        frame.steps.outcomes.veto_at = None  # a veto that has arrived meanwhile is answered, too
        layout, reducer, coef = frame.layout, self.compression.exchange.reducer, self.compression.table()
        backlog = self.averaged.averages.make()[: layout.numel]
        reducer.take_residuals(backlog)
        # m = b1*m + (1 - b1)*g + e: residuals do not decay in the step that takes them up, momentum does.
        backlog.view(layout.n_blocks, -1).div_(coef[:, Coef.BETA1][frame.places.block_tensor, None])
        moments.write_out()
        moments.exp_avg_sq = moments.exp_avg_sq.to(options.formats.moments.dtype)
        with moments.in_float32():
            moments.exp_avg.copy_(reducer.result().add_(backlog))
            how = (options.numerics.eps_inside_sqrt, options.numerics.precondition, coef)
            rewarm(frame.places, moments.exp_avg, moments.exp_avg_sq, *how)
        reducer.scale.zero_()
        self.warm_up.correct(
            frame.steps.of_each == 0 if options.shares_variance else None
        )  # but for tensors without a gradient so far
        self.warm_up.begin_again(frame.steps.outcomes.updates)
        frame.coefficients.variance_betas = None
        moments.squares = None
        self._exclude([])
        self.compression.leave()

    def _exclude(self, tensors: list[int]) -> None:
        """Leave tensors out of everything from now on."""
        frame = self.frame
        self.warm_up.dead_tensors = list(tensors)
        frame.put_live(frame.active_mask(excluded=tensors))
        self.compression.exchange.reducer.set_live(frame.live)

    # ---------------------------------------------------------------- a part of an algorithm

    def plain_state(self) -> dict[str, Any]:
        outcomes = self.frame.steps.outcomes
        return {
            "settled": self.compression.settled(),
            "variance_betas": self.frame.coefficients.variance_betas,
            "vetoed": outcomes.vetoed,
            "veto_at": outcomes.veto_at,
        }

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        if header["phase"] != "compression" or header["algorithm"] != self.frame.name:
            return
        for name, now in self.compression.settled().items():
            # What is missing did not exist when it was written.
            was = header["settled"].get(name, _BEFORE.get(name, False))
            if was != now:
                way_out = f'pass variance="{was}", or warm_start' if name == "variance" else "pass the options it had"
                raise ValueError(
                    f"the checkpoint was written with {name}={was!r}, but here it is {now!r}; it can only be "
                    f"changed in the warm-up; {way_out}"
                )

    def resume(self, header: Mapping[str, Any]) -> None:
        frame = self.frame
        outcomes = frame.steps.outcomes
        outcomes.vetoed, outcomes.veto_at = header.get("vetoed", 0), header.get("veto_at")
        frame.coefficients.variance_betas = header.get("variance_betas")
        if header["phase"] != "compression":
            return
        self.compression.running = True
        self.moments.exp_avg_sq = self.moments.exp_avg_sq.to(self.options.formats.variance.dtype)
        self.warm_up.end()
        if frame.coefficients.variance_betas is None:  # written before it was kept
            frame.coefficients.freeze_variance(frame.hyper.taken)
        self._exclude(self.warm_up.dead_tensors)

    def resumed(self, header: Mapping[str, Any]) -> None:
        if self.compression.running:
            self.compression.exchange.reducer.serve_again()
            self.compression.arm_guard(torch.zeros((), dtype=torch.float64, device=self.frame.device))
        self.compression.guard.take(header)

    def stats(self) -> dict[str, Any]:
        waiting = self.compression.variance.waiting() if self.compression.running else None
        dead = self.warm_up.dead_tensors if waiting is None else waiting
        names = self.frame.parameters.called
        return {"vetoed_steps": self.frame.steps.outcomes.vetoed, "dead_tensors": [names[i] for i in dead]}
