"""Coming from DeepSpeed: its optimizers' configs and numerics, its schedules and its checkpoints.

``fusedonebit migrate`` prints what becomes of a whole config. Nothing here imports DeepSpeed.
"""

from __future__ import annotations

from .checkpoints import Taken, load_deepspeed
from .config import from_config
from .intervals import DeepSpeedRounds, DeepSpeedVariance
from .schedules import schedule

__all__ = ["DeepSpeedRounds", "DeepSpeedVariance", "Taken", "from_config", "load_deepspeed", "schedule"]
