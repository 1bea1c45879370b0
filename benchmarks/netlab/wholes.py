"""The page's tables of whole runs, from the record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from . import equal, goals, whole
from .labels import LABELS, rate, table

Record = Mapping[str, Any]
SHORT = {"bf16": "overlapped bf16", "int8": "int8", "powersgd": "PowerSGD"}


def met(record: Record) -> str:
    """Each number to meet beside what was found."""
    lines = [
        [goal.text, f"{goal.wanted:.2f}x", f"{goal.found:.2f}x", "met" if goal.met else "**missed**"]
        for goal in goals.goals(record)
    ]
    return table(["goal", "at least", "found", ""], lines)


def gains(record: Record) -> str:
    """How many times as fast whole runs of ours are as each rival's, at equal held-out loss, by rate."""
    rows = [*record["rates"], record["loopback"]]
    lines = [["share of messages, or case", *(row.get("case", "") for row in rows)]]
    for ours in whole.OURS:
        for rival in whole.RIVALS:
            cells = [_times(whole.gain(record, row, ours, rival)) for row in rows]
            lines.append([f"{LABELS[ours]} over {SHORT[rival]}", *cells])
    for name in (*whole.RIVALS, *whole.OURS):
        at, its_own = (equal.AT_ITS_OWN, ", to its own loss") if name == equal.AT_ITS_OWN else (equal.BASE, "")
        cells = [_seconds(whole.seconds(record, row, name, at)) for row in rows]
        lines.append([f"s: {LABELS[name]}{its_own}", *cells])
    return table(["whole runs at equal held-out loss", *(rate(row["megabits"]) for row in rows)], lines)


def _times(gain: float) -> str:
    return f"{gain:.2f}x" if gain >= 1 else f"**{gain:.2f}x, slower**"


def _seconds(seconds: float) -> str:
    return "never" if math.isinf(seconds) else f"{seconds:.0f}"


def crossings(record: Record) -> str:
    """From which rate on none of ours pays, against each rival."""
    told = []
    for rival in whole.RIVALS:
        megabits = whole.crossing(record, rival)
        if megabits == 0:
            told.append(f"over {SHORT[rival]} nowhere")
        elif math.isinf(megabits):
            told.append(f"over {SHORT[rival]} at all rates, the fastest of {rate(record['rates'][-1]['megabits'])} too")
        else:
            told.append(f"over {SHORT[rival]} below **{rate(float(f'{megabits:.3g}'))}**")
    return f"**Where it pays**, of whole runs, the best of ours: {'; '.join(told)}.\n"


def losses(record: Record) -> str:
    """Each method's tuned rate, its held-out losses, and how long its run must be."""
    runs, told = record["runs"], record["runs"]["methods"]
    head = [
        f"held-out loss after {runs['steps']} steps",
        *(f"lr {lr:g}" for lr in runs["grid"]),
        "runs of other lengths",
    ]
    lines = []
    for name in equal.TRAINED:
        tried = [_loss(loss, best=lr == told[name]["lr"]) for lr, loss in told[name]["tuning"]]
        others = sorted((run["length"], run["loss"]) for run in told[name]["lengths"] if run["length"] != 1)
        needed = [_length(whole.length(record, name, at)) for at in (equal.BASE, equal.AT_ITS_OWN)]
        more = ", ".join(f"x{length:g}: {_loss(loss)}" for length, loss in others)
        lines.append([LABELS[name], *tried, more, *needed])
    return table([*head, "length for bf16's loss", "for PowerSGD's"], lines)


def _loss(loss: float | None, best: bool = False) -> str:
    text = "diverged" if loss is None else f"{loss:.4f}"
    return f"**{text}**" if best else text


def _length(length: float) -> str:
    return f"more than {equal.LENGTHS[-1]:g}" if math.isinf(length) else f"{length:.3f}"


def timed(record: Record) -> str:
    """Runs that were timed from their first step to their last, beside what their stages add up to."""
    run = record["run"]
    head = [f"{run['steps']} steps at {rate(run['megabits'])}, {run['warmup']:.0%} of them warm-up of 1-bit Adam"]
    lines = []
    for name, told in run["methods"].items():
        gain = run["methods"]["bf16"]["seconds"] / told["seconds"]
        cells = [f"{told['seconds']:.1f}", f"{told['bytes'] / 1e6:.1f}", f"{told['loss']:.3f}", f"{gain:.2f}x"]
        lines.append([LABELS[name], *cells, f"{whole.against_product(record, name):.3f}"])
    return table([*head, "s", "MB sent", "last loss", "as fast as bf16", "of what its stages add up to"], lines)
