"""Whether gradients arrive averaged already, seen at the first compressed step."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import warn
from .telemetry import HostMirror


class FirstLook:
    """Warns once if all ranks have the same gradients where each should have its own.

    DistributedDataParallel leaves no mark on parameters. But the first compressed momenta differ between
    ranks by nothing but their gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._mirror = HostMirror(device, depth=1 if device.type == "cuda" else 0)

    def over(self, alike: Tensor) -> bool:
        """Takes ``CompressedAllReduce.looks_alike()`` of a step; whether enough has been seen."""
        seen = [int(x) for x in self._mirror.push(alike) if x >= 0]
        if any(seen):
            warn(
                "all ranks had the same gradients at the first compressed step: something has averaged them "
                "already, so that compression saves nothing, or all ranks see the same data. With "
                "DistributedDataParallel write fusedonebit.ddp.attach(model, optimizer) after making both"
            )
        return bool(seen)
