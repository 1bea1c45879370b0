"""What the network lab is to show, and what it has found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import model, whole

Record = Mapping[str, Any]
LITERAL = 560.0
"""Mbit/s, a rate that a goal names."""
NOISE = 0.03
"""Share of a step that medians of a few rounds differ by."""


class Goal(NamedTuple):
    """A number to meet.

    Attributes:
        name: In ``tests/test_netlab.py``.
        text: In the page.
        wanted: At least.
        found: In the record.
    """

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


def _of_runs(row: Record, ours: str, about: str, rival: str, least: float, found: float) -> Goal:
    said = f"whole runs at {row['megabits']:g} Mbit/s, {ours} over {rival}"
    return Goal(f"{about}-at-{'literal' if row['megabits'] == LITERAL else 'papers'}", said, least, found)


def goals(record: Record) -> list[Goal]:
    """All numbers, in the order of the table."""
    wanted = (
        ("bf16", 3.5, papers(record), "overlapped bf16"),
        ("int8", 2.5, papers(record), "the int8 all-reduce"),
        ("powersgd", 1.0, papers(record), "PowerSGD at its own loss"),
        ("bf16", 1.2, at(record, LITERAL), "overlapped bf16"),
    )
    made = []
    for rival, least, row, text in wanted:
        ours, found = whole.best(record, row, rival)
        made.append(_of_runs(row, ours, rival, text, least, found))
    for least, row in ((1.7, papers(record)), (1.15, at(record, LITERAL))):
        found = whole.gain(record, row, whole.ANY, "bf16")
        made.append(_of_runs(row, whole.ANY, whole.ANY, "overlapped bf16", least, found))
    hidden = min(model.rows(record), key=lambda row: whole.gain(record, row, whole.ANY, "bf16"))
    where = "the loopback" if hidden["megabits"] is None else f"{hidden['megabits']:g} Mbit/s"
    said = f"whole runs, {whole.ANY} over overlapped bf16, at worst ({where})"
    made.append(Goal(f"{whole.ANY}-at-worst", said, 1 - NOISE, whole.gain(record, hidden, whole.ANY, "bf16")))
    slowest = min(record["rates"], key=overlap_gain)
    said = (
        f"a step with overlap=True over one without, at worst ({slowest['megabits']:g} Mbit/s), less {NOISE:.0%} noise"
    )
    return [*made, Goal("overlap", said, 1 - NOISE, overlap_gain(slowest))]
