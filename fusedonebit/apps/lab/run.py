"""One run of the lab: a task, an optimizer, a seed, some workers."""

from __future__ import annotations

import copy
import math
import threading
import time
from dataclasses import asdict
from typing import Any

import torch

from ...comm import SimulatedGroup, Transport
from .contenders import CONTENDERS, EVALUATED, Key, Setting
from .tasks import TASKS, Trial

WARM_UP = 0.2  # of the steps, before the freeze
LR_WARM_UP, FINAL_LR = 0.05, 0.1  # shares of the steps, and of the peak at the end of the cosine
DIVERGED = 10.0  # times the loss at the freeze
WINDOW = 10  # steps that a loss is averaged over, there and later
EARLIER_SEED = 1000


def run(key: Key) -> dict[str, object]:
    """Train on simulated workers; see ``Worker.train`` for what it returns."""
    began = time.perf_counter()
    start = begin(key)
    results = SimulatedGroup(key.workers).run(lambda rank, transport: Worker(key, start, rank, transport).train())
    return {**asdict(key), **results[0], "seconds": round(time.perf_counter() - began, 2)}


def begin(key: Key) -> Trial:
    """Return what all workers start from: a function of the task and the seed."""
    torch.manual_seed(key.seed)
    return TASKS[key.task].make()


def earlier_states(key: Key, optimizer: str) -> list[dict[str, Any]]:
    """Rank 0's optimizers, just frozen, of an earlier run of the same task: other values, other batches."""
    earlier = Key(key.task, optimizer, key.seed + EARLIER_SEED, key.workers)
    start = begin(earlier)

    def until_the_freeze(rank: int, transport: Transport) -> list[dict[str, Any]]:
        worker = Worker(earlier, start, rank, transport)
        for step in range(worker.freeze_step + 1):
            worker.step(step)
        return [optimizer.state_dict() for optimizer in worker.optimizers]

    return SimulatedGroup(key.workers).run(until_the_freeze)[0]


_COPYING = threading.Lock()


class Worker:
    """One worker's models and optimizers."""

    def __init__(self, key: Key, start: Trial, rank: int, transport: Transport) -> None:
        self.key, self.rank, self.transport, self.task = key, rank, transport, TASKS[key.task]
        with _COPYING:
            self.trial = copy.deepcopy(start)
        self.freeze_step = int(WARM_UP * self.task.steps)
        self.batch_size = max(1, self.task.batch_size // key.workers)
        make = CONTENDERS[key.optimizer]
        self.optimizers = [
            make(Setting(list(model.parameters()), self.task, self.freeze_step, transport, key, index, earlier_states))
            for index, model in enumerate(self.trial.models)
        ]
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(o, self._lr_factor) for o in self.optimizers]

    def _lr_factor(self, step: int) -> float:
        rising = min(1.0, (step + 1) / (LR_WARM_UP * self.task.steps))
        return rising * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * step / self.task.steps)))

    def train(self) -> dict[str, Any]:
        """Train to the end, or until the loss is not finite.

        Returns:
            losses: mean over the workers, by step; of a GAN the sum of both players'. steps: how many.
            metric: mean of the last evaluations, None where one is missing. freeze_step.
            diverged_at: the first step since the freeze whose loss, over ``WINDOW`` steps, is not
            finite or above ``DIVERGED`` times that at the freeze; or None.
            vetoed, rewarms, bytes: of the optimizers together, what they tell.
        """
        losses: list[float] = []
        metrics: list[float] = []
        evaluate = {int(share * self.task.steps) for share in EVALUATED}
        for step in range(self.task.steps):
            losses.append(self.step(step))
            if not math.isfinite(losses[-1]):
                break
            if step + 1 in evaluate:
                metrics.append(self.trial.metric())
        complete = len(metrics) == len(evaluate) and all(map(math.isfinite, metrics))
        told = [o.stats() for o in self.optimizers if hasattr(o, "stats")]
        return {
            "metric": sum(metrics) / len(metrics) if complete else None,
            "diverged_at": diverged_at(losses, self.freeze_step),
            "freeze_step": self.freeze_step,
            "steps": len(losses),
            "losses": [round(loss, 5) if math.isfinite(loss) else None for loss in losses],
            "vetoed": sum(stats.get("vetoed_steps", 0) for stats in told),
            "rewarms": sum(stats.get("rewarms", 0) for stats in told),
            "bytes": sum(stats["bytes_total"] for stats in told),
            "rounds": sum(stats.get("rounds", stats["step"]) for stats in told),
        }

    def step(self, step: int) -> float:
        """Take one step of all optimizers; return the sum of their losses, averaged over the workers."""
        draw = torch.Generator().manual_seed((self.key.seed * 1_000_003 + step) * 4099 + self.rank)
        mean = torch.zeros(1)
        for index, loss in self.trial.losses(draw, self.batch_size):
            self.optimizers[index].zero_grad()
            loss.backward(inputs=list(self.trial.models[index].parameters()))
            self.optimizers[index].step()
            mean += loss.detach() / self.transport.world_size
        self.transport.all_reduce(mean)
        for schedule in self.schedules:
            schedule.step()
        return float(mean)


def diverged_at(losses: list[float], freeze_step: int) -> int | None:
    """Return the first step since the freeze whose loss is too large; see ``Worker.train``."""
    windows = [losses[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(losses))]
    means = [sum(window) / len(window) for window in windows]
    limit = DIVERGED * means[freeze_step - 1] if len(means) >= freeze_step else math.inf
    return next((i for i, mean in enumerate(means) if i >= freeze_step and not mean <= limit), None)
