"""Checks hyper-parameters, and turns those of the groups into the table that kernels read."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..triton_kernels import LARGEST_GRADIENT, Coef
from ..triton_kernels.tables import capturing
from .telemetry import upload

_LR = 0  # column of the uploaded rows


def numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group in which tensors of one element are numbers; but for ``lr``, which may stay one."""
    return {key: value if key in ("lr", "params") else _number(value) for key, value in group.items()}


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return type(value)(map(_number, value)) if type(value) in (tuple, list) else value


def read_once(group: dict[str, Any]) -> None:
    """Replace hyper-parameters that lie on another device by numbers, as no step must wait to read them."""
    for key, value in group.items():
        of_group = value if key == "betas" and isinstance(value, (tuple, list)) else (value,)
        if key not in ("lr", "params") and any(isinstance(x, Tensor) and x.device.type != "cpu" for x in of_group):
            group[key] = _number(value)


def check_group(group: dict[str, Any], name: str = "") -> None:
    """Check the hyper-parameters of one parameter group, ``numbers`` of which were taken.

    Raises:
        ValueError: naming the argument, its value and what is expected.
    """
    where = f" in {name}" if name else ""
    check_lr(group["lr"], where)
    for key, (holds, expected) in OF_GROUPS.items():
        if key in group and not holds(group[key]):
            raise ValueError(f"{key} must be {expected}, got {_shown(group[key])}{where}")
    for low, high in (("c_min", "c_max"), ("r_min", "r_max")):
        if {low, high} <= group.keys() and group[low] > group[high]:
            raise ValueError(f"{low} must be at most {high}, got {group[low]!r} > {group[high]!r}{where}")


def _betas(group: Mapping[str, Any]) -> tuple[float, float]:
    return group["betas"] if "betas" in group else (group["momentum"], 0.0)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_count(name: str, value: object, alternative: str | None = None, least: int = 0) -> None:
    """Raise ValueError unless ``value`` is an int of at least that (or the alternative word)."""
    if alternative is not None and isinstance(value, str) and value == alternative:
        return
    if not is_int(value) or value < least:
        other = f' or "{alternative}"' if alternative else ""
        raise ValueError(f"{name} must be an int >= {least}{other}, got {value!r}")


def check_lr(lr: object, where: str) -> None:
    """Raise ValueError unless ``lr`` is a number >= 0, or a tensor of one, as far as the host can see."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr must be a number or a tensor of one element, got shape {tuple(lr.shape)}{where}")
        # One on another device is not read: that would wait for the device.
        lr = lr.item() if lr.device.type == "cpu" else 0.0
    if not _fits_float32(lr) or lr < 0:
        raise ValueError(f"lr must be a finite number >= 0, got {_shown(lr)}{where}")


def is_int(value: object) -> TypeGuard[int]:
    """Return whether it is an int, and no flag."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether it is a finite number."""
    # Not math.isfinite, which raises OverflowError for an int beyond float64.
    return isinstance(value, Real) and not isinstance(value, bool) and value < math.inf and not value <= -math.inf


def _fits_float32(value: object) -> TypeGuard[float]:
    """Return whether it is a number of which the kernels, which compute in float32, do not make an infinity."""
    return is_number(value) and abs(value) <= torch.finfo(torch.float32).max


def is_share(value: object) -> bool:
    """Return whether it is a number in [0, 1)."""
    return is_number(value) and 0.0 <= value < 1.0


def _shown(value: object) -> str:
    too_large = is_number(value) and not _fits_float32(value)
    return f"{value!r}{', which is infinite in float32' * too_large}"


OF_GROUPS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "betas": (
        lambda v: isinstance(v, (tuple, list)) and len(v) == 2 and all(map(is_share, v)),
        "two numbers in [0, 1)",
    ),
    "maximize": (lambda v: isinstance(v, bool), "True or False"),
    **dict.fromkeys(("momentum", "beta3", "r_threshold"), (is_share, "a number in [0, 1)")),
    **dict.fromkeys(("eps", "weight_decay"), (lambda v: _fits_float32(v) and v >= 0, "a finite number >= 0")),
    **dict.fromkeys(("c_min", "r_min"), (lambda v: is_number(v) and v >= 0, "a finite number >= 0")),
    **dict.fromkeys(("c_max", "r_max", "global_ratio"), (lambda v: is_number(v) and v > 0, "a finite number > 0")),
}
"""What hyper-parameters of a group must be, but for ``lr``, of any optimizer of ours."""

_STILL = dict.fromkeys(
    (Coef.ONE_MINUS_BETA2, Coef.STEP_SIZE, Coef.LR, Coef.UNBIAS1, Coef.WEIGHT_DECAY, Coef.GLOBAL_RATIO), 0.0
)
"""With these, and 1 in all other columns, a gradient of 0 changes neither moments nor parameters, to the bit.

eps is 1, so that no moment is divided by 0.
"""


class CoefficientTable:
    """The per-tensor table of ``Coef`` columns, computed on the device without a host sync.

    ``group_of`` is the index of each tensor's group; ``columns`` are further ones, with the hyper-parameters of a group
    that go into them. Without ``bias_correction`` both corrections are 1.
    """

    def __init__(
        self,
        group_of: Sequence[int],
        device: torch.device,
        bias_correction: bool,
        columns: Mapping[Coef, str],
        capturable: bool = False,
    ) -> None:
        self.device = device
        self._reads_lr = not capturable
        self.bias_correction = bias_correction
        self.columns = dict(columns)
        self._group_of = torch.tensor(group_of, dtype=torch.int64, device=device)
        # Of each group the decay with which its variance was made, once that is done; None: betas[1]. The correction of
        # a frozen variance must not follow betas[1] any further.
        self.variance_betas: list[float] | None = None
        self._uploaded: list[tuple[float, ...]] = []
        self._rows = torch.empty(0)
        self._still = torch.tensor([_STILL.get(column, 1.0) for column in Coef], device=device)
        self.tag = 0

    def __call__(
        self,
        groups: Sequence[dict[str, Any]],
        steps: Tensor,
        variance_steps: Tensor | None = None,
        unit: Tensor | None = None,
    ) -> Tensor:
        """Compute the table for the update that follows: float32 [tensors, len(Coef)].

        Args:
            groups: ``param_groups``; lr may be a tensor, and is then read on the device.
            steps: float64 [tensors], updates of each done.
            variance_steps: float64 [tensors], updates that entered its variance, or None: steps + 1.
            unit: float32 [tensors], or None: 1.
        """
        rows = self._upload(groups)[self._group_of]
        lr, beta1, beta2, gain, eps, decay, sign, variance_beta2, *further = rows.unbind(1)
        one = torch.ones_like(lr)
        bias1 = bias2 = one
        if self.bias_correction:
            t = steps + 1
            bias1 = 1 - beta1**t
            bias2 = 1 - variance_beta2 ** (t if variance_steps is None else variance_steps.clamp(min=1))
        columns = {
            Coef.BETA1: beta1,
            Coef.ONE_MINUS_BETA1: gain * sign,
            Coef.BETA2: beta2,
            Coef.ONE_MINUS_BETA2: 1 - beta2,
            Coef.STEP_SIZE: lr / bias1,
            Coef.DECAY: 1 - lr * decay,
            Coef.RSQRT_BIAS2: bias2.rsqrt(),
            Coef.EPS: eps,
            Coef.LR: lr,
            Coef.UNBIAS1: 1 / bias1,
            Coef.WEIGHT_DECAY: decay,
            Coef.GRAD_LIMIT: torch.full_like(one, LARGEST_GRADIENT),
        } | dict(zip(self.columns, further, strict=True))
        table = torch.stack([columns.get(column, one) for column in Coef], dim=1)
        table = table.to(torch.float32)
        if unit is not None:
            table[:, Coef.UNIT] = unit
        return table

    def still(self, coef: Tensor, absent: Tensor | None) -> Tensor:
        """Return the table with coefficients that leave the ``absent`` tensors, bool [tensors], as they are."""
        return coef if absent is None else torch.where(absent[:, None], self._still, coef)

    def _upload(self, groups: Sequence[dict[str, Any]]) -> Tensor:
        values = [
            (
                self._host_value(group["lr"]),
                *map(float, _betas(group)),
                # SGD's momentum takes all of the gradient.
                1.0 if "momentum" in group else 1.0 - float(group["betas"][0]),
                float(group.get("eps", 0.0)),
                float(group.get("weight_decay", 0.0)),
                -1.0 if group["maximize"] else 1.0,
                float(_betas(group)[1]) if self.variance_betas is None else self.variance_betas[i],
                *(float(group[name]) for name in self.columns.values()),
            )
            for i, group in enumerate(groups)
        ]
        if values != self._uploaded:
            if capturing(self.device):
                raise RuntimeError(
                    "hyper-parameters that have changed can't be uploaded while a CUDA graph is captured: take one "
                    "uncaptured step with them first, or change only a tensor lr, in place"
                )
            self._rows = upload(values, torch.float64, self.device)
            self._uploaded = values
            self.tag = zlib.crc32(repr(values).encode()) & 0x7FFFFFFF
        for index, group in enumerate(groups):
            if isinstance(group["lr"], Tensor):
                self._rows[index, _LR] = group["lr"].to(self.device, non_blocking=True).reshape(())
        return self._rows

    def freeze_variance(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take note that the variance is done: its correction stays what it is with these groups."""
        self.variance_betas = [float(_betas(group)[1]) for group in groups]

    def _host_value(self, lr: float | Tensor) -> float:
        # A device tensor is not read here: that would wait for the device.
        on_device = isinstance(lr, Tensor) and (lr.device.type != "cpu" or not self._reads_lr)
        return 0.0 if on_device else float(lr)


def stated(value: object) -> str:
    """Return what ranks compare, and checkpoints keep, of a policy: its ``repr``, unless that tells its address."""
    own = type(value).__repr__ is not object.__repr__
    return repr(value) if own else f"{type(value).__module__}.{type(value).__qualname__}"
