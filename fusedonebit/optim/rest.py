"""What an optimizer of matrices trains by AdamW, on exact averages: vectors, the first and the last layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.averages import Averages
from ..core.frame import Frame
from ..core.handshake import Handshake
from ..core.members import Members
from ..core.part import Part
from ..core.scaling import LossScale
from ..core.state_tensor import StateTensor
from ..triton_kernels import adam_update
from ..triton_kernels.nouns import Moments


class Times(LossScale):
    """A loss scale that is told by what it multiplies gradients with, clipping included."""

    def factor(self) -> Tensor | None:
        """Return that: float32 [], or None."""
        return self.scale


class Rest(Part):
    """Averages gradients by an all-reduce of their own, and updates by AdamW.

    Args:
        frame: Of the optimizer.
        members: Whom it trains.
    """

    def __init__(self, frame: Frame, members: Members) -> None:
        self._frame, self._members = frame, members
        m, v = (torch.zeros(members.layout.numel, device=frame.device) for _ in range(2))
        self.moments = Moments(m, v)
        self.averages = Averages(members.layout, frame.ranks.transport, frame.device)

    def average(
        self, grads: Sequence[Tensor], factor: Tensor | None, digest: Tensor | None, abort: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Average the members' gradients times this rank's ``factor``; return as ``Averages.add_up``."""
        frame, members = self._frame, self._members
        tag, number = frame.coefficients.tag ^ members.layout.fingerprint, frame.steps.count.total
        ranks, count = frame.ranks.transport.world_size, len(members.which)
        handshake = Handshake(ranks, number, tag, count, members.missing, False)
        how = {"abort": abort, "averaged": False}
        by = Times(None if factor is None else factor.reshape(()), None)
        return self.averages.add_up(members.of(grads), handshake, by, frame.steps.updates, digest, **how)

    def __call__(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        """Update from gradients of all parameters, as ``averaging.Update``."""
        self.update(self._members.of(grads), coef, skip)

    def update(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor) -> None:
        """Update from the members' averaged gradients, unless ``skip`` is set."""
        members, rounding = self._members, self._frame.rounding
        adam_update(
            *(members.dense, grads, members.places, self.moments, members.of(coef), skip),
            *(None, rounding, None, None, members.correction),
        )

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        """Return both moments, as AdamW's."""
        which = self._members.which
        m = StateTensor("exp_avg", "element", self.moments.exp_avg, published=True, members=which)
        v = StateTensor(
            "exp_avg_sq", "element", self.moments.exp_avg_sq, published=True, not_negative=True, members=which
        )
        return m, v

    def held(self) -> Sequence[Tensor]:
        return self.averages.held()
