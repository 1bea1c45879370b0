"""Holds what all pictures share: one colour for each method, and a frame; needs matplotlib, and no display."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

METHODS = {
    "adamw": "#3d4652",
    "bf16": "#8c98a8",
    "int8": "#009e73",
    "powersgd": "#7a5195",
    "diloco": "#4f7942",
    "compress": "#e3a857",
    "onebit-adam": "#d55e00",
    "zero-one-adam": "#0072b2",
    "lamb": "#7d6b45",
    "onebit-lamb": "#b58900",
    "onebit-lion": "#cc79a7",
    "muon": "#5b6b73",
    "onebit-muon": "#8e3b6f",
    "marsit": "#3b9fd8",
    "psgd": "#3d4652",
    "signsgd": "#009e73",
    "ef-signsgd": "#7a5195",
    "ssdm": "#a6761d",
    "cascading": "#444444",
}
"""The colour that each method has in every picture, by the name it has in ``fusedonebit train`` and the lab.

Grey is uncompressed. The others are Okabe and Ito's or near them, which the colour-blind tell apart.
"""
PARTS = {"compute": "#9a9a9a", "compress": "#e9b44c", "communicate": "#2e6f95"}
"""The parts of a step."""


def method_colour(name: str) -> str:
    """Return the colour of a method and of its variants, as ``onebit-adam-living``; raise KeyError for others."""
    for method, colour in METHODS.items():
        if name == method or name.startswith(f"{method}-"):
            return colour
    raise KeyError(f"no colour for {name!r}: METHODS has {', '.join(METHODS)}")


def lighter(colour: str, share: float = 0.5) -> str:
    """Mix a colour with a share of white: a second line of one method."""
    red, green, blue = (1 - (1 - part) * (1 - share) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def clear(axes: Iterable[Axes]) -> None:
    """Give panels a light grid and no frame."""
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path | BinaryIO, dpi: int = 150) -> None:
    """Write a picture to a PNG, and forget it."""
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def running_mean(values: Iterable[float], keep: float) -> Iterator[float]:
    """Yield the exponential mean so far, of which ``keep`` is kept at each value."""
    mean, weight = 0.0, 0.0
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        yield mean / weight
