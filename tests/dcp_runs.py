"""Shares what tests of dcp and others set up."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from observe import fingerprint, parameters
from optimizers import by_name
from sharded import make_mesh, shard
from torch import Tensor, nn

from fusedonebit import FusedOneBitWarning, MarsitSGD, OneBitAdam, OneBitLamb
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.sharding import local

FREEZE = 10
BATCH = 48  # of all ranks together: 1, 2, 3 and 4 divide it


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 65), nn.ReLU(), nn.Linear(65, 1)).to(dtype)


KINDS = {
    "adam": by_name(OneBitAdam, freeze_step=FREEZE, guard="off"),
    "lamb": by_name(OneBitLamb, freeze_step=FREEZE, guard="off"),
    "marsit": by_name(MarsitSGD, momentum=0.9, full_precision_every=6),
}


def make(
    name: str, dtype: torch.dtype = torch.float32, *, frozen: bool = False, shards: int = 0, **options: Any
) -> tuple[Any, DistributedOptimizer]:
    """Returns a model, of which the second layer may be frozen, and an optimizer of its parameters or shards."""
    model = network(dtype)
    model[2].requires_grad_(not frozen)
    if shards:
        mesh = make_mesh(dist.get_world_size() // shards, shards)
        shard(model, mesh)
        options |= {"process_group": mesh["replicate"]}
    return model, KINDS[name](model.parameters(), **{"lr": 1e-2} | options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(1000 + step))
    return x, x.sum(1, keepdim=True).sin() + x[:, :1]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Every rank takes its part of the same batches, however many ranks there are."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dtype = next(model.parameters()).dtype
    for step in steps:
        x, y = (t.chunk(world_size)[rank].to(dtype) for t in batch(step))
        (model(x) - y).square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedOneBitWarning)
            optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: DistributedOptimizer) -> dict[str, str]:
    """Fingerprints of all parameters and all of this rank's state."""
    found = {f"parameter {i}": fingerprint([local(p)]) for i, p in enumerate(model.parameters())}
    for i, state in optimizer.state_dict()["state"].items():
        found |= {f"{key} of {i}": fingerprint([local(value)]) for key, value in state.items()}
    return found


def differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def conserved(optimizer: DistributedOptimizer) -> Tensor:
    """m + E + mean(e) of all parameters in units of the momentum; of Marsit the mean compensation."""
    if isinstance(optimizer, MarsitSGD):
        total = torch.cat([optimizer.compensation(p).double().reshape(-1) for p in parameters(optimizer)])
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total / dist.get_world_size()
    residual = torch.zeros_like(optimizer.algorithm.moments.exp_avg)
    optimizer.algorithm.exchange.reducer.take_residuals(residual)
    total = optimizer.algorithm.exchange.reducer.result().double() + residual.double()
    places = [(i, optimizer.frame.layout.offset(i)) for i in range(len(parameters(optimizer)))]
    parts = [optimizer.frame.parameters.shaped(total, i, at) for i, at in places]
    return torch.cat([optimizer.algorithm._in_momentum_units(part, i).reshape(-1) for i, part in enumerate(parts)])
