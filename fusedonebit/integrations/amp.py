"""Loss scaling on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.optimizer import frame_of


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose loss scale is the same on all ranks.

    Local gradients overflow on one rank and not on another. All of this package's optimizers then skip
    the step together, but torch's own scaler lowers the scale only where the overflow was; this one is
    told what the optimizer has agreed on. It costs no collective of its own. Arguments, methods and
    checkpoints are torch's. With several optimizers at one scaler, each of ours agrees for itself.

    Example::

        scaler = fusedonebit.amp.GradScaler("cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See ``torch.amp.GradScaler.step``; every rank must call it."""
        frame = frame_of(optimizer)
        if not self.is_enabled() or frame is None:
            return super().step(optimizer, *args, **kwargs)
        frame.steps.outcomes.scaler_is_told = True
        result = super().step(optimizer, *args, **kwargs)
        for found_inf in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found_inf.copy_(frame.scaling.overflowed[0])
        return result

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # A rank whose parameters have no gradient takes part as well; torch's own update() would refuse to.
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16) or {found_inf.device: found_inf}
