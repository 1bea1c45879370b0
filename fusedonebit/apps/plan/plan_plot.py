"""``plan.png``: what a step's messages cost against the number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from ..pictures import METHODS, clear, lighter, save
from .report import Plan
from .units import bandwidth, duration

ADAM, MARSIT = METHODS["onebit-adam"], METHODS["marsit"]
STYLES = {
    "fp32": (METHODS["adamw"], "-"),
    "bf16": (METHODS["bf16"], "-"),
    "int8": (METHODS["int8"], ":"),
    "powersgd": (METHODS["powersgd"], "--"),
    "diloco": (METHODS["diloco"], "-"),
    "flat": (ADAM, "-"),
    "flat-overlap": (ADAM, ":"),
    "hierarchical": (lighter(ADAM), "--"),
    "hierarchical-bf16": (lighter(ADAM), ":"),
    "zero-one": (METHODS["zero-one-adam"], "-"),
    "marsit-ring": (lighter(MARSIT, 0.4), "-"),
    "marsit-torus": (lighter(MARSIT, 0.4), "--"),
    "marsit-owner": (MARSIT, "-"),
}
"""1-bit Adam's are those of LAMB as well."""
SMALLEST_GAP = 0.052  # between two labels, of the axis' height


def plot_plan(plan: Plan, path: Path) -> None:
    """Draw a plan to a PNG."""
    figure, axis = plt.subplots(figsize=(10, 5.6), layout="constrained")
    draw(axis, plan)
    save(figure, path)


def draw(axis: Axes, plan: Plan) -> None:
    """Cost against GPUs, both logarithmic; each line is named where it ends."""
    counts = plan.scale()
    steps, ends = {n: plan.steps(n) for n in counts}, {}
    for name, (colour, dashes) in STYLES.items():
        points = [(n, 1e3 * steps[n][name].messages) for n in counts if name in steps[n]]
        if not points:
            continue
        heavy = name in ("fp32", "flat", "marsit-owner")
        axis.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=2.2 if heavy else 1.5)
        ends[name] = points[-1][1]
    axis.set(xscale="log", yscale="log", xlim=(counts[0], counts[-1]), xlabel="GPUs")
    axis.set_ylabel("ms a step, for messages alone, hidden ones too")
    axis.set_xticks(_ticks(counts), [f"{n:,}" for n in _ticks(counts)])
    axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}")
    clear([axis])
    _mark(axis, plan)
    _name(axis, plan, ends)
    net = plan.network
    between = "" if math.isinf(net.between) else f"{bandwidth(net.between)} between nodes, "
    inside = f"{net.inside / 1e9:.3g} GB/s inside"
    axis.set_title(
        f"{_short(plan.parameters)} parameters, {net.gpus_per_node} GPUs a node, {between}{inside}",
        fontsize=10,
        loc="left",
    )


def _ticks(counts: Sequence[int]) -> list[int]:
    return [n for n in (2, 8, 32, 128, 512, 2048, 16384, 131072) if counts[0] <= n <= counts[-1]]


def _mark(axis: Axes, plan: Plan) -> None:
    """Mark what was asked: its column and the best of ours; and how long a step computes."""
    if plan.compute is not None:
        axis.axhline(1e3 * plan.compute, color="black", linestyle=(0, (1, 3)), linewidth=1)
        axis.annotate(
            f"a step computes for {duration(plan.compute)}",
            (0.01, 1e3 * plan.compute),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )
    per_node = plan.network.gpus_per_node
    if per_node > 2:
        axis.axvspan(2, per_node, color="black", alpha=0.05, linewidth=0)
        axis.annotate("one node", (2, 0.01), (4, 0), ("data", "axes fraction"), "offset points", fontsize=8)
    if plan.gpus < 2:
        return
    best = plan.best()
    counts, seconds = plan.scale(), plan.steps()[best].messages
    right = plan.gpus**2 > counts[0] * counts[-1]
    axis.axvline(plan.gpus, color="black", linewidth=0.8, alpha=0.35, zorder=0)
    axis.plot([plan.gpus], [1e3 * seconds], "o", color=STYLES[best][0], markersize=8, zorder=5, clip_on=False)
    axis.annotate(
        f"{plan.gpus:,} GPUs: {plan.methods[best].label}, {duration(seconds)}",
        (plan.gpus, 1e3 * seconds),
        xytext=(-8 if right else 8, -14),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=9,
        fontweight="bold",
        color=STYLES[best][0],
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )


def _name(axis: Axes, plan: Plan, ends: dict[str, float]) -> None:
    """Draw labels behind the lines' ends, moved apart where they would overlap."""
    low, high = map(math.log, axis.get_ylim())
    places = {name: (math.log(end) - low) / (high - low) for name, end in ends.items()}
    wanted = sorted(places, key=places.__getitem__)
    spread = _apart([places[name] for name in wanted])
    for name, place in zip(wanted, spread, strict=True):
        axis.annotate(
            plan.methods[name].label,
            (1, places[name]),
            xycoords="axes fraction",
            xytext=(1.03, place),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=STYLES[name][0],
            arrowprops={
                "arrowstyle": "-",
                "color": STYLES[name][0],
                "linewidth": 0.8,
                "shrinkA": 0,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


def _apart(places: Sequence[float]) -> list[float]:
    """Move sorted places so that neighbours are ``SMALLEST_GAP`` apart, groups around their middle."""
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _bottom(groups[-1]) - _top(groups[-2]) < SMALLEST_GAP:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_bottom(group) + i * SMALLEST_GAP for group in groups for i in range(len(group))]


def _bottom(group: Sequence[float]) -> float:
    return sum(group) / len(group) - (len(group) - 1) / 2 * SMALLEST_GAP


def _top(group: Sequence[float]) -> float:
    return _bottom(group) + (len(group) - 1) * SMALLEST_GAP


def _short(parameters: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g}{letter}"
    return str(parameters)
