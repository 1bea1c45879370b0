"""The registry of cases, and what all of them print and record.

A case is a function that fills a ``Report``: tables that print as they grow, row by row, and can be
written as JSON together with the facts of the machine.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from fusedonebit.triton_kernels import backend

from .timing import Timing

Where = Literal["cpu", "cuda", "both"]
Record = dict[str, Any]
DRY_RUN = "dry run: no result"


@dataclass
class Table:
    """Rows that are printed as they come.

    Args:
        title: What was measured, and how.
        columns: Format of each key of a row: its width, and whatever else ``format`` takes. A row may have
            more keys, which are recorded only.
        rows: Those that there are.
        changed: Told of each row.
    """

    title: str
    columns: Mapping[str, str]
    rows: list[Record] = field(default_factory=list)
    changed: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        print(f"\n{self.title}")
        print(self._line({name: name for name in self.columns}), flush=True)

    def add(self, **row: Any) -> Record:
        """Prints and keeps a row; what is None is not known here."""
        self.rows.append(row)
        print(self._line(row), flush=True)
        self.changed()
        return row

    def _line(self, row: Record) -> str:
        return "  ".join(_cell(row.get(name), spec) for name, spec in self.columns.items()).rstrip()


def _cell(value: Any, spec: str) -> str:
    width = spec.split(".")[0].rstrip("dsf").replace(",", "")  # "<20", ">9", "12"
    if value is None or isinstance(value, str):
        width = width if width[:1] in "<>" else ">" + width
        return format("-" if value is None else value, width)
    return format(value, spec)


@dataclass
class Report:
    """What a case is told and what it tells.

    Args:
        device: Where to measure.
        numel: Parameters, instead of the case's own number.
        rounds: Turns of each peer, instead of the case's own number.
        dry_run: Whether the numbers mean nothing: a GPU's cases on a CPU.
        changed: Told whenever there is more to record: what ends the process in the middle of a case ends no row of it.
    """

    device: torch.device
    numel: int | None = None
    rounds: int | None = None
    dry_run: bool = False
    changed: Callable[[Report], None] = lambda report: None
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    def table(self, title: str, columns: Mapping[str, str]) -> Table:
        """Starts a table."""
        title = f"{DRY_RUN}: {title}" if self.dry_run else title
        self.tables.append(Table(title, columns, changed=lambda: self.changed(self)))
        return self.tables[-1]

    def note(self, text: str) -> None:
        """Prints and keeps a line."""
        self.notes.append(text)
        print(text, flush=True)
        self.changed(self)

    def limit(self, value: float | None, at_most: float | None = None, at_least: float | None = None) -> str | None:
        """A limit and whether it is kept, for a column of that name; None where there is none."""
        if at_most is None and at_least is None:
            return None
        told = f"<= {at_most:g}" if at_most is not None else f">= {at_least:g}"
        if self.dry_run or self.numel or value is None:  # limits are of the case's own size
            return f"{told}, not judged"
        kept = value <= at_most if at_most is not None else value >= (at_least or 0.0)
        return f"{told}: {'PASS' if kept else 'FAIL'}"

    def record(self, name: str, about: Record | None = None) -> Record:
        """What is written as JSON; ``about`` are the ``facts``, which are those of now if none are given."""
        tables = [{"title": t.title, "columns": list(t.columns), "rows": t.rows} for t in self.tables]
        about = about or facts(self.device, self.dry_run)
        return {"case": name, "complete": self.complete, "about": about, "notes": self.notes, "tables": tables}


TIMES: dict[str, str] = {"ms": ">9.2f", "10-90 %": ">17"}
"""Columns of a ``Timing``."""


def times(timing: Timing) -> Record:
    """A row's keys for ``TIMES``."""
    spread = f"{timing.low:.2f} to {timing.high:.2f}"
    return {"ms": timing.median, "low": timing.low, "high": timing.high, "10-90 %": spread}


@dataclass(frozen=True)
class Case:
    """A registered case."""

    name: str
    where: Where
    run: Callable[[Report], None]
    draw: Callable[[Record, Path], None] | None = None
    told: str = ""

    @property
    def about(self) -> str:
        """One line."""
        return self.told or (self.run.__doc__ or "").split("\n")[0]

    def is_at_home(self, device: torch.device) -> bool:
        """Whether its numbers mean something there."""
        return self.where in (device.type, "both")

    def fill(self, report: Report) -> None:
        """Runs it. Where it fails, ``report.complete`` stays False, and the cases behind it run all the same."""
        print(f"\n== {self.name}: {self.about}", flush=True)
        began = time.perf_counter()
        try:
            self.run(report)
        except Exception as error:
            traceback.print_exc()
            report.note(f"FAILED: {type(error).__name__}; what is above was measured before")
        else:
            report.complete = True
        print(f"({time.perf_counter() - began:.0f} s)", flush=True)


CASES: dict[str, Case] = {}


def case(
    name: str, where: Where, draw: Callable[[Record, Path], None] | None = None, about: str = ""
) -> Callable[[Callable[[Report], None]], Callable[[Report], None]]:
    """Registers a function; the first line of its docstring says what it measures.

    Args:
        name: On the command line, and of its file of results.
        where: Where its numbers mean something. Elsewhere it is a dry run of the code.
        draw: Makes a picture of its record.
        about: What it measures, if no docstring says it.
    """

    def register(run: Callable[[Report], None]) -> Callable[[Report], None]:
        CASES[name] = Case(name, where, run, draw, about)
        return run

    return register


def facts(device: torch.device, dry_run: bool) -> Record:
    """What ran, and on what; nothing that names a machine."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU",
        "memory_gib": torch.cuda.get_device_properties(device).total_memory >> 30 if cuda else None,
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "commit": _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "backend": backend(device),
        "date": datetime.date.today().isoformat(),
        "dry_run": dry_run,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip().splitlines()[0]
