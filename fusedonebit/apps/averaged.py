"""torch's optimizers on gradients averaged in one all-reduce: what compression is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comm import Transport, make_transport


class Averaged(torch.optim.Optimizer):
    """Optimizers of torch's, each of parameters of its own, after one float32 all-reduce of all gradients.

    Args:
        parts: These; their groups are one behind the other.
        transport: Connects the ranks; None: ``torch.distributed``, where it is initialised.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer], transport: Transport | None = None) -> None:
        self._parts = parts
        defaults = {key: value for part in reversed(parts) for key, value in part.defaults.items()}
        super().__init__([group for part in parts for group in part.param_groups], defaults)
        self.transport = transport or make_transport(None, self.param_groups[0]["params"][0].device)
        self._updates = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over the ranks, then update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._updates += 1
        self.transport.traffic.start_step()
        if self.transport.world_size > 1:
            flat = torch.cat([g.reshape(-1) for g in grads])
            self.transport.all_reduce(flat)
            parts = flat.div_(self.transport.world_size).split([g.numel() for g in grads])
            torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)])
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return those of all parts."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def stats(self) -> dict[str, Any]:
        """Return the keys of ``OneBitAdam.stats`` that a record needs."""
        sent, told = self.transport.traffic, {"phase": "uncompressed", "skipped_steps": 0, "freeze_step": None}
        told |= {"step": self._updates, "bytes_step": sent.bytes_step, "bytes_fp32": sent.bytes_step}
        return told | {"bytes_total": sent.bytes_total, "collectives_step": sent.collectives_step}


def averaged_adamw(params: Any, lr: float, transport: Transport | None = None, **options: Any) -> Averaged:
    """Make torch's AdamW on averages; ``options`` are its own."""
    return Averaged([torch.optim.AdamW(params, lr, **options)], transport)
