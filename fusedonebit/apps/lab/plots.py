"""The lab's page of plots: a panel per task, and two toys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from ..pictures import clear, running_mean, save
from . import toys
from .tasks import TASKS

Record = Mapping[str, Any]

SMOOTH = 0.9
TOO_LARGE = 10.0
"""Times the first loss: there a curve ends, in a cross."""

SHOWN = {
    "adam": "black",
    "adam-frozen": "tab:gray",
    "onebit-adam": "tab:blue",
    "lamb": "tab:olive",
    "onebit-lamb": "tab:green",
    "onebit-adam-l2": "tab:red",
    "onebit-adam-eps-inside": "tab:orange",
    "naive-onebit-adam": "tab:pink",
    "adam-frozen-no-floor": "tab:purple",
    "onebit-adam-deepspeed-guarded": "tab:cyan",
}
"""Optimizers on the page, and their colours."""


def plot(records: Sequence[Record], path: Path) -> None:
    """Smoothed loss of the first seed; the freeze dashed, a cross where a run diverges; then the toys."""
    tasks = [task for task in TASKS if any(r["task"] == task for r in records)]
    panels = len(tasks) + 2
    columns = min(3, panels)
    rows = -(-panels // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.2 * rows), squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for axis, task in zip(axes.flat, tasks, strict=False):
        handles |= _task(axis, task, records)
    _bowl(axes.flat[len(tasks)])
    _narrow(axes.flat[len(tasks) + 1])
    for axis in axes.flat[panels:]:
        axis.set_axis_off()
    clear(axes.flat[:panels])
    ordered = {name: handles[name] for name in SHOWN if name in handles}
    figure.legend(ordered.values(), ordered.keys(), loc="outside right upper", frameon=False, fontsize=8)
    save(figure, path, dpi=110)


def _task(axis: Axes, task: str, records: Sequence[Record]) -> dict[str, Any]:
    handles = {}
    for name, colour in SHOWN.items():
        run = next((r for r in records if (r["task"], r["optimizer"]) == (task, name) and r["losses"]), None)
        if run is None:
            continue
        losses = list(running_mean(_below(run["losses"], TOO_LARGE * run["losses"][0]), SMOOTH))
        handles[name] = axis.plot(losses, color=colour, linewidth=1.1)[0]
        if len(losses) < TASKS[task].steps:
            axis.plot(len(losses) - 1, losses[-1], "x", color=colour, markersize=8)
        axis.axvline(run["freeze_step"], color="black", linestyle="--", linewidth=0.8)
    axis.set(title=task, xlabel="step", ylabel="training loss", yscale="log")
    return handles


def _bowl(axis: Axes) -> None:
    for label, numerics in toys.BOWL.items():
        axis.plot(_worst(toys.bowl(numerics)), linewidth=1.1, label=label)
    axis.axvline(toys.BOWL_WARM_UP, color="black", linestyle="--", linewidth=0.8)
    axis.set(title="x² + y² from (1, 0.001)", xlabel="step", ylabel="value, worst of 20 steps", yscale="log")
    axis.legend(frameon=False, fontsize=7)


def _narrow(axis: Axes) -> None:
    for feedback, label in ((False, "signs alone"), (True, "with error feedback")):
        axis.plot(_worst(toys.narrow(feedback)), linewidth=1.1, label=label)
    axis.set(title="0.1 |x + y| + |x - y| from (1, 1)", xlabel="step", ylabel="value, worst of 20 steps")
    axis.legend(frameon=False, fontsize=7)


def _worst(values: Sequence[float]) -> list[float]:
    return [max(values[max(0, i - 19) : i + 1]) for i in range(len(values))]


def _below(losses: Iterable[float | None], limit: float) -> Iterable[float]:
    """Return the losses up to where one passes the limit, or is no number any more."""
    for loss in losses:
        if loss is None or loss > limit:
            return
        yield loss
