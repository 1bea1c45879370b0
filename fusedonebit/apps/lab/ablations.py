"""Optimizers with a part of ours alone: the freeze without compression, compression without the freeze."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import Lamb, Numerics
from ...comm import CompressedAllReduce, Transport
from ...core.options import Made
from ...core.settings import VARIANCE_FLOOR
from ...optim.averaging import AdamUpdate, AveragingOptimizer
from ...optim.freezing import DeadCoordinates
from ...triton_kernels import TAIL, Coef, freeze


class FrozenVariance(AveragingOptimizer):
    """An optimizer whose variance stays after ``freeze_step`` updates, raised as ours; nothing is compressed."""

    freeze_step: int | None = None
    floor = VARIANCE_FLOOR

    def coefficient_table(self) -> Tensor:
        """See ``DistributedOptimizer``."""
        if self.freeze_step is None or self.outcomes.updates < self.freeze_step:
            return super().coefficient_table()
        if self.outcomes.updates == self.freeze_step:
            self._freeze()
        frozen_at = torch.full_like(self.own_steps, self.freeze_step)
        coef = self.coefficients(self.param_groups, Made(self.own_steps, frozen_at, renews=False))
        coef[:, Coef.BETA2], coef[:, Coef.ONE_MINUS_BETA2] = 1.0, 0.0
        return coef

    def _freeze(self) -> None:
        layout, block_tensor = self.layout, self._block_tensor
        dead = DeadCoordinates(layout, block_tensor, self.exp_avg_sq, self.live.numel, self.shards)
        as_it_is = torch.ones(len(layout.sizes), len(Coef), device=self.device)
        tables = (as_it_is, block_tensor, dead.mean, dead.mean * self.floor)
        freeze(layout.sizes, layout.block_size, self.exp_avg, self.exp_avg_sq, False, False, *tables)


class AveragedAdam(AdamUpdate, FrozenVariance):
    """AdamW on averaged gradients."""

    def __init__(self, params: Iterable[Tensor], defaults: dict[str, Any], process_group: Transport) -> None:
        super().__init__(params, defaults, process_group=process_group, numerics=Numerics(bias_correction=True))


class NaiveOneBitAdam(AveragedAdam):
    """Adam on compressed gradients: no warm-up, nothing frozen. The variance sees the compression error squared."""

    def build(self) -> None:
        """See ``DistributedOptimizer``."""
        super().build()
        self._reducer = CompressedAllReduce(self.layout, self.transport, device=self.device)

    def _held(self) -> list[Tensor]:
        return [*super()._held(), *self._reducer.state()]

    def _exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        self._reducer(grads, abort=abort)
        grad = torch.nn.functional.pad(self._reducer.result(), (0, TAIL))
        self._update(grad, coef, self._reducer.flags)
        return self._reducer.flags


class FreezableLamb(FrozenVariance, Lamb):
    """LAMB whose variance may stay; its coefficients go on."""
