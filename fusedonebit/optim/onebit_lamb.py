"""1-bit LAMB (Li et al., 2021) as a plain ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..comm import Told
from ..comm.absent import Kept, absence
from ..core.frame import Frame
from ..core.header import FLAG, Field
from ..core.optimizer import DistributedOptimizer
from ..core.scaling import Agreed
from ..core.settings import (
    FAULTS,
    LAYERWISE,
    NUMERICS,
    VARIANCE_FLOOR,
    WIRE,
    Faults,
    Freeze,
    Layerwise,
    Numerics,
    Options,
    Params,
    Ranks,
    Wire,
    names_of,
)
from ..core.spec import Specs, StateSpec
from ..errors import warn
from ..triton_kernels import Coef, Layer, lamb_follow, lamb_ratio, lamb_rescale, live_variance, param_squares, rules
from ..triton_kernels.nouns import Divisor, Ratios, Signs
from .guard import LEAST_SQUARE
from .lamb import LambOptions, LambUpdate
from .onebit_options import OneBitOptions, Variance
from .two_stage import TwoStage

QUIET = 0.03
"""Ratio of the root mean squares of a layer's m and of its gradients below which it counts as quiet.

Gradients that are pure noise give 0.23 (beta1 = 0.9)."""

SETTLED = 0.8
"""Share of the coefficients that c_avg, which starts at 0, should have reached at the freeze; below it there is a
warning."""


RATIOS = ("r_min", "r_max", "r_threshold")
"""What bounds r, by the names that groups may give it."""


@dataclass(frozen=True, kw_only=True)
class OneBitLambOptions(OneBitOptions, Layerwise):
    """Settings of ``OneBitLamb``; ``variant`` is ``fusedonebit.deepspeed``'s."""

    precondition: bool = False
    bias_correction: bool = False
    variance_floor: float | None = VARIANCE_FLOOR
    variant: Literal["paper", "deepspeed"] = "paper"

    objects: ClassVar[dict[str, Any]] = {**OneBitOptions.objects, "layerwise": Layerwise}
    takes: ClassVar[frozenset[str]] = (OneBitOptions.takes - {"state"}) | names_of(Layerwise) | {"variant"}
    grouped: ClassVar[tuple[str, ...]] = (*LambOptions.grouped, *RATIOS)
    told: ClassVar[tuple[str, ...]] = (*(name for name in OneBitOptions.told if name != "state"), "variant")

    @classmethod
    def of(cls, optimizer: str, arguments: Mapping[str, Any]) -> OneBitLambOptions:
        """Settle the arguments; with a shared v, updates are preconditioned, corrected and floored as Adam's."""
        made, said = super().of(optimizer, arguments), arguments.get("numerics", NUMERICS)
        if not made.lives:
            return made
        return replace(
            made,
            precondition=made.precondition or said.precondition is None,
            bias_correction=made.bias_correction or said.bias_correction is None,
            variance_floor=said.variance_floor,
        )

    @property
    def ratios(self) -> bool:
        """Tell whether c follows the ratio r of the frozen variance to a fresh one."""
        return self.adaptive and not self.lives

    @property
    def layerwise(self) -> str:
        """Name which of the paper's two algorithms it is, as checkpoints do."""
        return "adaptive" if self.adaptive else "frozen"

    @property
    def scales_momentum(self) -> bool:
        """Tell whether each layer has a unit of its own; preconditioned momentum has one per coordinate."""
        return not self.precondition if self.momentum_scaling is None else self.momentum_scaling

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        super().check()
        self.check_ratios(vars(self))
        of = f'variance="{self.variance}"'
        if self.lives and not self.precondition:
            raise ValueError(
                f"precondition must be True or None with {of}, got False: coefficients are of updates; or pass "
                'variance="frozen"'
            )
        if self.lives and self.variant != "paper":
            raise ValueError(
                f"layerwise must be a Layerwise with {of}, got DeepSpeedLayerwise, whose variance is frozen; or pass "
                "freeze_step"
            )
        if self.lives and not self.adaptive:
            raise ValueError(
                f'adaptive must be True with {of}, got False: coefficients follow updates; or pass variance="frozen"'
            )
        if self.precondition and self.momentum_scaling:
            raise ValueError(
                "momentum_scaling must be False or None with Numerics(precondition=True), got True: "
                "each coordinate already has a unit of its own"
            )

    def check_group(self, group: Mapping[str, Any], name: str, world_size: int) -> None:
        super().check_group(group, name, world_size)
        self.check_ratios(group, f" in {name}" if name else "")

    def check_ratios(self, given: Mapping[str, Any], where: str = "") -> None:
        """Raise ValueError where a bound of r is given and no r is formed."""
        of = f'variance="{self.variance}"' if self.lives else "Layerwise(adaptive=False)"
        for name in RATIOS:
            if not self.ratios and (got := given[name]) != (usual := getattr(LAYERWISE, name)):
                way_out = "; or pass freeze_step" if self.lives else ""
                raise ValueError(f"{name} must be {usual} with {of}, got {got!r}{where}: no ratio is formed{way_out}")


_RATIOS: dict[str, Any] = {"given": True, "stage": "compressed", "when": "options.ratios"}
_FOLLOWS: dict[str, Any] = {"given": True, "stage": "compressed", "when": "options.lives", "not_negative": True}


class CompressedLamb(LambUpdate, TwoStage):
    """1-bit LAMB: averaged updates of LAMB, then steps in bits, or momentum."""

    settings: ClassVar[type[Options]] = OneBitLambOptions
    options: OneBitLambOptions
    columns: ClassVar = LambUpdate.columns | {
        Coef.R_MIN: "r_min",
        Coef.R_MAX: "r_max",
        Coef.R_THRESHOLD: "r_threshold",
    }
    kept: ClassVar[Specs] = (
        *TwoStage.kept,
        StateSpec("layer", "tensor", "_layers", rows=len(Layer)),
        StateSpec("unit", "tensor", "_unit", given=True, when="options.scales_momentum", not_negative=True),
        # Before the first compressed step this is the warm-up's momentum.
        StateSpec("exp_avg_sq_fresh", "element", "_fresh", **_RATIOS, not_negative="started"),
        StateSpec("exp_avg_last_bits", "bit", "_last_bits", **_RATIOS),
        StateSpec("exp_avg_last_nonzero", "bit", "_last_bits", **_RATIOS | {"when": "_keeps_last_nonzero"}, plane=1),
        StateSpec("exp_avg_last_scale", "block", "_last_scale", **_RATIOS, not_negative=True),
        StateSpec("param_squares", "block", "_x_squares", **_FOLLOWS),
        StateSpec("update_squares", "tensor", "_update_squares", **_FOLLOWS),
    )
    header_fields: ClassVar = {
        **TwoStage.header_fields,
        "unit_is_known": Field(FLAG, False, at="_unit_is_known"),
        "started": Field(FLAG, False),
    }

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        layout, device = frame.layout, frame.device
        self._deepspeed = self.options.variant == "deepspeed"
        self._fresh = torch.empty(0, device=device)
        self._unit_is_known = False
        if self.options.lives:
            self._x_squares = torch.zeros(layout.n_blocks, device=device)
            self._update_squares = torch.zeros(len(layout.sizes), device=device)
        if self.options.scales_momentum:
            self._unit = torch.ones(len(layout.sizes), device=device)
        if self.options.ratios:
            self._started = torch.zeros(1, dtype=torch.int32, device=device)
            self._last_bits = torch.zeros_like(self.reducer.bits, memory_format=torch.contiguous_format)
            self._last_scale = torch.zeros(layout.n_blocks, device=device)
            self._largest = torch.zeros(layout.n_blocks, device=device)

    def held(self) -> list[Tensor]:
        return [*super().held(), *([self._started] if self.options.ratios else [])]

    def scratch(self) -> list[Tensor]:
        return [*super().scratch(), *([self._largest] if self.options.ratios else [])]

    def _before_compression(self) -> None:
        if self.options.lives:
            self._begin_following()
        else:
            self._freeze_coefficients()
        self._drop_norms()

    def _begin_following(self) -> None:
        """Make the warm-up's last coefficients c the first of the compression stage, with a shared variance.

        A layer's mean |u|^2 begins as (|x|/c)^2, or is measured where c was clipped. A layer that has not moved yet
        gets the c of an update all of whose elements are 1.
        """
        frame = self.frame
        shards, c = frame.ranks.shards, self._layers[Layer.COEFFICIENT].double()
        self._x_squares.copy_(param_squares(frame.parameters.dense, frame.places))
        x = shards.sum(self._segments(self._x_squares.double(), "sum")).sqrt()
        moves = (shards.sum(self._sum_of_squares(self.exp_avg)) > 0) & (x > 0) & (c > 0)
        live = shards.sum(self._segments(frame.live.numel.double(), "sum"))
        coef = self.coefficient_table()
        usual = rules.coefficient(x[:, None], live.sqrt()[:, None], coef)[:, 0]
        unbias = coef[:, Coef.UNBIAS1].double().square()
        squares = shards.sum(self._segments(self._update_sums(self.exp_avg, coef), "sum")) * unbias
        clipped = (c <= coef[:, Coef.C_MIN]) | (c >= coef[:, Coef.C_MAX])  # then it tells nothing of the update
        self._update_squares.copy_(torch.where(moves, torch.where(clipped, squares, (x / c).square()), live))
        self._layers[Layer.COEFFICIENT] = torch.where(moves, c, usual)
        self._layers[Layer.RATIO] = 1.0
        self._unit = self._layers[Layer.COEFFICIENT]

    def _check_what_freezes(self) -> None:
        super()._check_what_freezes()
        if not self.options.lives and not self._layers[Layer.AVERAGE].any():
            raise RuntimeError(
                "the freeze needs averages of LAMB's coefficients, but all are 0: no LAMB update was made, or "
                "DeepSpeed's numerics left all out because they were 1. Set freeze_step above "
                f"{self.frame.steps.outcomes.updates}, or load a checkpoint of Lamb or OneBitLamb"
            )

    def _freeze_coefficients(self) -> None:
        if self.frame.steps.outcomes.updates > 0 and self.warm_up.again == 0:
            self._warn_of_averages()
        self._layers[Layer.COEFFICIENT] = self._layers[Layer.AVERAGE]
        self._layers[Layer.RATIO] = 1.0
        if self.options.scales_momentum and not self._unit_is_known:
            self._unit = self._momentum_scales()
        if self.options.ratios:
            # The gradients' buffer becomes the fresh variance. That is the frozen one until the next
            # step, whose m_{t-1} is in full precision for the last time: keep it there.
            self._fresh = self._full_size() if self.averages.buffer is None else self.averages.values
            self._fresh.copy_(self.exp_avg)
            self._started.zero_()

    def _rewarm(self) -> None:
        frame = self.frame
        super()._rewarm()
        self._layers[Layer.RATIO] = 1.0
        self._fresh = torch.empty(0, device=frame.device)
        self._norms = torch.zeros(2, frame.layout.n_blocks, dtype=torch.float64, device=frame.device)
        self._unit_is_known = False
        if self.options.lives:
            self._unit = None

    def _begin_warm(self, tables: Mapping[str, Tensor]) -> None:
        super()._begin_warm(tables)
        self._layers.copy_(tables["layer"])
        if self._unit is not None and "unit" in tables:
            self._unit, self._unit_is_known = tables["unit"], True

    def _layer_factor(self) -> Tensor:
        return self._layers[Layer.COEFFICIENT if self.options.lives else Layer.AVERAGE]

    def _arm_guard(self, last: Tensor) -> None:
        super()._arm_guard(last)
        self.weigh_guard()

    def weigh_guard(self) -> None:
        if not self.options.lives:
            super().weigh_guard()
        elif self.options.guard != "off":
            assert self.living is not None
            # Where c is in its range a step is as large as the layer.
            usual = torch.maximum(self._update_squares.double(), self.living.numels * LEAST_SQUARE)
            self._guard.refer((self._layers[Layer.COEFFICIENT].double().square() * usual).sum())

    def _warn_of_averages(self) -> None:
        """Warn where c_avg differs much from the coefficients that the layers have moved with so far."""
        frame = self.frame
        live = (self._segments(frame.live.numel.double(), "sum") > 0) & (frame.steps.of_each > 0)
        still = [
            frame.parameters.called[i] for i in (live & (self._layers[Layer.AVERAGE] == 0)).nonzero().flatten().tolist()
        ]
        if still:
            warn(
                f"{len(still)} tensor(s) have no average coefficient and will not move from now on: "
                f"{', '.join(still[:5])}; DeepSpeed's numerics leave coefficients of 1 out of it"
            )
        moved = [
            (n, frame.groups[g])
            for n, g in zip(frame.steps.of_each.tolist(), frame.parameters.group_of, strict=True)
            if n
        ]
        reached, fewest = min(((1 - float(group["beta3"]) ** n, int(n)) for n, group in moved), default=(1.0, 0))
        if reached < SETTLED and not self.warm_up.is_corrected:  # a warm start does not begin with 0
            warn(
                f"after so few updates ({fewest}) the average coefficient has reached {reached:.0%} of the "
                "coefficients (it starts at 0, as in the paper), and so has the learning rate from now on; "
                "set a larger freeze_step or a smaller beta3"
            )

    def _drop_norms(self) -> None:
        if not self._deepspeed:
            self._norms = self._norms[:, :0].clone()

    def _full_size(self) -> Tensor:
        """Return memory for the fresh variance, as large as that which the warm-up leaves."""
        return self.averages.room()[: self.frame.layout.numel]

    def _momentum_scales(self) -> Tensor:
        """Return what makes every layer's momentum of the mean layer's size: float32 [tensors] (section 4.3).

        A layer that is quiet at the freeze has a size from its variance, which remembers longer: with
        that of its vanishing momentum it would decide the shared scale once it moves again. It takes no
        part in the mean. A layer without any variance keeps 1.
        """
        frame = self.frame
        shards = frame.ranks.shards
        live = shards.sum(self._segments(frame.live.numel.double(), "sum")).clamp(min=1.0)
        variance = shards.sum(self._segments(live_variance(frame.places, self.exp_avg_sq)[0], "sum")) / live
        squares = shards.sum(self._sum_of_squares(self.exp_avg))
        size, least = (squares / live).sqrt(), QUIET * variance.sqrt()
        moving = (size > 0) & (size >= least)
        size = torch.maximum(size, least)
        counted = torch.where(frame.ranks.model_parallel.max(moving.any().int()) > 0, moving, size > 0)
        total, number = frame.ranks.model_parallel.sum(torch.stack([(size * counted).sum(), counted.sum().double()]))
        mean = total / number.clamp(min=1)
        return torch.where(size > 0, mean / size, 1.0).float()

    def _compressed_step(self, grads: Sequence[Tensor], agreed: Agreed, told: Told, coef: Tensor) -> None:
        """Take a step of Algorithm 1's compression stage, its lines numbered as in ``fusedonebit.reference``."""
        frame = self.frame
        # Lines 6 to 13: workers and servers average the momenta, each layer's scaled to one size (section 4.3).
        coef = self._synchronise(self.compressing(grads, agreed.coef, agreed.factor), told, coef)
        if self.options.lives:
            self._follow(coef)
            return
        skip, kept = self.reducer.flags, self._last_kept() if self.options.ratios else None
        if self.options.ratios:
            norms = self._norms if self._deepspeed else None
            new, last = Signs(self.reducer.bits, self.reducer.scale), Signs(self._last_bits, self._last_scale)
            momenta = (new, last, Divisor(self.exp_avg_sq, None, self.options.eps_inside_sqrt))
            fresh, ratios = (self._fresh, self._started), Ratios(self._largest, norms)
            flags = (self.options.precondition, self._deepspeed)
            # Line 15: g, rebuilt from m_t and m_{t-1}; line 16: its variance; line 17: the largest v / that, by block.
            lamb_ratio(frame.parameters.dense, frame.places, *momenta, *fresh, *flags, coef, skip, ratios)
            largest, start = self._by_layer(self._largest, "max")
            norms = None if norms is None else self._by_layer(norms)[0]
            # Line 17: r, the largest of a layer; lines 18 and 19: clipped, in change and in range; 20: c = r * c_avg.
            with self._layers_kept(self._layers):
                lamb_rescale(largest, norms, start, skip, self._deepspeed, self._started, coef, self._layers)
        else:  # "LAMB + basic 1-bit" (section 3.4): c = c_avg; rules.layer_step, but rounded at each operation
            average = self._layers[Layer.AVERAGE]
            coef[:, Coef.STEP_SIZE] *= average
            coef[:, Coef.DECAY] = 1 - coef[:, Coef.LR] * average * coef[:, Coef.WEIGHT_DECAY]
        # Line 21: x = x - lr * c * (m / (sqrt(v) + eps) + lambda * x), with the variance as it was frozen.
        self._apply_momentum(coef, self._divisor, self.options.eps_inside_sqrt)
        if kept is not None and frame.absent is not None:
            kept.restore(frame.absent)

    def _follow(self, coef: Tensor) -> None:
        """Apply the synchronised bits, and make the next coefficients, with a shared variance."""
        frame = self.frame
        scale, numel = self.reducer.scale, frame.live.numel
        squares, start = self._x_squares, self._layer_start
        if frame.ranks.shards.count > 1:
            of_bits = scale.double().square() * numel
            whole, start = self._by_layer(torch.stack([squares.double(), of_bits]))
            squares, scale, numel = whole[0].float(), whole[1].sqrt().float(), torch.ones_like(start[1:]).int()
        with self._layers_kept(self._layers, self._update_squares):
            lamb_follow(squares, scale, numel, start, self.reducer.flags, coef, self._layers, self._update_squares)
        self._apply_momentum(coef, x_squares=self._x_squares)
        if frame.absent is not None:  # then ``coef`` is a copy
            frame.coefficients.last[:, Coef.UNIT] = self._layers[Layer.COEFFICIENT]

    def _last_kept(self) -> Kept | None:
        """Keep the last momentum, to put it back where there was no gradient; coefficients keep the fresh variance.

        In the first compressed step there is none in bits yet: the next gradient rebuilt is then too large, once.
        """
        frame = self.frame
        if frame.absent is None:
            return None
        rows = absence(frame.layout, frame.missing, frame.device).rows
        return Kept(rows, frame.places.block_tensor, bits=[self._last_bits], tables=[self._last_scale])

    # ---------------------------------------------------------------- checkpoints

    @property
    def _keeps_last_nonzero(self) -> bool:
        return self.options.ratios and self.options.ternary

    def _settled(self) -> dict[str, Any]:
        options = self.options
        return super()._settled() | {"layerwise": options.layerwise, "momentum_scaling": options.scales_momentum}

    def plain_state(self) -> dict[str, Any]:
        # Until the first compressed step has succeeded, "exp_avg_sq_fresh" is the warm-up's momentum.
        started = {"started": bool(self._started)} if self.options.ratios else {}
        return super().plain_state() | started

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        super().check_plain_state(header)
        own = header["phase"] == "compression" and header["algorithm"] == self.frame.name
        if own and self.options.ratios and "started" not in header:
            raise ValueError("the checkpoint's header is damaged: it lacks started; load another checkpoint")

    def resume(self, header: Mapping[str, Any]) -> None:
        super().resume(header)
        if self.phase == "compression":
            self._drop_norms()
            if self.options.lives:
                self._unit = self._layers[Layer.COEFFICIENT]
            if self.options.ratios:
                self._fresh = self._full_size()
                self._started.fill_(header["started"])

    # ---------------------------------------------------------------- what users look at

    def _variance(self) -> Tensor:
        following = self.options.ratios and self.phase == "compression" and bool(self._started)
        return self._fresh if following else self.exp_avg_sq

    def described(self) -> list[str]:
        frozen = [f"layerwise: {self.options.layerwise}, as in {self.options.variant}"]
        return [*super().described(), *([] if self.options.lives else frozen)]


class OneBitLamb(DistributedOptimizer):
    r"""LAMB whose communication shrinks to one bit per parameter after a short warm-up.

    Warm-up: ``Lamb``. From then on the step itself is what is compressed, and tells how large it is: of each layer

    .. math::
        c_i = \beta_1 m + (1 - \beta_1) \, c_t \frac{g_i}{\sqrt{\hat v} + \epsilon} + e_i, \quad
        m = C\left(\tfrac{1}{W} \sum_i C(c_i) + E\right), \quad \|u_t\| = \frac{0.44}{c_t} \|\hat m\|, \\
        x \leftarrow x - \gamma \min\left(1, \frac{c(\|u_t\|)}{c_t}\right) \hat m - \gamma c_t \lambda x, \quad
        c_{t+1} = c\left(\overline{\|u\|}\right), \quad
        c(u) = \mathrm{clip}\left(\frac{\|x\|}{u}, c_{min}, c_{max}\right)

    where v lives on, as ``OneBitAdam``'s, the mean of norms remembers by beta3, and 0.44 is the share that a layer's
    update has in the norm of the bits that stand for it, with their noise (docs/numerics.md). One kernel more than
    ``OneBitAdam``, no state of a parameter's size.

    With ``freeze_step`` it is the paper's: the warm-up also keeps a moving average :math:`c_{avg}` of each layer's
    coefficient. After it :math:`c_{avg}` and the variance, now :math:`v_{T_w}`, are frozen; the momentum travels as it
    is, each layer's scaled to the same size, and (1-bit LAMB, Algorithm 1, lines 15 to 21)

    .. math::
        g = \frac{m_t - \beta_1 m_{t-1}}{1 - \beta_1}, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g^2, \quad
        r_t = \left\| \frac{v_{T_w}}{v_t} \right\|_\infty \text{, clipped to } (1 \pm r_{threshold}) r_{t-1}
        \text{ and } [r_{min}, r_{max}], \\
        x \leftarrow x - \gamma \, r_t \, c_{avg} \left( \frac{m_t}{\sqrt{v_{T_w}} + \epsilon} + \lambda x \right)

    so that the layers' learning rates go on adapting although only bits are known.

    Args:
        params, lr, betas, eps, freeze_step, warmup, total_steps, variance, max_grad_norm: As for ``OneBitAdam``; groups
            may also set c_min, c_max, beta3, r_min, r_max, r_threshold.
        process_group, numerics, wire, faults: As for ``OneBitAdam``.
        weight_decay: Part of u, in the compression stage too.
        layerwise: Defaults of c_min, c_max, beta3, r_min, r_max and r_threshold, and what becomes of the coefficients
            after the freeze; see ``Layerwise``.

    Example::

        optimizer = OneBitLamb(model.parameters(), lr=1e-2)
        loss.backward()
        optimizer.step()
    """

    kind = CompressedLamb
    algorithm: CompressedLamb

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int | Literal["auto"] | Freeze | None = None,
        warmup: int | float | None = None,
        total_steps: int | None = None,
        variance: Variance | None = None,
        max_grad_norm: float | None = None,
        layerwise: Layerwise = LAYERWISE,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        shared |= {"variance": variance, "warmup": warmup, "total_steps": total_steps}
        shared |= {"layerwise": layerwise, "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults, **shared, freeze_step=freeze_step)

    @classmethod
    def from_deepspeed(
        cls, params: Params, config: Mapping[str, Any], process_group: Ranks = None, **options: Any
    ) -> OneBitLamb:
        """Make the optimizer that a DeepSpeed config describes; see ``fusedonebit.deepspeed.from_config``."""
        from ..deepspeed import from_config  # here, as it imports this module

        return from_config(params, config, process_group, kind=cls, **options)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes in this context only accumulate, where ``overlap=True``; the one after it sends."""
        return self.algorithm.reducer.paused()

    def worker_error(self, param: Tensor) -> Tensor:
        """Return this rank's residual e of one parameter, in units of the momentum, float32 of its shape."""
        return self.algorithm.worker_error(param)
