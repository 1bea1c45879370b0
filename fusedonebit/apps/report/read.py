"""From a folder's files to runs: columns of numbers, whatever the files lack."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import recording
from ..parsing import InputError

NOT_NUMBERS = ("optimizer", "step", "phase", "layers")
MOST_OWN = 12
"""Of a user's own numbers at most so many are shown."""

MOST_RUNS = 200
"""Of one folder. More would be one name for each record, not runs."""

LAST_STEP = 2**53
"""Beyond it steps are no whole numbers in a browser."""

LARGEST = 1e250
"""Values from here on count as infinite: their sums would overflow."""

COUNTS = ("bytes_step", "bytes_total", "bytes_fp32", "skipped_steps", "vetoed_steps", "rewarms")
"""Of these a value that is not finite tells nothing, and is left out."""


@dataclass
class Series:
    """Values by step. Steps rise, once the run has been read."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Append a value."""
        self.steps.append(step)
        self.values.append(value)

    def in_order(self) -> Series:
        """Return each step once: of several the last that was written."""
        last = dict(zip(self.steps, self.values, strict=True))
        steps = sorted(last)
        return Series(array("q", steps), array("d", [last[step] for step in steps]))


@dataclass
class Run:
    """One run of one folder.

    ``label`` is unique in a report; ``series`` holds every number by its key, "phase" as an index of ``phases``;
    ``layers`` what was told of layers, by step; ``starts`` the headers, of the first start and of each resumption.
    """

    name: str
    folder: Path
    label: str = ""
    series: dict[str, Series] = field(default_factory=dict)
    layers: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0
    _last: int = -1
    _in_order: bool = True
    _places: dict[str, int] = field(default_factory=dict)

    @property
    def phases(self) -> list[str]:
        """Name of phases, in the order in which they came."""
        return list(self._places)

    @property
    def first_step(self) -> int:
        """Return the first recorded step."""
        return min(series.steps[0] for series in self.series.values()) if self.series else self._last

    @property
    def last_step(self) -> int:
        """Return the last recorded step."""
        return self._last

    @property
    def header(self) -> dict[str, Any]:
        """How it was last started; empty if that was not recorded."""
        return self.starts[-1] if self.starts else {}

    def get(self, key: str) -> Series:
        """Return the numbers of a key; empty where none were recorded."""
        return self.series.get(key, Series())

    def own_keys(self, known: Sequence[str]) -> list[str]:
        """Return keys of the user's own numbers."""
        return [key for key in self.series if key not in known and key != "phase"][:MOST_OWN]

    def take(self, step: int, record: dict[str, Any]) -> None:
        """Take in one record."""
        self._in_order &= step > self._last
        self._last = max(self._last, step)
        for key, value in record.items():
            if key in NOT_NUMBERS or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if math.isfinite(number := plain_float(value)) or key not in COUNTS:
                self.series.setdefault(key, Series()).add(step, number)
        if isinstance(phase := record.get("phase"), str):
            place = self._places.setdefault(phase, len(self._places))
            self.series.setdefault("phase", Series()).add(step, place)
        layers = record.get("layers")
        if isinstance(layers, dict) and isinstance(layers.get("name"), list):
            self.layers[step] = layers

    def finish(self) -> None:
        """Put in order what was recorded twice, or by several writers."""
        if not self._in_order:
            self.series = {key: series.in_order() for key, series in self.series.items()}
            self.layers = dict(sorted(self.layers.items()))


def read_runs(folders: Sequence[str], progress: Callable[[int], None] = lambda n: None) -> list[Run]:
    """Read all runs of folders, and name them apart.

    Args:
        folders: As given; a folder twice counts once, and its ``metrics.jsonl`` is as good as a folder.
        progress: Told the number of bytes read, now and then.

    Raises:
        InputError: for a folder without a single record.
    """
    paths = [_metrics_of(given) for given in folders]
    distinct = list({os.path.realpath(path): path for path in paths}.values())
    runs = [run for path in distinct for run in _read_folder(path, progress)]
    for run, label in zip(runs, _labels(runs), strict=True):
        run.label = label
    return runs


def size_of(folders: Sequence[str]) -> int:
    """Return bytes that ``read_runs`` will read."""
    return sum(_metrics_of(given).stat().st_size for given in folders)


def _metrics_of(given: str) -> Path:
    path = Path(given)
    what = f"a folder with {recording.METRICS}, as `fusedonebit train --out` and fusedonebit.Recorder leave it"
    if path.is_file() and path.name == recording.METRICS:
        return path
    if not path.is_dir():
        found = "a file" if path.exists() else "no such folder"
        raise InputError(f"DIR must be {what}, got {given!r}: {found}; check the path")
    if not (path / recording.METRICS).is_file():
        inside = sorted(str(p.parent) for p in path.glob(f"*/{recording.METRICS}"))[:5]
        hint = f"did you mean {' '.join(inside)}?" if inside else "check the path, or wait for the run's first step"
        raise InputError(f"DIR must be {what}, got {given!r} without one; {hint}")
    return path / recording.METRICS


def _read_folder(path: Path, progress: Callable[[int], None]) -> list[Run]:
    folder, damaged, seen = path.parent, 0, 0
    runs: dict[str, Run] = {}
    try:
        for number, (line, record) in enumerate(recording.read_lines(path)):
            seen += len(line) + 1
            if number % 1000 == 0:
                progress(seen)
                seen = 0
            step = None if record is None else record.get("step")
            if record is None or isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= LAST_STEP:
                damaged += 1
                continue
            name = record.get("optimizer")
            name = name if isinstance(name, str) and name else Path(os.path.realpath(folder)).name
            if name not in runs:
                if len(runs) == MOST_RUNS:
                    raise InputError(f'DIR {folder} holds more than {MOST_RUNS} runs, by "optimizer"; name fewer')
                runs[name] = Run(name, folder)
            runs[name].take(step, record)
        progress(seen)
        _read_starts(folder / recording.STARTS, runs)
    except OSError as error:
        raise InputError(f"DIR {folder} can't be read: {error.strerror or error}") from error
    if not runs:
        found = f"{damaged} lines that are no records" if damaged else "nothing"
        raise InputError(
            f"DIR must hold at least one record in {recording.METRICS}, got {found} in {path}; "
            "wait for the run's first step, or leave this folder out"
        )
    for run in runs.values():
        run.damaged = damaged
        run.finish()
    return list(runs.values())


def _read_starts(path: Path, runs: dict[str, Run]) -> None:
    if not path.is_file():
        return  # written before there was a header
    for _, start in recording.read_lines(path):
        name = start.get("optimizer") if start else None
        if start and isinstance(name, str) and name in runs:
            runs[name].starts.append(start)


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return names alone in one folder; of several folders as much of each path as tells them apart."""
    real = {run.folder: Path(os.path.realpath(run.folder)) for run in runs}
    folders = list(dict.fromkeys(real.values()))
    if len(folders) == 1:
        return [run.name for run in runs]
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        tails = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(tails)) == len(tails):
            break
    tail = dict(zip(folders, tails, strict=True))
    return [f"{tail[real[run.folder]]}: {run.name}" for run in runs]


def plain_float(value: float) -> float:
    """Return a float; infinite from ``LARGEST`` on."""
    if abs(value) >= LARGEST:
        return math.inf if value > 0 else -math.inf
    return float(value)
