"""The page's picture: what a step is made of on a slow link, and from which rate on compressing no longer pays."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from fusedonebit.apps.pictures import PARTS, clear, lighter, method_colour, plt, save

from . import goals, model, whole
from .tables import mbit, rate

SHORT = {
    "adamw": "AdamW, fp32",
    "bf16": "AdamW, bf16",
    "int8": "AdamW, int8",
    "powersgd": "PowerSGD",
    "compress-4": "AdamW, 4 bits",
    "onebit-adam": "1-bit Adam",
    "onebit-adam-overlap": "1-bit Adam, overlap",
    "zero-one-adam": "0/1 Adam",
    "onebit-lamb": "1-bit LAMB",
    "marsit-ring": "Marsit, ring",
    "marsit-owner": "Marsit, owner",
}
LIGHTER = ("onebit-adam-overlap", "marsit-ring")
"""Those that stand beside another one of the same method."""
COLOURS = {name: lighter(method_colour(name), 0.45 * (name in LIGHTER)) for name in SHORT}
Record = Mapping[str, Any]


def draw(record: Record, path: Path) -> None:
    """Draw two panels, to be read at half their width."""
    figure, (split, gains) = plt.subplots(2, 1, figsize=(6, 7.6), height_ratios=(1.25, 1), layout="constrained")
    clear([split, gains])
    _draw_split(split, record, goals.papers(record))
    _draw_gains(gains, record)
    save(figure, path)


def _draw_split(axis: Axes, record: Record, row: Record) -> None:
    names = list(SHORT)[::-1]
    for y, name in enumerate(names):
        parts = [1e3 * max(0.0, part) for part in model.split(record, name, row)]
        lefts = [0.0, *accumulate(parts)]
        for part, left, width in zip(PARTS, lefts, parts, strict=False):
            axis.barh(y, width, 0.7, left, color=PARTS[part], label=part if y == 0 else "")
        told = f"{1e3 * row['methods'][name]['whole']:,.0f} ms"
        if name != "adamw":
            told += f", {model.speedup(row, name):.1f} times as fast"
        inside = name == "adamw"
        place = {"xytext": (-4 if inside else 4, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(told, (lefts[-1], y), ha="right" if inside else "left", color="w" if inside else "k", **place)
    axis.set_yticks(range(len(names)), [SHORT[name] for name in names])
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("ms a step")
    axis.legend(frameon=False, loc="lower right")
    axis.set_title(f"A training step on a link of {rate(row['megabits'])}", loc="left")


def _draw_gains(axis: Axes, record: Record) -> None:
    """Draw how many times as fast the fastest of ours reaches the loss of each rival."""
    places = [row["megabits"] for row in record["rates"]]
    for rival in whole.RIVALS:
        seen = [whole.best(record, row, rival)[1] for row in record["rates"]]
        axis.plot(places, seen, "o-", color=COLOURS[rival], label=SHORT[rival], linewidth=2, markersize=4)
    axis.axhline(1, color="black", linewidth=1, linestyle="--")
    axis.annotate("below: ours is slower", (places[-1], 1), (0, -13), textcoords="offset points", ha="right")
    axis.set(xscale="log", xlabel="Mbit/s of each machine's link", ylabel="times as fast, to equal loss")
    axis.set_ylim(bottom=0)
    ticks = [tick for tick in (50, 100, 300, 1000, 3000, 10_000) if places[0] <= tick <= places[-1]]
    axis.set_xticks(ticks, [mbit(tick) for tick in ticks])
    axis.minorticks_off()
    axis.legend(title="the faster of 1-bit and 0/1 Adam, over", frameon=False, loc="upper right")
    axis.set_title("Whole runs, warm-up included", loc="left")
