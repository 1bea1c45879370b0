"""``docs/scale.png``: time and memory of one rank against parameters and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from fusedonebit.apps.pictures import METHODS, clear, lighter, plt, save

BLUES = {2: "#9ecae1", 64: "#4292c6", 1024: "#2171b5", 16384: "#08306b"}
WAYS = {
    "flat": ("1-bit, flat", METHODS["onebit-adam"], "-"),
    "hierarchical-bf16": ("1-bit, bf16 in node", lighter(METHODS["onebit-adam"]), "--"),
    "marsit-owner": ("Marsit, owner", METHODS["marsit"], "-"),
    "bf16": ("bf16 all-reduce", METHODS["bf16"], "-"),
}
GPU_MEMORY = 141


def plot(found: dict[str, Any], path: Path) -> None:
    """Draws four panels to a PNG."""
    rows = [r for r in found["predicted"] if r["optimizer"] == "adam"]
    figure, axes = plt.subplots(2, 2, figsize=(12.5, 9), layout="constrained")
    _kernels(axes[0, 0], rows)
    _memory(axes[0, 1], rows, found)
    _network(axes[1, 0], rows)
    _overhead(axes[1, 1], rows)
    clear(axes.flat)
    for axis in axes.flat:
        axis.legend(frameon=axis is axes[0, 1], edgecolor="none", fontsize=8.5)
    figure.suptitle("One rank of 1-bit Adam, compression stage, fp32, transformers; H200, NVLink, 400 Gbit/s a node")
    save(figure, path, dpi=140)


def _of(rows: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    return [r for r in rows if r["ranks"] == ranks]


def _kernels(axis: Axes, rows: list[dict[str, Any]]) -> None:
    for ranks, colour in BLUES.items():
        some = _of(rows, ranks)
        x = [r["parameters"] for r in some]
        axis.plot(x, [1e3 * sum(r["kernels_s"].values()) for r in some], "o-", color=colour, label=f"{ranks:,} ranks")
        floor = [1e3 * r["kernels_s"]["memory"] for r in some]
        axis.plot(x, floor, ":", color=colour, linewidth=1, label="of that, memory traffic" if ranks == 2 else None)
    axis.set(xscale="log", yscale="log", xlabel="parameters", ylabel="ms a step, messages not counted")
    axis.set_title("Kernels and launches (predicted): linear, above a fixed cost of launches")


def _memory(axis: Axes, rows: list[dict[str, Any]], found: dict[str, Any]) -> None:
    def line(some: list[dict[str, Any]], key: str, label: str, style: str, **how: Any) -> None:
        axis.plot([r["parameters"] for r in some], [r[key] / 1e9 for r in some], style, label=label, **how)

    for ranks, colour in BLUES.items():
        line(_of(rows, ranks), "state", f"state, {ranks:,} ranks", "-", color=colour)
    line(_of(rows, 16384), "tables", "of that, tables (16,384 ranks)", "--", color="#b5651d")
    run = [r for r in found["run"] if r["optimizer"] == "adam"]
    line(run, "state_bytes", "run here, 2 to 16,384 ranks", "kx", markersize=7)
    axis.axhline(GPU_MEMORY, color="#b03a2e", linewidth=1)
    axis.text(1.5e8, GPU_MEMORY * 1.25, "memory of one H200", color="#b03a2e", fontsize=8.5)
    axis.set(xscale="log", yscale="log", xlabel="parameters", ylabel="GB", ylim=(4e-4, 2e4))
    axis.set_title("Memory of one rank: linear in parameters, not in ranks")


def _network(axis: Axes, rows: list[dict[str, Any]]) -> None:
    some = [r for r in rows if 0.5e9 < r["parameters"] < 2e9]
    x = [r["ranks"] for r in some]
    for name, (label, colour, dashes) in WAYS.items():
        axis.plot(x, [1e3 * r["wire_s"][name] for r in some], dashes, color=colour, marker="o", label=label)
    axis.plot(x, [1e3 * sum(r["kernels_s"].values()) for r in some], "k:", marker="x", label="kernels and launches")
    axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms a step")
    axis.set_xticks(x, [f"{n:,}" for n in x], fontsize=8.5)
    axis.set_title("Messages of $10^9$ parameters (the planner's model): flat pays for each peer")


def _overhead(axis: Axes, rows: list[dict[str, Any]]) -> None:
    for ranks, colour in BLUES.items():
        some = _of(rows, ranks)
        x = [r["parameters"] for r in some]
        axis.plot(x, [r["sent_per_bit"] for r in some], "o-", color=colour, label=f"{ranks:,} ranks")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="parameters", ylabel="bits on the wire for each parameter's one")
    axis.set_yticks([1, 1.5, 2, 3, 5, 10], ["1", "1.5", "2", "3", "5", "10"])
    axis.set_title("Headers, scales and padding: a small model on many ranks")
