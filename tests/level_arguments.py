"""Arguments of the ops that bring workers' own variances to the mean gradient's level."""

from __future__ import annotations

from typing import Any

import torch
from op_arguments import arguments_of

from fusedonebit.optim.own_variance import places
from fusedonebit.triton_kernels.levels import LEVELS


def tell_arguments(p: Any, factor: float | None = None, updates: int = 3) -> Any:
    share = places(p.layout)[0]
    counts = p.layout.block_size // share
    gradients = (p.grads, p.places, p.exp_avg_sq)
    scale = None if factor is None else torch.tensor([factor])
    where = (share.int(), (counts.cumsum(0) - counts).int())
    written = (torch.full((int(counts.sum()),), torch.nan), torch.full((p.layout.n_blocks,), torch.nan))
    return arguments_of("tell_level", *gradients, scale, torch.tensor(updates), *where, *written)


def follow_arguments(p: Any, world_size: int = 3, flags: int = 0, absent: bool = False, first: bool = False) -> Any:
    """Of tensors of which the last but one has no squares, and the last an infinite projection; maybe told first."""
    tensors, places_of = len(p.layout.sizes), places(p.layout)[2]
    told = p.normal(places_of[-1] + tensors)
    told[places_of[-1] :] = told[places_of[-1] :].abs() * 100
    told[-2] = 0.0
    told[places_of[-1] - 1] = torch.inf
    levels, steps = p.normal(LEVELS, tensors).abs(), torch.arange(tensors).double() * (not first)
    levels[2] = (steps.float() - 2.0).clamp(min=0.0)
    if first:
        levels.zero_()
    missing = torch.arange(tensors).remainder(3).eq(1).to(torch.uint8) if absent else None
    where = (torch.tensor(places_of, dtype=torch.int32), world_size, p.coef, steps)
    return arguments_of(
        "follow_level",
        told,
        *where,
        torch.tensor([flags], dtype=torch.int32),
        missing,
        levels,
        torch.full((tensors,), 0.7),
    )
