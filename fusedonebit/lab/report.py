"""The lab's table and its page of plots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from .tasks import TASKS

Record = Mapping[str, Any]

TOO_LARGE = 10.0
"""Times the first loss: there a curve ends, in a cross."""


def table(records: Sequence[Record]) -> str:
    """Markdown: one row per optimizer, one column per task; mean and standard deviation over the seeds.

    "diverged 3/5": on so many of the seeds; the mean is then that of the others.
    """
    tasks = [task for task in TASKS if any(r["task"] == task for r in records)]
    heads = [f"{task}: {TASKS[task].metric} ({'higher' if TASKS[task].higher else 'lower'})" for task in tasks]
    lines = [f"| optimizer | {' | '.join(heads)} |", "|---|" + "--:|" * len(tasks)]
    for name in dict.fromkeys(r["optimizer"] for r in records):
        cells = [_cell([r for r in records if r["optimizer"] == name and r["task"] == task]) for task in tasks]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(runs: Sequence[Record]) -> str:
    if not runs:
        return ""
    fine = [r["metric"] for r in runs if r["diverged_at"] is None and r["metric"] is not None]
    parts = []
    if fine:
        mean = sum(fine) / len(fine)
        spread = math.sqrt(sum((x - mean) ** 2 for x in fine) / max(1, len(fine) - 1))
        parts.append(f"{mean:.4g} ± {spread:.2g}")
    if len(fine) < len(runs):
        parts.append(f"**diverged {len(runs) - len(fine)}/{len(runs)}**")
    return ", ".join(parts)


def plot(records: Sequence[Record], path: Path) -> None:
    """One panel per task: worker 0's smoothed loss of the first seed; the freeze dashed, a cross where it diverges."""
    tasks = [task for task in TASKS if any(r["task"] == task for r in records)]
    names = list(dict.fromkeys(r["optimizer"] for r in records))
    columns = min(4, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(tasks) :]:
        axis.set_axis_off()
    handles: dict[str, Any] = {}
    colours = plt.get_cmap("tab10" if len(names) <= 10 else "tab20")
    for axis, task in zip(axes.flat, tasks, strict=False):
        for i, name in enumerate(names):
            run = next((r for r in records if (r["task"], r["optimizer"]) == (task, name)), None)
            if run is None:
                continue
            losses, colour = list(_smooth(run["losses"], TOO_LARGE * run["losses"][0])), colours(i % colours.N)
            handles[name] = axis.plot(losses, color=colour, linewidth=1.2)[0]
            if len(losses) < len(run["losses"]):
                axis.plot(len(losses) - 1, losses[-1], "x", color=colour, markersize=8)
            axis.axvline(run["freeze_step"], color="black", linestyle="--", linewidth=0.8)
        axis.set(title=task, xlabel="step", ylabel="training loss", yscale="log")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _smooth(losses: Iterable[float | None], limit: float, keep: float = 0.9) -> Iterable[float]:
    """A running mean that ends where the loss passes the limit, or is no number any more."""
    mean, weight = 0.0, 0.0
    for loss in losses:
        if loss is None or loss > limit:
            return
        mean, weight = keep * mean + (1 - keep) * loss, keep * weight + (1 - keep)
        yield mean / weight
