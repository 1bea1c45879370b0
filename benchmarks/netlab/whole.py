"""Seconds of whole runs, warm-up included: steps of each stage, by what a step of that stage was measured to take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fusedonebit.optim.own_variance import EARLY, TOLD_EVERY
from fusedonebit.optim.variance import LONGEST, SHARE_OF_AGE

from . import equal
from .hooks import POWER_SGD_START

Record = Mapping[str, Any]
OURS = ("onebit-adam", "onebit-adam-overlap", "zero-one-adam")
RIVALS = ("bf16", "int8", "powersgd")
ANY = "compress-4"
"""Ours for any optimizer, here AdamW, which is compared by itself."""
TRAINED_AS = {"onebit-adam-overlap": "onebit-adam"}
"""Whose losses a method has: buckets change when bits travel, and not what they are."""


def renewals(steps: int) -> int:
    """Return how many of so many compressed steps share squares, after which the variance is renewed."""
    count = since = 0
    for age in range(1, steps + 1):
        since += 1
        if since >= min(LONGEST, max(1, age // SHARE_OF_AGE)):
            count, since = count + 1, 0
    return count


def stages(method: str, steps: int, warmup: float) -> dict[str, int]:
    """Return the steps of each stage of a whole run, by the name of the method that times them.

    Args:
        method: Which.
        steps: Of the run.
        warmup: Share of them that warm up 1-bit Adam.
    """
    if method == "powersgd":
        return {"adamw": POWER_SGD_START, method: steps - POWER_SGD_START}
    if method == "zero-one-adam":
        early = min(steps, EARLY)
        telling = early + (steps // TOLD_EVERY - early // TOLD_EVERY)
        return {"telling": telling, method: steps - telling}
    if not method.startswith("onebit-adam"):
        return {method: steps}
    warm = max(1, round(warmup * steps))
    renewing = renewals(steps - warm)
    renewal = "renewal" + method.removeprefix("onebit-adam")
    return {"warm-up": warm, renewal: renewing, method: steps - warm - renewing}


def seconds_of(row: Record, method: str, steps: int, warmup: float) -> float:
    """Return what a whole run takes at a row's rate."""
    counts = stages(method, steps, warmup)
    return sum(count * row["methods"][stage]["whole"] for stage, count in counts.items())


def length(record: Record, method: str, at: str = equal.BASE) -> float:
    """Return how long a method's run must be for the final loss of ``at``, whose own is 1; infinite: longer than any.

    Runs are not made shorter than those of bfloat16; for PowerSGD's loss they are.
    """
    told = record["runs"]["methods"]
    found = equal.needed(equal.losses_of(told[TRAINED_AS.get(method, method)]), equal.loss_at_one(told[at]))
    if found is None:
        return math.inf
    return found if at == equal.AT_ITS_OWN else max(1.0, found)


def seconds(record: Record, row: Record, method: str, at: str = equal.BASE) -> float:
    """Return what it takes at a row's rate until a method has the final loss of ``at``."""
    runs, times = record["runs"], length(record, method, at)
    if math.isinf(times):
        return math.inf
    return seconds_of(row, method, round(times * runs["steps"]), runs["warmup"])


def gain(record: Record, row: Record, ours: str, rival: str) -> float:
    """Return how many times as fast ours has the rival's loss: PowerSGD's own, of others bfloat16's."""
    at = equal.AT_ITS_OWN if rival == equal.AT_ITS_OWN else equal.BASE
    mine, theirs = seconds(record, row, ours, at), seconds(record, row, rival, at)
    return 0.0 if math.isinf(mine) else theirs / mine


def best(record: Record, row: Record, rival: str, among: Sequence[str] = OURS) -> tuple[str, float]:
    """Return which of ours is the fastest against a rival at a row's rate, and how many times as fast."""
    return max(((name, gain(record, row, name, rival)) for name in among), key=lambda pair: pair[1])


def crossing(record: Record, rival: str, among: Sequence[str] = OURS) -> float:
    """Return the rate, in Mbit/s, from which on none of ours is faster than a rival.

    It is interpolated between two that were measured, gain and rate in logarithms. 0: nowhere faster; infinite: faster
    at the fastest.
    """
    rows = record["rates"]
    gains = [best(record, row, rival, among)[1] for row in rows]
    faster = [i for i, each in enumerate(gains) if each > 1]
    if not faster:
        return 0.0
    last = faster[-1]
    if last == len(rows) - 1:
        return math.inf
    low, high = (math.log(rows[i]["megabits"]) for i in (last, last + 1))
    above, below = math.log(gains[last]), math.log(max(gains[last + 1], 1e-9))
    return math.exp(low + (high - low) * above / (above - below))


def against_product(record: Record, method: str) -> float:
    """Return the seconds of a run that was timed from its first step to its last, over those its stages add up to."""
    run = record["run"]
    row = next(row for row in record["rates"] if row["megabits"] == run["megabits"])
    return run["methods"][method]["seconds"] / seconds_of(row, method, run["steps"], run["warmup"])
