"""torch's own learning-rate schedules in a DeepSpeed config: those whose arguments are numbers, flags and words."""

from __future__ import annotations

from typing import Any

import torch

from .config import Config, InputError, literal

PARAMS = "scheduler.params."

_CYCLE = {"cycle_momentum": "flag", "base_momentum": "number in [0, 1)", "max_momentum": "number in [0, 1)"}

ARGUMENTS: dict[str, dict[str, str | tuple[str, ...]]] = {
    "StepLR": {"step_size": "whole >= 1", "gamma": "number >= 0"},
    "MultiStepLR": {"milestones": "wholes", "gamma": "number >= 0"},
    "ConstantLR": {"factor": "number in [0, 1]", "total_iters": "whole >= 0"},
    "LinearLR": {"start_factor": "number in [0, 1]", "end_factor": "number in [0, 1]", "total_iters": "whole >= 1"},
    "ExponentialLR": {"gamma": "number >= 0"},
    "PolynomialLR": {"total_iters": "whole >= 1", "power": "number >= 0"},
    "CosineAnnealingLR": {"T_max": "whole >= 1", "eta_min": "number >= 0"},
    "CosineAnnealingWarmRestarts": {"T_0": "whole >= 1", "T_mult": "whole >= 1", "eta_min": "number >= 0"},
    "CyclicLR": {
        "base_lr": "number >= 0",
        "max_lr": "number > 0",
        "step_size_up": "whole >= 1",
        "step_size_down": "whole >= 1",
        "mode": ("triangular", "triangular2", "exp_range"),
        "gamma": "number >= 0",
        "scale_mode": ("cycle", "iterations"),
        **_CYCLE,
    },
    "OneCycleLR": {
        "max_lr": "number > 0",
        "total_steps": "whole >= 1",
        "epochs": "whole >= 1",
        "steps_per_epoch": "whole >= 1",
        "pct_start": "number in [0, 1]",
        "anneal_strategy": ("cos", "linear"),
        "div_factor": "number > 0",
        "final_div_factor": "number > 0",
        "three_phase": "flag",
        **_CYCLE,
    },
}
"""Of each schedule its arguments: a key of ``config.KINDS``, or the words that it may be."""


def translate(config: Config, name: str) -> list[str]:
    """The line that makes ``scheduler``; keys that are no arguments are left out, and so unknown.

    Raises:
        InputError: for a value that does not fit, alone or beside the others.
    """
    config.carried("scheduler.type", f"torch's own {name}")
    config.explained(PARAMS + "last_epoch", "a schedule begins at its begin; load_deepspeed() says where one stood")
    config.explained(PARAMS + "verbose", "nothing: torch's schedules print no more")
    given, sources = {}, ["optimizer"]
    for key, kind in ARGUMENTS[name].items():
        path = PARAMS + key
        value = config.value(path, "text" if isinstance(kind, tuple) else kind)
        if value is None:
            config.explained(path, "null: left to torch's default")
            continue
        if isinstance(kind, tuple) and value not in kind:
            raise config.error(path, f"one of {', '.join(kind)}", value)
        given[key] = value
        sources.append(f"{key}={_source(value, kind)}")
        config.carried(path, f"{name}({key}=)")
    _try(config, name, given)
    return [f"scheduler = torch.optim.lr_scheduler.{name}({', '.join(sources)})"]


def _source(value: Any, kind: str | tuple[str, ...]) -> str:
    return repr(kind[kind.index(value)]) if isinstance(kind, tuple) else literal(value)


def _try(config: Config, name: str, given: dict[str, Any]) -> None:
    """Constructs the schedule: what torch refuses is told now, and not by the script."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3, momentum=0.9)
    try:
        getattr(torch.optim.lr_scheduler, name)(optimizer, **given)
    except (ArithmeticError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0].replace("__init__()", "")
        raise InputError(f"{config.name}: scheduler.params must be what torch's {name} takes: {reason}") from error
