"""Holds what the applications' pictures share; needs matplotlib, and no display."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def clear(axes: Iterable[Axes]) -> None:
    """Give panels a light grid and no frame."""
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a picture to a PNG, and forget it."""
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def running_mean(values: Iterable[float], keep: float) -> Iterator[float]:
    """Yield the exponential mean so far, of which ``keep`` is kept at each value."""
    mean, weight = 0.0, 0.0
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        yield mean / weight
