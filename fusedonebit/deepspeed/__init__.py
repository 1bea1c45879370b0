"""Coming from DeepSpeed: its optimizers' configs and numerics, its schedules and its checkpoints.

``fusedonebit migrate`` prints what becomes of a whole config. Nothing here imports DeepSpeed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints import Taken, load_deepspeed
    from .config import from_config
    from .intervals import DeepSpeedRounds, DeepSpeedVariance
    from .schedules import schedule

__all__ = ["DeepSpeedRounds", "DeepSpeedVariance", "Taken", "from_config", "load_deepspeed", "schedule"]

_HOMES = {"DeepSpeedRounds": "intervals", "DeepSpeedVariance": "intervals", "Taken": "checkpoints"}
_HOMES |= {"from_config": "config", "load_deepspeed": "checkpoints", "schedule": "schedules"}


def __getattr__(name: str) -> Any:
    """Import what is asked for: the command's help needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
