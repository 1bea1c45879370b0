"""Parameters that an optimizer of matrices trains by AdamW, on exact averages: vectors, the first and the last layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.averages import Averages
from ..core.frame import Frame
from ..core.handshake import Handshake
from ..core.members import Members
from ..core.part import Part
from ..core.scaling import NO_SCALE
from ..core.state_tensor import StateTensor
from ..triton_kernels import adam_update
from ..triton_kernels.nouns import Moments


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

    def average(self, grads: Sequence[Tensor], digest: Tensor, abort: bool) -> tuple[Tensor, Tensor | None]:
        """Average the members' gradients, still scaled; return as ``Averages.add_up``."""
        frame, members = self._frame, self._members
        tag, number = frame.coefficients.tag ^ members.layout.fingerprint, frame.steps.count.total
        of_members = len(members.which), members.missing
        handshake = Handshake(frame.ranks.transport.world_size, number, tag, *of_members, False)
        how = {"abort": abort, "averaged": False}
        return self.averages.add_up(members.of(grads), handshake, NO_SCALE, frame.steps.updates, digest, **how)

    def __call__(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        """Update from gradients of all parameters, as ``averaging.Update``."""
        self.update(self._members.of(grads), coef, skip)

    def update(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor) -> None:
        """Update from the members' averaged gradients, unless ``skip`` is set."""
        members = self._members
        coef = members.of(coef)
        how = (None, self._frame.rounding, None, None, self._members.correction)
        adam_update(members.dense, grads, members.places, self.moments, coef, skip, *how)

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        """Return both moments, as AdamW's."""
        m, v, _, _ = self.moments
        of_members = {"published": True, "members": self._members.which}
        m = StateTensor("exp_avg", "element", m, **of_members)
        return m, StateTensor("exp_avg_sq", "element", v, not_negative=True, **of_members)

    def held(self) -> Sequence[Tensor]:
        return self.averages.held()
