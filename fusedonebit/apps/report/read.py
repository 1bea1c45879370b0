"""Reads folders' files to runs: columns of numbers, whatever the files lack."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import recording
from ..parsing import InputError

NOT_NUMBERS = ("optimizer", "step", "phase", "layers")
MOST_RUNS = 200
"""Of one folder. More would be one name for each record, not runs."""
LAST_STEP = 2**53
"""Beyond it a step is no step."""
LARGEST, SMALLEST = 1e250, 1e-250
"""Values from here on count as infinite, as their sums would overflow; or as 0."""
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

    def finite(self) -> list[tuple[int, float]]:
        """Return the steps and values that are numbers."""
        return [(step, y) for step, y in zip(self.steps, self.values, strict=True) if math.isfinite(y)]

    def cut(self, first: float, last: float) -> Series:
        """Return what lies between two steps; of a step that was written twice the last."""
        found = dict(zip(self.steps, self.values, strict=True))
        steps = sorted(step for step in found if first <= step <= last)
        return Series(array("q", steps), array("d", [found[step] for step in steps]))


@dataclass
class Run:
    """One run of one folder.

    ``label`` is unique in a report; ``series`` holds every number by its key, "phase" as ``phases`` numbers them;
    ``layers`` what was told of layers, by step; ``starts`` the headers, of the first start and of each resumption.
    """

    name: str
    folder: Path
    label: str = ""
    series: dict[str, Series] = field(default_factory=dict)
    phases: dict[str, int] = field(default_factory=dict)
    layers: dict[int, dict[str, Any]] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    last_step: int = -1
    damaged: int = 0
    in_order: bool = True

    @property
    def header(self) -> dict[str, Any]:
        """How it was last started; empty if that was not recorded."""
        return self.starts[-1] if self.starts else {}

    def get(self, key: str) -> Series:
        """Return the numbers of a key; empty where none were recorded."""
        return self.series.get(key, Series())

    def last(self, key: str) -> float | None:
        """Return the last number recorded of a key."""
        values = self.get(key).values
        return values[-1] if values else None

    def take(self, step: int, record: dict[str, Any]) -> None:
        """Take in one record."""
        self.in_order &= step > self.last_step
        self.last_step = max(self.last_step, step)
        for key, value in record.items():
            if key in NOT_NUMBERS or (number := plain_float(value)) is None:
                continue
            if math.isfinite(number) or key not in COUNTS:
                self.series.setdefault(key, Series()).add(step, number)
        if isinstance(phase := record.get("phase"), str):
            number = self.phases.setdefault(phase, len(self.phases))
            self.series.setdefault("phase", Series()).add(step, number)
        layers = record.get("layers")
        if isinstance(layers, dict) and isinstance(layers.get("name"), list):
            self.layers[step] = layers

    def finish(self) -> None:
        """Put in order what was recorded twice, or by several writers."""
        if not self.in_order:
            self.series = {key: series.cut(0, LAST_STEP) for key, series in self.series.items()}
            self.layers = dict(sorted(self.layers.items()))


def read_runs(folders: Sequence[str]) -> list[Run]:
    """Read all runs of folders, and name them apart; a folder's ``metrics.jsonl`` is as good as the folder.

    Raises:
        InputError: for a folder without a single record.
    """
    distinct = {os.path.realpath(path): path for path in map(metrics_of, folders)}  # a folder twice counts once
    runs = [run for path in distinct.values() for run in _read_folder(path)]
    for run, label in zip(runs, _labels(runs), strict=True):
        run.label = label
    return runs


def metrics_of(given: str) -> Path:
    """Return the file of a folder; raise InputError where there is none."""
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


def _read_folder(path: Path) -> list[Run]:
    folder, damaged = path.parent, 0
    runs: dict[str, Run] = {}
    try:
        for _, record in recording.read_lines(path):
            step = None if record is None else record.get("step")
            if record is None or isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= LAST_STEP:
                damaged += 1
                continue
            name = record.get("optimizer")
            name = name if isinstance(name, str) and name else Path(os.path.realpath(folder)).name
            if name not in runs and len(runs) == MOST_RUNS:
                raise InputError(f'DIR {folder} holds more than {MOST_RUNS} runs, by "optimizer"; name fewer')
            runs.setdefault(name, Run(name, folder)).take(step, record)
        starts = folder / recording.STARTS
        for _, start in recording.read_lines(starts) if starts.is_file() else ():  # an older version wrote none
            if start and isinstance(name := start.get("optimizer"), str) and name in runs:
                runs[name].starts.append(start)
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


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return names alone in one folder; of several folders as much of each path as tells them apart."""
    parts = {run.folder: Path(os.path.realpath(run.folder)).parts for run in runs}
    if len(parts) == 1:
        return [run.name for run in runs]
    depth, tail = 0, dict[Path, str]()
    while len({*tail.values()}) < len(parts):
        depth += 1
        tail = {folder: "/".join(of[-depth:]) for folder, of in parts.items()}
    return [f"{tail[run.folder]}: {run.name}" for run in runs]


def plain_float(value: Any) -> float | None:
    """Return a number as a float, infinite or 0 beyond what can be drawn; None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if abs(value) >= LARGEST:
        return math.inf if value > 0 else -math.inf
    return 0.0 if abs(value) < SMALLEST else float(value)
