"""Marsit's figure 1b: how often the sign of an aggregate is that of the uncompressed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab.run import Key, Training, Worker
from benchmarks.lab.tasks import TASKS
from fusedonebit.apps.train.baseline_reducers import Cascading, ErrorFeedback, MajorityVote, StochasticSign
from fusedonebit.comm import MarsitAllReduce, SimulatedGroup, Transport
from fusedonebit.comm.rounds import RoundAllReduce

WORKERS, EVERY = 3, 10

PEERS: dict[str, Callable[..., RoundAllReduce]] = {
    "majority vote": MajorityVote,
    "EF-signSGD": ErrorFeedback,
    "Marsit": lambda *where: MarsitAllReduce(*where, full_precision_every=0),
    "SSDM": StochasticSign,
    "cascading": Cascading,
}


def matching(task: str, steps: int) -> dict[str, float]:
    """Percent of the coordinates, over a run of PSGD on ``WORKERS`` workers; every tenth update is looked at."""
    group = SimulatedGroup(WORKERS)
    training = Training(Key(task, "psgd", 0, WORKERS, TASKS[task].lr / 10), group)

    def rank(number: int, transport: Transport) -> dict[str, float]:
        worker = Worker(training, number, transport)
        group.meet("start of a run")
        return _watch(worker, steps)

    return group.run(rank)[0]


def _watch(worker: Worker, steps: int) -> dict[str, float]:
    (optimizer,) = worker.optimizers
    rights = {name: [0, 0] for name in PEERS}
    made = {name: make(optimizer.frame.layout, worker.transport) for name, make in PEERS.items()}  # type: ignore[attr-defined]
    for step in range(steps):
        worker.step(step)
        if step % EVERY == 0:
            updates = [optimizer.momentum(p) for p in optimizer.param_groups[0]["params"]]  # type: ignore[attr-defined]
            true = _sum(updates, worker.transport)
            for name, reduce in made.items():
                right, counted = _agreement(reduce, updates, true)
                rights[name][0] += right
                rights[name][1] += counted
    return {name: 100 * right / counted for name, (right, counted) in rights.items()}


def _sum(updates: list[Tensor], transport: Transport) -> list[Tensor]:
    total = [u.clone() for u in updates]
    for u in total:
        transport.all_reduce(u)
    return total


def _agreement(reduce: RoundAllReduce, updates: list[Tensor], true: list[Tensor]) -> tuple[int, int]:
    """How many coordinates that are not zero have the right sign, and how many there are; nothing is kept."""
    result = reduce(updates, 1.0)
    reduce.compensation.whole.zero_()
    reduce.compensation.formed()
    right = counted = 0
    for i, want in enumerate(true):
        at = reduce.layout.offset(i)
        found = result[at : at + want.numel()].view_as(want)
        right += int(((found >= 0) == (want > 0))[want != 0].sum())
        counted += int((want != 0).sum())
    return right, counted


def measure(steps: int = 200) -> dict[str, Any]:
    """By task, then by method."""
    return {task: matching(task, steps) for task in ("mlp", "resnet", "vgg")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, found in measure().items():
        print(name, {method: round(percent, 1) for method, percent in found.items()})
