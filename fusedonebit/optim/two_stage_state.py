"""Keeps what two stages have between two steps: settings, buffers, checkpoints, and what users look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.compressing import Feedback
from ..core.frame import Frame
from ..core.header import (
    AMOUNT,
    COMPRESSED,
    COUNT,
    STEPS,
    STEPS_OF_EACH,
    TABLE,
    Field,
    damaged,
    list_of,
    or_none,
)
from ..core.options import Made
from ..core.overlap import make_reducer
from ..core.settings import Freeze, Options
from ..core.spec import Specs, StateSpec
from ..triton_kernels import Coef, update_sums
from ..triton_kernels.renewal import LEVELS
from .averaging import DTYPE, Averaging
from .freezing import denominator
from .guard import LEAST_SQUARE, DivergenceGuard
from .living import LEAST_COUNTS, LivingVariance
from .onebit_options import OneBitOptions
from .warm_start import warm_start
from .warm_up import WarmUp

_BEFORE = {"frozen_dtype": str(torch.float32), "variance": "frozen"}
"""What settled options were before checkpoints said so; of others False."""


class TwoStageState(Feedback, Averaging):
    """The state of a 1-bit algorithm with a warm-up; see ``TwoStage``."""

    settings: ClassVar[type[Options]] = OneBitOptions
    options: OneBitOptions
    kept: ClassVar[Specs] = (
        StateSpec("exp_avg", "element", "exp_avg", stage="full", published="full", kept_in=DTYPE),
        StateSpec("exp_avg_sq", "element", "exp_avg_sq", published=True, not_negative=True, kept_in=DTYPE),
        *Feedback.kept,
        StateSpec(
            *("worker_sq", "part", "reducer.worker_sq"),
            stage="compressed",
            of_rank=True,
            when="follows_squares",
            not_negative=True,
        ),
        StateSpec("variance_level", "tensor", "living.levels", LEVELS, stage="compressed", when="follows_squares"),
    )
    phases: ClassVar = {"warmup": False, "compression": True}
    header_fields: ClassVar = {
        **COMPRESSED,
        "settled": Field(TABLE),
        "variance_step": Field(STEPS_OF_EACH, one_per="updates"),
        "variance_betas": Field(or_none(list_of(AMOUNT)), False, "group", "frame.coefficients.variance_betas"),
        "freeze_step": Field(or_none(COUNT), False, at="warm_up.ended_at"),
        "freeze_due": Field(or_none(COUNT), False),
        "rewarms": Field(COUNT, False, at="warm_up.again"),
        "vetoed": Field(COUNT, False, at="frame.steps.outcomes.vetoed"),
        "veto_at": Field(or_none(COUNT), False, at="frame.steps.outcomes.veto_at"),
        "guard": Field(or_none(list_of(STEPS, 2)), False),
        "dead_tensors": Field(list_of(COUNT), one_per="index", at="warm_up.dead_tensors"),
        "dead_coordinates": Field(COUNT, at="warm_up.dead_coordinates"),
        "auto": Field(or_none(TABLE), False),
        "renewals": Field(or_none(list_of(COUNT)), False),
    }

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        options, device = self.options, frame.device
        self.follows_squares = options.lives
        self.living = LivingVariance(self) if options.lives else None
        self.reducer = make_reducer(self)
        self._unit: Tensor | None = None
        beta2 = max(float(group["betas"][1]) for group in frame.groups)
        self.warm_up = WarmUp(options, beta2, frame.steps.of_each)
        self._guard = DivergenceGuard(device, not options.precondition and options.scale_scope != "block")
        if options.watches:
            self._exp_avg_sq_sums = torch.zeros(frame.layout.n_blocks, dtype=torch.float64, device=device)

    def begin(self, arguments: Mapping[str, Any]) -> None:
        freeze = arguments["freeze_step"]
        if isinstance(freeze, Freeze) and freeze.warm_start is not None:
            self._begin_warm(warm_start(self, freeze.warm_start))

    def close(self) -> None:
        self.reducer.close()
        super().close()

    def check_growth(self) -> None:
        # New parameters' variance would have to be corrected as well.
        if self.phase == "warmup" and self.warm_up.is_corrected:
            raise RuntimeError(
                "add_param_group must be called before the first freeze, and not after a warm start: the new "
                "parameters would have no variance; construct a new optimizer"
            )
        super().check_growth()

    def has_grown(self, carried: Any) -> None:
        self.warm_up.entered.copy_(self.frame.steps.of_each)

    def _begin_warm(self, tables: Mapping[str, Tensor]) -> None:
        """Note that v was filled from an earlier run, corrected for its start; ``tables`` are that run's, by name."""
        self.exp_avg_sq.mul_(self.frame.live.mask())
        self.warm_up.correct()

    def _exclude(self, tensors: Sequence[int]) -> None:
        """Leave tensors out of everything from now on."""
        frame = self.frame
        self.warm_up.dead_tensors = list(tensors)
        frame.put_live(frame.active_mask(excluded=tensors))
        self.reducer.set_live(frame.live)

    def coefficient_table(self) -> Tensor:
        frame = self.frame
        warm_up = self.warm_up
        frame.coefficients.memory = warm_up.memory
        waiting = None if self.phase == "warmup" or self.options.precondition else self.living
        mean_sq = None if waiting is None else waiting.mean_sq
        made = Made(frame.steps.of_each, warm_up.entered, warm_up.follows, self._unit, mean_sq)
        return self.frame.coefficients(frame.hyper.taken, made)

    # ---------------------------------------------------------------- what the guard is told

    def _update_sums(self, x: Tensor | None, coef: Tensor) -> Tensor:
        """Return the sum of (x/denom)^2 by block, float64 [B]; ``x`` None is 1."""
        return update_sums(self.frame.places, x, self.exp_avg_sq, self.options.eps_inside_sqrt, coef)

    def _arm_guard(self, last: Tensor) -> None:
        """Tell the guard what an update of sizes s is, and the norm of the ``last`` uncompressed one, float64 []."""
        frame = self.frame
        if self.options.guard == "off":
            return
        owner, live = frame.places.block_tensor, frame.live.numel.double()
        factor = self._layer_factor().double().square()[owner]
        beta1 = self.coefficient_table()[:, Coef.BETA1].double()[owner]
        # Momentum of pure noise has this norm; a training run at rest may have less.
        share = ((1 - beta1) / (1 + beta1)).clamp(min=LEAST_SQUARE)
        noise = frame.ranks.shards.sum((live * factor * share).sum()).sqrt()
        self._guard.arm(last, noise, self._update_weights())

    def weigh_guard(self) -> None:
        """Tell the guard of a variance that was renewed; preconditioned updates are divided already."""
        if self.options.guard != "off" and not self.options.precondition:
            self._guard.weigh(self._update_weights())

    def _update_weights(self) -> Tensor:
        """Return the square of the norm of an update by block where all sizes are 1: float64 [B]."""
        frame = self.frame
        owner, coef = frame.places.block_tensor, self.coefficient_table()
        weight = frame.live.numel.double() if self.options.precondition else self._update_sums(None, coef)
        factor = self._layer_factor().double().square()[owner]
        return weight / coef[:, Coef.UNIT].double()[owner].square() * factor

    def _layer_factor(self) -> Tensor:
        """Return what an update is multiplied with besides the learning rate: float32 [tensors]."""
        return torch.ones(len(self.frame.layout.sizes), device=self.frame.device)

    # ---------------------------------------------------------------- checkpoints

    def settle(self) -> None:
        if self.compressed:
            if self.living is not None:
                with self.frame.steps.whole("a renewal of the variance"):
                    self.living.settle(self)
            super().settle()

    def held(self) -> list[Tensor]:
        living = [] if self.living is None else self.living.state()
        return [*super().held(), self.warm_up.entered, *self._guard.state(), *living]

    def _settled(self) -> dict[str, Any]:
        """Return options that say in which unit, or with what, the compression stage goes on."""
        own = self.options
        told: dict[str, Any] = {"variance": own.variance, "precondition": own.precondition, "ternary": own.ternary}
        told["frozen_dtype"] = str(own.variance_dtype)
        return told | ({"eps_inside_sqrt": own.eps_inside_sqrt} if own.precondition else {})

    def plain_state(self) -> dict[str, Any]:
        return super().plain_state() | {
            "settled": self._settled(),
            **self.warm_up.plain_state(),
            "guard": None if self.options.guard == "off" else (float(self._guard.reference), float(self._guard.limit)),
            "renewals": None if self.living is None else self.living.state_dict(),
        }

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        if header["phase"] == "compression" and header["algorithm"] == self.frame.name:
            for name, now in self._settled().items():
                # What is missing did not exist when it was written.
                was = header["settled"].get(name, _BEFORE.get(name, False))
                if was != now:
                    way_out = f'; pass variance="{was}", or warm_start' if name == "variance" else ""
                    raise ValueError(
                        f"the checkpoint was written with {name}={was!r}, but here it is {now!r}; it can only be "
                        f"changed before the freeze{way_out}"
                    )
            if self.living is not None and len(header.get("renewals") or ()) < LEAST_COUNTS:
                damaged("renewals", f"have {LEAST_COUNTS} counts or more", repr(header.get("renewals")))
        super().check_plain_state(header)
        self.warm_up.check(header)

    def resume(self, header: Mapping[str, Any]) -> None:
        frame = self.frame
        super().resume(header)
        self.warm_up.resume(header, frame.steps.of_each)
        if header["phase"] != "compression":
            return
        self.phase = "compression"
        self.exp_avg_sq = self.exp_avg_sq.to(self.options.variance_dtype)
        self.warm_up.follows = False
        if frame.coefficients.variance_betas is None:  # written before it was kept
            frame.coefficients.freeze_variance(frame.hyper.taken)
        self._exclude(self.warm_up.dead_tensors)

    def resumed(self, header: Mapping[str, Any]) -> None:
        if self.living is not None and header.get("renewals") is not None:
            self.living.resume(self, header["renewals"])
        if self.phase == "compression":
            self.reducer.serve_again()
            self._arm_guard(torch.zeros((), dtype=torch.float64, device=self.frame.device))
        if header.get("guard") and self.options.guard != "off":
            self._guard.resume(*header["guard"])

    # ---------------------------------------------------------------- what users look at

    def stats(self) -> dict[str, Any]:
        frame = self.frame
        compensated, worker_error, server_error = self.reducer.norms()
        return super().stats() | {
            "freeze_step": self.warm_up.ended_at,
            "rewarms": self.warm_up.again,
            "vetoed_steps": frame.steps.outcomes.vetoed,
            "update_norm": float(self._guard.norm),
            "update_norm_limit": float(self._guard.limit),
            "residual_over_momentum": self.reducer.residual_ratio() if self.compressed else 0.0,
            "compensated_norm": compensated,
            "worker_error_norm": worker_error,
            "server_error_norm": server_error,
            "dead_tensors": [frame.parameters.called[i] for i in self._dead_now()],
            "renewals": 0 if self.living is None else self.living.renewals,
            "dead_coordinates": self.warm_up.dead_coordinates,
        }

    def _dead_now(self) -> list[int]:
        living = self.living if self.compressed else None
        return self.warm_up.dead_tensors if living is None else living.waiting()

    def layer_stats(self) -> dict[str, list[Any]]:
        # 0 in the warm-up and where a step was skipped. From the sums over blocks that the last step has made anyway:
        # no element is read, nothing of full size made.
        frame = self.frame
        squares = torch.zeros(2, len(frame.layout.sizes), dtype=torch.float64, device=frame.device)
        if self.compressed:
            squares.index_add_(1, frame.places.block_tensor, self.reducer.squares_by_block())
        error, momentum = squares
        ratio = torch.where(momentum > 0, error / momentum, 0.0).sqrt()
        return super().layer_stats() | {"residual_over_momentum": ratio.tolist()}

    def worker_error(self, param: Tensor) -> Tensor:
        """Return this rank's residual e of one parameter, in units of the momentum, float32 of its shape."""
        frame = self.frame
        i = frame.index(param)
        if self.phase == "warmup":
            return torch.zeros_like(frame.parameters.params[i], dtype=torch.float32)
        super().settle()
        return self._in_momentum_units(self._values_of("exp_avg", i), i)

    def momentum(self, param: Tensor) -> Tensor:
        """Return the momentum of one parameter, equal on all ranks, float32 of its shape."""
        frame = self.frame
        if self.phase == "warmup":
            return super().momentum(param)
        i = frame.index(param)
        return self._in_momentum_units(frame.parameters.shaped(self.reducer.result(), i, frame.layout.offset(i)), i)

    def _values_of(self, name: str, i: int) -> Tensor:
        """Return what is kept of one parameter under a name, float32 of its shape."""
        (spec,) = (spec for spec in self.kept if spec.name == name)
        return self.part_of(spec, i).float()

    def _in_momentum_units(self, part: Tensor, i: int) -> Tensor:
        part = part.clone() if self._unit is None else part / self._unit[i]
        if self.options.precondition:
            v, k = self._values_of("exp_avg_sq", i), self.coefficient_table()[i]
            part *= denominator(v, k, self.options.eps_inside_sqrt)
        return part

    def described(self) -> list[str]:
        options = self.options
        scale = f"scale: {options.scale_norm}, {options.scale_scope}"
        scale += ", preconditioned" * options.precondition + ", ternary" * options.ternary
        half = ["frozen_dtype: bfloat16"] if options.variance_dtype is torch.bfloat16 else []
        warmup = f"freeze_step: {options.freeze_step if options.warmup is None else self.warm_up.due!r}"
        if options.lives:
            warmup = f"variance: {options.variance}, after {self.warm_up.due} updates"
        return [warmup, scale, *half]
