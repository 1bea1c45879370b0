"""Formulas of ``outer`` and ``outer_scales``, once, as those in ``rules``."""

from __future__ import annotations

from .jit import rule, tl


@rule
def product(row, column):
    """s of an element: its row's scale times its column's."""
    return row * column


@rule
def weighted(x, y, share, rest):
    """share*x + rest*y."""
    return x * share + y * rest


@rule
def share(part: float, total: float) -> float:
    """part / total, 0 of nothing; float64, rounded once."""
    least = tl.where(total > 0, total, 1.0)
    return tl.where(total > 0, part / least, 0.0).to(tl.float32)
