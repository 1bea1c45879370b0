"""The divergence guard: the norm of a compressed update, known exactly before it is applied."""

from __future__ import annotations

import torch
from torch import Tensor

from ..triton_kernels.nouns import Limit

LIMIT = 10.0
"""Times the norm of the last uncompressed update that a compressed one may be at most."""

RISE = 1.5
"""By which factor a veto, and the warm-up after it, may raise what updates are compared with."""

LEAST_SQUARE = 0.04
"""Of an element's update, on average, as which at least it counts: one of 1 is healthy, however small they were."""

COARSE_LIMIT = 300.0
"""The same where the momentum is compressed with few scales: then healthy updates are tens of times larger."""


class DivergenceGuard:
    """Refuses updates much larger than the last uncompressed one; for no bytes on the wire.

    A synchronised update is s_b/denom_i in block b, up to its sign, so that

        |u|^2 = sum_b s_b^2 w_b,    w_b = sum over the live i in b of 1/denom_i^2

    and all w_b are constants of the freeze (where zeros travel as zeros, with ``ternary``, it is a
    bound). Bias correction of the momentum, which goes on, is a factor per tensor. Everything is the
    same on all ranks, and so is the verdict.

    Attributes:
        reference: float64 [], |u| of the last uncompressed update, or of pure noise where that is more; after a veto
            at most ``RISE`` times what it was: what led to it may have made updates large for long. Of a living LAMB
            the norm of all layers' steps as they are on average.
        limit: float64 [], the largest |u| that is let through.
        norm: float64 [], |u| of the last compressed update.
    """

    _of = "that of the last uncompressed one"

    def __init__(self, device: torch.device, coarse: bool) -> None:
        self._times = COARSE_LIMIT if coarse else LIMIT
        self.reference, self.limit, self.norm = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
        self._root = torch.empty(0, device=device)

    def weigh(self, weight: Tensor) -> None:
        """Take the weights w, float64 [B], of a variance that is new."""
        root = weight.sqrt().float()  # w itself may be beyond float32
        if root.shape == self._root.shape:  # where a CUDA graph reads it again
            self._root.copy_(root)
        else:
            self._root = root

    def arm(self, last: Tensor, noise: Tensor, weight: Tensor) -> None:
        """Take what the freeze knows.

        Args:
            last: float64 [], |u| of the last uncompressed update, 0 where there was none: after a warm
                start, whose first updates may well be large, only what is beyond doubt is refused.
            noise: float64 [], |u| of momentum that is pure noise.
            weight: float64 [B], w.
        """
        most = torch.where(self.reference > 0, RISE * self.reference, torch.inf)
        self.reference.copy_(torch.minimum(torch.maximum(last, noise), most))
        self.limit.copy_(torch.where(last > 0, self._times, COARSE_LIMIT) * self.reference)
        self.weigh(weight)

    def refer(self, squares: Tensor) -> None:
        """Take for ``reference`` the root of ``squares``, float64 []."""
        torch.sqrt(squares, out=self.reference)
        torch.mul(self.reference, self._times, out=self.limit)
        self._of = "that of an average step"

    def resume(self, reference: float, limit: float) -> None:
        """Take up a checkpoint's numbers; ``arm`` has given the weights, or will."""
        self.reference.fill_(reference)
        self.limit.fill_(limit)

    def limit_of(self, coef: Tensor, block_tensor: Tensor) -> Limit:
        """Return what the reducer refuses by; ``coef`` float32 [tensors, columns of ``Coef``] is the step's."""
        return Limit(coef, block_tensor, self._root, self.limit, self.norm)

    def describe(self, rewarms: bool, steps: int, lives: bool) -> str:
        """Say why an update was refused and what follows; wait for the device."""
        times, most = (float(x / self.reference.clamp(min=1e-300)) for x in (self.norm, self.limit))
        follows = (
            f"What it holds beyond a step of Adam's is dropped, and {steps} uncompressed updates follow"
            if rewarms
            else 'Its momentum is kept, and nothing else follows (guard="warn"), so that training may stand still from '
            "now on"
        )
        way_out = (
            "a lower learning rate"
            if lives
            else 'variance="shared" (no freeze_step), Numerics(precondition=True), a larger variance_floor there or a '
            "later freeze"
        )
        return (
            f"the norm of the compressed update, {float(self.norm):.3g}, was {times:.3g} times {self._of}; at most "
            f"{most:g} is let through. {follows}. If this happens again, use {way_out}"
        )

    def state(self) -> list[Tensor]:
        """Return all tensors."""
        return [self.reference, self.limit, self.norm, self._root]
