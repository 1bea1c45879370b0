"""1-bit LAMB and 0/1 Adam with DeepSpeed 0.19.6's formulas, not quite the papers'; to reproduce, not to be fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..comm import StepContext
from ..core.frame import Frame
from ..core.header import FLAG, Field, Fields
from ..core.scaling import Agreed
from ..core.settings import Layerwise
from ..optim.bit_rounds import DECAY, STEP_SIZE
from ..optim.compressed_lamb import PaperLamb
from ..optim.lamb import LambUpdate
from ..optim.local_adam import LocalAdam
from ..optim.moments import AdamUpdate
from ..optim.onebit_lamb import parts_of
from ..optim.shared_rounds import SharedRounds
from ..optim.zero_one import ZeroOneAdam
from ..triton_kernels import LARGEST_GRADIENT, Coef
from .intervals import DeepSpeedVariance


@dataclass(frozen=True, kw_only=True)
class DeepSpeedLayerwise(Layerwise):
    """DeepSpeed's LAMB: a ratio of roots, blended with the share of the weight decay and clipped the other way round.

    Coefficients of 1 are left out of the average: a layer that had no other stands still after the freeze.
    """

    variant: ClassVar[str] = "deepspeed"


class DeepSpeedLambUpdate(LambUpdate):
    """Makes DeepSpeed's averages of coefficients."""

    skips_ones = True

    def drop_room(self) -> None:
        """Keep ``norms``, with which the compression stage blends its ratios."""


class DeepSpeedLamb(PaperLamb):
    """Makes DeepSpeed's ratios."""

    of_denominators = range_first = blends = True


parts_of.register(DeepSpeedLayerwise, lambda _: (DeepSpeedLambUpdate, DeepSpeedLamb))


class DeepSpeedBitRounds(SharedRounds):
    """Rounds of bits by DeepSpeed's formulas.

    Until the variance is frozen what travels in one bit is not the momentum but the gradient, in every step in which
    the variance is not renewed. And then weight decay is part of what workers add up, so of the rebuilt momentum.
    """

    options: Any  # those of 0/1 Adam, with a DeepSpeedVariance
    decay_in_update: ClassVar = True
    renews = False
    ends_next = False  # what all have added up is compressed apart from the last step
    header_fields: ClassVar[Fields] = {**SharedRounds.header_fields, "was_frozen": Field(FLAG, False)}

    def __init__(self, **of_rounds: Any) -> None:
        super().__init__(**of_rounds)
        self.bits.waits = False
        self._update, self._was_frozen = AdamUpdate(self.frame, self.moments), False

    def is_frozen(self) -> bool:
        """Tell whether the variance is renewed no more."""
        return bool(self.options.variance_policy.frozen(self.plan.done))

    def forget_gradients(self) -> None:
        """Drop residuals where the variance was frozen just now: those of gradients are none of momenta."""
        if self.is_frozen() and not self._was_frozen:
            self.reducer.settle()
            for part in self.reducer.parts:
                for side in part.sides:
                    side.forget()
        self._was_frozen = self.is_frozen()

    def plain_state(self) -> dict[str, Any]:
        return super().plain_state() | {"was_frozen": self._was_frozen}

    def resume(self, header: Mapping[str, Any]) -> None:
        super().resume(header)
        self._was_frozen = header.get("was_frozen", False)

    def of_gradients(self, coef: Tensor) -> Tensor:
        if self.plan.alone or self.is_frozen():
            return coef
        plain = self.reducer.plain_coefficients()
        plain[:, Coef.GRAD_LIMIT] = LARGEST_GRADIENT
        return plain

    def agree_on_step(self, grads: Sequence[Tensor], coef: Tensor, alone: bool = False) -> Agreed:
        if alone or not self.is_frozen():
            return super().agree_on_step(grads, coef, alone)
        agreed = super().agree_on_step(grads, coef, alone=True)
        if agreed.hold is not None:
            ranks = self.lost.clone()
            self.frame.ranks.transport.all_reduce(ranks)
            self.frame.scaling.overflowed = (ranks > 0).float()
            self.lost.zero_()
        return agreed

    def synchronise(self, grads: Sequence[Tensor], agreed: Agreed, context: StepContext, coef: Tensor) -> None:
        if not self.is_frozen():
            self._average_gradient(grads, agreed, context, coef)
            return
        # The last step of a round is as the others; what all have added up is compressed apart.
        steps = self.plan.round.steps
        if self.round.local == 0:
            self.bits.make_floats(coef, renews=False)
        self.step_alone(grads, agreed, coef)
        coef[:, Coef.STEP_SIZE] = self.moved[STEP_SIZE] / steps
        coef[:, Coef.DECAY] = self.moved[DECAY]
        plain, nothing = self.reducer.plain_coefficients(), [self.frame.nothing] * len(grads)
        context = context._replace(hold=None, pending=self.pending)
        self.exchange.synchronise(lambda part: part.compress(nothing, plain), context, coef)
        if steps == 1:  # it has moved the parameters, as those of longer rounds have
            self.go_back()
        self.apply(coef, None)

    def sum_up(self, coef: Tensor) -> None:
        if self.round.local == 0:
            self.moved[STEP_SIZE], self.moved[DECAY] = 0.0, 1.0
        self.moved[STEP_SIZE].add_(coef[:, Coef.STEP_SIZE])

    def _average_gradient(self, grads: Sequence[Tensor], agreed: Agreed, context: StepContext, coef: Tensor) -> None:
        """Take Adam's step with the average of compressed gradients, and with the variance that is."""
        frame, reducer = self.frame, self.reducer
        context = context._replace(sums=False)  # no ``apply_momentum`` reads these bits
        self.exchange.synchronise(lambda part: part.compress(grads, agreed.coef), context, coef)
        if frame.absent is not None:
            reducer.scale.masked_fill_(frame.absent[frame.places.block_tensor], 0.0)
        self.bits.rebuild(self.anchor, coef)
        coef[:, Coef.BETA2], coef[:, Coef.ONE_MINUS_BETA2] = 1.0, 0.0  # leaves the variance as it is
        self._update(frame.layout.cut(self.anchor), frame.coefficients.still(coef, frame.absent), reducer.flags)
        self.plan.end_round()


class DeepSpeedLocalAdam(LocalAdam):
    """0/1 Adam by DeepSpeed's formulas."""

    rounds: DeepSpeedBitRounds

    @classmethod
    def check(cls, frame: Frame) -> None:
        super().check(frame)
        if not isinstance(policy := getattr(frame.options, "variance_policy", None), DeepSpeedVariance):
            raise ValueError(f"variance_policy must be a DeepSpeedVariance with DeepSpeed's numerics, got {policy!r}")

    def make_rounds(self, of_rounds: dict[str, Any]) -> DeepSpeedBitRounds:
        return DeepSpeedBitRounds(**of_rounds)

    def enter_stage(self) -> bool:
        changed = super().enter_stage()
        self.rounds.forget_gradients()
        return changed


class DeepSpeedZeroOneAdam(ZeroOneAdam):
    """Follows DeepSpeed's formulas; made by ``from_config``, with ``ZeroOneAdam``'s arguments."""

    kind = DeepSpeedLocalAdam
