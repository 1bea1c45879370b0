"""The lab's record: which runs were made, which learning rates they found, and which runs are still wanted."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..arguments import InputError
from . import tuning
from .contenders import CONTENDERS
from .run import Key, diverged, fingerprint
from .tasks import TASKS

Record = dict[str, Any]
Cell = tuple[str, str]
"""A task and an optimizer."""

TUNED_AT = 4
"""Workers of the runs that find learning rates."""


class Records:
    """The runs made so far, in a file with a line for each; those with other settings than today's don't count.

    A last line that was not written to its end does not count either, and is cut off when one is added.

    Raises:
        InputError: for a file that can't be read, or another line that is no run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[Key, Record] = {}
        try:
            text = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise InputError(f"{path} can't be read: {error.strerror}") from None
        whole = text.rfind(b"\n") + 1
        self._torn_at = None if whole == len(text) else whole
        for number, line in enumerate(text[:whole].splitlines(), 1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):  # JSON's and Unicode's errors are the first's
                raise InputError(f"{path}, line {number}, is no run of the lab: mend or remove it") from None

    def add(self, record: Record) -> None:
        """Keep a run, in the file as well."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            if self._torn_at is not None:
                file.truncate(self._torn_at)
                self._torn_at = None
            file.write(json.dumps(record) + "\n")
        self._take(record)

    def _take(self, record: Record) -> None:
        key = Key(*(record[field.name] for field in fields(Key)))
        numbers = [key.seed, key.workers, key.lr, record["initial"], record["sent"], record["metric"] or 0.0]
        if not all(isinstance(number, int | float) for number in numbers):
            raise TypeError(f"{numbers} must be numbers")
        known = key.task in TASKS and key.optimizer in CONTENDERS
        if known and record["defaults"] == fingerprint(key.task, key.optimizer):
            self.found[key] = record

    def metrics(self, task: str, optimizer: str) -> dict[float, float]:
        """Return the mean metric of each rate that was tried on all seeds of the search; inf where one diverged."""
        by_rate = defaultdict(list)
        for key, record in self.found.items():
            if (key.task, key.optimizer, key.workers) == (task, optimizer, TUNED_AT) and key.seed in tuning.SEEDS:
                by_rate[key.lr].append(math.inf if diverged(record) else record["metric"])
        return {lr: sum(found) / len(found) for lr, found in by_rate.items() if len(found) == len(tuning.SEEDS)}

    def tuned(self, task: str, optimizer: str) -> float | None:
        """Return the best rate, the smallest tried where all diverged; None where the search is not over."""
        return tuning.best(start(task, optimizer), self.metrics(task, optimizer))


def start(task: str, optimizer: str) -> float:
    """Return where the search for a rate begins."""
    contender = CONTENDERS[optimizer]
    return TASKS[task].lr * contender.rate * (TASKS[task].lamb if contender.lamb else 1.0)


def search(records: Records, cells: Iterable[Cell]) -> list[Key]:
    """Return the runs that the search for rates lacks now; [] where it is over."""
    return [
        Key(task, optimizer, seed, TUNED_AT, lr)
        for task, optimizer in cells
        for lr in tuning.wanted(start(task, optimizer), records.metrics(task, optimizer))
        for seed in tuning.SEEDS
    ]


def reported(
    records: Records, cells: Sequence[Cell], seeds: int, workers: Sequence[int], rates: Sequence[float], parents: bool
) -> list[Key]:
    """Return the runs that are reported: at multiples of the rate tuned for each optimizer, or for its parent."""
    keys = []
    # Seed by seed, so that what a stopped lab has is paired.
    for seed in range(seeds):
        for task, optimizer in cells:
            lr = records.tuned(task, CONTENDERS[optimizer].parent if parents else optimizer)
            if lr is not None:
                keys += [Key(task, optimizer, seed, w, tuning.rounded(lr * by)) for w in workers for by in rates]
    return keys
