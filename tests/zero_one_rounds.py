"""Small models that 0/1 Adam trains, policies that are lists, and what tests of it look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from marsit_rounds import make as make_parameters
from marsit_rounds import own_state, set_gradients, train
from observe import caught, flat, parameters, through_a_file
from optimizers import objects
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import ZeroOneAdam
from fusedonebit.optim.policies import Progress

__all__ = [
    "RENEW",
    "EveryRound",
    "Script",
    "caught",
    "make",
    "make_parameters",
    "momenta",
    "own_state",
    "residuals",
    "set_gradients",
    "through_a_file",
    "train",
    "variances",
]

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
