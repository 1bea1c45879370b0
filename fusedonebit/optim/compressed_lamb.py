"""1-bit LAMB's compression stages: where the variance is shared, and the paper's, where it is frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm.absent import Backup, absence
from ..core.averages import Averages, room_for
from ..core.frame import Frame
from ..core.header import FLAG, Field, Fields
from ..core.state_tensor import StateTensor
from ..errors import warn
from ..triton_kernels import Coef, Layer, lamb_follow, lamb_ratio, lamb_rescale, live_variance, param_squares, rules
from ..triton_kernels.nouns import Divisor, Ratios, Signs
from .compressed import Compressed
from .guard import LEAST_SQUARE
from .lamb import LambLayers, LambUpdate
from .moments import MomentBuffers
from .onebit_lamb_options import OneBitLambOptions
from .variance import SharedVariance
from .warm_up import WarmUp

QUIET = 0.03
"""Ratio of the root mean squares of a layer's m and of its gradients below which it counts as quiet.

Gradients that are pure noise give 0.23 (beta1 = 0.9)."""

SETTLED = 0.8
"""Share of the coefficients that c_avg, which starts at 0, should have reached at the freeze; below it there is a
warning."""


class CompressedLamb(Compressed):
    """What 1-bit LAMB's compression stages have in common: a coefficient for each layer.

    Args:
        frame, moments, warm_up: As of ``Compressed``.
        layers: The warm-up's coefficients.
        update: Its update.
    """

    header_fields: ClassVar[Fields] = {"unit_is_known": Field(FLAG, False)}
    options: OneBitLambOptions
    _unit_is_known = False  # from a warm start; of a frozen variance alone

    def __init__(
        self, frame: Frame, moments: MomentBuffers, warm_up: WarmUp, layers: LambLayers, update: LambUpdate
    ) -> None:
        super().__init__(frame, moments, warm_up)
        self.layers, self.warm_update = layers, update

    def take_over(self, averages: Averages) -> None:
        self.warm_update.drop_room()

    def leave(self) -> None:
        super().leave()
        self.layers.table[Layer.RATIO] = 1.0
        self.warm_update.make_room()

    def begin_warm(self, tables: Mapping[str, Tensor]) -> None:
        self.layers.table.copy_(tables["layer"])

    def plain_state(self) -> dict[str, Any]:
        return {"unit_is_known": self._unit_is_known}

    def resume(self, header: Mapping[str, Any]) -> None:
        self._unit_is_known = header.get("unit_is_known", False)
        if header["phase"] == "compression":
            self.warm_update.drop_room()

    def of_layers(self, by_block: Tensor) -> Tensor:
        """Return each layer's sum of values by block, on all shards: float64 [tensors]."""
        return self.frame.ranks.shards.sum(self.layers.segments(by_block))

    def settled(self) -> dict[str, Any]:
        options = self.options
        return super().settled() | {"layerwise": options.algorithm, "momentum_scaling": options.scales_momentum}

    def following(self) -> Tensor:
        """Return the variance that follows the gradients, [P]."""
        return self.moments.written_out()

    def layer_stats(self) -> dict[str, list[Any]]:
        return super().layer_stats() | self.layers.stats_of(self.following())

    # ---------------------------------------------------------------- a part of an algorithm

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        return *self.layers.state(compressed), *super().state(compressed)

    def held(self) -> Sequence[Tensor]:
        return *super().held(), *self.layers.held()

    def scratch(self) -> Sequence[Tensor]:
        return self.warm_update.scratch()


class FollowedLamb(CompressedLamb):
    """1-bit LAMB's compression stage with a shared variance: the step itself is what is compressed.

    Its bits tell how large it is, of which the next coefficients are made.
    """

    variance: SharedVariance

    def __init__(self, frame: Frame, *parts: Any) -> None:
        super().__init__(frame, *parts)
        self._x_squares = torch.zeros(frame.layout.n_blocks, device=frame.device)
        self._update_squares = torch.zeros(len(frame.layout.sizes), device=frame.device)

    def update(self, coef: Tensor) -> None:
        """Move by m, which is the step itself; make the next coefficients c of how large it is."""
        frame, exchange = self.frame, self.exchange
        # |u| of the scales of m; min(1, c(|u|) / c) into this step's size, and the c of the next.
        scale, numel = exchange.reducer.scale, frame.live.numel
        squares, start = self._x_squares, self.layers.start
        if frame.ranks.shards.count > 1:
            of_bits = scale.double().square() * numel
            whole, start = self.layers.whole(torch.stack([squares.double(), of_bits]))
            squares, scale, numel = whole[0].float(), whole[1].sqrt().float(), torch.ones_like(start[1:]).int()
        tables = self.layers.table, self._update_squares
        with self.layers.kept(*tables):
            lamb_follow(squares, scale, numel, start, exchange.reducer.flags, coef, *tables)
        # x = x - lr * min(1, ...) * m - lr * c * lambda * x
        exchange.apply(coef, x_squares=self._x_squares)
        if frame.absent is not None:  # then ``coef`` is a copy
            frame.coefficients.last[:, Coef.UNIT] = self.layers.table[Layer.COEFFICIENT]

    def take_over(self, averages: Averages) -> None:
        """Make the warm-up's last coefficients c the first of the compression stage.

        A layer's mean |u|^2 begins as (|x|/c)^2, or is measured where c was clipped. A layer that has not moved yet
        gets the c of an update all of whose elements are 1.
        """
        frame, table = self.frame, self.layers.table
        c = table[Layer.COEFFICIENT].double()
        self._x_squares.copy_(param_squares(frame.parameters.dense, frame.places))
        x = self.of_layers(self._x_squares.double()).sqrt()
        moving = frame.ranks.shards.sum(self.layers.sum_of_squares(self.moments.exp_avg))
        moves = (moving > 0) & (x > 0) & (c > 0)
        live = self.of_layers(frame.live.numel.double())
        coef = self.table()
        usual = rules.coefficient(x[:, None], live.sqrt()[:, None], coef)[:, 0]
        unbias = coef[:, Coef.UNBIAS1].double().square()
        squares = self.of_layers(self.update_sums(self.moments.exp_avg, coef)) * unbias
        clipped = (c <= coef[:, Coef.C_MIN]) | (c >= coef[:, Coef.C_MAX])  # then it tells nothing of the update
        self._update_squares.copy_(torch.where(moves, torch.where(clipped, squares, (x / c).square()), live))
        table[Layer.COEFFICIENT] = torch.where(moves, c, usual)
        table[Layer.RATIO] = 1.0
        self.unit = table[Layer.COEFFICIENT]
        super().take_over(averages)

    def leave(self) -> None:
        super().leave()
        self.unit = None

    def update_factor(self) -> Tensor:
        return self.layers.table[Layer.COEFFICIENT]

    def arm_guard(self, last: Tensor) -> None:
        super().arm_guard(last)
        self.weigh_guard()

    def weigh_guard(self) -> None:
        if self.guard.on:  # where c is in its range a step is as large as the layer
            usual = torch.maximum(self._update_squares.double(), self.variance.numels * LEAST_SQUARE)
            self.guard.refer((self.layers.table[Layer.COEFFICIENT].double().square() * usual).sum())

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        if not compressed:
            return super().state(compressed)
        return (
            *super().state(compressed),
            StateTensor("param_squares", "block", self._x_squares, not_negative=True),
            StateTensor("update_squares", "tensor", self._update_squares, not_negative=True),
        )

    def resume(self, header: Mapping[str, Any]) -> None:
        super().resume(header)
        if header["phase"] == "compression":
            self.unit = self.layers.table[Layer.COEFFICIENT]


class PaperLamb(CompressedLamb):
    """1-bit LAMB's compression stage, Algorithm 1: momentum is compressed, the variance and c_avg are frozen.

    Without ``Layerwise(adaptive=True)`` it is the paper's "LAMB + basic 1-bit" (section 3.4): r stays 1.

    Attributes:
        of_denominators: Whether r is the ratio of denominators, not of variances.
        range_first: Whether r's range is limited before its change.
        blends: Whether r is blended with weight decay's share of the update.
    """

    header_fields: ClassVar[Fields] = {**CompressedLamb.header_fields, "started": Field(FLAG, False)}

    of_denominators = range_first = blends = False

    def __init__(self, frame: Frame, *parts: Any) -> None:
        super().__init__(frame, *parts)
        layout, device = frame.layout, frame.device
        self._fresh = torch.empty(0, device=device)
        if self.options.scales_momentum:
            self.unit = torch.ones(len(layout.sizes), device=device)
        if self.options.ratios:
            self._started = torch.zeros(1, dtype=torch.int32, device=device)
            bits = self.exchange.reducer.bits
            self._last_bits = torch.zeros_like(bits, memory_format=torch.contiguous_format)
            self._last_scale = torch.zeros(layout.n_blocks, device=device)
            self._largest = torch.zeros(layout.n_blocks, device=device)

    def update(self, coef: Tensor) -> None:
        """Move by m, as lines 14 to 21 of Algorithm 1 say; those before are ``Compressed.step``'s."""
        frame, skip, options, layers = self.frame, self.exchange.reducer.flags, self.options, self.layers
        backup = self._back_up() if options.ratios else None
        if options.ratios:
            norms = self.warm_update.norms if self.blends else None
            # Line 15: g, rebuilt from m_t and m_{t-1}; line 16: its variance; line 17: the largest v / that, by block.
            lamb_ratio(
                *(frame.parameters.dense, frame.places),
                exp_avg=Signs(self.exchange.reducer.bits, self.exchange.reducer.scale),
                last=Signs(self._last_bits, self._last_scale),
                exp_avg_sq=Divisor(self.moments.exp_avg_sq, None, options.numerics.eps_inside_sqrt),
                fresh=self._fresh,
                started=self._started,
                preconditioned=options.numerics.precondition,
                of_denominators=self.of_denominators,
                coef=coef,
                skip=skip,
                ratios=Ratios(self._largest, norms),
            )
            largest, start = layers.whole(self._largest, "max")
            norms = None if norms is None else layers.whole(norms)[0]
            # Line 17: r, the largest of a layer; lines 18 and 19: clipped, in change and in range; 20: c = r * c_avg.
            with layers.kept(layers.table):
                lamb_rescale(largest, norms, start, skip, self.range_first, self._started, coef, layers.table)
        else:  # c = c_avg; rules.layer_step, but rounded at each operation
            average = layers.table[Layer.AVERAGE]
            coef[:, Coef.STEP_SIZE] *= average
            coef[:, Coef.DECAY] = 1 - coef[:, Coef.LR] * average * coef[:, Coef.WEIGHT_DECAY]
        # Line 21: x = x - lr * c * (m / (sqrt(v) + eps) + lambda * x), with the variance as it was frozen.
        self.exchange.apply(coef, self.divisor)
        if backup is not None and frame.absent is not None:
            backup.restore(frame.absent)

    def _back_up(self) -> Backup | None:
        """Keep the last momentum, to put it back where there was no gradient; coefficients keep the fresh variance.

        In the first compressed step there is none in bits yet: the next gradient rebuilt is then too large, once.
        """
        frame = self.frame
        if frame.absent is None:
            return None
        rows = absence(frame.layout, frame.missing, frame.device).rows
        return Backup(rows, frame.places.block_tensor, bits=[self._last_bits], tables=[self._last_scale])

    # ---------------------------------------------------------------- from one stage to the other

    def check_what_freezes(self) -> None:
        super().check_what_freezes()
        if not self.layers.table[Layer.AVERAGE].any():
            ones = ", or all were 1 and left out" if self.warm_update.skips_ones else ""
            raise RuntimeError(
                f"the freeze needs averages of LAMB's coefficients, but all are 0: no LAMB update was made{ones}. Set "
                f"freeze_step above {self.frame.steps.outcomes.updates}, or load a checkpoint of Lamb or OneBitLamb"
            )

    def take_over(self, averages: Averages) -> None:
        """Freeze c_avg, and scale each layer's momentum to one size."""
        if self.frame.steps.outcomes.updates > 0 and self.warm_up.again == 0:
            self._warn_of_averages()
        table = self.layers.table
        table[Layer.COEFFICIENT] = table[Layer.AVERAGE]
        table[Layer.RATIO] = 1.0
        if self.options.scales_momentum and not self._unit_is_known:
            self.unit = self._momentum_scales()
        if self.options.ratios:
            # The gradients' buffer becomes the fresh variance. That is the frozen one until the next
            # step, whose m_{t-1} is in full precision for the last time: keep it there.
            self._fresh = self._room() if averages.buffer is None else averages.values
            self._fresh.copy_(self.moments.exp_avg)
            self._started.zero_()
        super().take_over(averages)

    def leave(self) -> None:
        super().leave()
        self._fresh = torch.empty(0, device=self.frame.device)
        self._unit_is_known = False

    def begin_warm(self, tables: Mapping[str, Tensor]) -> None:
        super().begin_warm(tables)
        if self.unit is not None and "unit" in tables:
            self.unit, self._unit_is_known = tables["unit"], True

    def _room(self) -> Tensor:
        """Return memory for the fresh variance, float32 [P], as large as that which the warm-up leaves."""
        return room_for(self.frame.layout, self.frame.device)[: self.frame.layout.numel]

    def _warn_of_averages(self) -> None:
        """Warn where c_avg differs much from the coefficients that the layers have moved with so far."""
        frame, average = self.frame, self.layers.table[Layer.AVERAGE]
        live = (self.layers.segments(frame.live.numel.double()) > 0) & (frame.steps.of_each > 0)
        still = [frame.parameters.called[i] for i in (live & (average == 0)).nonzero().flatten().tolist()]
        if still:
            warn(
                f"{len(still)} tensor(s) have no average coefficient and will not move from now on: "
                f"{', '.join(still[:5])}{'; coefficients of 1 are left out' if self.warm_update.skips_ones else ''}"
            )
        each = zip(frame.steps.of_each.tolist(), frame.parameters.group_of, strict=True)
        moved = [(n, frame.groups[g]) for n, g in each if n]
        reached, fewest = min(((1 - float(group["beta3"]) ** n, int(n)) for n, group in moved), default=(1.0, 0))
        if reached < SETTLED and not self.warm_up.any_corrected:  # a warm start does not begin with 0
            warn(
                f"after so few updates ({fewest}) the average coefficient has reached {reached:.0%} of the "
                "coefficients (it starts at 0, as in the paper), and so has the learning rate from now on; "
                "set a larger freeze_step or a smaller beta3"
            )

    def _momentum_scales(self) -> Tensor:
        """Return what makes every layer's momentum of the mean layer's size: float32 [tensors] (section 4.3).

        A layer that is quiet at the freeze has a size from its variance, which remembers longer: with
        that of its vanishing momentum it would decide the shared scale once it moves again. It takes no
        part in the mean. A layer without any variance keeps 1.
        """
        frame, moments = self.frame, self.moments
        live = self.of_layers(frame.live.numel.double()).clamp(min=1.0)
        variance = self.of_layers(live_variance(frame.places, moments.exp_avg_sq)[0]) / live
        squares = frame.ranks.shards.sum(self.layers.sum_of_squares(moments.exp_avg))
        size, least = (squares / live).sqrt(), QUIET * variance.sqrt()
        moving = (size > 0) & (size >= least)
        size = torch.maximum(size, least)
        counted = torch.where(frame.ranks.model_parallel.max(moving.any().int()) > 0, moving, size > 0)
        total, number = frame.ranks.model_parallel.sum(torch.stack([(size * counted).sum(), counted.sum().double()]))
        mean = total / number.clamp(min=1)
        return torch.where(size > 0, mean / size, 1.0).float()

    def update_factor(self) -> Tensor:
        return self.layers.table[Layer.AVERAGE]

    # ---------------------------------------------------------------- what it keeps, and tells

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        kept = list(super().state(compressed))
        if self.unit is not None:
            kept.append(StateTensor("unit", "tensor", self.unit, not_negative=True))
        if not (compressed and self.options.ratios):
            return kept
        bits = self._last_bits
        if bits.dim() == 3:
            kept.append(StateTensor("exp_avg_last_nonzero", "bit", bits[:, 1]))
            bits = bits[:, 0]
        return [
            *kept,
            # Before the first compressed step this is the warm-up's momentum.
            StateTensor("exp_avg_sq_fresh", "element", self._fresh, not_negative="started"),
            StateTensor("exp_avg_last_bits", "bit", bits),
            StateTensor("exp_avg_last_scale", "block", self._last_scale, not_negative=True),
        ]

    def held(self) -> Sequence[Tensor]:
        return *super().held(), *([self._started] if self.options.ratios else [])

    def scratch(self) -> Sequence[Tensor]:
        return *super().scratch(), *([self._largest] if self.options.ratios else [])

    def plain_state(self) -> dict[str, Any]:
        # Until the first compressed step has succeeded, "exp_avg_sq_fresh" is the warm-up's momentum.
        started = {"started": bool(self._started)} if self.options.ratios else {}
        return super().plain_state() | started

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        own = header["phase"] == "compression" and header["algorithm"] == self.frame.name
        if own and self.options.ratios and "started" not in header:
            raise ValueError("the checkpoint's header is damaged: it lacks started; load another checkpoint")

    def resume(self, header: Mapping[str, Any]) -> None:
        super().resume(header)
        if header["phase"] == "compression" and self.options.ratios:
            self._fresh = self._room()
            self._started.fill_(header["started"])

    def close(self) -> None:
        self._fresh = self._fresh.new_empty(0)

    def following(self) -> Tensor:
        follows = self.running and self.options.ratios and bool(self._started)
        return self._fresh if follows else super().following()

    def described(self) -> list[str]:
        return [f"layerwise: {self.options.algorithm}, as in {self.options.variant}"]
