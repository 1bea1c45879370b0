"""What the lab's optimizers are made for, and what is said of each: shared by ``contenders`` and ``rivals``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedonebit.comm import Transport

BETAS = (0.9, 0.99)
EPS, LAMB_EPS = 1e-8, 1e-6
WARM_UP = 0.15
"""Share of the steps before the variance is frozen, as in the papers (15 to 20 %)."""
EVALUATED = (0.92, 0.94, 0.96, 0.98, 1.0)
"""Shares of the steps after which the metric is taken; their mean counts."""


def between(tensors: Sequence[Tensor]) -> list[int]:
    """Return which of a model's parameters, or their gradients, Muon trains: matrices but for the first and the last.

    Those are embeddings and heads, which AdamW trains, as vectors.
    """
    return [i for i, tensor in enumerate(tensors) if tensor.dim() >= 2][1:-1]


@dataclass(frozen=True)
class Setting:
    """Holds what an optimizer is made for: peak learning rate, number of steps, which run, and over which ranks."""

    lr: float
    steps: int
    weight_decay: float
    seed: int
    transport: Transport

    @property
    def freeze_step(self) -> int:
        """Update before the variance is frozen."""
        return int(WARM_UP * self.steps)

    @property
    def evaluations(self) -> list[int]:
        """Steps after which the metric is taken."""
        return [int(share * self.steps) for share in EVALUATED]


Params = Sequence[Tensor]
Make = Callable[[Params, Setting], torch.optim.Optimizer]


@dataclass(frozen=True)
class Contender:
    """An optimizer of the lab.

    Args:
        make: Makes it.
        parent: What it compresses, itself where nothing; at whose tuned rate it is looked at besides its own.
        lamb: Whether its rates are searched around LAMB's.
        rate: Factor of the rate that they are searched around.
        batched: Whether ranks differ in gradients and residuals alone, so that one optimizer can stand for all.
        local: Whether workers have parameters of their own between two synchronisations.
    """

    make: Make
    parent: str
    lamb: bool = False
    rate: float = 1.0
    batched: bool = False
    local: bool = False
