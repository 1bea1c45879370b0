"""``loss.png``: loss against steps and bytes sent, marked where bits begin. ``layers.png``: 1-bit LAMB's figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from ..pictures import clear, lighter, method_colour, running_mean, save

_SMOOTH = 0.8  # of the running mean that is drawn; the raw loss lies behind it


def plot_loss(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the records of one or several optimizers to a PNG."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    sent = any(r["bytes_total"] for r in records)
    for name in dict.fromkeys(r["optimizer"] for r in records):
        runs = [r for r in records if r["optimizer"] == name]
        colour = method_colour(name)
        if name.endswith("-frozen"):  # beside the same method, adapting
            colour = lighter(colour)
        steps, losses = [r["step"] for r in runs], [r["loss"] for r in runs]
        megabytes = [r["bytes_total"] / 1e6 for r in runs]
        for axis, xs in zip(axes, (steps, megabytes), strict=True):
            if axis is axes[1] and not sent:
                continue
            axis.plot(xs, losses, color=colour, alpha=0.18, linewidth=0.8)
            axis.plot(xs, list(running_mean(losses, _SMOOTH)), color=colour, linewidth=1.6, label=name)
            held_out = [(x, r["held_out_loss"]) for x, r in zip(xs, runs, strict=True) if "held_out_loss" in r]
            if held_out:
                axis.plot(*zip(*held_out, strict=True), "o", color=colour, markersize=4)
            frozen = next((x for x, r in zip(xs, runs, strict=True) if r["phase"] == "compression"), None)
            if frozen is not None:
                axis.axvline(frozen, color=colour, linestyle="--", linewidth=1)
                place = {"transform": axis.get_xaxis_transform(), "va": "top"}
                axis.text(frozen, 0.97, " 1 bit from here", fontsize=8, color=colour, **place)
    axes[0].set(xlabel="step", ylabel="loss (nats per byte)")
    if sent:
        axes[1].set(xlabel="MB sent by one rank", xscale="log")
    else:
        axes[1].text(0.5, 0.5, "one rank: nothing is sent", ha="center", transform=axes[1].transAxes)
    clear(axes)
    axes[0].plot([], [], "o", color="grey", markersize=4, label="dots: held out")
    axes[0].legend(frameon=False, fontsize=8, loc="center right")
    save(figure, path)


# What is recorded of each layer, and which of 1-bit LAMB's figures shows it.
_LAYER_PANELS = (
    ("coefficient", "coefficient c (figure 1)"),
    ("variance_norm", "norm of the variance (figure 2)"),
    ("ratio", "ratio r (figure 3)"),
)


def plot_layers(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw what LAMB does to each layer to a PNG: one row per optimizer, one line per layer."""
    records = [r for r in records if "coefficient" in r.get("layers", {"coefficient": ()})]  # those of LAMB
    names = list(dict.fromkeys(r["optimizer"] for r in records if "layers" in r))
    figure, rows = plt.subplots(len(names), 3, figsize=(13, 3.4 * len(names)), squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for name, axes in zip(names, rows, strict=True):
        runs = [r for r in records if r["optimizer"] == name]
        seen = [r for r in runs if "layers" in r]
        # Layers that differ in the number of their block share a colour.
        kinds = [".".join(p for p in layer.split(".") if not p.isdigit()) for layer in seen[0]["layers"]["name"]]
        colours = {kind: plt.get_cmap("tab20")(i % 20) for i, kind in enumerate(dict.fromkeys(kinds))}
        frozen = next((r["step"] for r in runs if r["phase"] == "compression"), None)
        for axis, (key, title) in zip(axes, _LAYER_PANELS, strict=True):
            if key == "ratio" and all(r == 1.0 for one in seen for r in one["layers"][key]):
                axis.set_axis_off()  # nothing adapts
                continue
            for layer, kind in enumerate(kinds):
                ys = [r["layers"][key][layer] for r in seen]
                handles[kind] = axis.plot([r["step"] for r in seen], ys, color=colours[kind], linewidth=1)[0]
            if frozen is not None:
                axis.axvline(frozen, color="black", linestyle="--", linewidth=1)
            axis.set(xlabel="step", yscale="linear" if key == "ratio" else "log")
            axis.set_title(f"{name}: {title}", fontsize=9)
            clear([axis])
    title = "one line per layer"
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=8, title=title)
    save(figure, path)
