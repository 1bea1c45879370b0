"""Small models that Marsit's optimizers train, for tests of what holds for both."""

from __future__ import annotations

import pytest
import torch
from observe import fingerprint, parameters
from optimizers import by_name
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import (
    MarsitAdam,
    MarsitSGD,
)
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.sharding import local

MARSIT = {"sgd": by_name(MarsitSGD), "adam": by_name(MarsitAdam)}
EACH = pytest.mark.parametrize("name", MARSIT)
PLACES = [("ring", 2), ("owner", 2), ("torus", 4)]
EACH_PLACE = pytest.mark.parametrize(("topology", "world_size"), PLACES)


def make(dtype: torch.dtype = torch.float32) -> list[Parameter]:
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


def kept(optimizer: DistributedOptimizer) -> list[Tensor]:
    return [optimizer.compensation(p) for p in parameters(optimizer)]


def own_state(optimizer: DistributedOptimizer) -> list[str]:
    saved = optimizer.state_dict()
    states = [saved["state"][i] for i in sorted(saved["state"])]
    return [
        f"{key} {i}: {fingerprint([local(v)])}" for i, state in enumerate(states) for key, v in sorted(state.items())
    ]
