"""From 100,000 steps to what a screen can show, without losing a spike, a NaN or a skipped step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .read import Run, Series, plain_float

MOST_POINTS = 1500
"""Of a curve; of many runs together ``ALL_POINTS``, so that the page stays small."""

ALL_POINTS = 9_000
MOST_MARKS = 500
MOST_BANDS = 120
WINDOWS = (MOST_BANDS, 60, 30, 15)
"""In so many windows phases are looked at together where they alternate more often."""

ALL_CELLS = 110_000
"""Of all heat maps together."""

MEAN_POINTS = 300
MEAN_WIDTH = 50
"""A running mean has the memory of a 50th of the records."""


def points_for(runs: int) -> int:
    """Return how many points a curve has where so many runs are shown."""
    return max(100, min(MOST_POINTS, ALL_POINTS // max(1, runs)))


def thin(series: Series, most: int) -> tuple[list[int], list[float]]:
    """At most ``most`` of the finite points: the first, the last, and each bin's least and greatest, in order."""
    kept = [i for i, y in enumerate(series.values) if math.isfinite(y)]
    if len(kept) > most:
        ys, inner = series.values, kept[1:-1]
        bins = max(1, (most - 2) // 2)
        ends = [len(inner) * b // bins for b in range(bins + 1)]
        chosen = {kept[0], kept[-1]}
        for start, stop in pairwise(ends):
            part = inner[start:stop]
            if part:
                chosen |= {min(part, key=ys.__getitem__), max(part, key=ys.__getitem__)}
        kept = sorted(chosen)
    return [series.steps[i] for i in kept], [short(series.values[i]) for i in kept]


def not_finite(series: Series) -> list[int]:
    """Return steps whose value is NaN or infinite; of very many, evenly spread ones, the first and the last too."""
    return spread([s for s, y in zip(series.steps, series.values, strict=True) if not math.isfinite(y)], MOST_MARKS)


def spread(items: list[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


def running_mean(series: Series) -> Series:
    """Return the exponential mean of finite values, ``MEAN_POINTS`` of it: what a noisy curve does.

    Its memory is a ``MEAN_WIDTH``-th of the records, and at first a fifth of those so far: it begins where they do.
    """
    share, mean, count, result = min(1.0, MEAN_WIDTH / max(1, len(series.values))), 0.0, 0, Series()
    every = max(1, len(series.values) // MEAN_POINTS)
    last = len(series.values) - 1
    for i, (step, y) in enumerate(zip(series.steps, series.values, strict=True)):
        if math.isfinite(y):
            mean += max(share, 5 / (count + 5)) * (y - mean)
            count += 1
        if count and (i % every == 0 or i == last):
            result.add(step, mean)
    return result


def at_steps(series: Series, steps: Sequence[int]) -> list[float]:
    """Return what a rising count was at these steps: the last value up to there; 0 before the first."""
    places = [bisect_right(series.steps, step) for step in steps]
    return [short(series.values[i - 1]) if i else 0 for i in places]


def bands(run: Run) -> list[list[Any]]:
    """Return stretches of one phase each: first step, last step, name. Phases that alternate quickly share one."""
    series, phases = run.get("phase"), run.phases
    if not series.steps:
        return []
    stretches = _stretches(series.steps, [phases[int(i)] for i in series.values])
    if len(stretches) <= MOST_BANDS:
        return stretches
    # A window as long as the phases' cycle sees all of it, and so do its neighbours.
    return next(s for count in WINDOWS if len(s := _in_windows(run, series, count)) <= count // 10 or count < 20)


def _in_windows(run: Run, series: Series, count: int) -> list[list[Any]]:
    steps, names, phases = [], [], run.phases
    for start, stop in pairwise(len(series.steps) * b // count for b in range(count + 1)):
        seen = sorted(set(series.values[start:stop]))
        steps += [series.steps[start], series.steps[stop - 1]]
        names += [" + ".join(phases[int(i)] for i in seen)] * 2
    return _stretches(steps, names)


def _stretches(steps: Sequence[int], names: Sequence[str]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for step, name in zip(steps, names, strict=True):
        if found and found[-1][2] == name:
            found[-1][1] = step
        else:
            found.append([step, step, name])
    return found


def skips(run: Run) -> list[list[int]]:
    """Return skips by record: its step, how many since the last one, how many of them vetoed."""
    series, vetoes = run.get("skipped_steps"), run.get("vetoed_steps")
    vetoed = at_steps(vetoes, series.steps)
    found, before = [], (0, 0)
    for step, *counts in zip(series.steps, series.values, vetoed, strict=True):
        now = (int(counts[0]), int(counts[1]))
        if now[0] > before[0]:  # less: a resumed run has begun to count anew
            found.append([step, now[0] - before[0], max(0, now[1] - before[1])])
        before = now
    return _merged(found)


def _merged(marks: list[list[int]]) -> list[list[int]]:
    """Join neighbours of very many marks to one, with their sums."""
    size = -(-len(marks) // MOST_MARKS) or 1
    groups = [marks[i : i + size] for i in range(0, len(marks), size)]
    return [[group[0][0], sum(m[1] for m in group), sum(m[2] for m in group)] for group in groups]


def heat(run: Run, key: str, most_cells: int, middle: float | None) -> dict[str, Any] | None:
    """Return what was told of each layer over time; None if nothing was.

    Args:
        run: The run.
        key: Of the layers' record.
        most_cells: Neighbouring columns become one until there are no more; of each the value farthest from
            ``middle``, or the greatest if that is None.
        middle: What says nothing.

    Returns:
        "layers" (names), "steps" (of the columns) and "rows" (a list per layer; None where nothing is known).
    """
    seen = [(step, told) for step, told in run.layers.items() if isinstance(told.get(key), list)]
    if not seen:
        return None
    names = list(dict.fromkeys(str(name) for _, told in seen for name in told["name"]))
    size = -(-len(seen) * len(names) // most_cells)
    groups = [seen[i : i + size] for i in range(0, len(seen), size)]
    rows: list[list[float | None]] = [[None] * len(groups) for _ in names]
    place = {name: i for i, name in enumerate(names)}
    for column, group in enumerate(groups):
        for _, told in group:
            for name, value in zip(told["name"], told[key], strict=False):
                if not isinstance(value, (int, float)) or isinstance(value, bool):
                    continue
                if math.isfinite(value := plain_float(value)):
                    row, was = rows[place[str(name)]], rows[place[str(name)]][column]
                    if was is None or _says_more(value, was, middle):
                        row[column] = short(value, 4)
    if all(x is None or x == (middle or 0.0) for row in rows for x in row):
        return None  # a map of what says nothing is no map
    steps = [group[-1][0] for group in groups]
    if middle is None:
        _end_with_the_phase(run, steps, rows)
    return {"layers": names, "steps": steps, "rows": rows}


def _end_with_the_phase(run: Run, steps: list[int], rows: list[list[float | None]]) -> None:
    """End what is compressed with its phase: an empty column where another begins between two records."""
    stretches = bands(run)
    told = {name for first, last, name in stretches if bisect_right(steps, last) > bisect_right(steps, first - 1)}
    for first, _, name in reversed(stretches[1:]):
        column = bisect_right(steps, first)
        if name not in told and column and steps[column - 1] < first:
            steps.insert(column, first)
            for row in rows:
                row.insert(column, None)


def _says_more(value: float, was: float, middle: float | None) -> bool:
    return value > was if middle is None else abs(value - middle) > abs(was - middle)


def short(value: float, digits: int = 5) -> float:
    """Return a number of so many significant digits, whole where it is."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
