"""One run of the lab: a task, an optimizer, a seed, some workers, a learning rate."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fusedonebit.comm import SimulatedGroup, Transport

from .alike import AlikeTransport
from .contenders import CONSTANTS, CONTENDERS, settings
from .gradients import Which, gradients
from .rivals.frame import Rival
from .setting import EVALUATED, Setting
from .tasks import TASKS, Trial
from .workers import TakesGradients, batch_workers

LR_WARM_UP, FINAL_LR = 0.05, 0.1  # shares of the steps, and of the peak at the end of the cosine
WINDOWS = 25
"""Means of the training loss that a record keeps."""
LEARNED = 0.95
"""Share of the metric before the first step that a run must get below: a network that is dead ends just below it."""


@dataclass(frozen=True)
class Key:
    """Which run.

    Attributes:
        alike: Share of each worker's batch that is drawn from what all workers have; the rest is of its own classes,
            parts of the text, or users.
    """

    task: str
    optimizer: str
    seed: int
    workers: int
    lr: float
    alike: float = 1.0


class Training:
    """What a run's workers have in common: where they start, their batches, and each step's gradients of all of them.

    Args:
        key: Which run.
        group: Where simulated ranks meet; None where one optimizer stands for all of them.
    """

    def __init__(self, key: Key, group: SimulatedGroup | None = None) -> None:
        self.key, self.group, self.task = key, group, TASKS[key.task]
        self.contender = CONTENDERS[key.optimizer]
        self.trial: Trial = self.task.make(key.seed)
        self.draws = [torch.Generator() for _ in range(key.workers)]
        self.batches: tuple[Tensor, ...] = ()
        self.rows: list[dict[str, Tensor]] = []  # of each worker, its gradients by parameter
        self.models: list[Sequence[nn.Module]] = []
        self.params: list[list[dict[str, Tensor]]] = []  # of each rank, of each of its models, by name
        self.losses: list[float] = []
        # Workers that move by themselves have parameters of their own.
        self.apart = self.contender.local

    def ready(self, models: Sequence[nn.Module]) -> None:
        """Take a rank's models; all have given theirs before the first step."""
        self.models.append(models)
        self.params.append([{n: p.detach() for n, p in model.named_parameters()} for model in models])

    def compute(self, step: int, player: int) -> None:
        """Draw all workers' batches, in a step's first call, and form the gradients of one model's parameters."""
        if player == 0:
            self._draw(step)
        which = Which(self.key.task, player, self.apart)
        params = [self._params(i) for i in range(len(self.trial.models))]
        rows, losses = gradients(which, self.trial, params, self.batches)
        self.rows = [{name: each[w] for name, each in rows.items()} for w in range(self.key.workers)]
        mean = float(losses.mean())
        if player == 0:
            self.losses.append(0.0)
        self.losses[step] += mean

    def _draw(self, step: int) -> None:
        each = max(1, self.task.batch_size // self.key.workers)
        batches = []
        for worker, draw in enumerate(self.draws):
            draw.manual_seed((self.key.seed * 1_000_003 + step) * 4099 + worker)
            picked = self.trial.pick(draw, each)
            if own := self._own(worker, step, each):
                picked = torch.cat([self._pick_own(draw, worker, own), picked[own:]])
            batches.append(self.trial.complete(picked, draw, step / self.task.steps))
        self.batches = tuple(map(torch.stack, zip(*batches, strict=True)))

    def _own(self, worker: int, step: int, each: int) -> int:
        """Return how many of a worker's ``each`` examples are of its own sources: on average their share, in turn."""
        until, share = worker + step, each * (1 - self.key.alike)
        return int(share * (until + 1)) - int(share * until)

    def _pick_own(self, draw: torch.Generator, worker: int, own: int) -> Tensor:
        """Draw as from all, and keep those of a worker's own sources; some share one where sources are fewer."""
        trial, sources = self.trial, self.task.sources
        groups, found = min(self.key.workers, sources), list[Tensor]()
        while sum(map(len, found)) < own:
            picked = trial.pick(draw, 4 * groups * own)
            found.append(picked[trial.source(picked) * groups // sources == worker % groups])
        return torch.cat(found)[:own]

    def _params(self, player: int) -> dict[str, Tensor]:
        of_ranks = [models[player] for models in self.params]
        if not self.apart:
            return of_ranks[0]
        return {name: torch.stack([params[name] for params in of_ranks]) for name in of_ranks[0]}

    def mean(self) -> dict[str, Tensor]:
        """Return the mean of the workers' gradients, added in the order of ranks as collectives do."""
        share = 1.0 / self.key.workers
        total = [g * share for g in self.rows[0].values()]
        for row in self.rows[1:]:
            torch._foreach_add_(total, [g * share for g in row.values()])
        return dict(zip(self.rows[0], total, strict=True))

    def validate(self) -> float:
        """Return the metric of the mean of workers' parameters, which costs no bytes; most have just agreed on it."""
        with torch.no_grad():
            return self.trial.validate([self._middle(player) for player in range(len(self.trial.models))])

    def _middle(self, player: int) -> dict[str, Tensor]:
        """Return the mean of the workers' parameters of a model: exactly what all have where they agree."""
        params = self._params(player)
        if not self.apart:
            return params
        return {name: each[0] + (each - each[0]).mean(0) for name, each in params.items()}


class Worker:
    """One rank's models and optimizers; or those that stand for all ranks."""

    def __init__(self, training: Training, rank: int, transport: Transport) -> None:
        self.training, self.rank, self.transport, task = training, rank, transport, training.task
        key, alone = training.key, training.group is None
        self.models: Sequence[nn.Module] = copy.deepcopy(training.trial.models)
        training.ready(self.models)
        others = [copy.deepcopy(self.models) for _ in range(1, key.workers) if alone and training.apart]
        for models in others:
            training.ready(models)
        setting = Setting(key.lr, task.steps, task.weight_decay, key.seed, transport)
        self.optimizers = [training.contender.make(list(model.parameters()), setting) for model in self.models]
        self.reducers: list[TakesGradients | None] = [None] * len(self.models)
        if alone:
            self.reducers = [
                batch_workers(optimizer, [[p.detach() for p in models[i].parameters()] for models in others])
                for i, optimizer in enumerate(self.optimizers)
            ]

    def step(self, step: int) -> None:
        """Take one step of all optimizers."""
        training = self.training
        rising = min(1.0, (step + 1) / (LR_WARM_UP * training.task.steps))
        cosine = 0.5 * (1 + math.cos(math.pi * step / training.task.steps))
        lr = training.key.lr * rising * (FINAL_LR + (1 - FINAL_LR) * cosine)
        for player, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            if self.rank == 0:
                training.compute(step, player)
            self._meet()
            self._give_gradients(player, model)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            self._meet()

    def _meet(self) -> None:
        if self.training.group is not None:
            self.training.group.meet("step of a run")

    def _give_gradients(self, player: int, model: nn.Module) -> None:
        """Give a worker's own gradients, or the mean of all beside each worker's to what compresses them."""
        training, reducer = self.training, self.reducers[player]
        alone = training.group is None
        own = training.mean() if alone else training.rows[self.rank]
        for name, p in model.named_parameters():
            p.grad = own[name]
        if reducer is not None:
            reducer.give(training.rows)

    def train(self) -> dict[str, Any]:
        """Train to the end, or until the loss is not finite.

        Returns:
            metric: The mean of the last evaluations; None where a loss or one of them was not finite. initial: Before
            the first step. steps. curve: Means of the training loss over equal stretches of the run. sent: Bytes of the
            whole run by parameter, step and rank, times W/(W - 1). received: The same of what a rank receives.
            vetoed_steps, rewarms: What the optimizers tell.
        """
        training, task = self.training, self.training.task
        initial = training.validate() if self.rank == 0 else math.nan
        evaluate, metrics = {int(share * task.steps) for share in EVALUATED}, []
        for step in range(task.steps):
            self.step(step)
            if not math.isfinite(training.losses[step]):  # of this step: rank 0 may be in the next
                break
            if self.rank == 0 and step + 1 in evaluate:
                metrics.append(training.validate())
        fine = len(metrics) == len(evaluate) and all(map(math.isfinite, metrics))
        return {
            "metric": sum(metrics) / len(metrics) if fine else None,
            "initial": initial,
            "steps": len(training.losses),
            "curve": _curve(training.losses, task.steps),
            **self._bytes(len(training.losses)),
            **self._told(),
        }

    def _bytes(self, steps: int) -> dict[str, float]:
        numel = sum(p.numel() for model in self.models for p in model.parameters())
        workers, sent = self.training.key.workers, self.transport.traffic.bytes_total
        rivals = [optimizer for optimizer in self.optimizers if isinstance(optimizer, Rival)]
        # In all others' collectives each rank receives as much as it sends.
        received = sum(rival.wires.received for rival in rivals) if rivals else sent
        by = workers / (workers - 1) / numel / steps
        return {"sent": sent * by, "received": received * by}

    def _told(self) -> dict[str, Any]:
        told = [optimizer.stats() for optimizer in self.optimizers if hasattr(optimizer, "stats")]
        return {name: sum(stats.get(name, 0) for stats in told) for name in ("vetoed_steps", "rewarms")}


def run(key: Key, ranks: bool = False) -> dict[str, Any]:
    """Make one run.

    Args:
        key: Which.
        ranks: Simulate each rank with an optimizer of its own, also where one could stand for all.

    Returns:
        The key's fields, what ``Worker.train`` returns, and: defaults (``fingerprint``), seconds (of processor time).
    """
    began = time.process_time()
    if ranks or not CONTENDERS[key.optimizer].batched:
        group = SimulatedGroup(key.workers)
        training = Training(key, group)

        def rank(number: int, transport: Transport) -> dict[str, Any]:
            worker = Worker(training, number, transport)
            group.meet("start of a run")
            return worker.train()

        result = group.run(rank)[0]
    else:
        training = Training(key)
        result = Worker(training, 0, AlikeTransport(0, key.workers)).train()
    seconds = round(time.process_time() - began, 2)
    return {**asdict(key), **result, "defaults": fingerprint(key.task, key.optimizer, key.alike), "seconds": seconds}


def diverged(record: Mapping[str, Any]) -> bool:
    """Tell whether a run has no metric, or one that is not below ``LEARNED`` times where it began."""
    return record["metric"] is None or not record["metric"] < LEARNED * record["initial"]


@cache
def fingerprint(task: str, optimizer: str, alike: float) -> str:
    """Return a hash of the settings of a task and an optimizer, with which a run's result follows from its key.

    It knows neither the task's data nor the arithmetic: ``launch.machine`` tells what those come from.
    """
    of = TASKS[task]
    besides = {"make", "metric", "lr", "lamb", "milder"} | ({"sources"} if alike == 1 else set())
    trained = [getattr(of, field.name) for field in fields(of) if field.name not in besides]
    constants = (LR_WARM_UP, FINAL_LR, EVALUATED, *CONSTANTS)
    settled = (trained, constants, *settings(optimizer, of.steps, of.weight_decay))
    return hashlib.sha256(repr(settled).encode()).hexdigest()[:12]


def _curve(losses: Sequence[float], steps: int) -> list[float | None]:
    """Return means of the losses over ``WINDOWS`` equal stretches; None where one is not finite, or missing."""
    length = max(1, steps // WINDOWS)
    means = [sum(part) / len(part) for i in range(0, steps, length) if (part := losses[i : i + length])]
    return [float(f"{mean:.5g}") if math.isfinite(mean) else None for mean in means]
