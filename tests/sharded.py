"""Models that ``fully_shard`` has sharded over one dimension of a 2 x 2 mesh, and how to look at them.

Rank 2i + k is in replica i and holds shard k of every tensor: of ranks k and k + 2, column k, shards are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from observe import flat, parameters, per_tensor, served
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fusedonebit.checkpoint import header_of
from fusedonebit.core.optimizer import DistributedOptimizer

REPLICAS = SHARDS = 2


def make_mesh(replicas: int = REPLICAS, shards: int = SHARDS) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    """Each layer by itself, then the rest, as one does."""
    for layer in model:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh["shard"], **options)
    return fully_shard(model, mesh=mesh["shard"], **options)


class Bag(nn.Module):
    """Parameters without a model: tests give them gradients."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(tensors)

    def forward(self) -> None:
        """Makes it a module that can be sharded."""


def sharded_parameters(tensors: Sequence[Tensor], mesh: DeviceMesh, **options: Any) -> list[nn.Parameter]:
    return list(fully_shard(Bag(tensors), mesh=mesh["shard"], **options).parameters())


def cut(whole: Tensor, column: int, columns: int = SHARDS) -> Tensor:
    """Column's part of a tensor, as FSDP2 cuts: maybe less than the others', maybe nothing."""
    chunks = whole.chunk(columns)
    return chunks[column] if column < len(chunks) else whole[:0]


def like(p: DTensor, whole: Tensor) -> DTensor:
    """``whole`` as a tensor distributed as ``p`` is."""
    part = cut(whole, p.device_mesh.get_local_rank(), p.device_mesh.size()).contiguous()
    return DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


def joined(columns: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Whole tensors, from each column's shards of them."""
    return [torch.cat(shards) for shards in zip(*columns, strict=True)]


def positions(shapes: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
    """Of each column and tensor, where its elements lie in the flat vector of all whole tensors."""
    total = sum(int(np.prod(shape)) for shape in shapes)
    lines = torch.arange(total).split([int(np.prod(shape)) for shape in shapes])
    wholes = [line.view(tuple(shape)) for line, shape in zip(lines, shapes, strict=True)]
    return [[cut(whole, column).reshape(-1).numpy() for whole in wholes] for column in range(SHARDS)]


def look(optimizer: DistributedOptimizer) -> dict[str, np.ndarray]:
    """This rank's state, momentum and residuals in the unit in which they travel, each tensor's shard in turn."""
    saved, params = optimizer.state_dict(), parameters(optimizer)
    header, states = header_of(saved), per_tensor(optimizer, saved)
    sizes = [p.to_local().numel() for p in params]
    seen = {"x": flat(params), "v": flat([s["exp_avg_sq"] for s in states]), "unit": np.ones(len(params))}
    if "layer" in states[0]:
        seen["layers"] = torch.stack([s["layer"] for s in states], dim=1).numpy()
    if optimizer.phase == "warmup":
        zeros = np.zeros(sum(sizes))
        seen |= {"m": flat([optimizer.momentum(p) for p in params]), "fresh": seen["v"]}
        return seen | {"worker_error": zeros, "server_error": zeros[:0], "served": np.zeros(0, dtype=int)}
    travelled = []
    for s, n in zip(states, sizes, strict=True):
        bits = np.unpackbits(s["exp_avg_bits"].numpy(), bitorder="little")[:n]
        travelled.append(np.where(bits, 1, -1) * np.repeat(s["exp_avg_scale"].numpy(), header["block_size"])[:n])
    seen["travelled"] = np.concatenate(travelled)
    for key in ("worker_error", "server_error", "unit"):
        if key in states[0]:
            seen[key] = flat([s[key] for s in states])
    seen["fresh"] = flat([s.get("exp_avg_sq_fresh", s["exp_avg_sq"]) for s in states])
    return seen | {"served": served(optimizer)}
