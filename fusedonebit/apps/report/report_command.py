"""The body of ``fusedonebit report``."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..parsing import InputError, printable
from .page import build
from .page_tables import in_bytes
from .read import read_runs, size_of

DESCRIPTION = (
    "Make one self-contained HTML page, which opens offline, of one or several runs: losses, phases, bytes, "
    "compression error, layers over time, settings and versions."
)
PATIENCE = 0.8
"""Seconds after which progress is shown."""

NAME = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR", help="with metrics.jsonl, as train --out or a Recorder leaves it")
    add("--out", metavar="FILE", help=f"the page (default: DIR/{NAME}; of several folders {NAME} here)")
    add("--title", default="Training runs", metavar="TEXT", help="of the page")


def run(arguments: argparse.Namespace) -> int:
    """Read, write the page, and say where it is and how large.

    Raises:
        InputError: if a folder holds no run, or can't be looked at, or the page can't be written.
    """
    try:
        return _run(arguments, _target(arguments))
    except OSError as error:
        raise InputError(f"{error.filename or 'a file'} can't be used: {error.strerror or error}") from error


def _run(arguments: argparse.Namespace, out: Path) -> int:
    with _Progress(size_of(arguments.folders)) as progress:
        runs = read_runs(arguments.folders, progress.read)
        page = build(runs, arguments.title, progress.drawn(len(runs)))
    content = page.encode("utf-8", "replace")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(content)
    except OSError as error:
        raise InputError(f"--out {out} can't be written: {error.strerror or error}; choose another file") from error
    damaged = sum({r.folder: r.damaged for r in runs}.values())
    more = f", {damaged} damaged lines passed over" if damaged else ""
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    print(f"wrote {printable(str(out))}: {in_bytes(len(content))}, {count}{more}")
    return 0


def _target(arguments: argparse.Namespace) -> Path:
    if arguments.out is not None:
        out = Path(arguments.out)
        if out.is_dir():
            raise InputError(f"--out must be a file to write, got the folder {arguments.out}; add /{NAME}")
        return out
    first = Path(arguments.folders[0])
    alone = len({os.path.realpath(folder) for folder in arguments.folders}) == 1
    folder = first if first.is_dir() else first.parent
    return folder / NAME if alone else Path(NAME)


class _Progress:
    """A bar on a terminal, if it takes long; nothing where rich is missing."""

    def __init__(self, total: int) -> None:
        self._total, self._began, self._done = max(total, 1), time.monotonic(), 0.0
        self._bars: Any = None
        self._task: Any = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def read(self, count: int) -> None:
        """Note bytes that were read; reading is two thirds of the work."""
        self._advance(count / self._total * 2 / 3)

    def drawn(self, runs: int) -> Callable[[], None]:
        """Return what is to be called when a run has been made ready to draw."""
        return lambda: self._advance(1 / 3 / runs)

    def _advance(self, share: float) -> None:
        self._done += share
        if self._bars is None and time.monotonic() - self._began > PATIENCE:
            self._show()
        if self._bars is not None:
            self._bars.update(self._task, completed=self._done)

    def _show(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            self._began = float("inf")
            return
        console = Console(stderr=True)
        self._bars = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._bars.start()
        self._task = self._bars.add_task("reading and drawing", total=1.0)
