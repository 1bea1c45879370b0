"""torch's AdamW on gradients averaged in one all-reduce: what compression is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..comm import Transport, make_transport


class AveragedAdamW(torch.optim.AdamW):
    """torch's AdamW after one float32 all-reduce of all gradients; ``options`` are its own."""

    def __init__(self, params: Any, lr: float, transport: Transport | None = None, **options: Any) -> None:
        super().__init__(params, lr, **options)
        self.transport = transport or make_transport(None, self.param_groups[0]["params"][0].device)
        self._updates = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over the ranks, then update."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._updates += 1
        self.transport.traffic.start_step()
        if self.transport.world_size > 1:
            flat = torch.cat([g.reshape(-1) for g in grads])
            self.transport.all_reduce(flat)
            parts = flat.div_(self.transport.world_size).split([g.numel() for g in grads])
            torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)])
        return super().step(closure)

    def stats(self) -> dict[str, Any]:
        """Return the keys of ``OneBitAdam.stats`` that a record needs."""
        sent, told = self.transport.traffic, {"phase": "uncompressed", "skipped_steps": 0, "freeze_step": None}
        told |= {"step": self._updates, "bytes_step": sent.bytes_step, "bytes_fp32": sent.bytes_step}
        return told | {"bytes_total": sent.bytes_total, "collectives_step": sent.collectives_step}
