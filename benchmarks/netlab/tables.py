"""The page's tables, from the record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..pages import markdown
from . import equal, goals, model, whole
from .hooks import POWER_SGD_RANK

Record = Mapping[str, Any]
LABELS = {
    "adamw": "AdamW, fp32 all-reduce (DDP)",
    "bf16": "AdamW, bf16 hook, overlapped (DDP)",
    "int8": "AdamW, int8 hook, overlapped (DDP)",
    "powersgd": f"AdamW, PowerSGD hook, rank {POWER_SGD_RANK} (DDP)",
    "compress-4": "AdamW, `compress(bits=4)`, overlapped (DDP)",
    "onebit-adam": "1-bit Adam",
    "onebit-adam-overlap": "1-bit Adam, `overlap=True`",
    "zero-one-adam": "0/1 Adam",
    "onebit-lamb": "1-bit LAMB",
    "marsit-ring": "Marsit (Adam), ring",
    "marsit-owner": "Marsit (Adam), owner",
}
STAGES = {
    "warm-up": "1-bit Adam, a step of the warm-up",
    "renewal": "1-bit Adam, a step that renews",
    "renewal-overlap": "1-bit Adam, `overlap=True`, a step that renews",
    "telling": "0/1 Adam, a step in which workers tell of their level",
}
LIBRARIES = {"onebit-lamb": "gloo", "onebit-lamb-mpi": "Open MPI"}


def mbit(megabits: float) -> str:
    return f"{megabits:,.0f}" if megabits >= 100 else f"{megabits:g}"


def rate(megabits: float | None) -> str:
    return "loopback" if megabits is None else f"{mbit(megabits)} Mbit/s"


def _rates(rows: Sequence[Record]) -> list[str]:
    return [rate(row["megabits"]) for row in rows]


SHORT = {"bf16": "overlapped bf16", "int8": "int8", "powersgd": "PowerSGD"}


def throughput(record: Record) -> str:
    """Samples per second, and how many times AdamW's; where compressing loses, it says so."""
    rows = model.rows(record)
    lines = []
    for name, label in LABELS.items():
        cells = []
        for row in rows:
            gain = model.speedup(row, name)
            told = f"{model.samples_per_second(record, name, row):.1f}"
            if name != "adamw":
                told += f" ({gain:.2f}x)" if gain >= 1 else f" (**{gain:.2f}x, slower**)"
            cells.append(told)
        lines.append([label, *cells])
    share = ["share of messages in AdamW's step", *(f"{model.fp32_share(row):.0%}" for row in rows)]
    return markdown([["samples/s in the compression stage", *_rates(rows)], *lines, share])


def steps(record: Record) -> str:
    """Each method's step at the papers' Ethernet case, at the rate that a goal names, and on the loopback."""
    head = ["ms a step: compute + compress + communicate", "MB sent"]
    rows = [goals.papers(record), goals.at(record, goals.LITERAL), record["loopback"]]
    lines = []
    for name, label in (LABELS | STAGES).items():
        cells = [f"{rows[0]['methods'][name]['bytes'] / 1e6:.3f}"]
        for row in rows:
            parts = " + ".join(f"{1e3 * max(0.0, part):.0f}" for part in model.split(record, name, row))
            cells.append(f"{parts} = **{1e3 * row['methods'][name]['whole']:.0f}**")
        lines.append([label, *cells])
    return markdown([[*head, *_rates(rows)], *lines])


def predictions(record: Record) -> str:
    """Predicted and measured steps."""
    rates = model.held_to(record)
    lines = []
    for name in model.FAMILY:
        cells = []
        for row in rates:
            predicted, measured = model.predict(record, name, row["megabits"], row), row["methods"][name]["whole"]
            cells.append(f"{1e3 * predicted:.0f} / {1e3 * measured:.0f} ({model.error(record, name, row):+.1%})")
        lines.append([LABELS[name], *cells])
    return markdown([["ms a step: predicted / measured", *_rates(rates)], *lines])


def overlaps(record: Record) -> str:
    """How far the planner's overlap, and none, are from what DDP's steps took."""
    told = []
    for names, who in ((("adamw",), "fp32"), (model.BETWEEN, "bf16, int8 and 4 bits in smaller buckets")):
        errors = {
            overlap: [
                model.error(record, name, row, overlap=overlap) for name in names for row in model.held_to(record)
            ]
            for overlap in (False, True)
        }
        ranges = {overlap: f"{min(found):+.0%} to {max(found):+.0%}" for overlap, found in errors.items()}
        told.append(f"{who} {ranges[False]} with nothing hidden, {ranges[True]} with what the planner hides")
    return f"Predictions of DDP's steps are off by: {'; '.join(told)}. The table hides nothing.\n"


def libraries(record: Record) -> str:
    """1-bit LAMB over gloo and over MPI."""
    rows = record["mpi"]
    lines = [
        [f"1-bit LAMB over {library}", *(_by_library(row["methods"][name]) for row in rows)]
        for name, library in LIBRARIES.items()
    ]
    gains = [
        "MPI is so many times as fast",
        *(f"{model.speedup(row, 'onebit-lamb-mpi', 'onebit-lamb'):.2f}x" for row in rows),
    ]
    crossed = [
        "bytes that MPI's ranks put on the link, of its payload",
        *("" if row["megabits"] is None else _crossed(row["methods"]["onebit-lamb-mpi"]) for row in rows),
    ]
    return markdown([["ms a step (communicate)", *_rates(rows)], *lines, gains, crossed])


def _by_library(seconds: Mapping[str, float]) -> str:
    return f"{1e3 * seconds['whole']:.0f} ({1e3 * seconds['communicate']:.0f})"


def _crossed(told: Mapping[str, float]) -> str:
    return f"{told['link_bytes'] / told['bytes']:.0%}"


def headline(record: Record) -> str:
    """The numbers that the lab was made for."""
    row = goals.papers(record)
    against = {rival: whole.best(record, row, rival) for rival in whole.RIVALS}
    told = ", ".join(f"{gain:.2f} times over {SHORT[rival]}" for rival, (_, gain) in against.items())
    errors = [model.error(record, name, r) for name in model.FAMILY for r in model.held_to(record)]
    return (
        f"At {rate(row['megabits'])}, where messages take {model.fp32_share(row):.0%} of AdamW's step, 1-bit Adam's "
        f"compression stage is **{model.speedup(row, 'onebit-adam'):.1f} times as fast as AdamW with an fp32 "
        f"all-reduce**. Whole runs of the best of ours, warm-up included, at equal held-out loss: **{told}** (at "
        f"PowerSGD's own loss). The planner's largest error of a step is {max(map(abs, errors)):.0%}.\n"
    )


def losing(record: Record) -> str:
    """Where compressing does not pay."""
    found = []
    for row in model.rows(record):
        names = [LABELS[n] for n in LABELS if n != "adamw" and model.speedup(row, n) < 1]
        if names:
            found.append(f"at {rate(row['megabits'])} {', '.join(names)}")
    return f"**Slower than AdamW's fp32 all-reduce**: {'; '.join(found) if found else 'nowhere'}.\n"


def conditions(record: Record) -> str:
    """What was measured on."""
    facts, task = record["facts"], record["task"]
    return (
        f"{record['parameters'] / 1e6:.2f}M parameters, {record['hosts']} hosts, {task['batch']} samples of "
        f"{task['seq_len']} bytes each; torch {facts['torch']}, {facts['cores']} cores for all hosts, load average "
        f"{facts['load_average_before']:.1f} before; {facts['date']}. gloo's all-to-all, alone at "
        f"{model.CALIBRATION:g} Mbit/s, took {record['congestion']:.2f} times what its bytes would.\n"
    )


# ---------------------------------------------------------------- whole runs


def met(record: Record) -> str:
    """Each number to meet beside what was found."""
    lines = [
        [goal.text, f"{goal.wanted:.2f}x", f"{goal.found:.2f}x", "met" if goal.met else "**missed**"]
        for goal in goals.goals(record)
    ]
    return markdown([["goal", "at least", "found", ""], *lines])


def gains(record: Record) -> str:
    """How many times as fast whole runs of ours are as each rival's, at equal held-out loss, by rate."""
    rows = [*record["rates"], record["loopback"]]
    lines = [["share of messages, or case", *(row.get("case", "") for row in rows)]]
    for ours in (*whole.OURS, whole.ANY):
        for rival in whole.RIVALS:
            cells = [_times(whole.gain(record, row, ours, rival)) for row in rows]
            lines.append([f"{LABELS[ours]} over {SHORT[rival]}", *cells])
    for name in (*whole.RIVALS, *whole.OURS, whole.ANY):
        at, its_own = (equal.AT_ITS_OWN, ", to its own loss") if name == equal.AT_ITS_OWN else (equal.BASE, "")
        cells = [_seconds(whole.seconds(record, row, name, at)) for row in rows]
        lines.append([f"s: {LABELS[name]}{its_own}", *cells])
    return markdown([["whole runs at equal held-out loss", *_rates(rows)], *lines])


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
    return markdown([[*head, "length for bf16's loss", "for PowerSGD's"], *lines])


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
    head += ["s", "MB sent", "last loss", "as fast as bf16", "of what its stages add up to"]
    return markdown([head, *lines])


def all_of(record: Record) -> str:
    """Return all tables."""
    parts = [met, conditions, gains, crossings, losses, timed]
    parts += [throughput, losing, steps, predictions, overlaps]
    made = [part(record) for part in parts]
    if record["mpi"]:
        made.append(libraries(record))
    return "\n".join(made)
