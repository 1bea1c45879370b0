"""The divergence guard: the norm of a compressed update, known exactly before it is applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.header import STEPS, Field, Fields, list_of, or_none
from ..core.part import Part
from ..triton_kernels.nouns import Limit

LIMIT = 10.0
"""Largest norm of a compressed update, as a multiple of the reference."""

RISE = 1.5
"""Largest factor by which the re-warm-up after a veto may raise the reference."""

LEAST_SQUARE = 0.04
"""Least mean square of an element's update (in units of lr) in the reference.

An update of 1 per element is healthy, even if all before it were much smaller."""

COARSE_LIMIT = 300.0
"""``LIMIT`` where momentum is compressed with fewer scales than one per block, or no uncompressed update came before.

In the former case healthy updates are tens of times larger than the reference."""


class DivergenceGuard(Part):
    """A limit on the norm of compressed updates, which costs no bytes on the wire.

    A synchronised update u has one magnitude s_b per block b, divided by the denominators of its elements i:

        |u_i| = s_b/denom_i,    |u|^2 = sum_b s_b^2 w_b,    w_b = sum of 1/denom_i^2 over the live elements i of b

    So the norm is known from the scales alone, exactly (with ``ternary``, which sends zeros, it is an upper bound), and
    before anything has moved. The weights w_b change only when v does; the momentum's bias correction is a factor per
    tensor. All of it is the same on all ranks, and so is the verdict.

    Args:
        device: Where the tensors lie.
        coarse: Whether the limit is ``COARSE_LIMIT`` times the reference instead of ``LIMIT`` times.
        on: Whether anybody asks it.

    Attributes:
        reference: float64 [], |u| of the last uncompressed update, or of pure noise if that is larger. After a veto it
            rises by ``RISE`` at most: whatever caused the veto may have enlarged the updates before it, too. Of LAMB
            with a shared variance it is the norm of an average step.
        limit: float64 [], the largest |u| that passes.
        norm: float64 [], |u| of the last compressed update.
    """

    header_fields: ClassVar[Fields] = {"guard": Field(or_none(list_of(STEPS, 2)), False)}
    _of = "that of the last uncompressed one"

    def __init__(self, device: torch.device, coarse: bool, on: bool = True) -> None:
        self.on = on
        self._times = COARSE_LIMIT if coarse else LIMIT
        self.reference, self.limit, self.norm = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
        self._root = torch.empty(0, device=device)

    def weigh(self, weight: Tensor) -> None:
        """Take the weights w, float64 [B], of a new variance."""
        root = weight.sqrt().float()  # w itself may be beyond float32
        if root.shape == self._root.shape:  # where a CUDA graph reads it again
            self._root.copy_(root)
        else:
            self._root = root

    def arm(self, last: Tensor, noise: Tensor, weight: Tensor) -> None:
        """Set the reference and the limit as the compression stage begins.

        Args:
            last: float64 [], |u| of the last uncompressed update. 0: there was none, as after a warm start, whose
                first updates may be large; the limit is then ``COARSE_LIMIT`` times the reference.
            noise: float64 [], |u| if the momentum were pure noise.
            weight: float64 [B], the weights w.
        """
        most = torch.where(self.reference > 0, RISE * self.reference, torch.inf)
        self.reference.copy_(torch.minimum(torch.maximum(last, noise), most))
        self.limit.copy_(torch.where(last > 0, self._times, COARSE_LIMIT) * self.reference)
        self.weigh(weight)

    def refer(self, squares: Tensor) -> None:
        """Set the reference to the root of ``squares``, float64 [], and the limit to its multiple."""
        torch.sqrt(squares, out=self.reference)
        torch.mul(self.reference, self._times, out=self.limit)
        self._of = "that of an average step"

    def take(self, header: Mapping[str, Any]) -> None:
        """Take up a checkpoint's reference and limit, once it was armed; the weights are those of ``arm``."""
        if self.on and header.get("guard"):
            for own, saved in zip((self.reference, self.limit), header["guard"], strict=True):
                own.fill_(saved)

    def limit_of(self, coef: Tensor, block_tensor: Tensor) -> Limit:
        """Return the limit as ops take it, with this step's ``coef``, float32 [tensors, columns of ``Coef``]."""
        return Limit(coef, block_tensor, self._root, self.limit, self.norm)

    def describe(self, rewarms: bool, steps: int, shared: bool) -> str:
        """Return a warning's text: why an update was refused and what follows; waits for the device."""
        times, most = (float(x / self.reference.clamp(min=1e-300)) for x in (self.norm, self.limit))
        follows = (
            f"What it holds beyond a step of Adam's is dropped, and {steps} uncompressed updates follow"
            if rewarms
            else 'Its momentum is kept, and nothing else follows (guard="warn"), so that training may stand still from '
            "now on"
        )
        way_out = (
            "a lower learning rate"
            if shared
            else 'variance="shared" (no freeze_step), Numerics(precondition=True), a larger variance_floor there or a '
            "later freeze"
        )
        return (
            f"the norm of the compressed update, {float(self.norm):.3g}, was {times:.3g} times {self._of}; at most "
            f"{most:g} is let through. {follows}. If this happens again, use {way_out}"
        )

    # ---------------------------------------------------------------- a part of an algorithm

    def held(self) -> Sequence[Tensor]:
        return self.reference, self.limit, self.norm, self._root

    def plain_state(self) -> dict[str, Any]:
        return {"guard": (float(self.reference), float(self.limit)) if self.on else None}

    def stats(self) -> dict[str, Any]:
        return {"update_norm": float(self.norm), "update_norm_limit": float(self.limit)}
