"""Gradients averaged in one all-reduce, for torch's own optimizers: what compression is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..comm import Transport


class Averaged(torch.optim.Optimizer):
    """Goes before one of torch's optimizers in the bases of a class, which sets ``transport``."""

    transport: Transport

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over the ranks, then update."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.transport.traffic.start_step()
        if self.transport.world_size > 1:
            flat = torch.cat([g.reshape(-1) for g in grads])
            self.transport.all_reduce(flat)
            parts = flat.div_(self.transport.world_size).split([g.numel() for g in grads])
            torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)])
        return super().step(closure)
