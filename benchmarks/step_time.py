"""Step time against the number of parameters, and its picture."""

from __future__ import annotations

import contextlib
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from .optimizers import AGAINST_ADAMW, FUSED, ONEBIT, against_adamw, makers, note_deepspeed, of_shapes
from .registry import Record, Report, case
from .timing import one_thread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORLD_SIZE, TENSORS = 2, 64
ON_CPU = [round(10 ** (half / 2)) for half in range(10, 16)]
ON_CUDA = [round(10 ** (half / 2)) for half in range(10, 19)]
METHODS = {
    FUSED: ("adamw", 0.0),
    "AdamW(foreach=True)": ("adamw", 0.5),
    "OneBitAdam": ("onebit-adam", 0.0),
    "OneBitLamb": ("onebit-lamb", 0.0),
    "DeepSpeed OnebitAdam": ("onebit-adam", 0.5),
    "DeepSpeed OnebitLamb": ("onebit-lamb", 0.5),
}
"""Of a line: its method's name, and how much lighter it is."""
DASHES = {"plain": ":", "native": "-", "triton": "-"}
End = tuple[tuple[float, float], str, str]
"""Of a line: where, its name and its colour."""


def draw(record: Record, path: Path) -> None:
    """Milliseconds by parameters, one line for each optimizer; its name stands at the line's end."""
    from fusedonebit.apps.pictures import lighter, method_colour, plt, save

    rows = [row for row in record["tables"][0]["rows"] if row.get("ms")]
    about = record["about"]
    figure, axis = plt.subplots(figsize=(8.5, 5), layout="constrained")
    ends: list[End] = []
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        points = sorted((row["parameters"], row["ms"]) for row in rows if row["optimizer"] == name)
        kind, _, backend = name.partition(", ")
        style = "--" if kind.startswith("DeepSpeed") else DASHES.get(backend, "-")
        method, share = METHODS[kind]
        colour = lighter(method_colour(method), share)
        axis.loglog(*zip(*points, strict=True), style, color=colour, marker="o", ms=3.5)
        ends.append((points[-1], name, colour))
    _label(axis, ends)
    cpu = about["device"].endswith("CPU")
    where = f"{about['device']}, one thread, load {about['load']:.0f} on {about['cpu_cores']} cores"
    axis.set_xlabel("parameters (float32)")
    axis.set_ylabel("ms per step")
    axis.set_title(
        f"Compression-stage step of one rank of {WORLD_SIZE}, {where if cpu else about['device']}",
        fontsize=10,
        loc="left",
    )
    axis.grid(which="major", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if about["dry_run"]:
        axis.text(0.5, 0.5, "dry run: no result", transform=axis.transAxes, ha="center", fontsize=24, alpha=0.4)
    save(figure, path, dpi=130)
    print(path)


def _label(axis: Axes, ends: list[End]) -> None:
    """Names at the lines' ends, moved up, and from the top down again, where they would overlap."""
    bottom, top = (math.log10(y) for y in axis.get_ylim())
    gap = 0.045 * (top - bottom)
    ends = sorted(ends, key=lambda end: end[0][1])
    places = [math.log10(y) for (_, y), *_ in ends]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    places[-1] = min(places[-1], top - 0.5 * gap)
    for i in reversed(range(len(places) - 1)):
        places[i] = min(places[i], places[i + 1] - gap)
    for ((x, _), name, colour), place in zip(ends, places, strict=True):
        axis.annotate(name, (x, 10**place), (8, 0), textcoords="offset points", va="center", fontsize=8, color=colour)


def _rounds(numel: int) -> int:
    """More where they cost nothing."""
    return min(51, max(5, 50_000_000 // numel))


@case("step-time", "both", draw)
def step_time(report: Report) -> None:
    """Step time against parameters, 10^5 to 10^7.5 (on a GPU to 10^9), each by turns with fused AdamW."""
    cuda = report.device.type == "cuda"
    points = [report.numel] if report.numel else ON_CUDA if cuda else ON_CPU
    columns = {"parameters": ">13,"} | AGAINST_ADAMW
    with contextlib.nullcontext() if cuda else one_thread():
        title = f"{TENSORS} tensors, fp32, one rank of {WORLD_SIZE}, messages copied on the device"
        table = report.table(title, columns)
        for numel in points:
            params = of_shapes([(max(1, numel // TENSORS),)] * TENSORS, report.device)
            base: list[float] = []

            def add(row: Record, numel: int = numel, base: list[float] = base) -> None:
                table.add(parameters=numel, **row)
                base += [row["adamw_ms"]] if "adamw_ms" in row else []

            against_adamw(params, makers(report.device, WORLD_SIZE, ONEBIT), report.rounds or _rounds(numel), add)
            # It took turns with every peer.
            median = statistics.median(base) if base else None
            table.add(parameters=numel, optimizer=FUSED, ms=median, **{"x AdamW(fused)": 1.0})
    note_deepspeed(report)
