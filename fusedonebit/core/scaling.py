"""Scales gradients before they count: by a GradScaler's loss scale, and clipping by the global norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import Flag, ModelGroup, ShardGroup, Transport
from ..triton_kernels import LARGEST_GRADIENT, FlatLayout, gradient_squares, rules, scale_coefficients
from ..triton_kernels.finish import PIECE
from ..triton_kernels.scaling import EARLIER, FACTOR, FOUND, MEAN_NORM, NORM, OVERFLOWED, RANKS

SCALER_ATTRIBUTES = ("grad_scale", "found_inf")


class LossScale(NamedTuple):
    """The two tensors that a ``GradScaler`` hands over for one step; None where it has not."""

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
    factor: Tensor = rules.clip_factor(norm.reshape(1), max_grad_norm)
    return factor


def gradient_norm(
    grads: Sequence[Tensor], layout: FlatLayout, model: ModelGroup, counted: Tensor | None = None
) -> Tensor:
    """Return the norm of a gradient without its bad elements, which drop out elsewhere: float32 [].

    Squares are added in float64. So a bad element, or a sum beyond float32, never lets the rest pass unclipped.
    ``grads`` are of ``layout``'s sizes; ``counted`` see ``Scaling``.
    """
    sums = Squares.of(layout, grads[0].device)
    gradient_squares(grads, layout.sizes, layout.block_size, LARGEST_GRADIENT, None, *sums)
    return model.sum(sums.of_this_rank(counted)).sqrt().float()


class Squares(NamedTuple):
    """Scratch memory in which ``gradient_squares`` adds up."""

    by_block: Tensor
    sums: Tensor
    tickets: Tensor
    total: Tensor

    @classmethod
    def of(cls, layout: FlatLayout, device: torch.device) -> Squares:
        """Make them for gradients of a layout."""
        pieces = -(-layout.n_blocks // PIECE)
        by_block, sums = (torch.empty(n, dtype=torch.float64, device=device) for n in (layout.n_blocks, pieces))
        tickets = torch.zeros(1 + pieces, dtype=torch.int32, device=device)
        return cls(by_block, sums, tickets, torch.empty((), dtype=torch.float64, device=device))

    def of_this_rank(self, counted: Tensor | None) -> Tensor:
        """Return what this rank adds to the model's, float64 []."""
        return self.total if counted is None else (self.by_block * counted).sum()


class Agreed(NamedTuple):
    """An agreement of all ranks on one step's clipping and loss scale; None where nobody asked for it."""

    coef: Tensor
    """Coefficients with gradients multiplied by ``factor``, and the limit of gradients that are still scaled."""
    hold: Tensor | None = None
    """Flags for which nothing may change: int32 [1]."""
    factor: Tensor | None = None
    """What the gradients are multiplied with; of clipping equal on all ranks: float32 [1]."""
    grad_norm: Tensor | None = None
    """Mean over the ranks of their gradients' norms, unscaled: float32 []."""
    ranks: Tensor | None = None
    """How many have found an inf, in this step or ``earlier``: float32 [1]."""
    overflowed: Tensor | None = None
    """1 where any rank or shard has, else 0: float32 [1]."""


class Scaling:
    """Agrees on clipping and loss scales, in memory that stays where it is: what a step is told, the next overwrites.

    Args:
        layout: Of the gradients.
        weighs: How many columns of coefficients weigh gradients, see ``scale_coefficients``.
        counted: Float64 [B], 1, or 0 in blocks which another rank of the model counts in norms; None: all count here.
    """

    def __init__(self, layout: FlatLayout, weighs: int, device: torch.device, counted: Tensor | None = None) -> None:
        self._layout, self._weighs, self._counted = layout, weighs, counted
        self._squares = Squares.of(layout, device)
        self._told = torch.zeros(EARLIER + 1, device=device)
        self._outcome = torch.empty(OVERFLOWED + 1, device=device)
        self._hold = torch.empty(1, dtype=torch.int32, device=device)
        self._coef = torch.empty(0, device=device)

    def memory(self) -> list[Tensor]:
        """Return all that it keeps."""
        return [*self._squares, self._told, self._outcome, self._hold, self._coef]

    def agree(
        self,
        grads: Sequence[Tensor],
        coef: Tensor,
        loss_scale: LossScale,
        max_grad_norm: float | None,
        transport: Transport,
        model: ModelGroup,
        *,
        largest: float = LARGEST_GRADIENT,
        earlier: Tensor | None = None,
        digest: Tensor | None = None,
    ) -> Agreed:
        """Decide what is multiplied with what in a compressed step, by at most one collective of a few numbers.

        Nobody knows the norm of the averaged gradient there: gradients are never averaged. The mean of the
        local norms bounds it from above (triangle inequality), and one factor for all ranks keeps the
        direction of their mean, which clipping each by its own norm does not.

        Args:
            grads: Of the layout's sizes.
            coef: float32 [tensors, columns of ``Coef``]; stays as it is.
            loss_scale: This rank's.
            max_grad_norm: None: nobody clips.
            transport: To the ranks that agree.
            model: Over which a norm is added up.
            largest: Elements beyond it do not count, unscaled.
            earlier: float32 [1], above 0 where this rank has found an inf since ranks have last met.
            digest: int64 [n], to the first of which the sum that all have received is added, for them to compare.
        """
        scale, found_inf = loss_scale
        told = self._told[:EARLIER] if earlier is None else self._told
        if max_grad_norm is not None:
            self._tell_norm(grads, loss_scale, model, largest, earlier, told)
        else:
            self._tell(found_inf, earlier, told)
        if max_grad_norm is not None or found_inf is not None:
            if model.count > 1:  # in an order which all of a model's ranks add up in: they must clip alike
                told.copy_(ShardGroup(transport).sum(told))
            else:
                transport.all_reduce(told)
        else:
            digest = None  # this rank has told itself alone
        if self._coef.shape != coef.shape:
            self._coef = torch.empty_like(coef)
        clip = (max_grad_norm is not None, 0.0 if max_grad_norm is None else max_grad_norm, self._weighs)
        written = (self._outcome, self._hold, coef, self._coef)
        scale_coefficients(told, transport.world_size, scale, *clip, *written, digest)
        hold, overflowed = self._hold, self._outcome[OVERFLOWED:]
        if found_inf is not None and model.count > 1:
            # Flags are the larger, the more ranks have found an inf.
            hold, found = model.max(torch.cat([hold, (overflowed > 0).int()])).split(1)
            overflowed = ((hold > 0) | (found > 0)).float()
        norm = None if max_grad_norm is None else self._outcome[MEAN_NORM]
        factor, ranks = self._outcome[FACTOR : FACTOR + 1], self._outcome[RANKS : RANKS + 1]
        return Agreed(self._coef, None if found_inf is None else hold, factor, norm, ranks, overflowed)

    def _tell_norm(
        self,
        grads: Sequence[Tensor],
        loss_scale: LossScale,
        model: ModelGroup,
        largest: float,
        earlier: Tensor | None,
        told: Tensor,
    ) -> None:
        """Write what this rank tells, in the launch that sums squares; of a model's part, once all are added up."""
        scale, found_inf = loss_scale
        where = (self._layout.sizes, self._layout.block_size, largest, scale)
        if model.count == 1:
            gradient_squares(grads, *where, *self._squares, found_inf, earlier, told)
            return
        gradient_squares(grads, *where, *self._squares)
        norm = model.sum(self._squares.of_this_rank(self._counted)).sqrt()
        self._tell(found_inf, earlier, told)
        told[NORM] = norm if scale is None else norm / scale

    @staticmethod
    def _tell(found_inf: Tensor | None, earlier: Tensor | None, told: Tensor) -> None:
        """Write what this rank tells, but for a norm."""
        if found_inf is None:
            told[FOUND] = 0.0
        else:
            torch.gt(found_inf, 0, out=told[FOUND])
        if earlier is not None:
            told[EARLIER:] = earlier
