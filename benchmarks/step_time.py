"""Step time against the number of parameters, and its picture."""

from __future__ import annotations

import contextlib
import math
import statistics
from pathlib import Path

from .optimizers import AGAINST_ADAMW, FUSED, ONEBIT, against_adamw, makers, note_deepspeed, of_shapes
from .registry import Record, Report, case
from .timing import Call, one_thread

WORLD_SIZE, TENSORS = 2, 64
ON_CPU = [round(10 ** (half / 2)) for half in range(10, 16)]
ON_CUDA = [round(10 ** (half / 2)) for half in range(10, 19)]
COLOURS = {
    FUSED: "#222222",
    "AdamW(foreach=True)": "#9a9a9a",
    "OneBitAdam": "#2e6f95",
    "OneBitLamb": "#d1495b",
    "DeepSpeed OnebitAdam": "#7fb2d1",
    "DeepSpeed OnebitLamb": "#eba0a9",
}
DASHES = {"plain": ":", "compiled": "-", "triton": "-"}


def draw(record: Record, path: Path) -> None:
    """Milliseconds by parameters, one line for each optimizer; its name stands at the line's end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in record["tables"][0]["rows"] if row.get("ms")]
    about = record["about"]
    figure, axis = plt.subplots(figsize=(8.5, 5), layout="constrained")
    ends = []
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        points = sorted((row["parameters"], row["ms"]) for row in rows if row["optimizer"] == name)
        kind, _, backend = name.partition(", ")
        if kind not in COLOURS:
            continue
        axis.loglog(*zip(*points, strict=True), DASHES.get(backend, "-"), color=COLOURS[kind], marker="o", ms=3.5)
        ends.append((points[-1], name, COLOURS[kind]))
    _label(axis, ends)
    where = f"{about['device']}, one thread" if about["device"].endswith("CPU") else about["device"]
    axis.set_xlabel("parameters (float32)")
    axis.set_ylabel("ms per step")
    axis.set_title(f"Compression-stage step of one rank of {WORLD_SIZE}, {where}", fontsize=10, loc="left")
    axis.grid(which="major", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if about["dry_run"]:
        axis.text(0.5, 0.5, "dry run: no result", transform=axis.transAxes, ha="center", fontsize=24, alpha=0.4)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(path)


def _label(axis: object, ends: list) -> None:
    """Names at the lines' ends, moved apart where they would overlap: by at least a fifth of an octave of height."""
    place = -math.inf
    for (x, y), name, colour in sorted(ends, key=lambda end: end[0][1]):
        place = max(math.log10(y), place + 0.16)
        axis.annotate(  # type: ignore[attr-defined]
            name, (x, 10**place), (7, 0), textcoords="offset points", va="center", fontsize=8, color=colour
        )


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

            def add(row: Record, call: Call, numel: int = numel, base: list[float] = base) -> None:
                table.add(parameters=numel, **row)
                base += [row["adamw_ms"]] if "adamw_ms" in row else []

            against_adamw(params, makers(report.device, WORLD_SIZE, ONEBIT), report.rounds or 7, add)
            # It took turns with every peer.
            table.add(parameters=numel, optimizer=FUSED, ms=statistics.median(base), **{"x AdamW(fused)": 1.0})
    note_deepspeed(report)
