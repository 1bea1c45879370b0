"""DeepSpeed's learning-rate schedules, with the same rate in every step, and torch's that it knows by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler

Rate = Callable[[int, float], float]
"""The learning rate after so many updates, of a group whose own is the second argument."""


def schedule(optimizer: torch.optim.Optimizer, block: Mapping[str, Any]) -> lr_scheduler.LRScheduler:
    """Make the schedule of a DeepSpeed config's ``"scheduler"`` block.

    Call its ``step`` after each ``optimizer.step()``; DeepSpeed's waits where the loss scale has overflowed.

    Args:
        optimizer: Its learning rates become those of the schedule, where that has its own (``warmup_max_lr``).
        block: ``{"type": ..., "params": {...}}``: one of DeepSpeed's five schedules, or one of torch's whose
            arguments are plain values. A cycle's momentum stays as it is.

    Raises:
        ValueError: for another schedule, or for what it does not take.
    """
    kind, given = block.get("type"), dict(block.get("params") or {})
    if kind in TORCHS:
        try:
            made: lr_scheduler.LRScheduler = getattr(lr_scheduler, kind)(optimizer, **given)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = [*str(error).replace("__init__()", "").splitlines(), type(error).__name__][0]
            raise ValueError(f"params must be what torch's {kind} takes: {reason}") from error
        return made
    if not isinstance(kind, str) or kind not in RULES:
        raise ValueError(f"type must be one of {', '.join(RULES)}, or of torch's {', '.join(TORCHS)}, got {kind!r}")
    given.pop("last_batch_iteration", None)
    _check(RULES[kind], given)
    own, rate = RULES[kind](**given)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] if own is None else own
        if not group["lr"] > 0:
            raise ValueError(f"the schedule's learning rate must be > 0, got {group['lr']!r}")
        group.pop("initial_lr", None)
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    return lr_scheduler.LambdaLR(optimizer, [partial(_share, rate, peak) for peak in peaks])


def _share(rate: Rate, peak: float, update: int) -> float:
    return rate(update, peak) / peak


def parameters(kind: str) -> list[str]:
    """Name what may stand in the ``params`` of a schedule."""
    known = list(inspect.signature(RULES[kind] if kind in RULES else getattr(lr_scheduler, kind)).parameters)
    return known if kind in RULES else [name for name in known if name not in ("optimizer", "last_epoch")]


def rising_steps(block: Mapping[str, Any]) -> int | None:
    """Return for how many steps the rate of a valid block rises at first; None where it doesn't, or nobody can tell."""
    kind, params = block.get("type"), block.get("params") or {}
    if kind == "OneCycleLR":
        total = params.get("total_steps") or params.get("epochs", 0) * params.get("steps_per_epoch", 0)
        rising: float = params.get("pct_start", 0.3) * total
        return round(rising)
    name = RISES.get(str(kind))
    if name is None:
        return None
    rule = RULES.get(str(kind), getattr(lr_scheduler, str(kind), None))
    steps = params.get(name, inspect.signature(rule).parameters[name].default)  # type: ignore[arg-type]
    return steps if type(steps) is int and steps > 0 else None


def _check(rule: Callable[..., Any], given: Mapping[str, Any]) -> None:
    known = inspect.signature(rule).parameters
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"params must be of {', '.join(known)}, got {key!r}")
        expected, fits = KINDS[known[key].annotation.removesuffix(" | None")]
        if not fits(value):
            raise ValueError(f"{key} must be {expected}, got {value!r}")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in given:
            raise ValueError(f"{key} must be {KINDS[parameter.annotation][0]}, but there is none")


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("a string", lambda value: isinstance(value, str)),
    "int": ("a whole number >= 0", lambda value: type(value) is int and 0 <= value <= 10**15),
    "float": ("a finite number", lambda value: type(value) in (int, float) and abs(value) <= 10**15),
}
"""By the annotations below."""


# ---------------------------------------------------------------- DeepSpeed's five
# They set the first rate when they are constructed, and that of n - 1 in their n-th step.


def _rise(steps: int, kind: str) -> tuple[int, Callable[[int], float]]:
    """Make the share of the way up, and the steps that it takes: at least 2. An unknown kind is "log", as there."""
    least = max(2, steps)
    if kind == "linear":
        return least, lambda step: step / least
    return least, lambda step: math.log(step + 1) / math.log(least)


def _between(low: float, steps: int, kind: str, total: int | None) -> Rate:
    """Rise from ``low`` to the group's own rate; stay there, or fall in a line to 0 at ``total``."""
    steps, rise = _rise(steps, kind)

    def rate(update: int, peak: float) -> float:
        step = max(update - 1, 0)
        share = 1.0 if total is None else max(0.0, (total - step) / max(1, total - steps))
        return low + (peak - low) * (rise(step) if step < steps else share)

    return rate


def warmup_lr(
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> tuple[float | None, Rate]:
    """Rise between two rates, then stay."""
    return warmup_max_lr, _between(warmup_min_lr, warmup_num_steps, warmup_type, None)


def warmup_decay_lr(
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> tuple[float | None, Rate]:
    """Rise between two rates, then fall in a line to 0."""
    return warmup_max_lr, _between(warmup_min_lr, warmup_num_steps, warmup_type, total_num_steps)


def warmup_cosine_lr(
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> tuple[float | None, Rate]:
    """Rise to the optimizer's own rate, then fall along a cosine."""
    steps, rise = _rise(warmup_num_steps, warmup_type)

    def rate(update: int, peak: float) -> float:
        step = update - 1
        if step < 0:
            return 0.0
        if step < steps:
            return peak * (warmup_min_ratio + (1 - warmup_min_ratio) * rise(step))
        progress = min(1.0, (step - steps + 1) / max(1, total_num_steps - steps))
        return peak * (cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)

    return None, rate


def lr_range_test(
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> tuple[float | None, Rate]:
    """Rise for ever."""

    def rate(update: int, peak: float) -> float:
        share = update / max(1, lr_range_test_step_size)
        return peak * (1 + lr_range_test_step_rate * (math.floor(share) if lr_range_test_staircase else share))

    return lr_range_test_min_lr, rate


def one_cycle(
    cycle_min_lr: float,
    cycle_max_lr: float,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    decay_lr_rate: float = 0.0,
    decay_step_size: int = 0,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
) -> tuple[float | None, Rate]:
    """Rise and fall again, then decay."""
    first = cycle_first_step_size
    second = first if cycle_second_step_size is None else cycle_second_step_size
    stairs = cycle_first_stair_count
    falling = stairs if cycle_second_stair_count is None else cycle_second_stair_count

    def rate(update: int, peak: float) -> float:
        beyond = update - first - second
        if beyond >= 0:
            return peak / (1 + decay_lr_rate * beyond / decay_step_size) if decay_step_size else peak
        share, steps = (update / max(first, 1), stairs) if update <= first else (-beyond / max(second, 1), falling)
        share = math.floor(share * steps) / steps if steps else share
        return peak + (cycle_max_lr - peak) * share

    return cycle_min_lr, rate


RULES: dict[str, Callable[..., tuple[float | None, Rate]]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "LRRangeTest": lr_range_test,
    "OneCycle": one_cycle,
}

RISES = dict.fromkeys(("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"), "warmup_num_steps")
RISES |= {"OneCycle": "cycle_first_step_size", "LinearLR": "total_iters", "CyclicLR": "step_size_up"}
"""Which argument says for how long the rate rises at first."""

TORCHS = (
    *("StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR"),
    *("CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR"),
)
"""Those of torch whose arguments are plain values."""
