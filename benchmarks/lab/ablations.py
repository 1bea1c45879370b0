"""Optimizers with a part of ours alone: the freeze or a living variance without compression, and the other way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedonebit import Lamb, Numerics, OneBitAdam
from fusedonebit.comm import Transport
from fusedonebit.core.algorithm import Algorithm
from fusedonebit.core.frame import Frame
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.options import Made
from fusedonebit.core.resolved import Options
from fusedonebit.core.settings import VARIANCE_FLOOR
from fusedonebit.optim.averaging import Averaged, Update
from fusedonebit.optim.compressed import Compressed
from fusedonebit.optim.freezing import DeadCoordinates
from fusedonebit.optim.lamb import AveragedLamb, LambUpdate
from fusedonebit.optim.moments import AdamUpdate, MomentBuffers
from fusedonebit.optim.two_stage import TwoStage
from fusedonebit.triton_kernels import TAIL, Coef, flatten, freeze, rules

from .workers import BatchedAllReduce


class FrozenAverages(Averaged):
    """Averages gradients, with a variance that stays after ``freeze_step`` updates, raised as ours.

    Nothing is compressed. Both settings are set after it was made, before the first step.
    """

    freeze_step: int | None = None
    floor = VARIANCE_FLOOR

    def __init__(self, frame: Frame, update: Update, moments: MomentBuffers, in_place: bool = False) -> None:
        super().__init__(frame, update, in_place=in_place)
        self._moments = moments

    def table(self) -> Tensor:
        steps = self.frame.steps
        if self.freeze_step is None or steps.outcomes.updates < self.freeze_step:
            return super().table()
        if steps.outcomes.updates == self.freeze_step:
            self._freeze()
        frozen_at = torch.full_like(steps.of_each, self.freeze_step)
        coef = self.frame.coefficients(self.frame.hyper.taken, Made(steps.of_each, frozen_at, renews=False))
        coef[:, Coef.BETA2], coef[:, Coef.ONE_MINUS_BETA2] = 1.0, 0.0
        return coef

    def _freeze(self) -> None:
        frame, moments = self.frame, self._moments
        dead = DeadCoordinates(frame.places, moments.exp_avg_sq, frame.live.numel, frame.ranks.shards)
        as_it_is = torch.ones(len(frame.layout.sizes), len(Coef), device=frame.device)
        tables = (as_it_is, dead.mean, dead.mean * self.floor)
        freeze(frame.places, moments.exp_avg, moments.exp_avg_sq, False, False, *tables)


class FreezableAdam(Algorithm):
    """AdamW on averaged gradients, whose variance may stay."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self.moments = MomentBuffers(frame)
        self._frozen = FrozenAverages(frame, AdamUpdate(frame, self.moments), self.moments)
        self.parts = (self.moments, self._frozen)

    @property
    def stage(self) -> FrozenAverages:
        return self._frozen

    def table(self) -> Tensor:
        return self.stage.table()


class FreezableLambUpdate(AveragedLamb):
    """LAMB whose variance may stay; its coefficients go on."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        update = LambUpdate(frame, self.moments, self.layers)
        self._frozen = FrozenAverages(frame, update, self.moments, in_place=True)
        self.parts = (self.moments, self.layers, update, self._frozen)

    @property
    def stage(self) -> FrozenAverages:
        return self._frozen

    def table(self) -> Tensor:
        return self.stage.table()


class AveragedAdam(DistributedOptimizer):
    """AdamW on averaged gradients."""

    kind = FreezableAdam
    algorithm: FreezableAdam

    def __init__(self, params: Iterable[Tensor], defaults: dict[str, Any], process_group: Transport) -> None:
        super().__init__(params, defaults, process_group=process_group, numerics=Numerics(bias_correction=True))


class FreezableLamb(Lamb):
    """LAMB whose variance may stay; its coefficients go on."""

    kind = FreezableLambUpdate
    algorithm: FreezableLambUpdate


class ExactMomentum(Compressed):
    """1-bit Adam's compression stage, moving by a momentum which nobody has compressed; for the lab's workers.

    Messages are exchanged all the same, since a variance is renewed of what goes with them, and moves nothing.
    """

    _last: tuple[Tensor, Tensor]
    _exact: Tensor | None = None

    def step(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        moments, block_tensor = self.moments, self.frame.places.block_tensor
        per, v = coef[block_tensor], moments.written_out().view(self.frame.layout.n_blocks, -1)
        denominators = self._denominators(v, per)
        if self._exact is None:  # beta1 * m of the warm-up, divided at the freeze
            self._exact = self._reducer.worker.compensated.clone().view_as(v)
        else:  # after a renewal in the next unit, as what is compressed
            last, divided = self._last
            self._exact *= torch.where(last > 0, divided / denominators, 1.0) * per[:, Coef.BETA1, None]
        self._last, self._per = (v.clone(), denominators), per
        return super().step(grads, coef, abort)

    def update(self, coef: Tensor) -> None:
        frame, exact, per, (v, _) = self.frame, self._exact, self._per, self._last
        assert exact is not None
        layout, block_tensor = frame.layout, frame.places.block_tensor
        if int(self._reducer.flags):
            raise RuntimeError(
                "the guard has refused a step, which an exact momentum can't take back: pass guard='off'"
            )
        for rank in self._reducer.ranks:
            assert rank.squares is not None
            divided = self._denominators(torch.where(v > 0, v, rank.squares.stored.numbers.view_as(v)), per)
            share = per[:, Coef.ONE_MINUS_BETA1, None] / len(self._reducer.ranks)
            exact += share * self._flattened(rank.gradients) / divided
        moved = (exact * coef[block_tensor, Coef.STEP_SIZE, None]).view(-1)
        for i, p in enumerate(frame.parameters.dense):
            p.mul_(coef[i, Coef.DECAY]).sub_(frame.parameters.shaped(moved, i, layout.offset(i)))

    @property
    def _reducer(self) -> BatchedAllReduce:
        assert isinstance(self.exchange.reducer, BatchedAllReduce)
        return self.exchange.reducer

    def _denominators(self, v: Tensor, coef: Tensor) -> Tensor:
        return rules.denominator(v, coef, self.options.numerics.eps_inside_sqrt)

    def _flattened(self, gradients: Sequence[Tensor]) -> Tensor:
        layout = self.frame.layout
        out = torch.zeros(layout.numel + TAIL, device=self.frame.device)
        flatten([g.contiguous() for g in gradients], layout.sizes, layout.block_size, 1.0, None, out)
        return out[:-TAIL].view(layout.n_blocks, -1)


class ExactTwoStage(TwoStage):
    """The algorithm of that."""

    def make_stages(self) -> None:
        self.compression = ExactMomentum(self.frame, self.moments, self.warm_up)
        update = AdamUpdate(self.frame, self.moments)
        self.averaged = Averaged(self.frame, update, beside=self.compression.exchange)


class LivingAdam(OneBitAdam):
    """Adam whose variance lives as ``OneBitAdam``'s does and whose momentum nobody compresses."""

    kind = ExactTwoStage
    algorithm: ExactTwoStage


def settled(made: torch.optim.Optimizer) -> tuple[Options | None, int | None, float | None]:
    """Return an optimizer's options, its ``freeze_step`` and its ``floor``, each None where it has no such thing."""
    if not isinstance(made, DistributedOptimizer):
        return None, None, None
    algorithm = made.algorithm
    stage = algorithm.stage
    frozen = (stage.freeze_step, stage.floor) if isinstance(stage, FrozenAverages) else (None, None)
    return made.frame.options, *frozen
