"""The lab's tables: every optimizer on every task, the claims, and what was sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .tasks import TASKS

Record = Mapping[str, Any]


def named(records: Sequence[Record]) -> list[Record]:
    """Return the records; where the number of workers is not that of most, the optimizer's name tells it."""
    counts = [r["workers"] for r in records]
    usual = max(counts, key=counts.count)
    return [
        r if r["workers"] == usual else {**r, "optimizer": f"{r['optimizer']}, {r['workers']} workers"} for r in records
    ]


def table(records: Sequence[Record]) -> str:
    """Markdown: one row per optimizer, one column per task; mean and standard deviation over the seeds.

    "diverged 3/5": on so many of the seeds; the mean is then that of the others.
    """
    tasks = [task for task in TASKS if any(r["task"] == task for r in records)]
    heads = [f"{task}: {TASKS[task].metric} ({'higher' if TASKS[task].higher else 'lower'})" for task in tasks]
    lines = [f"| optimizer | {' | '.join(heads)} |", "|---|" + "--:|" * len(tasks)]
    for name in dict.fromkeys(r["optimizer"] for r in records):
        cells = [_cell([r for r in records if r["optimizer"] == name and r["task"] == task]) for task in tasks]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(runs: Sequence[Record]) -> str:
    if not runs:
        return ""
    fine = [r["metric"] for r in runs if r["diverged_at"] is None and r["metric"] is not None]
    parts = []
    if fine:
        mean = sum(fine) / len(fine)
        spread = math.sqrt(sum((x - mean) ** 2 for x in fine) / max(1, len(fine) - 1))  # one has none
        parts.append(f"{mean:.4g} ± {spread:.2g}" if len(fine) > 1 else f"{mean:.4g}")
    if len(fine) < len(runs):
        parts.append(f"**diverged {len(runs) - len(fine)}/{len(runs)}**")
    return ", ".join(parts)


CLAIMS = (
    ("onebit-adam", "adam-frozen"),
    ("onebit-adam", "adam"),
    ("adam-frozen", "adam"),
    ("zero-one-adam", "adam"),
    ("zero-one-adam", "adam-frozen"),
    ("onebit-lamb", "lamb-frozen"),
    ("onebit-lamb", "lamb"),
    ("lamb-frozen", "lamb"),
    ("onebit-adam-warm-start", "onebit-adam"),
    ("onebit-lamb-warm-start", "onebit-lamb"),
    ("onebit-adam-rewarm", "onebit-adam"),
    ("onebit-adam-ternary", "onebit-adam"),
    ("onebit-adam-freeze-3", "onebit-adam"),
    ("onebit-adam, 64 workers", "onebit-adam"),
    ("marsit-100", "psgd"),
    ("marsit", "psgd"),
)
"""Who is compared with whom, seed by seed. The cost of the freeze is that of "frozen" against none."""

MOST_ERRORS, MOST_PERCENT = 2.0, 2.0
"""The largest loss that counts as none: standard errors, and percent of the other's mean."""


def comparison(records: Sequence[Record], one: str, other: str, task: str) -> dict[str, Any] | None:
    """Return how much worse one optimizer is than another on a task, in paired seeds.

    Returns:
        None without a common seed, else a dict: seeds; diverged and other_diverged (how many); percent
        (of the other's mean, by which the mean metric is worse; negative: better) and its standard
        error; holds (never diverged, and not worse by ``MOST_ERRORS`` errors or ``MOST_PERCENT``).
    """
    a, b = ({r["seed"]: r for r in records if (r["optimizer"], r["task"]) == (name, task)} for name in (one, other))
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    bad = [[seed for seed in seeds if _failed(runs[seed])] for runs in (a, b)]
    fine = [seed for seed in seeds if not _failed(a[seed]) and not _failed(b[seed])]
    told: dict[str, Any] = {"seeds": len(seeds), "diverged": len(bad[0]), "other_diverged": len(bad[1])}
    sign = -1.0 if TASKS[task].higher else 1.0
    worse = [sign * (a[seed]["metric"] - b[seed]["metric"]) for seed in fine]
    mean, error = _mean_and_error(worse)
    scale = 100 / abs(_mean_and_error([b[seed]["metric"] for seed in fine])[0]) if fine else math.nan
    holds = not bad[0] and mean * scale <= MOST_PERCENT and (mean <= 0 or mean <= MOST_ERRORS * error)
    return told | {"percent": mean * scale, "error": error * scale, "holds": bool(holds) and bool(fine)}


def _failed(record: Record) -> bool:
    return record["diverged_at"] is not None or record["metric"] is None


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return math.nan, math.nan
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    spread = sum((x - mean) ** 2 for x in values) / (len(values) - 1)
    return mean, math.sqrt(spread / len(values))


def verdicts(records: Sequence[Record]) -> str:
    """Markdown: each claim by task. Percent worse (+) or better (-) +/- standard error over paired seeds."""
    tasks = [task for task in TASKS if any(r["task"] == task for r in records)]
    lines = [f"| worse by, % | {' | '.join(tasks)} | holds |", "|---|" + "--:|" * len(tasks) + "--:|"]
    for one, other in CLAIMS:
        found = {task: comparison(records, one, other, task) for task in tasks}
        known = [c for c in found.values() if c is not None]
        if known:
            cells = [_claim(found[task]) for task in tasks]
            judged = [c["holds"] for c in known if c["seeds"] > 1]  # one seed has no error to judge by
            holds = f"{sum(judged)}/{len(judged)}" if judged else "-"
            lines.append(f"| {one} than {other} | {' | '.join(cells)} | {holds} |")
    return "\n".join(lines) + "\n"


def _claim(c: Mapping[str, Any] | None) -> str:
    if c is None:
        return ""
    error = "" if math.isnan(c["error"]) else f" ± {c['error']:.2f}"  # one seed has none
    parts = [] if math.isnan(c["percent"]) else [f"{c['percent']:+.2f}{error}"]
    for key, whose in (("diverged", ""), ("other_diverged", "other ")):
        if c[key]:
            parts.append(f"**{whose}diverged {c[key]}/{c['seeds']}**")
    return ", ".join(parts)


def traffic(records: Sequence[Record]) -> str:
    """Markdown: how many times fewer bytes a whole run sent than Adam's, by optimizer and task; the guard's vetoes."""
    tasks = [task for task in TASKS if any(r["task"] == task for r in records)]
    lines = [f"| bytes saved | {' | '.join(tasks)} | vetoes |", "|---|" + "--:|" * len(tasks) + "--:|"]
    for name in dict.fromkeys(r["optimizer"] for r in records):
        mine = [r for r in records if r["optimizer"] == name and r.get("bytes")]
        cells = []
        for task in tasks:
            sent, full = (
                [r["bytes"] for r in rs if r["task"] == task and _complete(r)] for rs in (mine, _of_adam(records))
            )
            cells.append(f"{sum(full) / len(full) / (sum(sent) / len(sent)):.1f} x" if sent and full else "")
        if mine:
            lines.append(f"| {name} | {' | '.join(cells)} | {sum(r['vetoed'] for r in mine)} |")
    return "\n".join(lines) + "\n"


def _of_adam(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r["optimizer"] == "adam" and r.get("bytes")]


def _complete(record: Record) -> bool:
    return record["steps"] == TASKS[record["task"]].steps
