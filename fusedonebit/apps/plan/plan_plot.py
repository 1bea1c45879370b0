"""``plan.png``: what a step takes against the number of GPUs, with the best method of each family."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ..pictures import METHODS, clear, save
from ..units import bandwidth, digits, duration, scaled
from .report import Plan

COLOURS = {
    **{name: METHODS[name] for name in ("bf16", "int8", "powersgd", "diloco")},
    **dict.fromkeys(("compress-8", "compress-4"), METHODS["compress"]),
    **dict.fromkeys(("flat", "flat-overlap", "hierarchical", "hierarchical-bf16"), METHODS["onebit-adam"]),
    "zero-one": METHODS["zero-one-adam"],
    "muon": METHODS["onebit-muon"],
    **dict.fromkeys(("marsit-ring", "marsit-torus", "marsit-owner"), METHODS["marsit"]),
}
"""1-bit Adam's are those of LAMB as well."""


def plot_plan(plan: Plan, path: Path) -> None:
    """Draw a plan to a PNG that can be read at half its width."""
    figure, axis = plt.subplots(figsize=(6, 4.2), layout="constrained")
    draw(axis, plan)
    save(figure, path)


def draw(axis: Axes, plan: Plan) -> None:
    """Draw milliseconds against GPUs, both logarithmic; lines are named in the order in which they end."""
    counts, net = plan.scale(), plan.network
    steps = {n: plan.steps(n) for n in counts}
    ends: dict[Line2D, float] = {}
    for name in plan.best_of_each():
        points = [(n, 1e3 * steps[n][name].seconds) for n in counts if name in steps[n]]
        label = plan.methods[name].label
        ends[axis.plot(*zip(*points, strict=True), color=COLOURS[name], label=label, linewidth=2)[0]] = points[-1][1]
    if plan.compute is not None:
        label = f"compute alone,\n{duration(plan.compute)}"
        ends[axis.axhline(1e3 * plan.compute, color="black", linestyle=":", linewidth=1, label=label)] = 0
    if plan.gpus > 1:
        _mark(axis, plan, right=plan.gpus**2 > counts[0] * counts[-1])
    axis.set(xscale="log", yscale="log", xlim=(counts[0], counts[-1]), xlabel="GPUs")
    axis.set_ylabel("ms a step" if plan.compute is not None else "ms a step, messages alone")
    ticks = [n for n in (2, 8, 32, 128, 512, 2048, 16384, 131072) if counts[0] <= n <= counts[-1]]
    axis.set_xticks(ticks, [f"{n:,}" for n in ticks])
    least, most = axis.get_ylim()
    axis.set_yticks([n * 10**k for k in range(-5, 8) for n in (1, 2, 5) if least <= n * 10**k <= most])
    axis.yaxis.set_major_formatter(lambda value, _: digits(value))
    axis.minorticks_off()
    clear([axis])
    axis.legend(
        handles=sorted(ends, key=lambda line: -ends[line]), loc="center left", bbox_to_anchor=(1, 0.5), frameon=False
    )
    size = scaled(plan.parameters, {"B": 1e9, "M": 1e6, "k": 1e3, "": 1}).replace(" ", "")
    between = "one node" if math.isinf(net.between) else f"{bandwidth(net.between)} a node"
    axis.set_title(f"{size} parameters, {net.gpus_per_node} GPUs a node, {between}", fontsize=10, loc="left")


def _mark(axis: Axes, plan: Plan, right: bool) -> None:
    """Mark the best of ours for what was asked."""
    best = plan.best()
    at, colour = 1e3 * plan.steps()[best].seconds, COLOURS[best]
    axis.plot([plan.gpus], [at], "o", color=colour, markersize=8, clip_on=False)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
    side: dict[str, Any] = {"ha": "right" if right else "left", "va": "top", "textcoords": "offset points"}
    told = f"{plan.gpus:,} GPUs: {digits(at)} ms"
    axis.annotate(told, (plan.gpus, at), (-6 if right else 6, -6), color=colour, bbox=box, **side)
