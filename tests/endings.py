"""Counts how the processes of short runs end: ``python tests/endings.py --runs 200``.

Each rank is a process of its own that trains for a few steps and then ends as a script does: its interpreter is torn
down while the threads of its process group may still be at work. Every second run calls ``destroy_process_group()``
first. The processes are forked from this one, which has imported everything, so that hundreds of runs take minutes.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from observe import give_gradients
from optimizers import MAKE, by_name
from torch.nn import Parameter

from fusedonebit import OneBitAdam

OPTIMIZERS = {name: MAKE[name] for name in ("Lamb", "OneBitAdam", "MarsitSGD", "OneBitLion")}
OPTIMIZERS |= {"warm-up": by_name(OneBitAdam, freeze_step=1000)}


def train(name: str, steps: int, rank: int, late: bool = False) -> None:
    params = [Parameter(torch.ones(30, 20)), Parameter(torch.ones(7))]
    optimizer = OPTIMIZERS[name](params, lr=1e-3)
    for step in range(steps):
        give_gradients(optimizer, rank, step)
        if late and step == steps - 1:
            os.environ["LATE_THREADS"] = "50000"
            sys.setswitchinterval(1000.0)  # who computes in Python keeps the interpreter's lock
        optimizer.step()
    if late:
        be_busy(0.2)


def be_busy(seconds: float) -> None:
    """Computes in Python alone."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def be_rank(rank: int, given: argparse.Namespace, run: int, store: str) -> None:
    """What a user's script does, up to its last line."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=given.ranks, timeout=timedelta(seconds=120)
    )
    names = list(OPTIMIZERS)
    train(names[run // 2 % len(names)], given.steps, rank, late=given.late)
    if run % 2:
        dist.destroy_process_group()


def preload_late_threads() -> None:
    """Starts this program anew, with ``late_threads.c`` in it."""
    library = Path(tempfile.mkdtemp()) / "late_threads.so"
    source = Path(__file__).with_name("late_threads.c")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, source, "-ldl", "-Wl,--no-as-needed", "-l:libstdc++.so.6"], check=True
    )
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": str(library)})


def start(given: argparse.Namespace, run: int) -> tuple[str, list[int]] | None:
    """The store and the processes of one run; None in a process of these, which now may end."""
    folder = tempfile.mkdtemp()
    pids = []
    for rank in range(given.ranks):
        pid = os.fork()
        if pid == 0:
            be_rank(rank, given, run, f"{folder}/store")
            return None
        pids.append(pid)
    return folder, pids


def wait(folder: str, pids: list[int]) -> list[int]:
    """How each ended: 0, an exit code, or a signal below 0."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    shutil.rmtree(folder)
    return codes


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Count how the processes of short runs end.")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    parser.add_argument("--late", action="store_true", help="threads of the group are late in the last step")
    given = parser.parse_args(arguments)
    if given.late and "late_threads" not in os.environ.get("LD_PRELOAD", ""):
        preload_late_threads()
    torch.set_num_threads(1)  # threads would not survive the fork
    for name in OPTIMIZERS:  # on one rank: imports and builds what a step needs
        train(name, 5, 0)
    gc.freeze()
    ends: list[list[int]] = []
    under_way: list[tuple[str, list[int]]] = []
    for run in range(given.runs):
        if len(under_way) == given.at_once:
            ends.append(wait(*under_way.pop(0)))
        started = start(given, run)
        if started is None:
            return 0
        under_way.append(started)
    ends += [wait(*started) for started in under_way]
    aborted = sum(any(code < 0 for code in codes) for codes in ends)
    failed = sum(any(code > 0 for code in codes) for codes in ends)
    print(f"{len(ends)} runs of {given.ranks} ranks: {aborted} ended by a signal, {failed} with an error")
    return 1 if aborted or failed else 0


if __name__ == "__main__":
    sys.exit(main())
