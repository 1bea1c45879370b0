"""torch's AdamW on gradients that were averaged at 8, 4 or 1 bits, as ``fusedonebit.compress`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedonebit.apps.averaged import AveragedAdamW
from fusedonebit.comm import Format, QuantisedAllReduce, Step
from fusedonebit.triton_kernels import FlatLayout

from .setting import BETAS, EPS, Params, Setting


class CompressedAdamW(AveragedAdamW):
    """The same optimizer; one bucket has all gradients.

    Args:
        params, of: What the run is.
        bits, feedback: As of ``fusedonebit.compress``.
    """

    def __init__(self, params: Params, of: Setting, bits: int, feedback: str | None) -> None:
        super().__init__(params, of.lr, of.transport, betas=BETAS, eps=EPS, weight_decay=of.weight_decay)
        form = Format(bits, feedback)
        layout = FlatLayout(tuple(p.numel() for p in params), of.transport.world_size, form.block_size)
        self._average = QuantisedAllReduce(layout, of.transport, form, params[0].device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average this rank's gradients with the others', then update."""
        self._updates += 1
        params = [p for group in self.param_groups for p in group["params"]]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
        self._average(grads, Step(self._updates))
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        return torch.optim.AdamW.step(self, closure)
