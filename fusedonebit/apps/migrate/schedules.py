"""DeepSpeed's learning-rate schedules as torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import torch_schedules
from .config import Config
from .optimizers import Call

PARAMS = "scheduler.params."

# DeepSpeed's schedulers set the first rate when they are constructed, and number n - 1 in their n-th step.
RISE = {
    "log": "math.log(step + 1) / math.log({warmup})",
    "linear": "step / {warmup}",
}


@dataclass
class Schedule:
    """Lines that make ``scheduler``, after the optimizer's, and what they need imported."""

    lines: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)


def translate(config: Config, call: Call) -> Schedule | None:
    """The scheduler of the config, None if it has none; may set the optimizer's learning rate.

    Raises:
        InputError: for another scheduler than those of the two tables, or a bad value.
    """
    if config.values.get("scheduler") is None:
        config.explained("scheduler", "nothing to do: there is none")
        return None
    config.block("scheduler")
    config.block("scheduler.params")
    name: Any = config.value("scheduler.type", "text")
    if name in torch_schedules.ARGUMENTS:
        return Schedule(torch_schedules.translate(config, name))
    if name not in SCHEDULES:
        torchs = f"or of torch.optim.lr_scheduler {', '.join(torch_schedules.ARGUMENTS)}"
        raise config.error("scheduler.type", f"one of {', '.join(SCHEDULES)}, {torchs}", name)
    config.carried("scheduler.type", "torch's LambdaLR, with the same learning rate in every step")
    config.explained(PARAMS + "last_batch_iteration", "load_deepspeed() says where a schedule stood")
    return SCHEDULES[name](config, call)


def _lambda(function: list[str], comment: str) -> Schedule:
    return Schedule(
        [
            "",
            "",
            "def rate(update):",
            f"    # {comment}",
            *(f"    {line}" for line in function),
            "",
            "",
            "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)",
        ],
        ["import math"] if any("math." in line for line in function) else [],
    )


def _take_rate(config: Config, call: Call, source: str, key: str) -> None:
    """The schedule's own rate goes before the optimizer's."""
    given = call.arguments["lr"]
    if given != source:
        call.arguments["lr"] = source
        call.comments["lr"] = f"{key} of the schedule, which replaces params.lr ({given})"
        config.explained("optimizer.params.lr", f"{key} of the schedule replaces it, as in DeepSpeed", again=True)


def _rise(config: Config) -> tuple[str, str]:
    """Over how many updates it rises, and the share that it has reached at ``step``, as source."""
    steps = config.source(PARAMS + "warmup_num_steps", "whole >= 0", 1000)
    kind = config.value(PARAMS + "warmup_type", "text", "log")
    for key in ("warmup_num_steps", "warmup_type"):
        config.carried(PARAMS + key, "in rate()")
    steps = str(max(2, int(steps))) if steps.isdigit() else f"max(2, {steps})"  # as in DeepSpeed
    return steps, RISE.get(kind, RISE["log"]).format(warmup=steps)  # of another type DeepSpeed warns


def _total(config: Config) -> str:
    if config.value(PARAMS + "total_num_steps", "whole >= 1") is None:
        raise config.error(PARAMS + "total_num_steps", "a whole number >= 1", None)
    config.carried(PARAMS + "total_num_steps", "in rate()")
    return config.source(PARAMS + "total_num_steps", "whole >= 1")


def _between(config: Config, call: Call, after: str, comment: str, high: float | None) -> Schedule:
    """Rises between two learning rates; what the share is ``after`` that, as source."""
    steps, rise = _rise(config)
    low = config.source(PARAMS + "warmup_min_lr", "number >= 0", 0.0)
    if config.has(PARAMS + "warmup_max_lr") or high is not None:
        _take_rate(config, call, config.source(PARAMS + "warmup_max_lr", "number > 0", high), "warmup_max_lr")
    config.carried(PARAMS + "warmup_min_lr", "in rate()")
    config.carried(PARAMS + "warmup_max_lr", f"{call.name}(lr=)")
    lines = ["step = max(update - 1, 0)", f"share = {rise} if step < {steps} else {after.format(warmup=steps)}"]
    least = f"{low} / {call.arguments['lr']}"
    zero = low in ("0", "0.0")
    return _lambda([*lines, "return share" if zero else f"return {least} + (1 - {least}) * share"], comment)


def _warmup_lr(config: Config, call: Call) -> Schedule:
    return _between(config, call, "1.0", "WarmupLR: rises, then stays", None)


def _warmup_decay_lr(config: Config, call: Call) -> Schedule:
    total = _total(config)
    fall = f"max(0.0, ({total} - step) / max(1, {total} - {{warmup}}))"
    return _between(config, call, fall, "WarmupDecayLR: rises, then falls in a line to 0", 0.001)


def _warmup_cosine_lr(config: Config, call: Call) -> Schedule:
    total = _total(config)
    steps, rise = _rise(config)
    low = config.source(PARAMS + "warmup_min_ratio", "number >= 0", 0.0)
    least = config.source(PARAMS + "cos_min_ratio", "number >= 0", 0.0001)
    for key in ("warmup_min_ratio", "cos_min_ratio"):
        config.carried(PARAMS + key, "in rate()")
    lines = [
        "step = update - 1",
        "if step < 0:",
        "    return 0.0",
        f"if step < {steps}:",
        f"    return {low} + (1 - {low}) * {rise}",
        f"progress = min(1.0, (step - {steps} + 1) / max(1, {total} - {steps}))",
        f"return {least} + (1 - {least}) * (1 + math.cos(math.pi * progress)) / 2",
    ]
    return _lambda(lines, "WarmupCosineLR: rises, then falls along a cosine")


def _range_test(config: Config, call: Call) -> Schedule:
    low = config.source(PARAMS + "lr_range_test_min_lr", "number > 0", 1e-3)
    size = config.source(PARAMS + "lr_range_test_step_size", "whole >= 1", 2000)
    rate = config.source(PARAMS + "lr_range_test_step_rate", "number", 1.0)
    stairs = config.value(PARAMS + "lr_range_test_staircase", "flag", False)
    for key in ("step_size", "step_rate", "staircase"):
        config.carried(f"{PARAMS}lr_range_test_{key}", "in rate()")
    config.carried(f"{PARAMS}lr_range_test_min_lr", f"{call.name}(lr=)")
    _take_rate(config, call, low, "lr_range_test_min_lr")
    share = f"update // {size}" if stairs else f"update / {size}"
    return _lambda([f"return 1 + {rate} * ({share})"], "LRRangeTest: rises for ever")


MOMENTUM = ("cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate")


def _one_cycle(config: Config, call: Call) -> Schedule:
    low = config.value(PARAMS + "cycle_min_lr", "number > 0")
    high = config.value(PARAMS + "cycle_max_lr", "number > 0")
    for key, value in (("cycle_min_lr", low), ("cycle_max_lr", high)):
        if value is None:
            raise config.error(PARAMS + key, "a number > 0", None)
    first = config.value(PARAMS + "cycle_first_step_size", "whole >= 1", 2000)
    second = config.value(PARAMS + "cycle_second_step_size", "whole >= 0", first)
    decay = config.value(PARAMS + "decay_lr_rate", "number >= 0", 0.0)
    every = config.value(PARAMS + "decay_step_size", "whole >= 0", 0)
    stairs = config.value(PARAMS + "cycle_first_stair_count", "whole >= 0", 0)
    falling = config.value(PARAMS + "cycle_second_stair_count", "whole >= 0", stairs)
    for key in ("cycle_max_lr", "cycle_first_step_size", "cycle_second_step_size", "decay_lr_rate", "decay_step_size"):
        config.carried(PARAMS + key, "in rate()")
    for key in ("cycle_first_stair_count", "cycle_second_stair_count"):
        config.carried(PARAMS + key, "in rate()")
    config.carried(PARAMS + "cycle_min_lr", f"{call.name}(lr=)")
    for key in MOMENTUM:
        config.explained(
            PARAMS + key, "only the learning rate goes in a cycle; betas stay, as the frozen variance does"
        )
    _take_rate(config, call, repr(low), "cycle_min_lr")
    rise, fall = f"update / {first}", f"({first + second} - update) / {max(second, 1)}"
    rise = f"math.floor({rise} * {stairs}) / {stairs}" if stairs else rise
    fall = f"math.floor({fall} * {falling}) / {falling}" if falling else fall
    end = f"1 / (1 + {decay} * (update - {first + second}) / {every})" if decay and every else "1.0"
    lines = [
        f"if update < {first + second}:",
        f"    share = {rise} if update <= {first} else {fall}",
        f"    return 1 + ({high} / {low} - 1) * share",
        f"return {end}",
    ]
    return _lambda(lines, "OneCycle: up and down again, then decays; DeepSpeed's betas went in a cycle, too")


SCHEDULES: dict[str, Callable[[Config, Call], Schedule]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "LRRangeTest": _range_test,
    "OneCycle": _one_cycle,
}
