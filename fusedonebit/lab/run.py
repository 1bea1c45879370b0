"""One run of the lab: a task, an optimizer, a seed, some simulated workers."""

from __future__ import annotations

import copy
import math
import threading
import time
from dataclasses import asdict, dataclass

import torch

from ..comm import SimulatedGroup
from ..comm.simulated import SimulatedTransport
from .contenders import CONTENDERS
from .tasks import TASKS, Trial

WARM_UP = 0.2  # of the steps, before the freeze
LR_WARM_UP, FINAL_LR = 0.05, 0.1  # shares of the steps, and of the peak at the end of the cosine
DIVERGED = 10.0  # times the loss at the freeze
AT_THE_FREEZE = 10  # steps averaged for it


@dataclass(frozen=True)
class Key:
    """Which run."""

    task: str
    optimizer: str
    seed: int
    workers: int = 4


def run(key: Key) -> dict[str, object]:
    """Trains; returns the key, the metric, worker 0's loss by step, the step at which it diverged, and seconds."""
    began, task = time.perf_counter(), TASKS[key.task]
    torch.manual_seed(key.seed)
    start = task.make()
    freeze_step = int(WARM_UP * task.steps)
    results = SimulatedGroup(key.workers).run(lambda rank, transport: _Worker(key, start, rank, transport).train())
    losses, metric = results[0]
    before = losses[max(0, freeze_step - AT_THE_FREEZE) : freeze_step]
    limit = DIVERGED * sum(before) / len(before)
    diverged = next((i for i, loss in enumerate(losses) if not loss <= limit and i >= freeze_step), None)
    return {
        **asdict(key),
        "metric": metric if math.isfinite(metric) else None,
        "diverged_at": diverged,
        "freeze_step": freeze_step,
        "losses": [round(loss, 5) if math.isfinite(loss) else None for loss in losses],
        "seconds": round(time.perf_counter() - began, 2),
    }


_COPYING = threading.Lock()


class _Worker:
    """One worker's models and optimizers."""

    def __init__(self, key: Key, start: Trial, rank: int, transport: SimulatedTransport) -> None:
        self.key, self.rank, self.task = key, rank, TASKS[key.task]
        with _COPYING:
            self.trial = copy.deepcopy(start)
        make = CONTENDERS[key.optimizer]
        freeze_step = int(WARM_UP * self.task.steps)
        self.optimizers = [
            make(list(model.parameters()), self.task.lr, freeze_step, transport) for model in self.trial.models
        ]
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(o, self._lr_factor) for o in self.optimizers]

    def _lr_factor(self, step: int) -> float:
        rising = min(1.0, (step + 1) / (LR_WARM_UP * self.task.steps))
        return rising * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * step / self.task.steps)))

    def train(self) -> tuple[list[float], float]:
        """Returns worker 0's loss by step, shared by all so that all stop together, and the metric."""
        losses: list[float] = []
        for step in range(self.task.steps):
            draw = torch.Generator().manual_seed((self.key.seed * 1_000_003 + step) * 4099 + self.rank)
            first = math.nan
            for index, loss in self.trial.losses(draw):
                self.optimizers[index].zero_grad()
                loss.backward(inputs=list(self.trial.models[index].parameters()))
                self.optimizers[index].step()
                first = float(loss.detach()) if index == 0 else first
            for schedule in self.schedules:
                schedule.step()
            losses.append(first)
        return losses, self.trial.metric()
