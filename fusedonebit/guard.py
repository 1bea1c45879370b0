"""The divergence guard: the norm of a compressed update, known exactly before it is applied."""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = 10.0
"""Times the norm of the last uncompressed update, where what is compressed is the update itself."""

PLAIN_LIMIT = 300.0
"""The same where the momentum is: with one size for all of it, healthy updates are tens of times larger."""


class DivergenceGuard:
    """Refuses updates much larger than the last uncompressed one; for no bytes on the wire.

    A synchronised update is s_b/denom_i in block b, up to its sign, so that

        |u|^2 = sum_b s_b^2 w_b,    w_b = sum over the live i in b of 1/denom_i^2

    and all w_b are constants of the freeze. Bias correction of the momentum, which goes on, is a
    factor per tensor. Everything is the same on all ranks, and so is the verdict.

    Attributes:
        reference: float64 [], |u| of the last uncompressed update; 0: not armed.
        norm: float64 [], |u| of the last compressed one.
    """

    def __init__(self, device: torch.device, preconditioned: bool) -> None:
        self._times = LIMIT if preconditioned else PLAIN_LIMIT
        self.reference = torch.zeros((), dtype=torch.float64, device=device)
        self.norm = torch.zeros((), dtype=torch.float64, device=device)
        self._weight = torch.empty(0, device=device)

    def arm(self, reference: Tensor, weight: Tensor) -> None:
        """Takes what the freeze knows: |u| of the last uncompressed update, and w, [B] each block's."""
        self.reference = reference.double()
        self._weight = weight.double()  # 1/denom^2 may be beyond float32

    @property
    def limit(self) -> Tensor:
        """The largest norm that is let through, float64 []."""
        return self._times * self.reference

    def refuses(self, scale: Tensor, unbias: Tensor) -> Tensor:
        """Whether an update is too large, or not finite: bool [1].

        Args:
            scale: float32 [B], s.
            unbias: float32 [B], 1 / (1 - beta1^t) of each block's tensor.
        """
        size = (scale * unbias).double()
        self.norm = (size * size * self._weight).sum().sqrt()
        return ~(self.norm <= self.limit).reshape(1)

    def describe(self, rewarms: bool, steps: int) -> str:
        """Why an update was refused and what follows; waits for the device."""
        times = float(self.norm / self.reference.clamp(min=1e-300))
        follows = (
            f"{steps} uncompressed updates follow"
            if rewarms
            else 'nothing else follows (guard="warn"), so that training may stand still from now on'
        )
        return (
            f"the norm of the compressed update, {float(self.norm):.3g}, was {times:.3g} times that of the last "
            f"uncompressed one; at most {self._times:g} is let through. Its momentum is kept, and {follows}. "
            "Where it goes on, use precondition=True, a larger variance_floor or a later freeze"
        )

    def state(self) -> list[Tensor]:
        """All tensors."""
        return [self.reference, self.norm, self._weight]
