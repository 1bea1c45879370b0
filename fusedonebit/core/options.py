"""Checks hyper-parameters, and turns those of the groups into the table that kernels read."""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..comm import Flag
from ..triton_kernels import LARGEST_GRADIENT, Coef, advance
from ..triton_kernels.nouns import NOT_COUNTED, Coefficients, Count
from ..triton_kernels.tables import capturing
from .telemetry import upload, upload_into


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


def averaged(group: Mapping[str, Any]) -> bool:
    """Tell whether a group of an optimizer that compresses others trains by AdamW, on exact averages."""
    return group.get("algorithm") == "adamw"


def _accumulates(group: Mapping[str, Any]) -> bool:
    """Tell whether what a group keeps takes all of a gradient: as SGD's momentum, and the residuals of matrices."""
    return "momentum" in group and not averaged(group)


def _betas(group: Mapping[str, Any]) -> tuple[float, float]:
    return (group["momentum"], 0.0) if _accumulates(group) else group["betas"]


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
    "algorithm": (lambda v: v in ("muon", "adamw"), "'muon' or 'adamw'"),
    "stacks": (lambda v: is_int(v) and v >= 1, "an int >= 1"),
    **dict.fromkeys(("momentum", "beta3", "r_threshold"), (is_share, "a number in [0, 1)")),
    **dict.fromkeys(("eps", "weight_decay"), (lambda v: _fits_float32(v) and v >= 0, "a finite number >= 0")),
    **dict.fromkeys(("c_min", "r_min"), (lambda v: is_number(v) and v >= 0, "a finite number >= 0")),
    **dict.fromkeys(("r_max", "global_ratio"), (lambda v: is_number(v) and v > 0, "a finite number > 0")),
    "c_max": (lambda v: is_number(v) and v >= 1e-30, "a finite number >= 1e-30"),
}
"""What hyper-parameters of a group must be, but for ``lr``, of any optimizer of ours."""

_STILL = dict.fromkeys(
    (Coef.ONE_MINUS_BETA2, Coef.STEP_SIZE, Coef.LR, Coef.UNBIAS1, Coef.WEIGHT_DECAY, Coef.GLOBAL_RATIO), 0.0
)
"""With these, and 1 in all other columns, a gradient of 0 changes neither moments nor parameters, to the bit.

eps is 1, so that no moment is divided by 0.
"""


_NO_ROUND = (None, False, 1)


class Made(NamedTuple):
    """Inputs of a coefficient table, besides the groups' hyper-parameters."""

    steps: Tensor
    """Updates of each tensor done: float64 [tensors]."""
    entered: Tensor | None = None
    """Updates that have entered its variance, infinite where that is corrected: float64 [tensors]; None: all."""
    renews: bool = True
    """Whether the coming update enters the variance; else its correction follows ``variance_betas``."""
    unit: Tensor | None = None
    """Float32 [tensors], or None: 1."""
    mean_sq: Tensor | None = None
    """The mean of v, of which denominators get a share: float64 [tensors], or None."""
    rho: Tensor | None = None
    """What v is multiplied with in denominators: float32 [tensors], or None."""

    def versions(self) -> tuple[object, ...]:
        """Return what changes when somebody writes into one of the tensors."""
        # Tensors made in inference mode have no version: they count as changed.
        return tuple((object() if x.is_inference() else x._version) if isinstance(x, Tensor) else x for x in self)

    def same(self, other: Made) -> bool:
        """Return whether both are of the same tensors, whatever is in them."""
        return all(map(operator.is_, self, other))


class CoefficientTable:
    """The per-tensor table of ``Coef`` columns: float32 [tensors, len(Coef)], in memory that stays.

    It is made on the device, by the op that ends a step, for the coming one. Only where something has changed in the
    meantime is it made anew, by one launch more; what changes it within a step does so until the step ends. A step
    that ``renews`` the columns which a count or a rate changes, and counts, has launches that do so on the way.

    ``group_of`` is the index of each tensor's group; ``columns`` are further ones, with the hyper-parameters of a group
    that go into them. Without ``bias_correction`` both corrections are 1. ``lr``, float32 [groups], is where learning
    rates are on the device, or None. ``floor`` is the share of the mean of v that is added to it. Where ``linear``,
    ONE_MINUS_BETA2 multiplies gradients, not their squares: it is negative where the objective is maximised.
    """

    def __init__(
        self,
        group_of: Sequence[int],
        device: torch.device,
        bias_correction: bool,
        columns: Mapping[Coef, str],
        lr: Tensor | None = None,
        *,
        floor: float = 0.0,
        linear: bool = False,
    ) -> None:
        self.device = device
        self.bias_correction = bias_correction
        self.columns = dict(columns)
        self.lr, self._floor, self._linear = lr, floor, linear
        self._group_of = torch.tensor(group_of, dtype=torch.int32, device=device)
        # Of each group the decay with which its variance was made, once that is done; None: betas[1]. The correction of
        # a frozen variance must not follow betas[1] any further.
        self.variance_betas: list[float] | None = None
        self.memory: float | None = None  # steps, the most that a variance remembers
        self._uploaded: tuple[Any, ...] = ()
        self._given: tuple[Any, ...] = ()  # of what that was made, where it is of numbers alone
        self._rows = torch.empty(0)
        self._table = torch.empty(len(group_of), len(Coef), device=device)
        self._made: Made | None = None
        self._versions: tuple[object, ...] | None = None
        self.renews = self.counted = self._stale = False
        self._round: tuple[Tensor | None, bool, int] = _NO_ROUND
        self._still = torch.tensor([_STILL.get(column, 1.0) for column in Coef], device=device)
        self.tag = 0

    def __call__(self, groups: Sequence[dict[str, Any]], made: Made) -> Tensor:
        """Return the table for the update that follows; ``groups``, as ``HyperParameters.taken``, nobody fills."""
        rates, others = self._upload(groups, made.renews)
        changed = others or ((rates or self._stale) and not self.renews)
        if changed or self._made is None or not made.same(self._made) or made.versions() != self._versions:
            self._launch(made, self._table)
            self._made, self._versions, self._stale = made, made.versions(), False
        return self._table

    def fresh(self, groups: Sequence[dict[str, Any]], made: Made) -> Tensor:
        """Return the same in new memory, for whoever needs another table within a step."""
        self._upload(groups, made.renews)
        table = torch.empty_like(self._table)
        self._launch(made, table)
        self._versions = None  # what lies on the device may be for this one alone
        return table

    @property
    def last(self) -> Tensor:
        """Return the table as it is now, which is the last step's: nothing is launched."""
        return self._table

    def begin(self, renews: bool) -> None:
        """Take note that a step begins, and whether launches of its own renew the table, and count."""
        self.renews, self.counted, self._round = renews, False, _NO_ROUND

    def add_up(self, moved: Tensor, begins: bool, length: int) -> None:
        """Let this step be added in ``moved``, see ``advance``; where it renews, the table is a round's of ``length``.

        ``begins``: whether it is the round's first.
        """
        self._round = moved, begins, length

    def lend(self) -> None:
        """Take note that the step may write into the table from now on."""
        self._versions = None

    def forget(self) -> None:
        """Make the table anew when it is next asked for: a kernel has changed what it is made of, which nobody sees."""
        self._versions = None

    def renewal(self) -> Coefficients | None:
        """Return the table with what launches on the way renew it by; None where they shall not."""
        if not self.renews:
            return None
        assert self._made is not None
        moved, _, length = self._round
        made = self._made.steps, self._made.mean_sq, self._table
        return Coefficients(self._rows, self.lr, self._group_of, *made, moved, length)

    def count(self, absent: Tensor | None, *counters: Tensor | None) -> tuple[Count, Tensor]:
        """Return what the op ``apply_momentum`` counts the step by, and updates of each tensor, and note that."""
        assert self._made is not None
        self.counted = True
        return self._counting(absent, *counters), self._made.steps

    def advance(self, flags: Tensor, absent: Tensor | None, *counters: Tensor | None) -> None:
        """Count the step that ends, and make the table for one like it; see the op."""
        assert self._made is not None
        self._launch(self._made, self._table, flags, self._counting(absent, *counters), self._round[:2])
        self._stale = self.renews = False
        self.end()

    def end(self) -> None:
        """Take note that a step ends which has counted: the table is that step's, if it was renewed on the way."""
        assert self._made is not None
        self._stale |= self.renews
        self._versions, self.renews = self._made.versions(), False

    def still(self, coef: Tensor, absent: Tensor | None) -> Tensor:
        """Return the table with coefficients that leave the ``absent`` tensors, bool [tensors], as they are."""
        return coef if absent is None else torch.where(absent[:, None], self._still, coef)

    @staticmethod
    def _counting(absent: Tensor | None, *counters: Tensor | None) -> Count:
        updates, number, replays = counters
        absent = None if absent is None else absent.view(torch.uint8)
        return Count(absent, updates, number, replays, int(Flag.VETO), int(Flag.MISMATCH | Flag.ABORT))

    def _launch(
        self,
        made: Made,
        table: Tensor,
        flags: Tensor | None = None,
        count: Count = NOT_COUNTED,
        of_round: tuple[Tensor | None, bool] = _NO_ROUND[:2],
    ) -> None:
        moved, begins = of_round
        coefficients = Coefficients(self._rows, self.lr, self._group_of, made.steps, made.mean_sq, table, moved)
        advance(coefficients, count, flags, made.entered, made.renews, made.unit, begins, made.rho)

    def _upload(self, groups: Sequence[dict[str, Any]], renews: bool) -> tuple[bool, bool]:
        """Bring the groups' rows up to date; return whether learning rates may have changed, and anything else."""
        betas = None if renews else self.variance_betas
        given = *groups, betas, self.memory
        if len(given) == len(self._given) and all(map(operator.is_, given, self._given)):
            return False, False
        self._given = ()
        values = [
            (
                self._host_value(group["lr"]),
                *map(float, _betas(group)),
                1.0 if _accumulates(group) else 1.0 - float(group["betas"][0]),
                float(group.get("eps", 0.0)),
                float(group.get("weight_decay", 0.0)),
                -1.0 if group["maximize"] else 1.0,
                float(_betas(group)[1]) if betas is None else betas[i],
                float(self.bias_correction and not ("betas" in group and _accumulates(group))),
                *(float(group[name]) for name in self.columns.values()),
            )
            for i, group in enumerate(groups)
        ]
        was = self._uploaded
        rates = others = (values, self.memory) != was
        if others:
            others = not was or self.memory != was[1] or [each[1:] for each in values] != [each[1:] for each in was[0]]
            if capturing(self.device):
                raise RuntimeError(
                    "hyper-parameters that have changed can't be uploaded while a CUDA graph is captured: take one "
                    "uncaptured step with them first, or change only a tensor lr, in place"
                )
            rows = [self._row(*each) for each in values]
            if len(rows) == len(self._rows):  # the same memory, which a CUDA graph may read again
                upload_into(self._rows, rows)
            else:
                self._rows = upload(rows, torch.float64, self.device)
            self._uploaded = values, self.memory
            self.tag = zlib.crc32(repr(values).encode()) & 0x7FFFFFFF
        if self.lr is not None:  # what lies there somebody may have written, or a CUDA graph
            return True, others
        if not any(isinstance(group["lr"], Tensor) for group in groups):  # who changes numbers gives other groups
            self._given = given
        for index, group in enumerate(groups):
            if isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu":
                self._rows[index, Coef.LR] = group["lr"].to(self.device, non_blocking=True).reshape(())
                rates = True
        return rates, others

    def _row(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        gain: float,
        eps: float,
        decay: float,
        sign: float,
        variance_beta2: float,
        corrects: float,
        *further: float,
    ) -> list[float]:
        """Return what the tensors of a group have in common: ``Coef``, then ``Group``."""
        least = 0.0 if self.memory is None else 1.0 / self.memory
        row = {
            Coef.BETA1: beta1,
            Coef.ONE_MINUS_BETA1: gain * sign,
            Coef.BETA2: min(beta2, 1.0 - least),
            Coef.ONE_MINUS_BETA2: max(1.0 - beta2, least) * (sign if self._linear else 1.0),
            Coef.EPS: eps,
            Coef.LR: lr,
            Coef.WEIGHT_DECAY: decay,
            Coef.GRAD_LIMIT: LARGEST_GRADIENT,
        } | dict(zip(self.columns, further, strict=True))
        corrections = (beta1, variance_beta2) if corrects else (0.0, 0.0)
        return [row.get(column, 1.0) for column in Coef] + [*corrections, self._floor]

    def freeze_variance(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take note that the variance is done: its correction stays what it is with these groups."""
        self.variance_betas = [float(_betas(group)[1]) for group in groups]

    def _host_value(self, lr: float | Tensor) -> float:
        # A device tensor is not read here: that would wait for the device.
        on_device = isinstance(lr, Tensor) and (lr.device.type != "cpu" or self.lr is not None)
        return 0.0 if on_device else float(lr)


def stated(value: object) -> str:
    """Return what ranks compare, and checkpoints keep, of a policy: its ``repr``, unless that tells its address."""
    own = type(value).__repr__ is not object.__repr__
    return repr(value) if own else f"{type(value).__module__}.{type(value).__qualname__}"
