"""The page's tables, from the record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import goals, model, whole, wholes
from .labels import LABELS, LIBRARIES, STAGES, rate, table

Record = Mapping[str, Any]


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
    return table(["samples/s in the compression stage", *(rate(row["megabits"]) for row in rows)], [*lines, share])


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
    return table([*head, *(rate(row["megabits"]) for row in rows)], lines)


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
    return table(["ms a step: predicted / measured", *(rate(row["megabits"]) for row in rates)], lines)


def overlaps(record: Record) -> str:
    """How far the planner's overlap, and none, are from what DDP's steps took."""
    told = []
    for names, who in ((("adamw",), "fp32"), (model.BETWEEN, "bf16 and int8 in small buckets")):
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
    head = ["ms a step (communicate)", *(rate(row["megabits"]) for row in rows)]
    return table(head, [*lines, gains, crossed])


def _by_library(seconds: Mapping[str, float]) -> str:
    return f"{1e3 * seconds['whole']:.0f} ({1e3 * seconds['communicate']:.0f})"


def _crossed(told: Mapping[str, float]) -> str:
    return f"{told['link_bytes'] / told['bytes']:.0%}"


def headline(record: Record) -> str:
    """The numbers that the lab was made for."""
    row = goals.papers(record)
    against = {rival: whole.best(record, row, rival) for rival in whole.RIVALS}
    told = ", ".join(f"{gain:.2f} times over {wholes.SHORT[rival]}" for rival, (_, gain) in against.items())
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


def all_of(record: Record) -> str:
    """Return all tables."""
    parts = [wholes.met, conditions, wholes.gains, wholes.crossings, wholes.losses, wholes.timed]
    parts += [throughput, losing, steps, predictions, overlaps]
    made = [part(record) for part in parts]
    if record["mpi"]:
        made.append(libraries(record))
    return "\n".join(made)
