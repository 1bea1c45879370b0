"""The body of ``fusedonebit report``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from ..parsing import InputError, listed, printable
from ..units import size
from .page import MADE, build
from .read import Run, metrics_of, read_runs

DESCRIPTION = (
    "Make one self-contained HTML page, which opens offline, of one or several runs: losses, phases, bytes, "
    "compression error, layers, settings and versions."
)
NAME = "report.html"
LARGE = 100e6
"""Bytes that take seconds to read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR", help="with metrics.jsonl, as train --out or a Recorder leaves it")
    add("--out", metavar="FILE", help=f"the page (default: DIR/{NAME}; of several folders {NAME} here)")
    add("--title", default="Training runs", metavar="TEXT", help="of the page")
    add("--runs", metavar="A,B", help="only these of the runs, by name")
    add("--steps", type=_steps, metavar="A:B", help="look closer: pictures of these steps alone")


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,15}):(\d{1,15})", text)
    if not found or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"must be a first and a last step, as 100:200, got {text!r}")
    return int(found[1]), int(found[2])


def run(arguments: argparse.Namespace) -> int:
    """Read, write the page, and say where it is and how large.

    Raises:
        InputError: if a folder holds no run, or can't be looked at, or the page can't be written.
    """
    try:
        out = _target(arguments)
        total = sum(metrics_of(folder).stat().st_size for folder in arguments.folders)
        if total > LARGE:
            print(f"reading {size(total)}", file=sys.stderr)
        runs = _chosen(read_runs(arguments.folders), listed(arguments.runs))
        content = build(runs, arguments.title, arguments.steps).encode("utf-8", "replace")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(content)
    except OSError as error:
        raise InputError(f"{error.filename or 'a file'} can't be used: {error.strerror or error}") from error
    damaged = sum({r.folder: r.damaged for r in runs}.values())
    more = f", {damaged} damaged lines passed over" if damaged else ""
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    print(f"wrote {printable(str(out))}: {size(len(content))}, {count}{more}")
    return 0


def _chosen(runs: list[Run], names: list[str]) -> list[Run]:
    for name in names:
        if not any(name in (run.name, run.label) for run in runs):
            raise InputError(f"--runs must be of {', '.join(run.label for run in runs)}, got {name!r}")
    return [run for run in runs if not names or {run.name, run.label} & {*names}]


def _target(arguments: argparse.Namespace) -> Path:
    """Return the file to write: none that exists already, but a page that this command has made."""
    first = Path(arguments.folders[0])
    alone = len({os.path.realpath(folder) for folder in arguments.folders}) == 1
    out = (first if first.is_dir() else first.parent) / NAME if alone else Path(NAME)
    if arguments.out is not None:
        out = Path(arguments.out)
        if out.is_dir():
            raise InputError(f"--out must be a file to write, got the folder {arguments.out}; add /{NAME}")
    if out.is_file() and out.stat().st_size and MADE not in out.read_text("utf-8", "replace"):
        raise InputError(f"--out {out} is there already, and no page of this command; choose another file")
    return out
