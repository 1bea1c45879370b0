"""The page's picture, in the manner of figures 3 to 6 of 1-bit Adam and 1-bit LAMB."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from fusedonebit.apps.pictures import PARTS, lighter, method_colour, plt, save

from . import goals, model, whole
from .labels import LIBRARIES, mbit, rate

SHORT = {
    "adamw": "AdamW, fp32",
    "bf16": "AdamW, bf16",
    "int8": "AdamW, int8",
    "powersgd": "PowerSGD",
    "onebit-adam": "1-bit Adam",
    "onebit-adam-overlap": "1-bit Adam, overlap",
    "zero-one-adam": "0/1 Adam",
    "onebit-lamb": "1-bit LAMB",
    "marsit-ring": "Marsit, ring",
    "marsit-owner": "Marsit, owner",
}
LIGHTER = ("onebit-adam-overlap", "marsit-ring")
"""Those that stand beside another one of the same method."""
COLOURS = {name: lighter(method_colour(name), 0.45 * (name in LIGHTER)) for name in SHORT}
Record = Mapping[str, Any]


def draw(record: Record, path: Path) -> None:
    """Six panels."""
    figure, axes = plt.subplots(2, 3, figsize=(16.5, 9.4), layout="constrained")
    _draw_split(axes[0, 0], record, goals.papers(record))
    _draw_throughput(axes[0, 1], record)
    _draw_gains(axes[0, 2], record)
    _draw_losses(axes[1, 0], record)
    _draw_errors(axes[1, 1], record)
    if record["mpi"]:
        _draw_libraries(axes[1, 2], record)
    else:
        _draw_speedup(axes[1, 2], record)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    save(figure, path, dpi=110)


def _title(axis: Axes, text: str) -> None:
    axis.set_title(text, fontsize=11, loc="left")


def _draw_split(axis: Axes, record: Record, row: Record) -> None:
    names = list(SHORT)[::-1]
    for y, name in enumerate(names):
        parts = [1e3 * max(0.0, part) for part in model.split(record, name, row)]
        lefts = [0.0, *accumulate(parts)]
        for part, left, width in zip(PARTS, lefts, parts, strict=False):
            axis.barh(y, width, 0.7, left, color=PARTS[part], label=part if y == 0 else "")
        told = f"{1e3 * row['methods'][name]['whole']:,.0f}"
        if name != "adamw":
            told = f"{' + '.join(f'{part:.0f}' for part in parts)} = {told}:  {model.speedup(row, name):.1f}x"
        axis.annotate(told, (lefts[-1], y), (4, -4), textcoords="offset points", fontsize=9)
    axis.set_yticks(range(len(names)), [SHORT[name] for name in names])
    axis.set_xlim(0, 1.12e3 * row["methods"]["adamw"]["whole"])
    axis.set_xlabel("ms a step")
    axis.grid(alpha=0.25, axis="x")
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    _title(axis, f"A step at {rate(row['megabits'])}: messages are {model.fp32_share(row):.0%} of AdamW's")


def _rates(axis: Axes, record: Record) -> list[float]:
    """A logarithmic axis of rates, and the loopback where a faster one would be."""
    places = [row["megabits"] for row in record["rates"]]
    places.append(places[-1] * 3.2)
    axis.set_xscale("log")
    axis.set_xticks(places, [mbit(place) for place in places[:-1]] + ["loop-\nback"], fontsize=8, rotation=60)
    axis.minorticks_off()
    axis.axvline((places[-2] * places[-1]) ** 0.5, color="grey", linewidth=0.8, linestyle=":")
    axis.set_xlabel("Mbit/s of each host's link")
    axis.grid(alpha=0.25)
    return places


def _draw_throughput(axis: Axes, record: Record) -> None:
    places = _rates(axis, record)
    for name, label in SHORT.items():
        seen = [model.samples_per_second(record, name, row) for row in model.rows(record)]
        axis.plot(places[:-1], seen[:-1], "o-", color=COLOURS[name], label=label, markersize=5)
        axis.plot(places[-2:], seen[-2:], "o:", color=COLOURS[name], markersize=5)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("samples/s, all hosts, compression stage")
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    _title(axis, "Throughput against the network")


def _draw_speedup(axis: Axes, record: Record) -> None:
    places = _rates(axis, record)
    ends = [record["rates"][0]["megabits"], record["rates"][-1]["megabits"]]
    curve = [ends[0] * (ends[1] / ends[0]) ** (i / 60) for i in range(61)]
    for name, label in SHORT.items():
        if name == "adamw":
            continue
        seen = [model.speedup(row, name) for row in model.rows(record)]
        axis.plot(places, seen, "o", color=COLOURS[name], label=label, markersize=6)
        if name in model.FAMILY:
            said = [model.predict(record, "adamw", at) / model.predict(record, name, at) for at in curve]
            axis.plot(curve, said, color=COLOURS[name], linewidth=1.3, alpha=0.8)
    axis.axhline(1, color="black", linewidth=0.9, linestyle="--")
    axis.annotate("below: slower than AdamW", (places[0], 1), (0, -12), textcoords="offset points", fontsize=8)
    axis.plot([], [], color="grey", label="planner")
    axis.set_yscale("log")
    ticks = [0.5, 1, 2, 4, 8, 16]
    axis.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    axis.set_ylabel("times as fast as AdamW with an fp32 all-reduce")
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=9, loc="upper right")
    _title(axis, "Speedup: measured (dots), planner's (lines)")


def _draw_gains(axis: Axes, record: Record) -> None:
    places = _rates(axis, record)
    styles = dict(zip(whole.RIVALS, ("-", "--", ":"), strict=True))
    for ours in whole.OURS:
        for rival, style in styles.items():
            seen = [whole.gain(record, row, ours, rival) for row in record["rates"]]
            axis.plot(places[:-1], seen, style, color=COLOURS[ours], marker="o", markersize=4)
        axis.plot([], [], color=COLOURS[ours], label=SHORT[ours])
    for rival, style in styles.items():
        axis.plot([], [], style, color="grey", label=f"over {SHORT[rival]}")
    axis.axhline(1, color="black", linewidth=0.9, linestyle="--")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("times as fast to equal held-out loss")
    axis.legend(frameon=False, fontsize=9, loc="upper right")
    _title(axis, "Whole runs, warm-up included, against each rival")


def _draw_losses(axis: Axes, record: Record) -> None:
    row, runs = goals.papers(record), record["runs"]
    for name in (*whole.RIVALS, *whole.OURS):
        told = runs["methods"][whole.TRAINED_AS.get(name, name)]["lengths"][0]
        steps, losses = zip(*told["curve"], strict=True)
        seconds = [whole.seconds_of(row, name, told["steps"], runs["warmup"]) * step / told["steps"] for step in steps]
        axis.plot(seconds, losses, "o-", color=COLOURS[name], label=SHORT[name], markersize=4)
        axis.annotate(f"{losses[-1]:.3f}", (seconds[-1], losses[-1]), (4, -3), textcoords="offset points", fontsize=8)
    axis.set_xlabel("seconds, the warm-up spread over the run")
    axis.set_ylabel("held-out loss, nats per byte")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=9)
    _title(axis, f"{runs['steps']} steps at {rate(row['megabits'])}")


def _draw_errors(axis: Axes, record: Record) -> None:
    rates = model.held_to(record)
    width = 0.8 / len(model.FAMILY)
    for i, name in enumerate(model.FAMILY):
        places = [k - 0.4 + width * (i + 0.5) for k in range(len(rates))]
        errors = [100 * model.error(record, name, row) for row in rates]
        axis.bar(places, errors, 0.9 * width, color=COLOURS[name], label=SHORT[name])
    for limit in (-100 * model.LARGEST_ERROR, 100 * model.LARGEST_ERROR):
        axis.axhline(limit, color="black", linewidth=0.9, linestyle="--")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_ylim(-60, 90)
    axis.set_xticks(range(len(rates)), [mbit(row["megabits"]) for row in rates])
    axis.set_xlabel("Mbit/s of each host's link")
    axis.set_ylabel("predicted over measured step, %")
    axis.grid(alpha=0.25, axis="y")
    axis.legend(frameon=False, fontsize=8, ncol=3, loc="upper center")
    _title(axis, "The planner's errors (dashed: 15 %)")


def _draw_libraries(axis: Axes, record: Record) -> None:
    rows = record["mpi"]
    for i, (name, library) in enumerate(LIBRARIES.items()):
        places = [k + 0.38 * (i - 0.5) for k in range(len(rows))]
        rest = [1e3 * (row["methods"][name]["whole"] - row["methods"][name]["communicate"]) for row in rows]
        sent = [1e3 * row["methods"][name]["communicate"] for row in rows]
        colour = (PARTS["communicate"], "#2a9d8f")[i]
        axis.bar(places, rest, 0.34, color=PARTS["compute"], label="compute and compress" if i == 0 else "")
        axis.bar(places, sent, 0.34, rest, color=colour, label=f"communicate, {library}")
        for place, low, high in zip(places, rest, sent, strict=True):
            axis.annotate(
                f"{high:.0f}", (place, low + high), (0, 3), textcoords="offset points", ha="center", fontsize=9
            )
    axis.set_xticks(range(len(rows)), [rate(row["megabits"]) for row in rows])
    axis.set_ylabel("ms a step, 1-bit LAMB")
    axis.set_ylim(0, 1.4 * max(1e3 * t["whole"] for row in rows for t in row["methods"].values()))
    axis.grid(alpha=0.25, axis="y")
    axis.legend(frameon=False, fontsize=9, loc="upper right")
    _title(axis, "Two libraries (numbers: ms of messages)")
