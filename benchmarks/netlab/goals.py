"""What the network lab is to show, and what it has found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import model, whole

Record = Mapping[str, Any]
LITERAL = 560.0
"""Mbit/s, a rate that a goal names."""
NOISE = 0.03
"""Share of a step that medians of a few rounds differ by."""
RIVALS = {"bf16": "overlapped bf16", "int8": "the int8 all-reduce", "powersgd": "PowerSGD at its own loss"}


class Goal(NamedTuple):
    """A number to meet: its name in ``tests/test_netlab.py``, text in the page, what is wanted at least, and found."""

    name: str
    text: str
    wanted: float
    found: float

    @property
    def met(self) -> bool:
        return self.found >= self.wanted


def at(record: Record, megabits: float) -> Record:
    """Return the row of a rate."""
    return next(row for row in record["rates"] if row["megabits"] == megabits)


def papers(record: Record) -> Record:
    """Return the row where messages take what they take on the papers' Ethernet."""
    return next(row for row in record["rates"] if row["share"] == model.PAPERS_SHARE)


def overlap_gain(row: Record) -> float:
    """Return how many times as fast a step of 1-bit Adam is with ``overlap=True``."""
    return model.speedup(row, "onebit-adam-overlap", "onebit-adam")


def _of_runs(record: Record, row: Record, rival: str, least: float, *among: str) -> Goal:
    ours, found = whole.best(record, row, rival, among or whole.OURS)
    name = f"{ours if among else rival}-at-{'literal' if row['megabits'] == LITERAL else 'papers'}"
    return Goal(name, f"whole runs at {row['megabits']:g} Mbit/s, {ours} over {RIVALS[rival]}", least, found)


def goals(record: Record) -> list[Goal]:
    """All numbers, in the order of the table."""
    slow, fast = papers(record), at(record, LITERAL)
    wanted = (slow, "bf16", 3.5), (slow, "int8", 2.5), (slow, "powersgd", 1.0), (fast, "bf16", 1.2)
    made = [_of_runs(record, *each) for each in wanted]
    made += [_of_runs(record, row, "bf16", least, whole.ANY) for row, least in ((slow, 1.7), (fast, 1.15))]
    gains = [(whole.gain(record, row, whole.ANY, "bf16"), row["megabits"] or math.inf) for row in model.rows(record)]
    found, at_worst = min(gains)  # of the loopback, too, which has no rate
    said = f"whole runs, {whole.ANY} over {RIVALS['bf16']}, at worst ({at_worst:g} Mbit/s)"
    made.append(Goal(f"{whole.ANY}-at-worst", said, 1 - NOISE, found))
    found, at_worst = min((overlap_gain(row), row["megabits"]) for row in record["rates"])
    said = f"a step with overlap=True over one without, at worst ({at_worst:g} Mbit/s), less {NOISE:.0%} noise"
    return [*made, Goal("overlap", said, 1 - NOISE, found)]
