"""Scales gradients before they count: by a GradScaler's loss scale, and clipping by the global norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import Flag, ModelGroup, ShardGroup, Transport
from ..triton_kernels import LARGEST_GRADIENT, FlatLayout, gradient_squares, rules, scale_coefficients
from ..triton_kernels.finish import PIECE
from ..triton_kernels.gradient_scaling import EARLIER, FACTOR, FOUND, MEAN_NORM, NORM, OVERFLOWED, RANKS
from ..triton_kernels.tables import tables_of

SCALER_ATTRIBUTES = ("grad_scale", "found_inf")


class LossScale(NamedTuple):
    """The two tensors that a ``GradScaler`` hands over for one step; None where it has not."""

    scale: Tensor | None
    """What the loss, so the gradients, were multiplied with: float32 []."""
    found_inf: Tensor | None
    """Above 0 where this rank has an infinite gradient: float32 []."""

    @classmethod
    def of(cls, optimizer: object) -> LossScale:
        """Read the two attributes that ``torch.amp.GradScaler`` sets on an optimizer for a step."""
        scale, found_inf = (getattr(optimizer, name, None) for name in SCALER_ATTRIBUTES)
        # Where no parameter has a gradient the scaler hands over the number 0 instead of a tensor.
        return cls(*(None if x is None else torch.as_tensor(x).float().reshape(()) for x in (scale, found_inf)))

    def factor(self) -> Tensor | None:
        """Return what unscales gradients: float32 [], or None."""
        return None if self.scale is None else self.scale.reciprocal()


NO_SCALE = LossScale(None, None)
"""Where no ``GradScaler`` has a part in a step."""


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
    ranks: Tensor | None = None
    """How many have found an inf, in this step or ``earlier``: float32 [1]."""


class Room(NamedTuple):
    """Memory of what ranks agree on, which stays where it is: what a step is told, the next overwrites."""

    squares: Squares
    told: Tensor
    outcome: Tensor
    hold: Tensor
    coef: Tensor

    @classmethod
    def of(cls, layout: FlatLayout, coef: Tensor) -> Room:
        """Make it for gradients of a layout, and coefficients like these."""
        told, outcome = (torch.zeros(n, device=coef.device) for n in (EARLIER + 1, OVERFLOWED + 1))
        hold = torch.empty(1, dtype=torch.int32, device=coef.device)
        return cls(Squares.of(layout, coef.device), told, outcome, hold, torch.empty_like(coef))


class Scaling:
    """Agrees on clipping and loss scales; both cost nothing where nobody asks for them.

    Args:
        layout: Of the gradients.
        device: Where they lie.
        counted: Float64 [B], 1, or 0 in blocks which another rank of the model counts in norms; None: all count here.

    Attributes:
        norm: Of the last step's gradients, before clipping: float32 []; 0: nobody clips.
        overflowed: Above 0 where any rank, or shard, has found an inf in the last step: float32 [1].
    """

    def __init__(self, layout: FlatLayout, device: torch.device, counted: Tensor | None = None) -> None:
        self._layout, self._counted = layout, counted
        self.norm, self.overflowed = torch.zeros((), device=device), torch.zeros(1, device=device)
        self._room: Room | None = None
        self._flat: tuple[FlatLayout, object] | None = None  # of averages, as one tensor; with its tables, for launches

    def scratch(self) -> list[Tensor]:
        """Return what no later step reads."""
        return [] if self._room is None else [*self._room.squares, *self._room[1:]]

    def held(self) -> list[Tensor]:
        """Return all else."""
        return [self.norm, self.overflowed, *([] if self._counted is None else [self._counted])]

    def clip(self, averages: Tensor, most: float, model: ModelGroup) -> None:
        """Clip averaged gradients, float32 [P] by flat index, to a norm; exactly, as all ranks have them."""
        if self._flat is None:
            flat = FlatLayout((len(averages),), 1, self._layout.block_size)
            self._flat = flat, tables_of(flat, averages.device)
        self.norm = gradient_norm([averages], self._flat[0], model, self._counted)
        averages *= clip_factor(self.norm, most)

    def agree(
        self,
        grads: Sequence[Tensor],
        coef: Tensor,
        loss_scale: LossScale,
        max_grad_norm: float | None,
        transport: Transport,
        model: ModelGroup,
        weighs: int,
        *,
        largest: float = LARGEST_GRADIENT,
        earlier: Tensor | None = None,
        digest: Tensor | None = None,
    ) -> Agreed:
        """Decide what is multiplied with what in a compressed step, by at most one collective of a few numbers.

        Also note ``norm`` and ``overflowed``.

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
            weighs: How many columns of coefficients weigh gradients, see ``scale_coefficients``.
            largest: Elements beyond it do not count, unscaled.
            earlier: float32 [1], above 0 where this rank has found an inf since ranks have last met.
            digest: int64 [n], to the first of which the sum that all have received is added, for them to compare.
        """
        scale, found_inf = loss_scale
        if self._room is None:
            self._room = Room.of(self._layout, coef)
        room = self._room
        told = room.told[:EARLIER] if earlier is None else room.told
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
        clip = (max_grad_norm is not None, 0.0 if max_grad_norm is None else max_grad_norm, weighs)
        written = (room.outcome, room.hold, coef, room.coef)
        scale_coefficients(told, transport.world_size, scale, *clip, *written, digest)
        hold, overflowed = room.hold, room.outcome[OVERFLOWED:]
        if found_inf is not None and model.count > 1:
            # Flags are the larger, the more ranks have found an inf.
            hold, found = model.max(torch.cat([hold, (overflowed > 0).int()])).split(1)
            overflowed = ((hold > 0) | (found > 0)).float()
        if found_inf is not None:
            self.overflowed = overflowed
        if max_grad_norm is not None:
            self.norm = room.outcome[MEAN_NORM]
        factor, ranks = room.outcome[FACTOR : FACTOR + 1], room.outcome[RANKS : RANKS + 1]
        return Agreed(room.coef, None if found_inf is None else hold, factor, ranks)

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
        assert self._room is not None
        squares = self._room.squares
        if model.count == 1:
            gradient_squares(grads, *where, *squares, found_inf, earlier, told)
            return
        gradient_squares(grads, *where, *squares)
        norm = model.sum(squares.of_this_rank(self._counted)).sqrt()
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
