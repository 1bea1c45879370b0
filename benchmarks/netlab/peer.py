"""One host of the network lab, started by ``network.run_module``; rank 0 prints JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .methods import METHODS, WHOLE
from .split import WARM_UP, Turn, summarise, whole
from .task import Task

TINY, REPEATS = 16, 60
"""Bytes of messages that are all latency, and how often they are sent."""


def latencies() -> dict[str, float]:
    """Seconds of each collective for next to no bytes: medians."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sums, rows, row = torch.zeros(TINY // 4), torch.zeros(world_size, TINY, dtype=torch.uint8), None
    row = rows[:1].clone()
    everything = torch.zeros_like(rows)

    def exchange() -> None:
        sent = dist.P2POp(dist.isend, row, (rank + 1) % world_size)
        received = dist.P2POp(dist.irecv, everything[0], (rank - 1) % world_size)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(sums),
        "all_gather": lambda: dist.all_gather_into_tensor(everything, row),
        "all_to_all": lambda: dist.all_to_all_single(everything, rows),
        "exchange": exchange,
    }
    return {name: _median_of(call) for name, call in calls.items()}


def all_to_all(nbytes: int) -> dict[str, float]:
    """Seconds until all have what every host sends, ``nbytes`` with its own share, after pauses as in training."""
    rows = torch.zeros(dist.get_world_size(), nbytes // dist.get_world_size(), dtype=torch.uint8)
    everything = torch.zeros_like(rows)
    seconds = []
    for _ in range(REPEATS // 4):
        time.sleep(0.3)
        dist.barrier()
        began = time.perf_counter()
        dist.all_to_all_single(everything, rows)
        seconds.append(time.perf_counter() - began)
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {"seconds": float(slowest.median())}


def _median_of(call: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[REPEATS // 4 :])


def link_bytes() -> int:
    """What has left over this host's interface."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def steps(task: Task, methods: Mapping[str, int]) -> dict[str, Any]:
    """Every method's step by turns: seconds of its parts, bytes, and what the link counted.

    Args:
        task: What is trained.
        methods: By name, how many steps of each are timed.
    """
    rank, corpus = dist.get_rank(), task.corpus()
    replicas = {name: METHODS[name](task.model()) for name in methods}
    turns: dict[str, list[Turn]] = {name: [] for name in methods}
    crossed = dict.fromkeys(methods, 0)
    for i in range(WARM_UP + max(methods.values())):
        batch = task.batch_of(corpus, i, rank)
        for name, replica in replicas.items():
            if not WARM_UP - replica.settles <= i < WARM_UP + methods[name]:
                continue
            before = link_bytes()
            turn = replica.turn(batch)
            if i >= WARM_UP:
                turns[name].append(turn)
                crossed[name] += link_bytes() - before
    for name, replica in replicas.items():
        phase = getattr(replica.optimizer, "phase", "")
        assert phase in (("warmup",) if name == "warm-up" else ("", "compression", "one-bit")), (name, phase)
    of_all = _of_all_ranks(turns)
    overlapped = [name for name, replica in replicas.items() if replica.overlaps]
    seconds = summarise({name: _by_round([t[name] for t in of_all]) for name in methods}, overlapped)
    return {
        name: seconds[name] | {"bytes": replica.sent(), "link_bytes": crossed[name] // methods[name]}
        for name, replica in replicas.items()
    }


def run(task: Task, count: int, warmup: float) -> dict[str, Any]:
    """Whole runs one after the other, the same batches, each with whatever its steps do."""
    rank, corpus = dist.get_rank(), task.corpus()
    told = {}
    for name, make in WHOLE.items():
        replica = make(task.model(), warmup, count)
        dist.barrier()
        began = time.perf_counter()
        turns, sent = [], 0
        for i in range(count):
            turns.append(replica.turn(task.batch_of(corpus, i, rank)))
            sent += replica.sent()
        dist.barrier()
        seconds = time.perf_counter() - began
        rounds = _by_round(_of_all_ranks(turns))
        told[name] = {
            "seconds": seconds,
            "bytes": sent,
            "loss": statistics.fmean(t.loss for t in rounds[-1]),
            "steps": [whole(ranks) for ranks in rounds],
        }
    return told


def _of_all_ranks(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _by_round(ranks: Sequence[Sequence[Turn]]) -> list[list[Turn]]:
    return [list(turns) for turns in zip(*ranks, strict=True)]


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    # mpirun numbers its ranks itself.
    os.environ.setdefault("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", ""))
    dist.init_process_group("gloo")
    task = Task(**given["task"])
    if given["what"] == "latencies":
        told = latencies()
    elif given["what"] == "all_to_all":
        told = all_to_all(given["nbytes"])
    elif given["what"] == "steps":
        told = steps(task, given["methods"])
    else:
        told = run(task, given["steps"], given["warmup"])
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.barrier()
    if "OMPI_COMM_WORLD_RANK" in os.environ:  # MPI wants to be ended in order
        dist.destroy_process_group()
        return
    # All has been told. gloo's threads end a process with an error that takes them down while one still runs.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
