"""What the lab's runs say: by how much each optimizer is worse than what it compresses, seed by seed, and its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, stdev

from .contenders import CONTENDERS
from .records import Record, Records
from .run import diverged
from .tasks import FIRST, TASKS
from .tuning import SEEDS, rounded

PERCENT, DECADES = 1.0, 0.05
"""By how much a mean may be worse: percent of the parent's metric, or decades of it where there is no noise floor."""

MULTIPLES = (1.0, 0.5, 2.0)
"""Of tuned rates, of which there are tables."""

Rows = list[list[str]]


@dataclass(frozen=True)
class View:
    """Which runs a table is about.

    Args:
        workers: How many.
        parents: At the rate tuned for each optimizer's uncompressed parent; else at its own.
        by: Multiple of that rate.
        alike: Share of each worker's batch that is drawn from what all workers have.
        first: The first seed that counts.
    """

    workers: int = 4
    parents: bool = False
    by: float = 1.0
    alike: float = 1.0
    first: int = 0

    @property
    def title(self) -> str:
        """Say it."""
        rate = "its parent's tuned rate" if self.parents else "its own tuned rate"
        data = "" if self.alike == 1 else f", {100 * (1 - self.alike):g} % of each one's data its own"
        data += f", seeds from {self.first}" if self.first else ""
        return f"{self.workers} workers{data}, each optimizer at {rate}{'' if self.by == 1 else f' x {self.by:g}'}"

    def runs(self, records: Records, task: str, optimizer: str) -> dict[int, Record]:
        """Return an optimizer's runs by seed."""
        lr = records.tuned(task, CONTENDERS[optimizer].parent if self.parents else optimizer)
        if lr is None:
            return {}
        lr = rounded(lr * self.by)
        wanted = (self.workers, lr, self.alike)
        runs = {k.seed: r for k, r in records.of(task, optimizer).items() if (k.workers, k.lr, k.alike) == wanted}
        return {seed: record for seed, record in runs.items() if seed >= self.first and seed not in SEEDS}


@dataclass(frozen=True)
class Difference:
    """How much worse an optimizer is than its parent, in paired seeds.

    Args:
        seeds: How many both have, in which the parent did not diverge.
        diverged: In how many of those it diverged.
        mean: In percent of the parent's metric, or in decades; negative: better; NaN where all diverged.
        error: Its standard error; NaN where it can't be known.
        unit: "%" or "dec".
        lost: Seeds in which the parent diverged: they say nothing.
    """

    seeds: int
    diverged: int
    mean: float
    error: float
    unit: str
    lost: int = 0

    @property
    def misses(self) -> bool:
        """Whether it is worse than allowed, or diverged."""
        return self.diverged > 0 or self._above > 0

    @property
    def certain(self) -> bool:
        """Whether it is worse than allowed by more than two standard errors, or diverged; one seed tells nothing."""
        return self.diverged > 0 or self._above > 2 * self.error

    @property
    def _above(self) -> float:
        return self.mean - (DECADES if self.unit == "dec" else PERCENT)

    def __str__(self) -> str:
        parts = []
        if not math.isnan(self.mean):
            digits = 2 if self.unit == "dec" else 1
            error = "" if math.isnan(self.error) else f" ± {self.error:.{digits}f}"  # one seed has none
            parts.append(f"{self.mean:+.{digits}f}{error} {self.unit}")
        if self.diverged:
            parts.append(f"diverged {self.diverged}/{self.seeds}")
        if self.lost:
            parts.append(f"parent diverged {self.lost}/{self.seeds + self.lost}")
        return ", ".join(parts)


def difference(records: Records, view: View, task: str, optimizer: str, other: str = "") -> Difference | None:
    """Compare an optimizer with its parent, or an ``other`` one; None without a common seed."""
    mine, theirs = (view.runs(records, task, name) for name in (optimizer, other or CONTENDERS[optimizer].parent))
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds:
        return None
    against = [s for s in seeds if not diverged(theirs[s])]
    fine = [s for s in against if not diverged(mine[s])]
    pairs = [(mine[s]["metric"], theirs[s]["metric"]) for s in fine]
    if TASKS[task].noiseless:
        worse = [math.log10(a / b) for a, b in pairs]
    else:
        scale = 100 * len(pairs) / sum(abs(b) for _, b in pairs) if pairs else math.nan
        worse = [scale * (a - b) for a, b in pairs]
    unit, lost = "dec" if TASKS[task].noiseless else "%", len(seeds) - len(against)
    return Difference(len(against), len(against) - len(fine), *_mean_and_error(worse), unit, lost)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return fmean(values) if values else math.nan, error


def sent(records: Records, view: View, optimizer: str, tasks: Sequence[str] = FIRST) -> float | None:
    """Return bytes by parameter and step of whole runs, the mean over tasks; None without runs."""
    by_task = [
        sum(r["sent"] for r in runs.values()) / len(runs)
        for task in tasks
        if (runs := view.runs(records, task, optimizer))
    ]
    return sum(by_task) / len(by_task) if by_task else None


def rows(records: Records, view: View, optimizers: Sequence[str], tasks: Sequence[str] = tuple(TASKS)) -> Rows:
    """Return a table, its head first: a row per task, a column per optimizer; parents by their metric, others worse by.

    The last rows are how many tasks each misses, how many of those by more than errors, and the bytes that it sends.
    """
    shown = [name for name in optimizers if _has_column(records, view, name)]
    found = {(task, name): difference(records, view, task, name) for task in tasks for name in shown}
    table = [["task", *shown]]
    for task in tasks:
        cells = [_metric(records, view, task, n) if _is_parent(n) else str(found[task, n] or "") for n in shown]
        if any(cells):
            table.append([f"{task}, {TASKS[task].metric}", *cells])
    told = {name: [d for task in tasks if (d := found[task, name]) and d.seeds] for name in shown}
    limits = f"worse by more than {PERCENT:g} % ({DECADES} dec)"
    for title, count in ((limits, lambda d: d.misses), ("of those by two standard errors", lambda d: d.certain)):
        counts = [f"{sum(map(count, told[name]))} of {len(told[name])}" for name in shown]
        table.append([title, *("" if _is_parent(n) else text for n, text in zip(shown, counts, strict=True))])
    table.append(["bytes per parameter and step", *(f"{sent(records, view, n, tasks) or 0:.2f}" for n in shown)])
    return table


def _has_column(records: Records, view: View, optimizer: str) -> bool:
    """Tell whether a view has runs that are not merely those at an own rate that happens to be the view's."""
    own = View(view.workers, alike=view.alike)
    runs = [(view.runs(records, task, optimizer), own.runs(records, task, optimizer)) for task in TASKS]
    elsewhere = view != own and not _is_parent(optimizer)
    return any(here and not (elsewhere and here == there) for here, there in runs)


def _is_parent(optimizer: str) -> bool:
    return CONTENDERS[optimizer].parent == optimizer


def _metric(records: Records, view: View, task: str, optimizer: str) -> str:
    runs = list(view.runs(records, task, optimizer).values())
    fine = [r["metric"] for r in runs if not diverged(r)]
    parts = [f"{sum(fine) / len(fine):.4g}"] if fine else []
    if len(fine) < len(runs):
        parts.append(f"diverged {len(runs) - len(fine)}/{len(runs)}")
    return ", ".join(parts)


def rates(records: Records, optimizers: Sequence[str]) -> Rows:
    """Return the tuned learning rates, a row per task; one at the edge of its search says so."""
    table = [["learning rate", *optimizers]]
    for task in TASKS:
        found = [_rate(records, task, name) for name in optimizers]
        if any(found):
            table.append([task, *found])
    return table


def _rate(records: Records, task: str, optimizer: str) -> str:
    lr, tried = records.tuned(task, optimizer), records.metrics(task, optimizer)
    if lr is None:
        return ""
    return f"{lr:g}, at the edge" if lr in (min(tried), max(tried)) else f"{lr:g}"


def views(records: Records) -> list[View]:
    """Return the tables that there are runs for, beginning with the headline's."""
    of_data = sorted({(-key.alike, key.workers) for key in records.found if key.seed not in SEEDS})
    every = [View(w, parents, by, -a) for by, parents, (a, w) in product(MULTIPLES, (False, True), of_data)]
    recorded = [name for name in CONTENDERS if any(records.of(task, name) for task in TASKS)]
    compared = [name for name in recorded if not _is_parent(name)] or recorded
    cells = [(task, name) for name in compared for task in TASKS]
    told = {view: [view.runs(records, *cell) for cell in cells] for view in every}

    def says_more(view: View) -> bool:
        # Some own rates are their parents': those runs alone are no table beside the other's.
        mine, theirs = told[view], told[replace(view, parents=not view.parents)]
        return any(runs and runs != other for runs, other in zip(mine, theirs, strict=True)) or (
            mine == theirs and any(mine) and not view.parents
        )

    return list(filter(says_more, every))
