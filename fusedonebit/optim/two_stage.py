"""The algorithm of two stages: a warm-up in full precision, then momentum in bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.contents import Contents
from ..core.exchange import FeedbackExchange
from ..core.frame import Frame
from ..core.settings import Freeze
from ..core.stage import Stage
from ..core.traits import Traits
from .averaging import Averaged
from .compressed import Compressed
from .freezing import denominator
from .moments import AdamUpdate, MomentBuffers
from .onebit_options import OneBitOptions
from .transition import Transition
from .warm_start import warm_start
from .warm_up import WarmUp


class TwoStage(Algorithm):
    """1-bit Adam: averaged updates of Adam, then momentum in bits.

    Attributes:
        moments: m and v.
        warm_up: When the warm-up ends, and begins again.
        compression: The second stage.
        averaged: The first.
        transition: What leads from one to the other.
    """

    traits: ClassVar = Traits(OneBitOptions, {"warmup": False, "compression": True}, corrects=True)
    options: OneBitOptions
    exchange: FeedbackExchange

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self.moments, self.warm_up = MomentBuffers(frame), WarmUp(frame, self.options)
        self.make_stages()
        first, second = self.averaged, self.compression
        self.exchange = second.exchange
        self.transition = Transition(frame, self.moments, self.warm_up, first, second)
        parts = (self.moments, first, second, second.exchange, second.guard, second.variance, self.warm_up)
        self.parts = (*parts, self.transition)  # in this order: v is renewed before residuals are formed
        if self.options.watches:
            self.moments.watch()

    def make_stages(self) -> None:
        """Make both."""
        self.compression = Compressed(self.frame, self.moments, self.warm_up)
        update = AdamUpdate(self.frame, self.moments)
        stage = self.compression
        self.averaged = Averaged(self.frame, update, beside=stage.exchange, table=stage.table)

    def begin(self, arguments: Mapping[str, Any]) -> None:
        given = arguments["freeze_step"]
        if not isinstance(given, Freeze) or given.warm_start is None:
            return
        contents = Contents(self)
        tables = warm_start(self.frame, contents.kept(), contents.declared(), given.warm_start)
        self.moments.exp_avg_sq.mul_(self.frame.live.mask())  # the earlier run may have had no mask
        self.warm_up.correct()
        self.compression.begin_warm(tables)

    @property
    def stage(self) -> Stage:
        return self.compression if self.compression.running else self.averaged

    def check_growth(self) -> None:
        if self.compression.running:
            raise RuntimeError(
                "add_param_group must be called in the warm-up: the layout is fixed later; construct a new optimizer"
            )
        # New parameters' variance would have to be corrected as well.
        if self.warm_up.any_corrected:
            raise RuntimeError(
                "add_param_group must be called before the first freeze, and not after a warm start: the new "
                "parameters would have no variance; construct a new optimizer"
            )

    def has_grown(self, carried: Any) -> None:
        self.warm_up.entered.copy_(self.frame.steps.of_each)

    # ---------------------------------------------------------------- a step

    def enter_stage(self) -> bool:
        """Enter the stage of the coming step, see ``Transition``; return whether it is another."""
        before = self.phase
        self.transition.enter_stage()
        self.phase = "compression" if self.compression.running else "warmup"
        return self.phase != before

    def after_step(self) -> None:
        frame = self.frame
        if self.compression.running:
            if self.options.wire.capturable and self.compression.shares_squares:
                self.compression.renew()  # the next step may be a replay, and no graph does
                self.compression.table()
            return
        if (watch := self.warm_up.watch) is not None and self.moments.squares is not None:
            watch.observe(frame.ranks.model.sum(self.moments.squares.sum()), frame.steps.updates)

    # ---------------------------------------------------------------- what users look at

    def owed(self) -> float:
        """Return the norm of residuals, root mean square over the ranks, over that of the last update."""
        return self.compression.exchange.owed() if self.compression.running else 0.0

    def worker_error(self, param: Tensor) -> Tensor:
        """Return this rank's residual e of one parameter, in units of the momentum, float32 of its shape."""
        i = self.frame.index(param)
        if not self.compression.running:
            return torch.zeros_like(self.frame.parameters.params[i], dtype=torch.float32)
        self.compression.exchange.settle()
        residual, _ = self.moments.state(compressed=False)  # where the momentum was
        return self._in_momentum_units(residual.part(self.frame, i).float(), i)

    def momentum(self, param: Tensor) -> Tensor:
        """Return the momentum of one parameter, equal on all ranks, float32 of its shape."""
        if not self.compression.running:
            return super().momentum(param)
        frame, result = self.frame, self.compression.exchange.reducer.result()
        i = frame.index(param)
        return self._in_momentum_units(frame.parameters.shaped(result, i, frame.layout.offset(i)), i)

    def _in_momentum_units(self, part: Tensor, i: int) -> Tensor:
        unit = self.compression.unit
        part = part.clone() if unit is None else part / unit[i]
        if self.options.numerics.precondition:
            v, k = self.value_of("exp_avg_sq", i).float(), self.compression.table()[i]
            part *= denominator(v, k, self.options.numerics.eps_inside_sqrt)
        return part

    def described(self) -> list[str]:
        options, numerics = self.options, self.options.numerics
        scale = f"scale: {numerics.scale_norm}, {numerics.scale_scope}"
        scale += ", preconditioned" * numerics.precondition + ", ternary" * numerics.ternary
        half = ["frozen_dtype: bfloat16"] if options.formats.variance.dtype is torch.bfloat16 else []
        warmup = f"freeze_step: {options.freeze_step if options.warmup is None else self.warm_up.due!r}"
        if options.shares_variance:
            warmup = f"variance: {options.variance}, after {self.warm_up.due} updates"
        return [warmup, scale, *half, *self.compression.described()]
