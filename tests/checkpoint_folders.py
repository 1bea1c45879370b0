"""Shares what tests of checkpoint damage and others set up."""

from __future__ import annotations

import torch
from observe import fingerprint, parameters
from torch import nn

from fusedonebit import (
    Faults,
    OneBitAdam,
    dcp,
)
from fusedonebit.checkpoint import KEY
from fusedonebit.core.optimizer import DistributedOptimizer


def everything(optimizer: DistributedOptimizer) -> tuple[str, str]:
    saved = optimizer.state_dict()
    tensors = [value for _, state in sorted(saved["state"].items()) for _, value in sorted(state.items())]
    groups = [sorted((k, v) for k, v in group.items() if k != KEY) for group in saved["param_groups"]]
    return fingerprint([*parameters(optimizer), *tensors]), repr((groups, optimizer.phase, optimizer.stats()["step"]))


def make_network() -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 5))
    return model, OneBitAdam(model.parameters(), lr=1e-2, freeze_step=2, faults=Faults(guard="off"))


def train_network(model: nn.Module, optimizer: DistributedOptimizer, rank: int, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def write_folder(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = make_network()
    train_network(model, optimizer, rank, 5)
    dcp.save(model, optimizer, folder)
