"""Small models that Marsit's optimizers and 0/1 Adam train, policies that are lists, and what tests of them look at."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from observe import fingerprint, flat, parameters
from optimizers import by_name, objects
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import FusedOneBitWarning, MarsitAdam, MarsitSGD, ZeroOneAdam
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.sharding import local
from fusedonebit.optim.policies import Progress

MARSIT = {"sgd": by_name(MarsitSGD), "adam": by_name(MarsitAdam)}
EACH = pytest.mark.parametrize("name", MARSIT)
PLACES = [("ring", 2), ("owner", 2), ("torus", 4)]


def make_parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).to(dtype)) for shape in ((40, 30), (7,), ())]
    return [*params, Parameter(torch.randn(8, 6).t().to(dtype)), Parameter(torch.randn(21, 8)[::2, ::3].to(dtype))]


def set_gradients(optimizer: DistributedOptimizer, rank: int, step: int) -> None:
    for i, p in enumerate(parameters(optimizer)):
        generator = torch.Generator().manual_seed(1 + rank + 10 * step + 100_000 * i)
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer: DistributedOptimizer, rank: int, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        set_gradients(optimizer, rank, step)
        optimizer.step()


def step_once(optimizer: DistributedOptimizer, rank: int, step: int, bad: Collection[int]) -> None:
    """Step, with a NaN on rank 1 in the steps ``bad``."""
    set_gradients(optimizer, rank, step)
    if step in bad and rank == 1:
        parameters(optimizer)[0].grad[0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        optimizer.step()


def kept(optimizer: DistributedOptimizer) -> list[Tensor]:
    return [optimizer.compensation(p) for p in parameters(optimizer)]


def own_state(optimizer: DistributedOptimizer) -> list[str]:
    saved = optimizer.state_dict()
    states = [saved["state"][i] for i in sorted(saved["state"])]
    return [
        f"{key} {i}: {fingerprint([local(v)])}" for i, state in enumerate(states) for key, v in sorted(state.items())
    ]


# ---------------------------------------------------------------- 0/1 Adam

RENEW = 0


@dataclass(frozen=True)
class Script:
    """Both policies: a list of rounds, over and over; 0 renews the variance, K synchronises after K steps."""

    rounds: tuple[int, ...]

    def renews(self, done: Progress) -> bool:
        return self._round(done) == RENEW

    def steps(self, done: Progress) -> int:
        return self._round(done)

    def _round(self, done: Progress) -> int:
        return self.rounds[done.rounds % len(self.rounds)]

    def places(self, steps: int) -> list[str]:
        """What each of the first ``steps`` steps is, as ``phase`` tells it."""
        found: list[str] = []
        while len(found) < steps:
            for k in self.rounds:
                found += ["uncompressed"] if k == RENEW else ["local"] * (k - 1) + ["one-bit"]
        return found[:steps]


@dataclass(frozen=True)
class EveryRound:
    """Renews the variance in every round: then it is AdamW."""

    def renews(self, done: Progress) -> bool:
        return True


def make(params: Any, rounds: tuple[int, ...] = (0, 0, 1, 3, 1, 0, 2), lr: Any = 1e-2, **options: Any) -> ZeroOneAdam:
    """An optimizer whose rounds are a list; betas are small, so that few steps show much."""
    script = Script(rounds)
    given = {"betas": (0.8, 0.9), "variance_policy": script, "sync_policy": script} | options
    return ZeroOneAdam(params, lr, **objects(**given))


def momenta(optimizer: ZeroOneAdam) -> list[Tensor]:
    return [optimizer.momentum(p) for p in parameters(optimizer)]


def residuals(optimizer: ZeroOneAdam) -> list[Tensor]:
    return [optimizer.worker_error(p) for p in parameters(optimizer)]


def variances(optimizer: ZeroOneAdam) -> list[Tensor]:
    return [optimizer.state[p]["exp_avg_sq"] for p in parameters(optimizer)]


def everything(optimizer: ZeroOneAdam) -> list[Tensor]:
    """What conservation is about: parameters, momenta and residuals."""
    return [*map(Parameter.detach, parameters(optimizer)), *momenta(optimizer), *residuals(optimizer)]


def whole(tensors: list[Tensor]) -> Tensor:
    return torch.from_numpy(flat(tensors)).double()
