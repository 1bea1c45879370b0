"""``python -m benchmarks [CASE ...]`` runs the named cases, or all that belong on the device; ``--list`` lists them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import adamw, averaging, bytes_moved, host, kernels, ranks, step
from .gpu import defaults, smoke, steps, two_ranks
from .pages import RESULTS, keep
from .registry import CASES, Case, Report, facts

ON_A_GPU = (smoke, two_ranks, steps, defaults, kernels)
MODULES = (bytes_moved, step, adamw, host, ranks, averaging, *ON_A_GPU)
"""Which register the cases, in this order."""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmark cases.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all that belong on the device")
    parser.add_argument("--list", action="store_true", help="name the cases and run none")
    parser.add_argument("--out", type=Path, help="folder for a JSON file of each case, and its picture if it has one")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--numel", type=_positive, help="parameters, or elements of a kernel's tensor")
    parser.add_argument("--rounds", type=int, help="turns of each peer")
    given = parser.parse_args(arguments)
    if given.list:
        for case in CASES.values():
            print(f"{case.name:14} {case.where:5} {case.about}")
        return 0
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())  # as tensors say it: tables are kept by that
    failed = False
    for case in _chosen(parser, given, device):
        report = Report(device, given.numel, given.rounds, dry_run=not case.is_at_home(device))
        if given.out:
            report.changed = _keeper(report, case.name, given.out)
        case.fill(report)
        failed |= not report.complete
        if given.out:
            _write(report, case.name, given.out)
    return int(failed)


def _chosen(parser: argparse.ArgumentParser, given: argparse.Namespace, device: torch.device) -> list[Case]:
    """The cases to run; ends the program where they can't be."""
    dry = "--device cpu --numel 100000 is a dry run of the code"
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"no CUDA device here; {dry}")
    unknown = [name for name in given.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; there are {', '.join(CASES)}")
    chosen = [CASES[name] for name in given.cases] or [c for c in CASES.values() if c.is_at_home(device)]
    strangers = [case for case in chosen if not case.is_at_home(device)]
    if strangers and device.type == "cuda":
        parser.error(f"case {strangers[0].name!r} belongs on a CPU: --device cpu")
    if strangers and not (given.device and given.numel):
        parser.error(f"case {strangers[0].name!r} belongs on cuda; {dry}")
    if strangers and given.out and given.out.resolve().is_relative_to(RESULTS):
        parser.error("a dry run is no result: give another --out, or none")
    return chosen


def _path(report: Report, name: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{'dry-run-' if report.dry_run else ''}{name}.json"


def _keeper(report: Report, name: str, folder: Path) -> Callable[[Report], None]:
    """What writes a case's record as it grows, with the facts of its beginning."""
    about, path = facts(report.device, report.dry_run), _path(report, name, folder)
    return lambda grown: keep(grown.record(name, about), path, str)


def _write(report: Report, name: str, folder: Path) -> None:
    record, path = report.record(name), _path(report, name, folder)
    keep(record, path, str)
    print(path)
    draw = CASES[name].draw
    if draw is None or not record["complete"]:
        return
    try:
        draw(record, path.with_suffix(".png"))
    except ImportError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    sys.exit(main())
