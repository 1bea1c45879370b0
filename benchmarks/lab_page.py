"""The lab's tables for ``docs/choose.md`` and ``docs/tables/``, from the recorded runs.

``python -m benchmarks.lab_page`` writes them, ``table.md`` and ``worse.png`` beside the runs, and ``docs/toys.png``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from benchmarks.lab.contenders import CONTENDERS, HEADLINE
from benchmarks.lab.plots import plot, plot_toys
from benchmarks.lab.publish import publish
from benchmarks.lab.records import Records
from benchmarks.lab.report import DECADES, View, difference, rates, rows, views
from benchmarks.lab.tasks import FIRST, LATER, TASKS, images, synthetic

from . import pages
from .pages import DOCS, TABLES, markdown, write_tables

RESULTS = pages.RESULTS / "lab"
OTHER_SEEDS = View(parents=True, first=40)
"""Seeds on which nothing was chosen; their runs are in a file of their own."""
FROZEN = "adam-frozen"
"""Adam with a variance that is frozen, communicating in full precision."""
VOTES = ("onebit-lion", "marsit-adam")
"""Ours whose ranks vote on signs: simulated one by one, they take longer, and are recorded at 4 workers alone."""
LIVING = ("onebit-adam-living", "onebit-adam-living-0")
"""1-bit Adam with a variance that lives, at AdamW's rates: after a warm-up of 5 %, and of one step."""
LAMB = ("lamb", "onebit-lamb-living", "onebit-lamb")
"""LAMB, and 1-bit LAMB with a variance that lives, or is frozen, at LAMB's rates."""
OURS = (LIVING[0], "onebit-adam", "zero-one-adam-shared", LAMB[1])
DEFAULTS = (OURS[0], OURS[2])
APART = {LIVING[0]: "OneBitAdam", OURS[2]: "ZeroOneAdam", "zero-one-adam-own": "the same in rounds of one"}
"""Those that are looked at where workers' data differ, at AdamW's rates, and what they are called."""

COMPRESSED = ("compress-8", "compress-4", "compress-8-none", "compress-4-none", "compress-1")
COMPRESSED += ("compress-8-fsdp", "compress-4-fsdp", "compress-8-fsdp-8bit", "compress-4-fsdp-8bit")
"""AdamW at its rates, on gradients that ``compress`` averages; for SGD and Muon names begin with theirs."""


MUONS = tuple(name for name in CONTENDERS if name.startswith("onebit-muon-"))
"""A bit each way around Muon, at Muon's rates: what ``onebit-muon`` was chosen among."""
OF_MATRICES = ("causal", "masked", "vgg", "resnet", "mlp", "lstm")
"""Tasks of matrices, on which those are trained, and SGD and Muon on compressed gradients."""
BF16 = "bf16"
COMPRESSED_BY = {
    f"{workers} workers{'' if alike else ', their data apart'}": View(workers, parents=True, alike=alike)
    for alike, workers in product((1.0, 0.0), (4, 16))
}
"""Where AdamW on compressed gradients is looked at, at AdamW's rates."""


def near(records: Records, view: View, name: str, percent: float = 0.5) -> tuple[list[str], list[str], list[str]]:
    """Return the tasks that a compressed optimizer was trained on; those on which it ends near its parent.

    Near is within so many ``percent`` (0.05 decades): its mean and one standard error. The third are those of which
    seeds tell too little: half of that.
    """
    found = {task: d for task in FIRST if (d := difference(records, view, task, name)) is not None}
    limit = {task: DECADES if TASKS[task].noiseless else percent for task in found}
    within = [task for task, d in found.items() if d.diverged == 0 and d.mean + d.error <= limit[task]]
    return list(found), within, [task for task, d in found.items() if d.error > limit[task] / 2]


def compressed_table(records: Records) -> str:
    """Return how much worse AdamW is at its own rate where its gradients are compressed to 8 bits, and to 4.

    And by bfloat16's hook, with 4 workers, for what seeds tell.
    """
    first, *others = COMPRESSED_BY.items()
    cells = [(BF16, *first), *((name, *each) for name in COMPRESSED[:2] for each in (first, *others))]
    head = ["", *(f"{name.removeprefix('compress-')}{' bits' * (name != BF16)}, {said}" for name, said, _ in cells)]
    body = [
        [f"{task}, {TASKS[task].metric}", *(str(difference(records, view, task, n) or "") for n, _, view in cells)]
        for task in FIRST
    ]
    counts = [near(records, view, name) for name, _, view in cells]
    body.append(["within 0.5 % (0.05 dec), error included", *(f"{len(w)} of {len(all_)}" for all_, w, _ in counts)])
    body.append(["of which seeds tell too little", *(f"{len(u)} of {len(all_)}" for all_, _, u in counts)])
    return markdown([head, *body])


def headline_table(records: Records) -> str:
    """Return how much worse ours are than what they compress, at 4 workers and its rates."""
    return markdown(rows(records, View(parents=True), OURS, FIRST))


def apart_table(records: Records) -> str:
    """Return how much worse ours are than AdamW where none of a worker's data are others', by number of workers."""
    cells = [(name, View(w, parents=True, alike=0.0)) for name in APART for w in (4, 16)]
    found = {task: [difference(records, view, task, name) for name, view in cells] for task in TASKS}
    head = ["all of each worker's data its own", *(f"{APART[name]}, {view.workers} workers" for name, view in cells)]
    body = [[f"{task}, {of_task(task)}", *(d or "" for d in found[task])] for task in TASKS if any(found[task])]
    return markdown([head, *body])


def of_task(task: str) -> str:
    """Say what is a worker's own."""
    count, of = TASKS[task].sources, {images.CLASSES: "classes", synthetic.MODULUS: "sums"}
    return f"of {count} {of.get(count, 'groups of users' if task == 'recsys' else 'parts of the text')}"


def other_seeds() -> Records:
    """Return the runs on ``OTHER_SEEDS`` as well; rates are those of the others."""
    return Records(RESULTS / "other-seeds.jsonl", RESULTS / "runs.jsonl")


def page_tables(records: Records) -> str:
    """Return the headline's tables that have all tasks, each under what it shows, ``LIVING``, ``VOTES``, and rates.

    Behind them, at AdamW's rates, ``APART`` where workers' data differ.
    """
    whole = [v for v in views(records) if all(v.runs(records, task, name) for task in FIRST for name in HEADLINE)]
    parts = [f"{view.title.capitalize()}:\n\n{markdown(rows(records, view, HEADLINE, FIRST))}" for view in whole]
    checked = rows(other_seeds(), OTHER_SEEDS, ["adamw", *DEFAULTS], FIRST)
    parts.append(f"{OTHER_SEEDS.title.capitalize()}, on which nothing was chosen:\n\n{markdown(checked)}")
    living = [v for v in views(records) if v.parents and all(v.runs(records, task, LIVING[0]) for task in FIRST)]
    parts += [
        f"{view.title.capitalize()}, with a variance that lives:\n\n"
        f"{markdown(rows(records, view, ['adamw', 'onebit-adam', *LIVING], FIRST))}"
        for view in living
    ]
    others = [v for v in living if v.by != 1 and all(v.runs(records, task, LAMB[1]) for task in FIRST)]
    parts += [f"{v.title.capitalize()}, LAMB:\n\n{markdown(rows(records, v, LAMB[:2], FIRST))}" for v in others]
    votes = rows(records, View(), ["adamw", *VOTES], FIRST)
    parts.append(f"{View().title.capitalize()}, where ranks vote on signs:\n\n{markdown(votes)}")
    later = [v for v in views(records) if v.parents and v.alike == 1 and v.runs(records, LATER[-1], LIVING[0])]
    apart = [v for v in views(records) if v.parents and v.alike < 1]
    parts += [f"{v.title.capitalize()}:\n\n{markdown(rows(records, v, ['adamw', *APART], LATER))}" for v in later]
    parts += [f"{v.title.capitalize()}:\n\n{markdown(rows(records, v, ['adamw', *APART]))}" for v in apart]
    for base in ("adamw", "sgd", "muon"):
        names = [base, *(name if base == "adamw" else f"{base}-{name}" for name in COMPRESSED)]
        made = [v for v in views(records) if v.parents and any(v.runs(records, task, names[1]) for task in FIRST)]
        parts += [f"{v.title.capitalize()}, by `compress`:\n\n{markdown(rows(records, v, names))}" for v in made]
    parts.append(f"Tuned learning rates:\n\n{markdown(rates(records, (*HEADLINE, *VOTES)))}")
    return "\n".join(parts)


def muon_tables(records: Records) -> str:
    """Return how much worse Muon is with a bit each way, by where that lies around Newton-Schulz."""
    of_each = [(v, _with_runs(records, v, ("onebit-muon", *MUONS))) for v in views(records) if v.parents]
    every = [(v, rows(records, v, ["muon", *names], OF_MATRICES)) for v, names in of_each if names]
    short = [(v, [[cell.removeprefix("onebit-muon-") for cell in head], *body]) for v, (head, *body) in every]
    return "\n".join(f"{v.title.capitalize()}:\n\n{markdown(table)}" for v, table in short)


def _with_runs(records: Records, view: View, names: Sequence[str]) -> list[str]:
    """Return those that have runs on a task of matrices."""
    return [name for name in names if any(view.runs(records, task, name) for task in OF_MATRICES)]


def ablations(records: Records) -> str:
    """Return, at their parents' rates, what a frozen variance does alone; and single parts of ours, a row for each."""
    recorded = {key.optimizer for key in records.found}
    shown = {*HEADLINE, *LIVING, *VOTES, *MUONS, FROZEN}
    others = [name for name in CONTENDERS if name in recorded - shown and "compress-" not in name]
    others = [name for name in others if name not in ("sgd", "muon", "onebit-muon", BF16)]
    view = View(parents=True)
    parts = map(list, zip(*rows(records, view, others), strict=True))
    return f"{markdown(rows(records, view, [FROZEN]))}\n{markdown(list(parts))}"


def main() -> None:
    """Write them."""
    records = Records(RESULTS / "runs.jsonl")
    publish(records, RESULTS)
    plot(records, RESULTS / "worse.png", parents=True)
    plot_toys(DOCS / "toys.png")
    write_tables(DOCS / "choose.md", headline_table(records), "LAB")
    write_tables(DOCS / "choose.md", apart_table(records), "APART")
    write_tables(DOCS / "compress.md", compressed_table(records), "LAB")
    write_tables(TABLES / "lab.md", page_tables(records))
    write_tables(TABLES / "ablations.md", ablations(records))
    write_tables(TABLES / "muon.md", muon_tables(records))
    print("wrote the tables of docs/choose.md, docs/compress.md and, in docs/tables/, lab.md, ablations.md and muon.md")


if __name__ == "__main__":
    main()
