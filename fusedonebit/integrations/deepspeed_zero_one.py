"""0/1 Adam with DeepSpeed 0.19.6's numerics, which are not quite the paper's; to reproduce, not to be fast.

Until the variance is frozen what travels in one bit is not the momentum but the gradient, in every step in which
the variance is not renewed. And then weight decay is part of what workers add up, so of the rebuilt momentum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.scaling import LossScale
from ..core.state.header import FLAG, Field, Fields
from ..optim.policies import DeepSpeedVariance
from ..optim.zero_one import ZeroOneAdam
from ..optim.zero_one_state import DECAY
from ..triton_kernels import LARGEST_GRADIENT, Coef, rebuild_momentum


class DeepSpeedZeroOneAdam(ZeroOneAdam):
    """What ``ZeroOneAdam.from_deepspeed`` makes; the arguments are those of ``ZeroOneAdam``."""

    _stays: ClassVar = {Coef.BETA2: 1.0, Coef.ONE_MINUS_BETA2: 0.0}
    """Coefficients with which Adam's update leaves the variance as it is."""

    _was_frozen: bool

    def check_group(self, group: dict[str, Any], name: str = "") -> None:
        super().check_group(group, name)
        if not isinstance(policy := self.options.variance_policy, DeepSpeedVariance):
            raise ValueError(f"variance_policy must be a DeepSpeedVariance with DeepSpeed's numerics, got {policy!r}")

    def _is_frozen(self) -> bool:
        policy = self.options.variance_policy
        assert isinstance(policy, DeepSpeedVariance)
        return policy.frozen(self._done)

    @property
    def _seen(self) -> Tensor:
        return torch.ones_like(self._mean_sq, dtype=torch.bool)

    def _enter_phase(self) -> None:
        super()._enter_phase()
        if self._is_frozen() and not self._was_frozen:
            # Residuals of gradients are none of momenta.
            self.reducer.settle()
            self.reducer.worker.forget()
            self.reducer.server.forget()
        self._was_frozen = self._is_frozen()

    def build(self) -> None:
        super().build()
        self._was_frozen = False

    header_fields: ClassVar[Fields] = {**ZeroOneAdam.header_fields, "was_frozen": Field(FLAG, False)}

    def plain_state(self) -> dict[str, Any]:
        return super().plain_state() | {"was_frozen": self._was_frozen}

    def resume(self, header: Mapping[str, Any]) -> None:
        super().resume(header)
        self._was_frozen = header.get("was_frozen", False)

    def _synchronise(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        if self._is_frozen():
            return self._synchronise_momentum(grads, coef, abort)
        return self._synchronise_gradient(grads, coef, abort)

    def _synchronise_gradient(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Adam's step with the average of compressed gradients, and with the variance that is."""
        agreed, layout, reduce = self._rescaling(grads, alone=False), self.layout, self.reducer
        plain = reduce.plain_coefficients()
        plain[:, Coef.GRAD_LIMIT] = LARGEST_GRADIENT
        plain = agreed.scaled(plain)
        missing = () if abort else self._missing
        reduce(grads, coef=plain, tag=self._mixed_tag(), abort=abort, hold=agreed.hold, missing=missing)
        self._absent = reduce.absent
        scale = reduce.scale
        if self._absent is not None:
            scale = torch.where(self._absent[self._block_tensor], 0.0, scale)
            reduce.restore(self._absent)
        where = coef, self._block_tensor, self.live.bits, self.live.row
        rebuild_momentum(layout.sizes, layout.block_size, reduce.bits, scale, None, False, *where, self._anchor)
        for column, value in self._stays.items():
            coef[:, column] = value
        self.parameters.before_update()
        self._update(self._anchor, self.coefficients.still(coef, self._absent), reduce.flags)
        self.parameters.after_update()
        self._drop_bits()
        self._end_round()
        self._as_floats = True
        return reduce.flags

    def _move_alone(self, grads: Sequence[Tensor], coef: Tensor) -> Tensor:
        self.parameters.before_update()
        self._step_alone(grads, coef)
        self.parameters.after_update()
        self._tag = self._mixed_tag()
        self._local += 1
        self._done = self._done._replace(steps=self._done.steps + 1)
        return self._none.clone()

    def _step_alone(self, grads: Sequence[Tensor], coef: Tensor) -> None:
        if self._local == 0:
            self._begin_round()
        self._note_missing(first=self._local == 0)
        agreed = self._rescaling(grads, alone=True)
        self._add_alone(grads, agreed.scaled(coef), agreed.hold, last=False, leaks=True)
        self._sum_up(coef)
        self._moved[DECAY] = 1.0  # decay is in what was added up

    def _synchronise_momentum(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """The last step of a round is as the others; what all have added up is compressed apart."""
        self.parameters.before_update()
        self._step_alone(grads, coef)
        if LossScale.of(self).found_inf is not None:
            ranks = self._lost.clone()
            self.transport.all_reduce(ranks)
            self._tell_scaler(ranks, alone=False)
        nothing, reduce = [self.nothing] * len(grads), self.reducer
        reduce(
            nothing,
            coef=reduce.plain_coefficients(),
            tag=self._mixed_tag(),
            abort=abort,
            pending=self._pending,
            missing=() if abort else self._missed,
        )
        self._leave_absent()
        self._apply(coef, None, moved=True)
        return reduce.flags
