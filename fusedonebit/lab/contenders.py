"""The lab's optimizers by name: ours, under each named numerics, and what they are measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import Lamb, OneBitAdam, OneBitLamb
from ..averaging import AveragingOptimizer
from ..comm import CompressedAllReduce, Transport
from ..freezing import DeadCoordinates
from ..hyperparameters import Options
from ..triton_kernels import TAIL, Coef, adam_update, freeze

BETAS = (0.9, 0.99)
EPS = 1e-8
LAMB_LR = 7.0
SGD_LR = 30.0
"""Learning rates as multiples of Adam's."""


class AveragedAdam(AveragingOptimizer):
    """Adam on averaged gradients; after ``freeze_step`` updates its variance stays, but nothing is compressed."""

    def __init__(self, params: Iterable[Tensor], lr: float, freeze_step: int | None, process_group: Transport) -> None:
        defaults = {"lr": lr, "betas": BETAS, "eps": EPS, "weight_decay": 0.0, "maximize": False}
        options = Options(bias_correction=True, eps_inside_sqrt=False, nonfinite="skip", block_size=None)
        self.freeze_step, self._frozen = freeze_step, False
        super().__init__(params, defaults, options, process_group=process_group)

    def _coefficient_table(self) -> Tensor:
        if self.freeze_step is None or self._outcomes.updates < self.freeze_step:
            return super()._coefficient_table()
        if not self._frozen:
            self._freeze()
        frozen_at = torch.full_like(self._step, self.freeze_step)
        coef = self._coefficients(self.param_groups, self._step, frozen_at)
        coef[:, Coef.BETA2], coef[:, Coef.ONE_MINUS_BETA2] = 1.0, 0.0
        return coef

    def _freeze(self) -> None:
        """Gives coordinates that had no gradient yet a variance, as ``OneBitAdam`` does."""
        layout, block_tensor = self.layout, self._block_tensor
        dead = DeadCoordinates(layout, block_tensor, self._exp_avg_sq, self._live.numel)
        as_it_is = torch.ones(len(layout.sizes), len(Coef), device=self.device)
        state = (self._exp_avg, self._exp_avg_sq, False, False, as_it_is, block_tensor, dead.mean, None)
        freeze(layout.sizes, layout.block_size, *state)
        self._frozen = True

    def _update(self, grad: Tensor, coef: Tensor, skip: Tensor) -> None:
        layout, live = self.layout, self._live
        state = (grad, self._exp_avg, self._exp_avg_sq, coef, self._block_tensor, live.bits, live.row)
        adam_update(self._list.dense, layout.sizes, layout.block_size, *state, skip, None)


class NaiveOneBitAdam(AveragedAdam):
    """Adam on compressed gradients: no warm-up, nothing frozen. The variance sees the compression error squared."""

    def _build(self) -> None:
        super()._build()
        self._reduce = CompressedAllReduce(self.layout, self._transport, device=self.device)

    def _exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        self._reduce(grads, abort=abort)
        grad = torch.nn.functional.pad(self._reduce.result(), (0, TAIL))
        self._update(grad, coef, self._reduce.flags)
        return self._reduce.flags


class AveragedSGD(torch.optim.SGD):
    """SGD with momentum on averaged gradients."""

    def __init__(self, params: Iterable[Tensor], lr: float, process_group: Transport) -> None:
        super().__init__(params, lr, momentum=0.9)
        self._transport = process_group

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages the gradients over the ranks, then updates."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in grads])
        self._transport.all_reduce(flat)
        for g, part in zip(grads, flat.div_(self._transport.world_size).split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g))
        return super().step(closure)


Make = Callable[[Iterable[Tensor], float, int, Transport], torch.optim.Optimizer]
"""Makes an optimizer from parameters, Adam's learning rate, the freeze step and a transport."""


def _onebit_adam(params: Iterable[Tensor], lr: float, freeze_step: int, transport: Transport, **numerics: Any) -> Any:
    return OneBitAdam(params, lr, BETAS, EPS, 0.0, freeze_step=freeze_step, process_group=transport, **numerics)


def _onebit_lamb(params: Iterable[Tensor], lr: float, freeze_step: int, transport: Transport, **numerics: Any) -> Any:
    lr *= LAMB_LR
    return OneBitLamb(params, lr, BETAS, 1e-6, 0.0, freeze_step=freeze_step, process_group=transport, **numerics)


CONTENDERS: dict[str, Make] = {
    "sgd": lambda params, lr, freeze_step, transport: AveragedSGD(params, lr * SGD_LR, transport),
    "adam": lambda params, lr, freeze_step, transport: AveragedAdam(params, lr, None, transport),
    "adam-frozen": AveragedAdam,
    "naive-onebit-adam": lambda params, lr, freeze_step, transport: NaiveOneBitAdam(params, lr, None, transport),
    "onebit-adam-deepspeed": partial(_onebit_adam, bias_correction=False, dead_coordinates="keep"),
    "onebit-adam-l2": _onebit_adam,
    "onebit-adam-eps-inside": partial(_onebit_adam, eps_inside_sqrt=True),
    "onebit-adam-l1": partial(_onebit_adam, scale_norm="l1"),
    "onebit-adam-contractive": partial(_onebit_adam, scale_norm="contractive"),
    "onebit-adam-preconditioned-l2": partial(_onebit_adam, precondition=True),
    "onebit-adam-preconditioned": partial(_onebit_adam, precondition=True, scale_norm="contractive"),
    "lamb": lambda params, lr, freeze_step, transport: Lamb(
        params, lr * LAMB_LR, BETAS, 1e-6, 0.0, process_group=transport
    ),
    "onebit-lamb": _onebit_lamb,
    "onebit-lamb-frozen": partial(_onebit_lamb, layerwise="frozen"),
}
"""By name. "adam-frozen" freezes its variance but compresses nothing; "preconditioned" alone is contractive."""
