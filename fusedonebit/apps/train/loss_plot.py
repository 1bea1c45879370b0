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
    ("coefficient", "c, how far LAMB scales a layer's update (figure 1)"),
    ("variance_norm", "norm of a layer's variance v (figure 2)"),
    ("ratio", "r, by which c follows v once bits are sent (figure 3)"),
)


def plot_layers(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw what LAMB does to each layer to a PNG: up to three panels per optimizer, one line per layer."""
    of: dict[str, list[dict[str, Any]]] = {}
    for r in records:
        if "coefficient" in r.get("layers", ()):  # those of LAMB
            of.setdefault(r["optimizer"], []).append(r)
    panels = [
        (name, key, title)
        for name, seen in of.items()
        for key, title in _LAYER_PANELS
        if key != "ratio" or any(r != 1.0 for one in seen for r in one["layers"][key])  # else nothing adapts
    ]
    size = (6.4, 2.5 * len(panels) + 1)
    figure, axes = plt.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for (name, key, title), axis in zip(panels, axes.flat, strict=True):
        seen = of[name]
        # Layers that differ in the number of their block share a colour.
        kinds = [".".join(p for p in layer.split(".") if not p.isdigit()) for layer in seen[0]["layers"]["name"]]
        colours = {kind: plt.get_cmap("tab20")(i % 20) for i, kind in enumerate(dict.fromkeys(kinds))}
        for layer, kind in enumerate(kinds):
            ys = [r["layers"][key][layer] for r in seen]
            handles[kind] = axis.plot([r["step"] for r in seen], ys, color=colours[kind], linewidth=1)[0]
        if (frozen := next((r["step"] for r in seen if r["phase"] == "compression"), None)) is not None:
            axis.axvline(frozen, color="black", linestyle="--", linewidth=1)
        axis.set(xlabel="step", yscale="linear" if key == "ratio" else "log")
        axis.set_title(f"{name}: {title}", fontsize=9)
    clear(axes.flat)
    title = "one line per layer; dashed: bits from here on"
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncol=2, frameon=False, title=title)
    save(figure, path)
