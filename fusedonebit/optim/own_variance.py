"""Keeps, of 0/1 Adam's workers with a variance of their own each, the level at which these are to be.

A worker's v is the EMA of squares of its own gradients, |g_w|^2 = |mean g|^2 and noise, of which the mean gradient has
W times less. Divided by their roots alone updates would be smaller than Adam's on mean gradients, by up to sqrt(W). So
each tensor has a share rho = |mean g|^2 / mean |g_w|^2 with which v is multiplied in denominators. It follows from what
workers tell each other where they synchronise (``triton_kernels.levels``): a few projections of a tensor's
gradient, and its sum of v. v itself nobody sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.frame import Frame
from ..core.part import Part
from ..core.state_tensor import StateTensor
from ..triton_kernels import FlatLayout, follow_level, tell_level
from ..triton_kernels.levels import FOLLOWED, LEVELS

MOST = 64
"""Projections of a tensor at most: more tell little more, as an EMA of their squares is what counts."""

EARLY, TOLD_EVERY = 16, 4
"""Of the first steps each round's gradient is told, then that of one round in so many steps: the EMA is longer."""


class OwnVariance(Part):
    """Follows the level of each tensor's gradient.

    Args:
        frame: Of the optimizer.

    Attributes:
        levels: float32 [3, tensors], see ``follow_level``.
        rho: float32 [tensors], 1 until it is known.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        layout, device = frame.layout, frame.device
        tensors = len(layout.sizes)
        self.levels, self.rho = torch.zeros(LEVELS, tensors, device=device), torch.ones(tensors, device=device)
        if frame.ranks.transport.world_size == 1:
            return
        share, lengths, first = places(layout)
        counts = layout.block_size // share
        self._share, self._place = share.int().to(device), (counts.cumsum(0) - counts).int().to(device)
        self._lengths, self._first = torch.tensor(lengths, device=device), torch.tensor(first, device=device).int()
        self._blocks = torch.tensor(layout.first_block, device=device)  # where each tensor's begin
        self._projections = torch.zeros(int(counts.sum()), device=device)
        self._told = int(sum(lengths))  # behind them are those of padding
        self._sums = torch.zeros(layout.n_blocks, device=device)

    def tells(self, done: int, steps: int) -> bool:
        """Return whether ranks tell each other anything in a round of ``steps`` after ``done`` steps."""
        several = self._frame.ranks.transport.world_size > 1
        return several and (done < EARLY or (done + steps) // TOLD_EVERY > done // TOLD_EVERY)

    def tell(self, grads: Sequence[Tensor], factor: Tensor | None, exp_avg_sq: Tensor) -> Tensor:
        """Return what this rank tells of its gradients, float32 [projections + tensors]."""
        frame = self._frame
        given = (grads, frame.places, exp_avg_sq, factor, frame.steps.updates)
        tell_level(*given, self._share, self._place, self._projections, self._sums)
        how: dict[str, Any] = {"unsafe": True, "initial": 0.0}
        told = torch.segment_reduce(self._projections[: self._told], "sum", lengths=self._lengths, **how)
        sums = torch.segment_reduce(self._sums.double(), "sum", offsets=self._blocks, **how)
        return torch.cat([told, sums.float()])

    def follow(self, told: Tensor, flags: Tensor, absent: Tensor | None) -> None:
        """Renew rho of what all ranks tell, ``told`` is this one's and becomes their sum; nothing where it was skipped.

        Raises:
            CollectiveError: if the collective fails.
        """
        frame = self._frame
        transport = frame.ranks.transport
        transport.all_reduce(told)
        coef, absent = frame.coefficients.last, None if absent is None else absent.view(torch.uint8)
        of_ranks = (told, self._first, transport.world_size)
        follow_level(*of_ranks, coef, frame.steps.of_each, flags, absent, self.levels, self.rho)

    def begin(self, steps: Tensor) -> None:
        """Go on from another optimizer's variance after ``steps`` float64 [tensors]: no gradient was told yet."""
        self.levels[FOLLOWED] = steps

    # ---------------------------------------------------------------- a part of an algorithm

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        return (
            StateTensor("level", "tensor", self.levels, not_negative=True, optional=True),
            StateTensor("rho", "tensor", self.rho, not_negative=True, optional=True),
        )

    def held(self) -> Sequence[Tensor]:
        alone = self._frame.ranks.transport.world_size == 1
        tables = () if alone else (self._share, self._place, self._lengths, self._first, self._blocks)
        return self.levels, self.rho, *tables

    def scratch(self) -> Sequence[Tensor]:
        return [] if self._frame.ranks.transport.world_size == 1 else [self._projections, self._sums]


def places(layout: FlatLayout) -> tuple[Tensor, list[int], list[int]]:
    """Place projections.

    Returns:
        Of how many elements each block's sums are, int64 [B], a power of two; how many of these, one behind the other,
        are each projection; and where each tensor's projections begin.
    """
    share = torch.full((layout.n_blocks,), layout.block_size)
    lengths: list[int] = []
    first = [0]
    for size, begin, end in zip(layout.sizes, layout.first_block, layout.first_block[1:], strict=False):
        wanted = 1 << max(0, -(-size // MOST) - 1).bit_length()  # elements of each, a power of two
        of_block = min(wanted, layout.block_size)
        share[begin:end] = of_block
        sums, count = (end - begin) * (layout.block_size // of_block), -(-size // wanted)
        if count:
            of_each = wanted // of_block
            lengths += [of_each] * (count - 1) + [sums - of_each * (count - 1)]  # of the last one the zeros behind, too
        first.append(first[-1] + count)
    return share, lengths, first
