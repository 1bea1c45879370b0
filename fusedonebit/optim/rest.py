"""What an optimizer of matrices trains by AdamW: vectors, the first and the last layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.frame import Frame
from ..core.members import Members
from ..core.part import Part
from ..core.state_tensor import StateTensor
from ..triton_kernels import adam_update
from ..triton_kernels.nouns import Moments


class Rest(Part):
    """Updates by AdamW what is no matrix.

    Args:
        frame: Of the optimizer.
        members: Whom it trains.
    """

    def __init__(self, frame: Frame, members: Members) -> None:
        self._frame, self.members = frame, members
        kept = frame.options.formats.moments
        m, v = (torch.zeros(members.layout.numel, dtype=kept.dtype, device=frame.device) for _ in range(2))
        self.moments = Moments(m, v, drawn=frame.steps.updates if kept.random else None)

    def __call__(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        """Update from gradients of all parameters, as ``averaging.Update``."""
        self.update(self.members.of(grads), coef, skip)

    def update(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor) -> None:
        """Update from the members' averaged gradients, unless ``skip`` is set."""
        members, rounding = self.members, self._frame.rounding
        adam_update(
            *(members.dense, grads, members.places, self.moments, members.of(coef), skip),
            *(None, rounding, None, None, members.correction),
        )

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        """Return both moments, as AdamW's."""
        which = self.members.which
        m = StateTensor("exp_avg", "element", self.moments.exp_avg, published=True, members=which)
        v = StateTensor(
            "exp_avg_sq", "element", self.moments.exp_avg_sq, published=True, not_negative=True, members=which
        )
        return m, v
