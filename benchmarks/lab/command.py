"""The command: ``python -m benchmarks.lab``, which is ``make lab``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fusedonebit.apps.cli import Defaults, exit_code
from fusedonebit.apps.parsing import InputError, listed, need, whole

WORKERS = (2, 4, 8, 16, 32, 64)
"""Numbers of workers: powers of 2, by which sums are divided exactly."""

DESCRIPTION = (
    "Train small real tasks with named optimizers on simulated workers, each at its tuned learning rate; tables and a "
    "picture of how much worse each is than what it compresses, and of the bytes of the whole run."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 2 for bad input, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser("python -m benchmarks.lab", description=DESCRIPTION, formatter_class=Defaults)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    return exit_code(lambda: run(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--tasks", metavar="A,B", help="some of the tasks (default: all; --list names them)")
    add("--optimizers", metavar="A,B", help="some of the optimizers (default: those of the headline)")
    add("--seeds", type=whole(1, 1000), default=5, help="paired seeds, from 0; others find the rates")
    add("--workers", metavar="M,N", default="4,16", help="simulated workers of the runs")
    add(
        "--alike",
        metavar="A,B",
        default="1",
        help="shares, 0 to 1, of each worker's batch that are drawn from what all have; the rest is of classes, parts "
        "of the text or users of its own, in tasks that have such",
    )
    add("--rates", metavar="X,Y", default="1", help="multiples of the tuned rates, of 0.5, 1, 2")
    add("--parents", action="store_true", help="at the rates tuned for what each compresses, not searched for itself")
    add("--report", action="store_true", help="make no runs: print the tables of all that are there; with --out alone")
    add("--out", default="runs/lab", metavar="DIR", help="for runs.jsonl, tables and picture; what is there stays")
    add("--list", action="store_true", help="name the tasks and the optimizers")


def run(arguments: argparse.Namespace) -> int:
    """Make the runs that are missing, and report; return 1 where one failed.

    Raises:
        InputError: for an unknown name, a number that makes no sense, ``--report`` with what chooses runs, or a folder
            that can't be written.
    """
    if not arguments.list:  # torch alone takes a second or two
        print(f"starting the lab: {'its tables' if arguments.report else 'its runs'}", file=sys.stderr, flush=True)
    from .contenders import CONTENDERS, HEADLINE
    from .report import MULTIPLES
    from .tasks import TASKS

    if arguments.list:
        print("\n".join(["tasks:", *(f"  {name}" for name in TASKS), "optimizers:", *(f"  {n}" for n in CONTENDERS)]))
        return 0
    if arguments.report:
        _check_alone(arguments)
    for name in ("tasks", "optimizers", "out"):
        if getattr(arguments, name) == "":
            raise InputError(f"--{name} must not be empty, got ''; or leave it out")
    tasks, optimizers = listed(arguments.tasks) or list(TASKS), listed(arguments.optimizers) or list(HEADLINE)
    for flag, given, known in (("--tasks", tasks, TASKS), ("--optimizers", optimizers, CONTENDERS)):
        for name in given:
            if name not in known:
                raise InputError(f"{flag} must be of {', '.join(known)}, got {name!r}")
    workers = _numbers("--workers", arguments.workers)
    for n in workers:
        if n not in WORKERS:
            raise InputError(f"--workers must be of {', '.join(map(str, WORKERS))}, got {n:g}")
    by = _numbers("--rates", arguments.rates)
    for multiple in by:
        if multiple not in MULTIPLES:
            raise InputError(f"--rates must be of {', '.join(f'{m:g}' for m in MULTIPLES)}, got {multiple:g}")
    alike = _numbers("--alike", arguments.alike, "from 0 to 1, such as 0,0.5,1", lambda a: 0 <= a <= 1)
    if min(alike) < 1:
        tasks = _with_sources(tasks, named=bool(arguments.tasks))
    need("rich", "sklearn")
    from .launch import make
    from .publish import publish
    from .records import Records, reported, search

    # Parents too: what is compressed is compared with them.
    optimizers = list(dict.fromkeys([*(CONTENDERS[name].parent for name in optimizers), *optimizers]))
    cells = [(task, optimizer) for task in tasks for optimizer in optimizers]
    records, failed = Records(Path(arguments.out) / "runs.jsonl"), 0
    if arguments.report and not records.found:
        raise InputError(f"--report needs runs, and {records.path} has none of today's settings: leave --report out")
    if not arguments.report:
        _make_folder(Path(arguments.out))
        searched = cells
        if arguments.parents:  # several have one parent
            searched = list(dict.fromkeys((task, CONTENDERS[name].parent) for task, name in cells))
        failed += make(records, lambda: search(records, searched), "finding rates")
        counts = [int(n) for n in workers]
        runs = partial(reported, records, cells, arguments.seeds, counts, by, arguments.parents, alike)
        failed += make(records, runs, "runs")
    publish(records, Path(arguments.out))
    return 1 if failed else 0


def _check_alone(arguments: argparse.Namespace) -> None:
    """Refuse ``--report`` beside what chooses runs, which would change nothing."""
    flags = argparse.ArgumentParser()
    add_arguments(flags)
    for name in ("tasks", "optimizers", "seeds", "workers", "alike", "rates", "parents"):
        if getattr(arguments, name) != flags.get_default(name):
            raise InputError(f"--report prints all that is there: leave --{name} out")


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "runs.jsonl").touch()
    except OSError as error:
        raise InputError(f"--out must be a folder that can be written, got {str(out)!r}: {error.strerror}") from None


def _with_sources(tasks: Sequence[str], named: bool) -> list[str]:
    """Return the tasks in which workers' data can differ; one that was named and can't is an InputError."""
    from .tasks import TASKS

    apart = [name for name in tasks if TASKS[name].sources]
    if named and (other := [name for name in tasks if name not in apart]):
        able = ", ".join(name for name, task in TASKS.items() if task.sources)
        raise InputError(f"--alike below 1 needs tasks with classes, texts or users ({able}), got {other[0]!r}")
    return apart


def _positive(number: float) -> bool:
    return 0 < number < math.inf


def _numbers(
    flag: str, text: str, which: str = "> 0, such as 1,2", fits: Callable[[float], bool] = _positive
) -> list[float]:
    try:
        numbers = [float(part) for part in listed(text)]
    except ValueError:
        numbers = []
    if not numbers or not all(map(fits, numbers)):
        raise InputError(f"{flag} must be numbers {which}; got {text!r}")
    return list(dict.fromkeys(numbers))
