"""Scales gradients before they count: by a GradScaler's loss scale, and clipping by the global norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import Flag, ShardGroup, Transport
from ..triton_kernels import LARGEST_GRADIENT, Coef, FlatLayout, gradient_squares

SCALER_ATTRIBUTES = ("grad_scale", "found_inf")
_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s


class LossScale(NamedTuple):
    """What a ``GradScaler`` has handed over for one step; None where it has not."""

    scale: Tensor | None
    """What the loss, so the gradients, were multiplied with: float32 []."""
    found_inf: Tensor | None
    """Above 0 where this rank has an infinite gradient: float32 []."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> LossScale:
        """Read the two attributes that ``torch.amp.GradScaler`` sets on an optimizer for a step."""
        scale, found_inf = (getattr(optimizer, name, None) for name in SCALER_ATTRIBUTES)
        # Where no parameter has a gradient the scaler hands over the number 0 instead of a tensor.
        return cls(*(None if x is None else torch.as_tensor(x).float().reshape(()) for x in (scale, found_inf)))

    def factor(self) -> Tensor | None:
        """Return what unscales gradients: float32 [], or None."""
        return None if self.scale is None else self.scale.reciprocal()


def overflow_flags(ranks: Tensor, world_size: int) -> Tensor:
    """Return the flags of a step on which ``ranks`` [] of all ranks have found an inf: int32 [1]."""
    local = (ranks > 0) & (ranks < world_size)
    return ((ranks > 0).int() * int(Flag.OVERFLOW) + local.int() * int(Flag.LOCAL)).reshape(1)


def clip_factor(norm: Tensor, max_grad_norm: float) -> Tensor:
    """Return what brings a gradient of ``norm`` [] down to ``max_grad_norm``, as in torch; 0 where it is infinite."""
    return (max_grad_norm / (norm + _CLIP_EPS)).clamp(max=1.0)


def gradient_norm(
    grads: Sequence[Tensor],
    layout: FlatLayout,
    shards: ShardGroup,
    loss_scale: Tensor | None = None,
    largest: float = LARGEST_GRADIENT,
) -> Tensor:
    """Return the norm of a gradient without its bad elements, which drop out elsewhere: float32 [], unscaled.

    Squares are added in float64. So a bad element, or a sum beyond float32, never lets the rest pass unclipped.
    ``grads`` are of ``layout``'s sizes; ``largest`` is what counts, unscaled.
    """
    device = grads[0].device
    bound = torch.full((1,), largest, device=device)
    squares = torch.empty(layout.n_blocks, dtype=torch.float64, device=device)
    where = layout.sizes, layout.block_size
    gradient_squares(grads, *where, bound if loss_scale is None else bound * loss_scale, squares)
    norm = shards.sum(squares.sum()).sqrt()
    return (norm if loss_scale is None else norm / loss_scale).float()


class Agreed(NamedTuple):
    """What all ranks do with their gradients in one step; None where nobody asked for it."""

    hold: Tensor | None
    """Flags for which nothing may change: int32 [1]."""
    factor: Tensor | None
    """What the gradients are multiplied with; of clipping equal on all ranks: float32 []."""
    grad_norm: Tensor | None
    """Mean over the ranks of their gradients' norms, unscaled: float32 []."""
    overflowed: Tensor | None = None
    """Above 0 where any rank has found an inf, in this step or ``earlier``: float32 []."""
    loss_scale: Tensor | None = None
    """What gradients were multiplied with before, so also the largest of them that counts: float32 []."""

    def scaled(self, coef: Tensor, *columns: Coef) -> Tensor:
        """Return the coefficients with gradients multiplied by ``factor``, in ONE_MINUS_BETA1 and other ``columns``."""
        if self.factor is None:
            return coef
        coef = coef.clone()
        for column in (Coef.ONE_MINUS_BETA1, *columns):
            coef[:, column] *= self.factor
        return self.limited(coef)

    def limited(self, coef: Tensor) -> Tensor:
        """Return the table, itself, with the limit of gradients that are still scaled."""
        if self.loss_scale is not None:
            coef[:, Coef.GRAD_LIMIT] *= self.loss_scale
        return coef


def agree_on_scaling(
    grads: Sequence[Tensor],
    loss_scale: LossScale,
    max_grad_norm: float | None,
    transport: Transport,
    shards: ShardGroup,
    layout: FlatLayout,
    *,
    largest: float = LARGEST_GRADIENT,
    earlier: Tensor | None = None,
) -> Agreed:
    """Decide what is multiplied with what in a compressed step, by at most one collective of a few numbers.

    Nobody knows the norm of the averaged gradient there: gradients are never averaged. The mean of the
    local norms bounds it from above (triangle inequality), and one factor for all ranks keeps the
    direction of their mean, which clipping each by its own norm does not. ``earlier``, float32 [1], is above 0 where
    this rank has found an inf since ranks have last met.
    """
    factor, found_inf = loss_scale.factor(), loss_scale.found_inf
    if found_inf is None and max_grad_norm is None:
        return Agreed(None, factor, None, loss_scale=loss_scale.scale)
    told = torch.zeros(2 if earlier is None else 3, device=grads[0].device)
    if found_inf is not None:
        told[0] = found_inf > 0
    if max_grad_norm is not None:
        told[1] = gradient_norm(grads, layout, shards, loss_scale.scale, largest)
    if earlier is not None:
        told[2:] = earlier
    transport.all_reduce(told)
    overflowed = told[0] + told[2:].sum()
    hold = None if found_inf is None else shards.union(overflow_flags(told[0], transport.world_size))
    if max_grad_norm is None:
        return Agreed(hold, factor, None, overflowed, loss_scale.scale)
    mean_norm = told[1] / transport.world_size
    clip = clip_factor(mean_norm, max_grad_norm)
    return Agreed(hold, clip if factor is None else factor * clip, mean_norm, overflowed, loss_scale.scale)
