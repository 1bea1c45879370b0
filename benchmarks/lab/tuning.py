"""Finds each optimizer's learning rate on each task, by the same search for all, on seeds apart from those reported."""

from __future__ import annotations

import math
from collections.abc import Mapping

GRID = (0.3, 1.0, 3.0)
"""First rates, as multiples of where the search begins."""
FURTHER = 10 / 3
"""Beyond the grid's edge, while the best lies there."""
REFINED = (0.55, 1.8)
"""Around the best of the grid, about half a step away in either direction."""
FURTHEST = 5
"""Rates tried beyond either edge at most."""
SEEDS = (1000, 1001)
"""Of the runs that are searched; reported ones begin at 0."""


def rounded(lr: float) -> float:
    """Return a rate of three digits, as keys have them."""
    return float(f"{lr:.3g}")


def wanted(start: float, found: Mapping[float, float]) -> list[float]:
    """Return rates to be tried next, [] where the search is over.

    Args:
        start: Where the search begins.
        found: The metric at each rate tried so far, lower is better, inf where it diverged.
    """
    grid = _grid(start, found)
    if missing := [lr for lr in grid if lr not in found]:
        return missing
    best = min(grid, key=found.__getitem__)
    return [lr for lr in (rounded(best * by) for by in REFINED) if lr not in found]


def best(start: float, found: Mapping[float, float]) -> float | None:
    """Return the rate with the best metric, the smallest where all diverged; None where the search is not over."""
    return None if wanted(start, found) else min(sorted(found), key=found.__getitem__)


def _grid(start: float, found: Mapping[float, float]) -> list[float]:
    """Return the first grid, with one rate more beyond an edge while the best lies there."""
    grid = [rounded(start * by) for by in GRID]
    for _ in range(FURTHEST):
        if not all(lr in found for lr in grid):
            break
        at = min(grid, key=found.__getitem__)
        if at == grid[-1]:
            grid.append(rounded(at * FURTHER))
        elif at == grid[0] or not math.isfinite(found[at]):
            grid.insert(0, rounded(grid[0] / FURTHER))
        else:
            break
    return grid
