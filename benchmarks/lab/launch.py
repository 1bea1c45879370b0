"""Makes the lab's runs on all cores, each in a process of its own; one that fails ends no other."""

from __future__ import annotations

import multiprocessing as mp
import os
import platform
import re
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fusedonebit import FusedOneBitWarning
from fusedonebit.apps.parsing import InputError

from .records import Record, Records
from .run import Key, run


def make(records: Records, plan: Callable[[], Sequence[Key]], name: str) -> int:
    """Make the runs of a plan that ``records`` lacks, until it plans no others. One that fails ends no other.

    Where a run's process is killed, by the system as a rule, for want of memory, the runs that are missing begin again.

    Returns:
        How many failed.

    Raises:
        InputError: where processes are killed before any run has ended.
    """
    failed: set[Key] = set()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(highlight=False)) as progress:
        bar = progress.add_task(name, total=None)
        first = [key for key in plan() if key not in records.found]
        hours = f", about {records.hours(first):.2f} core-hours by those recorded" if records.found else ""
        progress.console.print(f"{name}: {len(first)} runs{hours}")
        while missing := [key for key in plan() if key not in records.found and key not in failed]:
            done = int(progress.tasks[0].completed)
            progress.update(bar, total=done + len(missing))
            try:
                for key, record in _each(missing):
                    if "error" in record:
                        failed.add(key)
                        progress.console.print(f"{key} failed:\n{record['error']}")
                    else:
                        records.add(record)
                    progress.update(bar, advance=1)
            except BrokenProcessPool:
                if progress.tasks[0].completed == done:
                    killed = (
                        "a run's process was killed before any run ended: use fewer cores (taskset), each needs memory"
                    )
                    raise InputError(killed) from None
                progress.console.print("a run's process was killed: what was not over begins again")
    return len(failed)


def _each(keys: Sequence[Key]) -> Iterator[tuple[Key, Record]]:
    """Make runs in spawned processes, of one thread each, since steps are short; give each as it ends."""
    context = mp.get_context("spawn")
    pool = ProcessPoolExecutor(_cores(), mp_context=context, initializer=_prepare, initargs=(os.getpid(),))
    waiting = list(reversed(keys))
    running: dict[Future[Record], Key] = {}
    try:
        while waiting or running:
            while waiting and len(running) < _cores():  # what has been handed over can't be called back
                key = waiting.pop()
                running[pool.submit(_recorded, key)] = key
            done = wait(running, return_when=FIRST_COMPLETED).done
            for future in sorted(done, key=lambda each: each.exception() is not None):  # what ended well is kept
                yield running.pop(future), future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _cores() -> int:
    """Count those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepare(parent: int) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FusedOneBitWarning)


def _end_with(parent: int) -> None:
    """End this process once its parent is gone: killed, it has told nobody."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _recorded(key: Key) -> Record:
    try:
        return {**run(key), **machine()}
    except Exception:
        return {**asdict(key), "error": traceback.format_exc()}


def _model() -> list[str]:
    """Return the processor's family and model, where Linux tells: kernels differ between some of one capability."""
    try:
        with open("/proc/cpuinfo") as told:
            lines = dict(re.findall(r"^(cpu family|model)\s*: (.+)$", told.read(), re.MULTILINE))
    except OSError:
        return []
    return list(lines.values())


def machine() -> Mapping[str, str]:
    """Return what a run's last bits depend on besides its key: arithmetic, and Python's own texts, which tasks read."""
    cpu = " ".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), *_model()])
    return {"torch": torch.__version__.split("+")[0], "cpu": cpu, "python": platform.python_version()}
