"""The optimizers that ``fusedonebit train`` knows by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .. import OneBitAdam
from ..comm import make_transport

BETAS = (0.9, 0.99)
EPS = 1e-8
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Settings:
    """What all optimizers of a run share."""

    lr: float
    freeze_step: int | Literal["auto"]
    lr_warmup_steps: int


class AveragedAdamW(torch.optim.AdamW):
    """The baseline: torch's fused AdamW after one fp32 all-reduce of all gradients."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        params = list(params)
        super().__init__(params, lr, BETAS, EPS, WEIGHT_DECAY, fused=True)
        self._transport = make_transport(None, params[0].device)
        self._updates = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages the gradients over the ranks, then updates."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._transport.traffic.start_step()
        if self._transport.world_size > 1:
            flat = torch.cat([g.reshape(-1) for g in grads])
            self._transport.all_reduce(flat)
            parts = flat.div_(self._transport.world_size).split([g.numel() for g in grads])
            torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)])
        self._updates += 1
        return super().step(closure)

    def stats(self) -> dict[str, Any]:
        """The keys of ``OneBitAdam.stats`` that the display needs."""
        traffic = self._transport.traffic
        return {
            "phase": "uncompressed",
            "step": self._updates,
            "skipped_steps": 0,
            "freeze_step": None,
            "bytes_step": traffic.bytes_step,
            "bytes_total": traffic.bytes_total,
            "collectives_step": traffic.collectives_step,
        }


def _adamw(params: Iterable[Tensor], settings: Settings) -> torch.optim.Optimizer:
    return AveragedAdamW(params, settings.lr)


def _onebit_adam(params: Iterable[Tensor], settings: Settings) -> torch.optim.Optimizer:
    return OneBitAdam(
        params,
        settings.lr,
        BETAS,
        EPS,
        WEIGHT_DECAY,
        freeze_step=settings.freeze_step,
        lr_warmup_steps=settings.lr_warmup_steps,
    )


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor], Settings], Any]] = {
    "adamw": _adamw,
    "onebit-adam": _onebit_adam,
}
"""By name; each takes parameters and ``Settings`` and returns an optimizer with ``stats()``."""
