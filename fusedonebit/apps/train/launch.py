"""Starts the ranks, and ends them together."""

from __future__ import annotations

import multiprocessing as mp
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ... import recording
from ..parsing import installed, missing
from .display import print_table
from .optimizers import FREEZE, Job
from .run import train_all

INTERRUPTED = 130  # as a shell reports SIGINT


def run(job: Job, nproc: int) -> int:
    """Train on ``nproc`` ranks, or as one rank of ``torchrun``; return the exit code.

    Ctrl-C ends all ranks at once; what they have written stays, and is summed up.
    """
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return _under_torchrun(job)
        if nproc == 1:
            train_all(job, 0, 1, _device(job, 0))
        code = _spawn(job, nproc) if nproc > 1 else 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code in (0, INTERRUPTED):
        report(job)
    if code == INTERRUPTED:
        print(f"interrupted; what was written is in {job.out}", file=sys.stderr)
    return code


def report(job: Job) -> None:
    """Print the table, and draw pictures where matplotlib is, of what was measured."""
    found = recording.read_lines(job.metrics) if job.metrics.exists() else ()
    records = [r for _, r in found if r is not None and r["optimizer"] in job.optimizers]
    if not records:
        return
    print_table(records)
    compressed = {r["optimizer"] for r in records if r["phase"] == "compression"}
    for name, steps in {r["optimizer"]: r["step"] for r in records}.items():
        if name in FREEZE and name not in compressed:
            print(f"{name} still warms up after {steps} steps, and so has compressed nothing yet")
    print(f"wrote {', '.join(map(str, [job.metrics, *_pictures(job, records)]))}")
    if absent := missing("matplotlib"):
        print(f"pictures need {absent}")
    if installed("apps/report"):
        print(f"look at it: fusedonebit report {shlex.quote(job.out)}")


def _pictures(job: Job, records: Sequence[dict[str, Any]]) -> list[Path]:
    """Draw what there is to draw; nothing without matplotlib."""
    if missing("matplotlib"):
        return []
    from .loss_plot import plot_layers, plot_loss

    drawn = [Path(job.out) / "loss.png"]
    plot_loss(records, drawn[0])
    if any("coefficient" in r.get("layers", {}) for r in records):
        drawn.append(Path(job.out) / "layers.png")
        plot_layers(records, drawn[1])
    return drawn


def _under_torchrun(job: Job) -> int:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _device(job, int(os.environ["LOCAL_RANK"]))
    _in_group(job, rank, world_size, device)
    if rank == 0:
        report(job)
    return 0


def _in_group(job: Job, rank: int, world_size: int, device: torch.device, place: str = "env://") -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=world_size)
    try:
        train_all(job, rank, world_size, device)
    finally:
        dist.destroy_process_group()


def _spawn(job: Job, nproc: int) -> int:
    context = mp.get_context("spawn")
    # Leaves through the cleanup: without it, ranks would go on alone.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # The ranks meet in a file and talk over the loopback interface: no port is open to others.
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank_main, args=(job, rank, nproc, folder)) for rank in range(nproc)]
        for process in ranks:
            process.start()
        try:
            while any(process.is_alive() for process in ranks) and not any(process.exitcode for process in ranks):
                time.sleep(0.05)
            return int(any(process.exitcode for process in ranks))
        finally:
            _end(ranks)


def _end(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        process.terminate()
    for process in ranks:
        process.join(timeout=2)
        if process.is_alive():
            process.kill()
            process.join()
    if sys.stdout.isatty():
        print("\x1b[?25h", end="")  # a rank that was ended may have left the cursor hidden


def _rank_main(job: Job, rank: int, world_size: int, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    device = _device(job, rank)
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo" if sys.platform == "linux" else "lo0")  # the loopback
    _in_group(job, rank, world_size, device, f"file://{folder}/store")


def _device(job: Job, local_rank: int) -> torch.device:
    if job.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
