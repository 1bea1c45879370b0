"""Keeps a variance alive while momentum travels in bits: for a few hundredths of a byte per parameter and step.

1-bit Adam freezes v because nobody knows the mean gradient any more, of whose squares it is made. Each worker knows
its own gradient, though, and can tell the others two things of it (docs/numerics.md, "A variance that lives"):

    its shape    s_w, the EMA of its own squares, as logarithms of 8 bits; their mean has the shape of v, but is larger
                 by the noise that the mean gradient has less of: up to W times
    its level    projections of it on random signs r, the same on all workers: their mean over workers is r.(mean g),
                 and E (r.(mean g))^2 = |mean g|^2

So v = (level / sum of the mean of s_w) * mean of s_w, by tensor. Both are told at renewals, often at first, then every
``LONGEST`` steps. In between v stays, the same on all ranks, and what is divided by its root stays comparable; at a
renewal momentum and residuals are multiplied by old over new denominator, so that error feedback stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm import FeedbackReducer, Flag, ShardGroup
from ..comm.feedback import Unit
from ..core.telemetry import HostMirror
from ..triton_kernels import Coef, FlatLayout, LiveTable, live_variance
from ..triton_kernels.eager import only_live, tiles
from ..triton_kernels.squares import decode, renew
from .onebit_options import OneBitOptions, warmup_steps

LONGEST = 50
"""Steps between two renewals at most."""

SHARE_OF_AGE = 4
"""Before, a renewal follows after so much of what was done since the freeze, or since tensors came alive."""

NOTICED_AFTER = 2
"""Steps until the host knows which tensors have come alive."""

LEAST_COUNTS = 6
"""Of a state's plain values; behind them are those that are on their way to the host."""

LEVEL, WEIGHT, MEAN, FOLLOWED = range(4)  # rows of ``levels``


class Owner(Protocol):
    """Is an optimizer whose variance lives: ``OneBitOptimizer``, which says what these are."""

    options: OneBitOptions
    param_groups: list[dict[str, Any]]
    layout: FlatLayout
    device: torch.device
    reducer: FeedbackReducer
    shards: ShardGroup
    live: LiveTable
    exp_avg_sq: Tensor
    own_steps: Tensor

    @property
    def entered(self) -> Tensor:
        """Return how many updates have entered each tensor's v, infinite where it is corrected: float64 [tensors]."""

    @property
    def block_tensor(self) -> Tensor:
        """Return each block's tensor, int32 [B]."""

    def coefficient_table(self) -> Tensor:
        """Return the coefficients of the coming step, float32 [tensors, columns of ``Coef``]."""

    def weigh_guard(self) -> None:
        """Tell the guard of a variance that was renewed."""


class LivingVariance:
    """Renews the variance of an optimizer in its compression stage.

    Args:
        optimizer: Whose.

    Attributes:
        levels: float32 [4, tensors]: the EMA of |mean g|^2, from 0; how much of its weights has been given; the mean of
            v, 0 while a tensor waits for its first gradient; and the tensor's updates when the EMA was last followed.
        mean_sq: float64 [tensors], the mean again, for the table of coefficients.
        steps: Steps since the freeze.
        age: The same, or steps since tensors came alive.
        since: Steps since the last renewal.
        renewals: How many there were.
        due: Whether the next step begins with a renewal.
    """

    def __init__(self, optimizer: Owner) -> None:
        tensors, device = max(1, len(optimizer.layout.sizes)), optimizer.device
        self.levels = torch.zeros(4, tensors, device=device)
        self.mean_sq = torch.zeros(tensors, dtype=torch.float64, device=device)
        self._woken = torch.zeros(1, dtype=torch.int32, device=device)
        self._mirror = HostMirror(device, NOTICED_AFTER)
        self._eases_after = 0
        self.steps = self.age = self.since = self.renewals = 0
        self.due = False

    # ---------------------------------------------------------------- when

    def begin_step(self, optimizer: Owner) -> None:
        """Renew if it is time, and decide whether the next step does; the same on all ranks."""
        if self.due:
            self._renew(optimizer)
        if any(self._mirror.push(self._woken if self.due else 0)):
            self.age = 0
        self.steps, self.age, self.since = self.steps + 1, self.age + 1, self.since + 1
        self._ease(optimizer)
        self.due = self.since >= min(LONGEST, max(1, self.age // SHARE_OF_AGE))

    def _ease(self, optimizer: Owner) -> None:
        """Choose how scales are measured; the same on all ranks."""
        if optimizer.options.scale_norm == "relaxed":
            optimizer.reducer.set_norm("contractive" if self.steps <= self._eases_after else "relaxed")

    def state_dict(self) -> list[int]:
        """Return plain values to resume from; waits for the device."""
        woken = self._mirror.flush_pending()
        return [self.steps, self._eases_after, self.age, self.since, self.renewals, int(self.due), *woken]

    def resume(self, state: Sequence[int]) -> None:
        """Take up those, ``levels`` are filled apart."""
        self.steps, self._eases_after, self.age, self.since, self.renewals, due, *woken = state
        self.due = bool(due)
        self._mirror.refill(woken)
        self.mean_sq.copy_(self.levels[MEAN])

    # ---------------------------------------------------------------- what

    def begin(self, optimizer: Owner, mean: Tensor) -> None:
        """Take over the warm-up's v, of which ``mean`` float32 [tensors] is that of v > 0; both become corrected."""
        v, layout = optimizer.exp_avg_sq, optimizer.layout
        optimizer.reducer.follow(v)
        root = optimizer.coefficient_table()[:, Coef.RSQRT_BIAS2].double().square()
        sums, _ = live_variance(layout.sizes, layout.block_size, v)
        self.levels[LEVEL] = self._by_tensor(optimizer, sums).clamp(max=torch.finfo(torch.float32).max)
        self.levels[WEIGHT] = 1.0 / root
        self.levels[MEAN] = mean * root
        self.levels[FOLLOWED] = optimizer.own_steps
        self.mean_sq.copy_(self.levels[MEAN])
        v.view(layout.n_blocks, -1).mul_(root.float()[optimizer.block_tensor, None])
        optimizer.entered.fill_(torch.inf)
        optimizer.entered.masked_fill_((mean == 0) & (optimizer.own_steps == 0), 0.0)  # Adam corrects what is late
        self.steps = self.age = self.since = 0
        self._eases_after = warmup_steps(max(float(group["betas"][1]) for group in optimizer.param_groups))
        self.due = False
        self._mirror.flush()

    def follow(self, optimizer: Owner, coef: Tensor) -> None:
        """Let the level follow the gradients of the step just made, which were projected; unless it was skipped.

        One that only the guard refuses counts: a variance that is too small would be refused again and again.
        """
        squares = optimizer.shards.sum(optimizer.reducer.projected_squares())
        level, weight, _, followed = self.levels.double()
        done = optimizer.own_steps + 1.0
        kept = coef[:, Coef.BETA2].double() ** (done - followed).clamp(min=1.0)
        taken = ((optimizer.reducer.flags & ~int(Flag.VETO)) == 0) & squares.float().isfinite()
        if optimizer.reducer.absent is not None:
            taken &= ~optimizer.reducer.absent
        new = torch.stack([kept * level + (1 - kept) * squares, kept * weight + (1 - kept), self.mean_sq, done])
        self.levels.copy_(torch.where(taken, new, self.levels.double()))

    def _renew(self, optimizer: Owner) -> None:
        reducer, v = optimizer.reducer, optimizer.exp_avg_sq
        logs, tops = reducer.mean_squares()
        tables = self._tables(optimizer, logs, tops)
        coef, block_size = optimizer.coefficient_table(), optimizer.layout.block_size
        if optimizer.options.precondition:
            reducer.change_unit(Unit(coef, optimizer.options.eps_inside_sqrt, tables), v, logs, tops)
        renew(block_size, v, logs, tops, tables, optimizer.block_tensor, optimizer.live.bits, optimizer.live.row)
        optimizer.weigh_guard()
        self.since = 0
        self.renewals += 1

    def _tables(self, optimizer: Owner, logs: Tensor, tops: Tensor) -> Tensor:
        """Return what the new v is made of by tensor, see ``renewed``; note which tensors have come alive."""
        sums, alive, live = self._sums(optimizer, logs, tops)
        level = self.levels[LEVEL].double() / self.levels[WEIGHT].double()
        level = torch.where((sums > 0) & (level > 0), level, 0.0)  # else there is nothing to divide by yet
        mean = level / alive.clamp(min=1.0)
        floor = optimizer.options.least_share
        tables = torch.stack([level / torch.where(sums > 0, sums, 1.0), mean, mean * floor]).float()
        self._woken.fill_(((level > 0) & (self.mean_sq == 0) & (live > 0)).any())
        self.levels[MEAN] = mean
        self.mean_sq.copy_(self.levels[MEAN])
        optimizer.entered.masked_fill_(mean > 0, torch.inf)
        return tables

    def _sums(self, optimizer: Owner, logs: Tensor, tops: Tensor) -> tuple[Tensor, ...]:
        """Return by tensor the sum of the workers' mean squares, how many are above 0, and how many elements count."""
        layout, live = optimizer.layout, optimizer.live
        by_block = torch.zeros(2, layout.n_blocks, dtype=torch.float64, device=optimizer.device)
        for tile in tiles((layout.numel,), 1, layout.block_size, optimizer.device):
            mean_sq = decode(logs.view(-1, layout.block_size)[tile.blocks], tops[tile.blocks])
            mean_sq = only_live(mean_sq, live.bits, live.row, tile)
            by_block[0, tile.blocks] = mean_sq.sum(1, dtype=torch.float64)
            by_block[1, tile.blocks] = (mean_sq > 0).sum(1).double()
        return tuple(self._by_tensor(optimizer, each) for each in (*by_block, live.numel.double()))

    def _by_tensor(self, optimizer: Owner, by_block: Tensor) -> Tensor:
        sums = torch.zeros_like(self.mean_sq).index_add_(0, optimizer.block_tensor, by_block)
        return optimizer.shards.sum(sums)

    def waiting(self, optimizer: Owner) -> list[int]:
        """Return indices of tensors that wait for their first gradient; reads from the device."""
        live = self._by_tensor(optimizer, optimizer.live.numel.double())
        return torch.nonzero((self.mean_sq == 0) & (live > 0)).flatten().tolist()

    def state(self) -> list[Tensor]:
        """Return all tensors."""
        return [self.levels, self.mean_sq, self._woken]
