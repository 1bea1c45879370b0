"""Coming from DeepSpeed: its configs (``fusedonebit migrate``), its schedules and its checkpoints."""

from __future__ import annotations

from .checkpoints import Taken, load_deepspeed
from .schedules import schedule

__all__ = ["Taken", "load_deepspeed", "schedule"]
