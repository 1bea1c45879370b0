"""Quality over the bytes of a whole run: ours and what others compress with, each at its own rate, on the lab's tasks.

``python -m benchmarks.frontier`` makes the runs that are missing, which can be stopped and goes on, and writes
``docs/tables/frontier.md`` and a picture; ``--report`` makes none. Rates are searched for, and points made, with 4
workers and three seeds; those on a front, ours or the others', with 16 workers and five seeds as well.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.lab.contenders import LENGTHS
from benchmarks.lab.launch import make
from benchmarks.lab.records import Records, reported, search
from benchmarks.lab.report import Rows, View, difference
from benchmarks.lab.rivals import RIVALS
from benchmarks.lab.run import Key

from . import lab_page, pages
from .pages import DOCS, TABLES, markdown, write_tables

RESULTS = pages.RESULTS / "frontier"
PAGE, PICTURE = TABLES / "frontier.md", DOCS / "frontier.png"
TASKS = ("mlp", "resnet", "causal", "lstm", "recsys", "vae")
"""One of each kind, of those that tell seeds apart: images, convolutions, attention, recurrence, late rows, a VAE."""
BUDGETS = (0.025, 0.1, 0.25, 0.5, 1.0, 2.0)
"""Bytes per parameter and step."""
NOMINAL = (0.27, 1.1, 2.1, 4.0)
"""Those of one, four, eight and sixteen bits each way with their scales, for which ``BUDGETS`` have no room."""
OURS = (
    *("onebit-adam-living", "onebit-adam-living-0"),
    *("zero-one-adam-shared", "zero-one-adam-own", "zero-one-adam-own-2"),
    *(f"zero-one-adam-own-{length}" for length in LENGTHS),
    *("compress-8", "compress-4", "compress-1"),
)
PAPERS = ("onebit-adam", "zero-one-adam", "zero-one-adam-16", "marsit-adam")
"""Ours as their papers have them: beside the rivals."""
CANDIDATE = tuple(name for name in RIVALS if name.startswith("onebit-loco"))
"""What would be one of ours if it were the best of those that spend least: no verdict counts it on either side."""
OF_MUON = ("onebit-muon",)
"""What compresses another optimizer than Adam: no verdict counts it on either side."""
POINTS = (*OURS, *PAPERS, *OF_MUON, *RIVALS)
OTHERS = tuple(name for name in POINTS if name not in (*OURS, *CANDIDATE, *OF_MUON))
SELDOM = {
    "1-bit LoCo": CANDIDATE,
    "0/1 Adam": tuple(name for name in OURS if name.startswith("zero-one-adam")),
    "DiLoCo": tuple(name for name in RIVALS if name.startswith(("diloco", "local-adamw"))),
    "SparseLoCo": tuple(name for name in RIVALS if name.startswith("sparseloco")),
}
"""Those that synchronise seldom."""
LEAST = (0.025, 0.05, 0.1)
"""Budgets that only these afford, as a rule."""
CEILING = "adamw"
SEEDS = {4: 3, 16: 5}
"""Paired seeds, by the number of workers."""


@dataclass(frozen=True)
class Point:
    """An optimizer on a task.

    Attributes:
        name: Of the contender.
        spent: Bytes per parameter and step, sent or received, whichever are more.
        worse: Mean over seeds, in percent of AdamW's metric; infinite where a run diverged.
        error: Its standard error.
    """

    name: str
    spent: float
    worse: float
    error: float


def points(records: Records, task: str, workers: int = 4) -> list[Point]:
    """Return what there is of a task, the cheapest first."""
    found, view = [], View(workers)
    for name in POINTS:
        compared, runs = difference(records, view, task, name, CEILING), list(view.runs(records, task, name).values())
        if compared is None or compared.seeds < SEEDS[workers]:
            continue
        spent = sum(max(run["sent"], run["received"]) for run in runs) / len(runs)
        worse = math.inf if compared.diverged else compared.mean
        found.append(Point(name, spent, worse, compared.error))
    return sorted(found, key=lambda point: point.spent)


def front(found: Sequence[Point]) -> list[Point]:
    """Return those that are better than all that spend no more; ``found`` is sorted by what they spend."""
    kept: list[Point] = []
    for point in found:
        if point.worse < (kept[-1].worse if kept else math.inf):
            kept.append(point)
    return kept


def affordable(found: Sequence[Point], budget: float, names: Container[str]) -> Point | None:
    """Return the best of some that spends no more than a budget."""
    those = [p for p in found if p.spent <= budget and p.name in names and math.isfinite(p.worse)]
    return min(those, key=lambda point: point.worse, default=None)


def best(found: Sequence[Point], budget: float, ours: bool) -> Point | None:
    """Return the best of ours, or of the others, that spends no more than a budget."""
    return affordable(found, budget, OURS if ours else OTHERS)


Verdict = Literal["best", "tie", "lost", "unopposed"]


def verdict(found: Sequence[Point], budget: float) -> Verdict | None:
    """Tell how ours does within a budget: None where nobody affords it.

    "best": better than all others. "tie": within one standard error of the best of the others, which is a win too.
    "lost": neither, or only others afford it. "unopposed": only ours does, which says nothing about quality.
    """
    mine, theirs = (best(found, budget, ours) for ours in (True, False))
    if mine is None:
        return "lost" if theirs else None
    if theirs is None:
        return "unopposed"
    if mine.worse < theirs.worse:
        return "best"
    return "tie" if mine.worse - theirs.worse <= math.hypot(mine.error, theirs.error) else "lost"


def on_a_front(records: Records) -> list[tuple[str, str]]:
    """Return tasks and optimizers that are on the front of ours, of the candidate or of the others, with 4 workers."""
    cells = []
    for task in TASKS:
        found = points(records, task)
        for names in (OURS, CANDIDATE, OTHERS):
            cells += [(task, point.name) for point in front([p for p in found if p.name in names])]
    return cells


def fill(records: Records) -> int:
    """Make the runs that are missing; return how many failed."""
    cells = [(task, name) for name in (CEILING, *POINTS) for task in TASKS]
    failed = make(records, lambda: search(records, cells), "finding rates")
    failed += make(records, partial(_reported, records, cells, 4), "runs with 4 workers")
    chosen = [*((task, CEILING) for task in TASKS), *on_a_front(records)]
    return failed + make(records, partial(_reported, records, chosen, 16), "runs with 16 workers")


def _reported(records: Records, cells: Sequence[tuple[str, str]], workers: int) -> list[Key]:
    return reported(records, cells, SEEDS[workers], [workers], [1.0], parents=False)


# ---------------------------------------------------------------- what is shown


def verdicts(records: Records, workers: int, budgets: Sequence[float]) -> Rows:
    """Return, by task and budget, the best of ours and of the others; in bold where ours wins."""
    table = [["task", *(f"{budget:g} B" for budget in budgets), "budgets"]]
    for task in TASKS:
        found = points(records, task, workers)
        told = [verdict(found, budget) for budget in budgets]
        opposed = sum(each in ("best", "tie", "lost") for each in told)
        won = f"{told.count('best')} best, {told.count('tie')} tied of {opposed}; {told.count('unopposed')} unopposed"
        table.append([task, *(_told(found, budget) for budget in budgets), won])
    return table


def _told(found: Sequence[Point], budget: float) -> str:
    mine, theirs = (best(found, budget, ours) for ours in (True, False))
    told = " / ".join(f"{p.name} {p.worse:+.1f} %" if p else "none" for p in (mine, theirs))
    how = {"best": "**{}**", "tie": "**{}** (tie)", "unopposed": "{} (unopposed)"}
    return how.get(verdict(found, budget) or "", "{}").format(told)


def seldom(records: Records, workers: int) -> Rows:
    """Return, by task and least budget, the best of each method that synchronises seldom; the best of them in bold."""
    table = [["task", "budget", *SELDOM]]
    for task in TASKS:
        found = points(records, task, workers)
        for budget in LEAST:
            each = [affordable(found, budget, names) for names in SELDOM.values()]
            least = min((p.worse for p in each if p), default=math.nan)
            cells = [f"{p.name} {p.worse:+.1f} ± {p.error:.1f} %" if p else "" for p in each]
            bold = [f"**{cell}**" if p and p.worse == least else cell for p, cell in zip(each, cells, strict=True)]
            table.append([task, f"{budget:g} B", *bold])
    return table


def every_point(records: Records, workers: int) -> Rows:
    """Return all points: bytes, and how much worse than AdamW, a row for each optimizer."""
    table = [["optimizer", *TASKS]]
    by_task = {task: {p.name: p for p in points(records, task, workers)} for task in TASKS}
    for name in POINTS:
        cells = [_cell(by_task[task].get(name)) for task in TASKS]
        if any(cells):
            table.append([name, *cells])
    return table


def _cell(point: Point | None) -> str:
    if point is None:
        return ""
    worse = "diverged" if math.isinf(point.worse) else f"{point.worse:+.1f} ± {point.error:.1f} %"
    return f"{point.spent:.3f} B: {worse}"


def tables(records: Records) -> str:
    """Return all tables, as Markdown."""
    parts = []
    for workers in SEEDS:
        title = f"{workers} workers, the best of ours / the best of the others that spend no more:"
        parts.append(f"{title}\n\n{markdown(verdicts(records, workers, BUDGETS))}")
        title = f"{workers} workers, with room for the others' scales:"
        parts.append(f"{title}\n\n{markdown(verdicts(records, workers, NOMINAL))}")
        parts.append(f"{workers} workers, those that synchronise seldom:\n\n{markdown(seldom(records, workers))}")
    parts.append(f"All points, 4 workers:\n\n{markdown(every_point(records, 4))}")
    return "\n".join(parts)


SHOWN = (-5.0, 30.0)
"""Percent that the picture has room for."""
KINDS = dict(zip(TASKS, ("MLP", "ResNet", "transformer", "LSTM", "recommender", "VAE"), strict=True))


def draw(records: Records, path: Path) -> None:
    """Draw two fronts for each task, to be read at half its width: the least loss that each number of bytes buys."""
    from fusedonebit.apps.pictures import METHODS, clear, plt, save

    figure, axes = plt.subplots(3, 2, figsize=(6, 7.6), sharex=True, sharey=True, layout="constrained")
    sides = {"this library": (OURS, METHODS["onebit-adam"]), "the others' best": (OTHERS, METHODS["adamw"])}
    for axis, task in zip(axes.flat, TASKS, strict=True):
        found = points(records, task)
        for label, (names, colour) in sides.items():
            if steps := front([p for p in found if p.name in names]):
                x, y = [p.spent for p in steps], [p.worse for p in steps]
                axis.step([*x, 10.0], [*y, y[-1]], where="post", linewidth=2.5, color=colour, label=label)
        axis.axhline(0.0, color="black", linewidth=1, linestyle=":")
        axis.set_title(KINDS[task], loc="left")
        axis.set(xscale="log", xlim=(0.02, 8.0), ylim=SHOWN)
        axis.set_yscale("symlog", linthresh=5.0)
        axis.set_yticks([-5, 0, 5, 10, 30], ["-5 %", "as AdamW", "5 %", "10 %", "30 %"])
        axis.set_xticks([0.03, 0.1, 0.3, 1, 3], ["0.03", "0.1", "0.3", "1", "3"])
        axis.minorticks_off()
    clear(axes.flat)
    figure.supylabel("worse than AdamW", fontsize=10)
    figure.supxlabel("bytes sent per parameter and step (AdamW: 8)", fontsize=10)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="make no runs")
    arguments = parser.parse_args()
    records = Records(RESULTS / "runs.jsonl", lab_page.RESULTS / "runs.jsonl")
    failed = 0 if arguments.report else fill(records)
    write_tables(PAGE, tables(records))
    draw(records, PICTURE)
    print(f"wrote {PAGE} and {PICTURE}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
