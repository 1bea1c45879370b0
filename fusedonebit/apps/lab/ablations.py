"""Optimizers with a part of ours alone: the freeze or a living variance without compression, and the other way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import Lamb, Numerics, OneBitAdam
from ...comm import CompressedAllReduce, Told, Transport
from ...core.options import Made
from ...core.scaling import Agreed
from ...core.settings import VARIANCE_FLOOR
from ...optim.adam_update import AdamUpdate
from ...optim.averaging import AveragingOptimizer
from ...optim.freezing import DeadCoordinates
from ...triton_kernels import TAIL, Coef, flatten, freeze, rules
from .workers import BatchedAllReduce


class FrozenVariance(AveragingOptimizer):
    """An optimizer whose variance stays after ``freeze_step`` updates, raised as ours; nothing is compressed."""

    freeze_step: int | None = None
    floor = VARIANCE_FLOOR

    def coefficient_table(self) -> Tensor:
        """See ``DistributedOptimizer``."""
        if self.freeze_step is None or self.steps.outcomes.updates < self.freeze_step:
            return super().coefficient_table()
        if self.steps.outcomes.updates == self.freeze_step:
            self._freeze()
        frozen_at = torch.full_like(self.steps.of_each, self.freeze_step)
        coef = self.coefficients(self.param_groups, Made(self.steps.of_each, frozen_at, renews=False))
        coef[:, Coef.BETA2], coef[:, Coef.ONE_MINUS_BETA2] = 1.0, 0.0
        return coef

    def _freeze(self) -> None:
        dead = DeadCoordinates(self.places, self.exp_avg_sq, self.live.numel, self.ranks.shards)
        as_it_is = torch.ones(len(self.layout.sizes), len(Coef), device=self.device)
        tables = (as_it_is, dead.mean, dead.mean * self.floor)
        freeze(self.places, self.exp_avg, self.exp_avg_sq, False, False, *tables)


class AveragedAdam(AdamUpdate, FrozenVariance):
    """AdamW on averaged gradients."""

    def __init__(self, params: Iterable[Tensor], defaults: dict[str, Any], process_group: Transport) -> None:
        super().__init__(params, defaults, process_group=process_group, numerics=Numerics(bias_correction=True))


class NaiveOneBitAdam(AveragedAdam):
    """Adam on compressed gradients: no warm-up, nothing frozen. The variance sees the compression error squared."""

    def build(self) -> None:
        """See ``DistributedOptimizer``."""
        super().build()
        self._reducer = CompressedAllReduce(self.layout, self.ranks.transport, device=self.device)

    def _held(self) -> list[Tensor]:
        return [*super()._held(), *self._reducer.state()]

    def _exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        self._reducer(grads, abort=abort)
        self._update(self.layout.cut(self._reducer.result()), coef, self._reducer.flags)
        return self._reducer.flags


class FreezableLamb(FrozenVariance, Lamb):
    """LAMB whose variance may stay; its coefficients go on."""


class LivingAdam(OneBitAdam):
    """Adam whose variance lives as ``OneBitAdam``'s does and whose momentum nobody compresses; for the lab's workers.

    Messages are exchanged all the same, since a variance is renewed of what goes with them, and moves nothing.
    """

    reducer: BatchedAllReduce
    _last: tuple[Tensor, Tensor]
    _exact: Tensor | None = None

    def _compressed_step(self, grads: Sequence[Tensor], agreed: Agreed, told: Told, coef: Tensor) -> None:
        per, v = coef[self.places.block_tensor], self.exp_avg_sq.view(self.layout.n_blocks, -1)
        denominators = self._denominators(v, per)
        if self._exact is None:  # beta1 * m of the warm-up, divided at the freeze
            self._exact = self.reducer.worker.compensated.clone().view_as(v)
        else:  # after a renewal in the next unit, as what is compressed
            last, divided = self._last
            self._exact *= torch.where(last > 0, divided / denominators, 1.0) * per[:, Coef.BETA1, None]
        self._last = v.clone(), denominators
        coef = self._synchronise(self.compressing(grads, agreed.coef, agreed.factor), told, coef)
        if int(self.reducer.flags):
            raise RuntimeError(
                "the guard has refused a step, which an exact momentum can't take back: pass guard='off'"
            )
        for rank in self.reducer.ranks:
            assert rank.worker_sq is not None
            divided = self._denominators(torch.where(v > 0, v, rank.worker_sq.view_as(v)), per)
            share = per[:, Coef.ONE_MINUS_BETA1, None] / len(self.reducer.ranks)
            self._exact += share * self._flattened(rank.gradients) / divided
        moved = (self._exact * coef[self.places.block_tensor, Coef.STEP_SIZE, None]).view(-1)
        for i, p in enumerate(self.parameters.dense):
            p.mul_(coef[i, Coef.DECAY]).sub_(self.parameters.shaped(moved, i, self.layout.offset(i)))

    def _denominators(self, v: Tensor, coef: Tensor) -> Tensor:
        return rules.denominator(v, coef, self.options.eps_inside_sqrt)

    def _flattened(self, gradients: Sequence[Tensor]) -> Tensor:
        out = torch.zeros(self.layout.numel + TAIL, device=self.device)
        flatten([g.contiguous() for g in gradients], self.layout.sizes, self.layout.block_size, 1.0, None, out)
        return out[:-TAIL].view(self.layout.n_blocks, -1)
