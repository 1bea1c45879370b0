"""Coming from DeepSpeed: its configs (``fusedonebit migrate``) and its checkpoints (``load_deepspeed``)."""

from __future__ import annotations

from .checkpoints import Taken, load_deepspeed

__all__ = ["Taken", "load_deepspeed"]
