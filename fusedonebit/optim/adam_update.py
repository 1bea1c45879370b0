"""Updates as AdamW does: what ``AdamW`` does always, and 1-bit Adam in its warm-up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..triton_kernels import adam_update
from .narrow_state import NarrowState


class AdamUpdate(NarrowState):
    """Skeleton of an optimizer whose uncompressed update is AdamW's."""

    def _update(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        dense, m, v, sums = self.parameters.dense, self.exp_avg, self.exp_avg_sq, self._exp_avg_sq_sums
        flag, before = found or (None, None)
        how = self._rounding, flag, before, self._drawn_moments, self.octaves, self.parameters.correction
        adam_update(dense, grads, self.places, m, v, coef, skip, sums, *how)
