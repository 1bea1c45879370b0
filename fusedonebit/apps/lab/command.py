"""The body of ``fusedonebit lab``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import InputError, listed, need, whole

DESCRIPTION = (
    "Train small real tasks with named optimizers on simulated workers, each at its tuned learning rate; tables and a "
    "picture of how much worse each is than what it compresses, and of the bytes of the whole run."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--tasks", metavar="A,B", help="some of the tasks (default: all; --list names them)")
    add("--optimizers", metavar="A,B", help="some of the optimizers (default: those of the headline)")
    add("--seeds", type=whole(1), default=5, help="paired seeds, from 0; others find the rates")
    add("--workers", metavar="M,N", default="4,16", help="simulated workers of the runs (default: 4,16)")
    add("--rates", metavar="X,Y", default="1", help="multiples of the tuned rates (default: 1)")
    add("--parents", action="store_true", help="at the rates tuned for what each compresses, not searched for itself")
    add("--report", action="store_true", help="make no runs: print the tables of those that are there")
    add("--out", default="runs/lab", metavar="DIR", help="for runs.jsonl, tables and picture; what is there stays")
    add("--list", action="store_true", help="name the tasks and the optimizers")


def run(arguments: argparse.Namespace) -> int:
    """Make the runs that are missing, and report.

    Raises:
        InputError: for an unknown name, or a number that makes no sense.
    """
    from .contenders import CONTENDERS, HEADLINE
    from .tasks import TASKS

    if arguments.list:
        print("\n".join(["tasks:", *(f"  {name}" for name in TASKS), "optimizers:", *(f"  {n}" for n in CONTENDERS)]))
        return 0
    tasks, optimizers = listed(arguments.tasks) or list(TASKS), listed(arguments.optimizers) or list(HEADLINE)
    for flag, given, known in (("--tasks", tasks, TASKS), ("--optimizers", optimizers, CONTENDERS)):
        for name in given:
            if name not in known:
                raise InputError(f"{flag} must be of {', '.join(known)}, got {name!r}")
    workers = [int(n) for n in _numbers("--workers", arguments.workers)]
    for n in workers:
        if n < 2 or n & (n - 1) or n > 64:
            raise InputError(f"--workers must be of 2, 4, 8, 16, 32, 64, got {n}")
    by = _numbers("--rates", arguments.rates)
    need("rich", "sklearn")
    from .launch import make
    from .publish import publish
    from .records import Records, reported, search

    # Parents too: what is compressed is compared with them.
    optimizers = list(dict.fromkeys([*(CONTENDERS[name].parent for name in optimizers), *optimizers]))
    cells = [(task, optimizer) for task in tasks for optimizer in optimizers]
    records = Records(Path(arguments.out) / "runs.jsonl")
    if arguments.report and not records.found:
        raise InputError(f"--report needs runs, and {records.path} has none of today's defaults: leave --report out")
    if not arguments.report:
        searched = [(task, CONTENDERS[name].parent) for task, name in cells] if arguments.parents else cells
        make(records, lambda: search(records, searched), "finding rates")
        make(records, lambda: reported(records, cells, arguments.seeds, workers, by, arguments.parents), "runs")
    publish(records, Path(arguments.out))
    return 0


def _numbers(flag: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in listed(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0:
        raise InputError(f"{flag} must be numbers > 0, such as 1,2; got {text!r}")
    return numbers
