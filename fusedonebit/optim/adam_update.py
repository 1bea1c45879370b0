"""Updates as AdamW does: what ``AdamW`` does always, and 1-bit Adam in its warm-up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..triton_kernels import adam_update
from .narrow_state import NarrowState


class AdamUpdate(NarrowState):
    """Skeleton of an algorithm whose uncompressed update is AdamW's."""

    def _update(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        frame = self.frame
        flag, before = found or (None, None)
        how = self._exp_avg_sq_sums, frame.rounding, flag, before, frame.parameters.correction
        adam_update(frame.parameters.dense, grads, frame.places, self.moments, coef, skip, *how)
