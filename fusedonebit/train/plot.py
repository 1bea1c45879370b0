"""``loss.png``: loss against steps and against bytes sent, with the freeze marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

COLOURS = {"adamw": "#4c566a", "onebit-adam": "#d1495b"}
_SMOOTH = 0.8  # of the running mean that is drawn; the raw loss lies behind it


def plot_loss(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the records of one or several optimizers to a PNG."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    sent = any(r["bytes_total"] for r in records)
    for i, name in enumerate(dict.fromkeys(r["optimizer"] for r in records)):
        runs = [r for r in records if r["optimizer"] == name]
        colour = COLOURS.get(name, f"C{i}")
        steps, losses = [r["step"] for r in runs], [r["loss"] for r in runs]
        megabytes = [r["bytes_total"] / 1e6 for r in runs]
        for axis, xs in zip(axes, (steps, megabytes), strict=True):
            if axis is axes[1] and not sent:
                continue
            axis.plot(xs, losses, color=colour, alpha=0.18, linewidth=0.8)
            axis.plot(xs, _smooth(losses), color=colour, linewidth=1.6, label=name)
            held_out = [(x, r["held_out_loss"]) for x, r in zip(xs, runs, strict=True) if "held_out_loss" in r]
            if held_out:
                axis.plot(*zip(*held_out, strict=True), "o", color=colour, markersize=4, label=f"{name}, held out")
            frozen = next((x for x, r in zip(xs, runs, strict=True) if r["phase"] == "compression"), None)
            if frozen is not None:
                axis.axvline(frozen, color=colour, linestyle="--", linewidth=1)
                axis.annotate(
                    "variance frozen,\n1 bit from here",
                    (frozen, 0.97),
                    xycoords=("data", "axes fraction"),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="top",
                    fontsize=8,
                    color=colour,
                )
    axes[0].set(xlabel="step", ylabel="loss (nats per byte)")
    if sent:
        axes[1].set(xlabel="MB sent by one rank", xscale="log")
    else:
        axes[1].text(0.5, 0.5, "one rank: nothing is sent", ha="center", transform=axes[1].transAxes)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8, loc="center right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _smooth(values: Sequence[float]) -> list[float]:
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        mean = _SMOOTH * mean + (1 - _SMOOTH) * value
        weight = _SMOOTH * weight + (1 - _SMOOTH)
        result.append(mean / weight)
    return result
