"""Optimizers with a part of ours alone: the freeze or a living variance without compression, and the other way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import Lamb, Numerics, OneBitAdam
from ...comm import CompressedAllReduce, Told, Transport
from ...core.frame import Frame
from ...core.optimizer import DistributedOptimizer
from ...core.options import Made
from ...core.scaling import Agreed
from ...core.settings import VARIANCE_FLOOR, Options
from ...optim.adam import CompressedAdam
from ...optim.adam_update import AdamUpdate
from ...optim.averaging import Averaging
from ...optim.freezing import DeadCoordinates
from ...optim.lamb import AveragedLamb
from ...triton_kernels import TAIL, Coef, flatten, freeze, rules
from .workers import BatchedAllReduce


class FrozenVariance(Averaging):
    """Skeleton of an algorithm whose variance stays after ``freeze_step`` updates, raised as ours.

    Nothing is compressed. Both settings are set after it was made, before the first step.
    """

    freeze_step: int | None = None
    floor = VARIANCE_FLOOR

    def coefficient_table(self) -> Tensor:
        """See ``Algorithm``."""
        steps = self.frame.steps
        if self.freeze_step is None or steps.outcomes.updates < self.freeze_step:
            return super().coefficient_table()
        if steps.outcomes.updates == self.freeze_step:
            self._freeze()
        frozen_at = torch.full_like(steps.of_each, self.freeze_step)
        coef = self.frame.coefficients(self.frame.hyper.taken, Made(steps.of_each, frozen_at, renews=False))
        coef[:, Coef.BETA2], coef[:, Coef.ONE_MINUS_BETA2] = 1.0, 0.0
        return coef

    def _freeze(self) -> None:
        frame = self.frame
        dead = DeadCoordinates(frame.places, self.exp_avg_sq, frame.live.numel, frame.ranks.shards)
        as_it_is = torch.ones(len(frame.layout.sizes), len(Coef), device=frame.device)
        tables = (as_it_is, dead.mean, dead.mean * self.floor)
        freeze(frame.places, self.exp_avg, self.exp_avg_sq, False, False, *tables)


class FreezableAdam(AdamUpdate, FrozenVariance):
    """AdamW on averaged gradients, whose variance may stay."""


class CompressedGradients(FreezableAdam):
    """AdamW on compressed gradients, from the first step on."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self._reducer = CompressedAllReduce(frame.layout, frame.ranks.transport, device=frame.device)

    def held(self) -> list[Tensor]:
        """See ``Algorithm``."""
        return [*super().held(), *self._reducer.state()]

    def exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """See ``Algorithm``."""
        self._reducer(grads, abort=abort)
        self._update(self.frame.layout.cut(self._reducer.result()), coef, self._reducer.flags)
        return self._reducer.flags


class FreezableLambUpdate(FrozenVariance, AveragedLamb):
    """LAMB whose variance may stay; its coefficients go on."""


class AveragedAdam(DistributedOptimizer):
    """AdamW on averaged gradients."""

    kind = FreezableAdam
    algorithm: FreezableAdam

    def __init__(self, params: Iterable[Tensor], defaults: dict[str, Any], process_group: Transport) -> None:
        super().__init__(params, defaults, process_group=process_group, numerics=Numerics(bias_correction=True))


class NaiveOneBitAdam(AveragedAdam):
    """Adam on compressed gradients: no warm-up, nothing frozen. The variance sees the compression error squared."""

    kind = CompressedGradients


class FreezableLamb(Lamb):
    """LAMB whose variance may stay; its coefficients go on."""

    kind = FreezableLambUpdate
    algorithm: FreezableLambUpdate


class ExactMomentum(CompressedAdam):
    """1-bit Adam that moves by a momentum which nobody has compressed; for the lab's workers.

    Messages are exchanged all the same, since a variance is renewed of what goes with them, and moves nothing.
    """

    reducer: BatchedAllReduce
    _last: tuple[Tensor, Tensor]
    _exact: Tensor | None = None

    def _compressed_step(self, grads: Sequence[Tensor], agreed: Agreed, told: Told, coef: Tensor) -> None:
        frame = self.frame
        layout, block_tensor = frame.layout, frame.places.block_tensor
        per, v = coef[block_tensor], self.exp_avg_sq.view(layout.n_blocks, -1)
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
        moved = (self._exact * coef[block_tensor, Coef.STEP_SIZE, None]).view(-1)
        for i, p in enumerate(frame.parameters.dense):
            p.mul_(coef[i, Coef.DECAY]).sub_(frame.parameters.shaped(moved, i, layout.offset(i)))

    def _denominators(self, v: Tensor, coef: Tensor) -> Tensor:
        return rules.denominator(v, coef, self.options.eps_inside_sqrt)

    def _flattened(self, gradients: Sequence[Tensor]) -> Tensor:
        layout = self.frame.layout
        out = torch.zeros(layout.numel + TAIL, device=self.frame.device)
        flatten([g.contiguous() for g in gradients], layout.sizes, layout.block_size, 1.0, None, out)
        return out[:-TAIL].view(layout.n_blocks, -1)


class LivingAdam(OneBitAdam):
    """Adam whose variance lives as ``OneBitAdam``'s does and whose momentum nobody compresses."""

    kind = ExactMomentum
    algorithm: ExactMomentum


def settled(made: torch.optim.Optimizer) -> tuple[Options | None, int | None, float | None]:
    """Return an optimizer's options, its ``freeze_step`` and its ``floor``, each None where it has no such thing."""
    if not isinstance(made, DistributedOptimizer):
        return None, None, None
    algorithm = made.algorithm
    frozen = (algorithm.freeze_step, algorithm.floor) if isinstance(algorithm, FrozenVariance) else (None, None)
    return made.frame.options, *frozen
