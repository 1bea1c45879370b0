"""Makes the lab's runs on all cores, each in a process of its own; one that fails ends no other."""

from __future__ import annotations

import multiprocessing as mp
import os
import platform
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ... import FusedOneBitWarning
from ..arguments import InputError
from .records import Record, Records
from .run import Key, run


def make(records: Records, plan: Callable[[], Sequence[Key]], name: str) -> int:
    """Make the runs of a plan that ``records`` lacks, until it plans no others. One that fails ends no other.

    Returns:
        How many failed.

    Raises:
        InputError: where processes of runs were killed, by the system as a rule, for want of memory.
    """
    failed: set[Key] = set()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Spawned, one thread each: steps are short.
    pool = ProcessPoolExecutor(
        _cores(), mp_context=mp.get_context("spawn"), initializer=_prepare, initargs=(os.getpid(),)
    )
    with pool, Progress(*columns, console=Console(highlight=False)) as progress:
        bar = progress.add_task(name, total=None)
        try:
            while missing := [key for key in plan() if key not in records.found and key not in failed]:
                done = int(progress.tasks[0].completed)
                progress.update(bar, total=done + len(missing))
                futures = {pool.submit(_recorded, key): key for key in missing}
                for future in as_completed(futures):
                    record = future.result()
                    if "error" in record:
                        failed.add(futures[future])
                        progress.console.print(f"{futures[future]} failed:\n{record['error']}")
                    else:
                        records.add(record)
                    progress.update(bar, advance=1)
        except BrokenProcessPool:
            raise InputError("a run's process was killed: what was made is kept, the same command goes on") from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return len(failed)


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


def machine() -> Mapping[str, str]:
    """Return what a run's last bits depend on besides its key."""
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": torch.__version__.split("+")[0], "cpu": cpu}
