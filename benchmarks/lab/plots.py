"""The lab's pictures: how much worse each optimizer is than what it compresses, task by task; and two toys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from fusedonebit.apps.pictures import clear, lighter, method_colour, save

from . import toys
from .records import Records
from .report import DECADES, PERCENT, Difference, View, difference, sent, views
from .tasks import FIRST, TASKS

OF_ADAM = ("onebit-adam-living", "onebit-adam", "zero-one-adam-shared")
SHOWN = (*OF_ADAM, "onebit-lamb-living", "onebit-lion", "marsit-adam")
"""Optimizers in the picture. 1-bit Adam with a frozen variance is the lighter one."""
COLOURS = {name: lighter(method_colour(name), 0.45 * (name == "onebit-adam")) for name in SHOWN}

WORST = 100.0
"""Percent at which the axis ends; what is worse, or diverged, is shown there."""


def plot(records: Records, path: Path, parents: bool = False) -> None:
    """Draw a panel for each number of workers that all tasks were run with, at the optimizers' own rates.

    Dots have standard errors. ``parents``: at those of what they compress, where that was done with several of them.
    """
    recorded = [view for view in views(records) if view.alike == 1]
    run = [task for task in TASKS if any(view.runs(records, task, name) for view in recorded for name in COLOURS)]
    tasks = [task for task in run if task in FIRST] or run
    own = [view for view in recorded if view.by == 1 and view.parents == parents]
    own = [v for v in own if not parents or sum(sent(records, v, name) is not None for name in COLOURS) > 1]
    whole = [v for v in own if all(any(v.runs(records, task, name) for name in COLOURS) for task in tasks)]
    shown = whole or own or recorded[:1]
    size = (1.2 + 4.2 * len(shown), 1.6 + 0.26 * len(tasks))
    figure, axes = plt.subplots(1, len(shown), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, view in zip(axes.flat, shown, strict=True):
        _panel(axis, records, view, tasks[::-1])
    clear(axes.flat)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save(figure, path, dpi=130)


def plot_toys(path: Path) -> None:
    """Draw what compression does to two functions of two variables."""
    figure, (bowl, narrow) = plt.subplots(1, 2, figsize=(9.2, 3.2), layout="constrained")
    for label, options in toys.BOWL.items():
        bowl.plot(_worst(toys.bowl(options)), linewidth=1.1, label=label)
    bowl.axvline(toys.BOWL_WARM_UP, color="black", linestyle="--", linewidth=0.8)
    bowl.set(title="x² + y² from (1, 0.001)", xlabel="step", ylabel="value, worst of 20 steps", yscale="log")
    for feedback, label in ((False, "signs alone"), (True, "with error feedback")):
        narrow.plot(_worst(toys.narrow(feedback)), linewidth=1.1, label=label)
    narrow.set(title="0.1 |x + y| + |x - y| from (1, 1)", xlabel="step", ylabel="value, worst of 20 steps")
    for axis in (bowl, narrow):
        axis.legend(frameon=False, fontsize=8)
    clear((bowl, narrow))
    save(figure, path, dpi=110)


def _worst(values: Sequence[float]) -> list[float]:
    return [max(values[max(0, i - 19) : i + 1]) for i in range(len(values))]


def _panel(axis: Axes, records: Records, view: View, tasks: Sequence[str]) -> None:
    found = {name: [difference(records, view, task, name) for task in tasks] for name in COLOURS}
    names = [name for name in COLOURS if sum(d is not None for d in found[name]) > len(tasks) / 2]
    for place, name in enumerate(names):
        offset = 0.16 * ((len(names) - 1) / 2 - place)
        each = [(row + offset, d) for row, d in enumerate(found[name])]
        told = [(row, d) for row, d in each if d is not None and d.seeds]  # where the parent diverged nothing is told
        percent = [(row, *_percent(d)) for row, d in told]
        x, errors, y = [p for _, p, _ in percent], [e for _, _, e in percent], [row for row, _, _ in percent]
        axis.errorbar(x, y, xerr=errors, fmt="o", markersize=4, linewidth=1, color=COLOURS[name], label=name)
        lost = [row for row, d in told if d.diverged]
        axis.plot([WORST] * len(lost), lost, "x", markersize=7, color=COLOURS[name])
    axis.axvspan(-PERCENT, PERCENT, color="black", alpha=0.08, linewidth=0)
    axis.set_xscale("symlog", linthresh=PERCENT)
    axis.set_xlim(-WORST, 1.2 * WORST)
    axis.set_xticks([-100, -10, -1, 0, 1, 10, 100], ["-100", "-10", "-1", "0", "1", "10", "100"])
    labels = [f"{task} *" if TASKS[task].noiseless else task for task in tasks]
    axis.set_yticks(range(len(tasks)), labels)
    axis.set_ylim(-0.6, len(tasks) - 0.4)
    axis.set_title(f"{view.workers} workers", fontsize=10)
    axis.set_xlabel(f"worse than its parent, %  (*: {PERCENT:g} % for {DECADES} decades; x: diverged)", fontsize=8)


def _percent(d: Difference) -> tuple[float, float]:
    """Return a difference and its error on the axis, on which as much as is allowed is one percent in either unit."""
    unit = PERCENT / DECADES if d.unit == "dec" else 1.0
    mean = WORST if math.isnan(d.mean) else min(WORST, unit * d.mean)
    return mean, 0.0 if math.isnan(d.error) else unit * d.error
