"""The lab's record: which runs were made, which learning rates they found, and which runs are still wanted."""

from __future__ import annotations

import fcntl
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

from fusedonebit.apps.parsing import InputError

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

    Args:
        path: The file.
        others: Files whose runs count as well, and to which none is added.

    Raises:
        InputError: for a file that can't be read, or another line that is no run.
    """

    def __init__(self, path: Path, *others: Path) -> None:
        self.path = path
        self.found: dict[Key, Record] = {}
        self._of_cell: dict[Cell, dict[Key, Record]] = defaultdict(dict)
        for each in (*others, path):
            self._read(each)

    def _read(self, path: Path) -> None:
        try:
            text = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise InputError(f"{path} can't be read: {error.strerror}") from None
        for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError):  # JSON's and Unicode's errors are the first's
                raise InputError(f"{path}, line {number}, is no run of the lab: mend or remove it") from None

    def add(self, record: Record) -> None:
        """Keep a run, in the file as well, where other processes may add theirs.

        Raises:
            InputError: for a file that can't be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
                _cut_torn_line(file)
                file.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            raise InputError(f"{self.path} can't be written: {error.strerror}") from None
        self._take(record)

    def _take(self, record: Record) -> None:
        record = {"received": record["sent"], "alike": 1.0, **record}  # older ones have no others
        key = Key(*(record[field.name] for field in fields(Key)))
        if key.task not in TASKS or key.optimizer not in CONTENDERS:
            return
        _check(key, record)
        if record["defaults"] == fingerprint(key.task, key.optimizer, key.alike):
            self.found[key] = self._of_cell[key.task, key.optimizer][key] = record

    def of(self, task: str, optimizer: str) -> dict[Key, Record]:
        """Return the runs of a task with an optimizer."""
        return self._of_cell.get((task, optimizer), {})

    def hours(self, keys: Iterable[Key]) -> float:
        """Estimate the time of runs, by the mean of recorded ones of the task on as many workers, on any, or of all."""
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        for key, record in self.found.items():
            for of in ((key.task, key.workers), (key.task, 0), ("", 0)):
                seconds[of].append(record.get("seconds", 0.0))
        means = {of: sum(each) / len(each) for of, each in seconds.items()}
        return sum(means.get((k.task, k.workers), means.get((k.task, 0), means.get(("", 0), 0.0))) for k in keys) / 3600

    def metrics(self, task: str, optimizer: str) -> dict[float, float]:
        """Return the mean metric of each rate that was tried on all seeds of the search; inf where one diverged."""
        by_rate = defaultdict(list)
        for key, record in self.of(task, optimizer).items():
            if (key.workers, key.alike) == (TUNED_AT, 1) and key.seed in tuning.SEEDS:
                by_rate[key.lr].append(math.inf if diverged(record) else record["metric"])
        return {lr: sum(found) / len(found) for lr, found in by_rate.items() if len(found) == len(tuning.SEEDS)}

    def tuned(self, task: str, optimizer: str) -> float | None:
        """Return the best rate, the smallest tried where all diverged, or a ``milder`` one; None before it is found."""
        best = tuning.best(start(task, optimizer), self.metrics(task, optimizer))
        return None if best is None else tuning.rounded(best * TASKS[task].milder)


def _check(key: Key, record: Record) -> None:
    """Raise TypeError or ValueError for a field that no run has."""
    if type(key.seed) is not int or type(key.workers) is not int:
        raise TypeError("seed and workers must be whole numbers")
    metric = record["metric"]
    numbers = [key.lr, record["initial"], record["sent"], record["received"], *([] if metric is None else [metric])]
    if not all(type(number) in (int, float) and math.isfinite(number) for number in [*numbers, key.alike]):
        raise TypeError("lr, initial, sent, received, metric and alike must be finite numbers")
    if not 0 <= key.alike <= 1:
        raise ValueError("alike must be from 0 to 1")
    if min(numbers[:4]) <= 0 or (metric is not None and metric <= 0):
        raise ValueError("lr, initial, sent, received and metric must be > 0")


def _cut_torn_line(file: BinaryIO) -> None:
    """Cut off what follows the last whole line."""
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)


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
    records: Records,
    cells: Sequence[Cell],
    seeds: int,
    workers: Sequence[int],
    rates: Sequence[float],
    parents: bool,
    alike: Sequence[float] = (1.0,),
) -> list[Key]:
    """Return the runs that are reported: at multiples of the rate tuned for each optimizer, or for its parent.

    Rates are those found with workers whose data are alike.
    """
    keys = []
    # Seed by seed, so that what a stopped lab has is paired.
    for seed in range(seeds):
        for task, optimizer in cells:
            lr = records.tuned(task, CONTENDERS[optimizer].parent if parents else optimizer)
            if lr is not None:
                at = [tuning.rounded(lr * by) for by in rates]
                keys += [Key(task, optimizer, seed, *of) for of in product(workers, at, alike)]
    return keys
