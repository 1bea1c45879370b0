"""The body of ``fusedonebit lab``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import InputError, listed, need, whole

DESCRIPTION = "Train small real tasks with named optimizers on simulated workers; a table and a page of plots."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--tasks", metavar="A,B", help="some of the tasks (default: all; --list names them)")
    add("--optimizers", metavar="A,B", help="some of the optimizers (default: all)")
    add("--seeds", type=whole(1), default=3, help="paired seeds, from 0")
    add("--workers", type=whole(1), default=4, help="simulated workers of each run")
    add("--out", default="runs/lab", metavar="DIR", help="for runs.jsonl, the table and the plots; what is there stays")
    add("--list", action="store_true", help="name the tasks and the optimizers")


def run(arguments: argparse.Namespace) -> int:
    """Make the runs that are missing, and report.

    Raises:
        InputError: for an unknown name.
    """
    from .contenders import CONTENDERS
    from .tasks import TASKS

    if arguments.list:
        print("\n".join(["tasks:", *(f"  {name}" for name in TASKS), "optimizers:", *(f"  {n}" for n in CONTENDERS)]))
        return 0
    tasks, optimizers = listed(arguments.tasks), listed(arguments.optimizers)
    for flag, given, known in (("--tasks", tasks, TASKS), ("--optimizers", optimizers, CONTENDERS)):
        for name in given:
            if name not in known:
                raise InputError(f"{flag} must be of {', '.join(known)}, got {name!r}")
    need("rich", "sklearn")
    from .launch import run_lab

    out = Path(arguments.out)
    run_lab(tasks or list(TASKS), optimizers or list(CONTENDERS), arguments.seeds, arguments.workers, out)
    return 0
