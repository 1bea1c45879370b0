"""Trains the lab's task by one method, all hosts simulated in one process: no network is in a loss.

``python -m benchmarks.netlab.curves '{"task": ..., "method": "bf16", "lr": 0.002, "steps": 400, ...}'`` prints
JSON. Hosts draw the batches that they draw on links.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab.alike import AlikeTransport
from benchmarks.lab.batched_muon import onebit_muon
from benchmarks.lab.compressed import OnAverages
from benchmarks.lab.rivals.one_bit_muon import MuonOnHalves
from benchmarks.lab.rivals.powersgd import PowerSGD
from benchmarks.lab.rivals.quantised import BFloat16, Quantised
from benchmarks.lab.setting import Setting
from benchmarks.lab.workers import BatchedZeroOneAdam, batch_workers
from fusedonebit import OneBitAdam, policies

from .hooks import POWER_SGD_RANK, POWER_SGD_START
from .task import BETAS, WEIGHT_DECAY, Task, of_blocks

RISING, FINAL = 0.05, 0.1
"""Share of the steps in which the learning rate rises, and share of its peak that is left at the end of the cosine."""
LOOKED_AT = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of the steps after which the held-out loss is taken."""

Params = Sequence[Tensor]


def _powersgd(params: Params, of: Setting) -> PowerSGD:
    made = PowerSGD(params, of, POWER_SGD_RANK)
    made.start = POWER_SGD_START  # as the hook that is timed
    return made


def _onebit_adam(params: Params, of: Setting, warmup: float) -> OneBitAdam:
    options: dict[str, Any] = {"warmup": warmup, "total_steps": of.steps, "process_group": of.transport}
    return OneBitAdam(params, of.lr, BETAS, weight_decay=of.weight_decay, **options)


def _zero_one_adam(params: Params, of: Setting) -> BatchedZeroOneAdam:
    how: dict[str, Any] = {"sync_policy": policies.EveryStep(), "process_group": of.transport}
    return BatchedZeroOneAdam(params, of.lr, BETAS, weight_decay=of.weight_decay, **how)


def makers(warmup: float, matrices: Sequence[int]) -> dict[str, Callable[[Params, Setting], torch.optim.Optimizer]]:
    """By name; 1-bit Adam's warm-up is a share of its steps, and ``matrices`` are which parameters Muon trains."""
    return {
        "bf16": BFloat16,
        "int8": partial(Quantised, bits=8),
        "powersgd": _powersgd,
        "compress-4": partial(OnAverages, base="adamw", bits=4, feedback="bf16"),
        "onebit-adam": partial(_onebit_adam, warmup=warmup),
        "zero-one-adam": _zero_one_adam,
        "muon-bf16": partial(MuonOnHalves, trained=matrices),
        "onebit-muon": partial(onebit_muon, trained=matrices, betas=BETAS),
    }


class Hosts:
    """A model, and one optimizer that stands for all hosts'."""

    def __init__(self, task: Task, method: str, lr: float, steps: int, hosts: int, warmup: float) -> None:
        self.task, self.hosts, self.corpus = task, hosts, task.corpus()
        self.model = task.model()
        self.params, self.names = list(self.model.parameters()), [name for name, _ in self.model.named_parameters()]
        # Hosts of 0/1 Adam move by themselves within a step, and have met again when it ends.
        apart = hosts - 1 if method == "zero-one-adam" else 0
        others = [[p.detach().clone() for p in self.params] for _ in range(apart)]
        setting = Setting(lr, steps, WEIGHT_DECAY, 0, AlikeTransport(0, hosts))
        self.optimizer: Any = makers(warmup, of_blocks(self.model))[method](self.params, setting)
        self.all_of_them = batch_workers(self.optimizer, others)

    def step(self, number: int) -> float:
        """Take a step of all hosts, and return the mean of their losses."""
        rows, losses = [], []
        for rank in range(self.hosts):
            loss = self.model(self.task.batch_of(self.corpus, number, rank))
            rows.append(dict(zip(self.names, torch.autograd.grad(loss, self.params), strict=True)))
            losses.append(float(loss.detach()))
        for name, p in zip(self.names, self.params, strict=True):
            p.grad = torch.stack([row[name] for row in rows]).mean(0)
        assert self.all_of_them is not None
        self.all_of_them.give(rows)
        self.optimizer.step()
        return sum(losses) / len(losses)

    def held_out_loss(self) -> float:
        return self.task.held_out_loss(self.model, self.corpus)


def rate_at(step: int, steps: int, lr: float) -> float:
    """The learning rate of a step: it rises, and falls as a cosine."""
    rising = min(1.0, (step + 1) / (RISING * steps))
    return lr * rising * (FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(given: Mapping[str, Any]) -> dict[str, Any]:
    """One run.

    Returns:
        loss: Held out, at the end; None where a loss was not finite. curve: Steps and held-out losses on the way.
        vetoed_steps, rewarms, renewals: What the optimizer tells.
    """
    task, steps = Task(**given["task"]), given["steps"]
    hosts = Hosts(task, *(given[key] for key in ("method", "lr", "steps", "hosts", "warmup")))
    looked_at, curve = {round(share * steps) for share in LOOKED_AT}, []
    for i in range(steps):
        for group in hosts.optimizer.param_groups:
            group["lr"] = rate_at(i, steps, given["lr"])
        if not math.isfinite(hosts.step(i)):
            break
        if i + 1 in looked_at:
            curve.append((i + 1, hosts.held_out_loss()))
    ended = bool(curve) and curve[-1][0] == steps and math.isfinite(curve[-1][1])
    stats = hosts.optimizer.stats() if hasattr(hosts.optimizer, "stats") else {}
    told = {name: stats[name] for name in ("vetoed_steps", "rewarms", "renewals") if name in stats}
    return {"loss": curve[-1][1] if ended else None, "curve": curve, **told}


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps(train(json.loads(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
