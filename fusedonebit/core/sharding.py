"""Parameters that are DTensors: each rank holds a shard (FSDP2), and works on that alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import TorchTransport, Transport, make_transport

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_WAY_OUT = (
    'fully_shard(module, mesh=mesh["shard"]), and process_group=mesh["replicate"] for the optimizer; of tensor '
    'parallelism Wire(model_parallel=mesh["tp"])'
)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether it is a DTensor; whoever has made one has imported them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: its shard, or the tensor itself where it is whole."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def with_own_storage(part: Tensor) -> Tensor:
    """Return the same memory, seen from its first element on: a DTensor of any other view ``torch.save`` can't save."""
    return torch.from_dlpack(part)


def plain(state: Any) -> Any:
    """Return a ``state_dict`` with this rank's plain tensors instead of DTensors, for one file per rank.

    For libraries that can't load DTensors from files; ``load_state_dict`` takes it as well.
    """
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    return local(state) if isinstance(state, Tensor) else state


def like(owner: Tensor, part: Tensor) -> Tensor:
    """Return ``part``, what this rank holds, as a tensor distributed as ``owner`` is; itself where that is whole."""
    if not is_dtensor(owner):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        with_own_storage(part),
        owner.device_mesh,
        owner.placements,
        run_check=False,
        shape=owner.shape,
        stride=owner.stride(),
    )


def model_ranks(model_parallel: Any, device: torch.device) -> list[Transport]:
    """Return the groups of ``Wire(model_parallel=...)``, from inside out; none where it is None.

    Raises:
        TypeError, ValueError: if it is no group.
    """
    if model_parallel is None:
        return []
    if hasattr(model_parallel, "get_group") and hasattr(model_parallel, "ndim"):
        groups = [model_parallel.get_group(i) for i in range(model_parallel.ndim)]
    else:
        groups = list(model_parallel) if isinstance(model_parallel, (tuple, list)) else [model_parallel]
    if not groups:
        raise ValueError(f"model_parallel must be a group of ranks, or None, got {model_parallel!r}: leave it out")
    for group in groups:
        if not isinstance(group, (dist.ProcessGroup, Transport)) and not hasattr(group, "get_group"):
            raise TypeError(
                "model_parallel must be a group of torch.distributed or a DeviceMesh, or of a pipeline and of tensor "
                f"parallelism one each, got {type(group).__name__}"
            )
    return [make_transport(group_of(group), device) for group in reversed(groups)]


def replicas(params: Sequence[Tensor], names: Sequence[str], ranks: Transport | None) -> list[bool]:
    """Return which parameters all of ``ranks`` hold alike; the others are shards. None: nobody else holds any.

    Raises:
        ValueError: if a DTensor is not distributed over just these ranks.
    """
    if ranks is None:
        return [False] * len(params)
    expected = dist.get_process_group_ranks(ranks.group) if isinstance(ranks, TorchTransport) else None
    found = []
    for name, p in zip(names, params, strict=True):
        if not is_dtensor(p):
            found.append(getattr(p, "tensor_model_parallel", False) is not True)
            continue
        over = dist.get_process_group_ranks(p.device_mesh.get_group()) if p.device_mesh.ndim == 1 else None
        if over is None or over != expected or p.placements[0].is_partial():
            raise ValueError(
                f"{name} must be sharded or replicated over the last group of Wire(model_parallel=...) alone, which "
                f"has ranks {expected}, got {p.placements} over {p.device_mesh}"
            )
        found.append(not p.placements[0].is_shard())
    return found


def shard_mesh(params: Sequence[Tensor], names: Sequence[str], is_split: bool = False) -> DeviceMesh | None:
    """Return the mesh over which parameters are sharded; None where they are whole.

    ``is_split``: Whether they are those of model parallelism, of which some may be whole.

    Raises:
        ValueError: if some are and some are not, or not over one dimension.
    """
    sharded = {name: p for name, p in zip(names, params, strict=True) if is_dtensor(p)}
    if not sharded:
        return None
    if is_split:
        return next(iter(sharded.values())).device_mesh
    if whole := [name for name in names if name not in sharded]:
        raise ValueError(
            f"params must be sharded all or none, but {whole[0]} is not and {next(iter(sharded))} is; "
            "let fully_shard() wrap the module that it belongs to, or pass the mesh of tensor parallelism as "
            "Wire(model_parallel=...)"
        )
    mesh = sharded[names[0]].device_mesh
    for name, p in sharded.items():
        if len(p.placements) != 1 or not p.placements[0].is_shard():
            raise ValueError(f"{name} must be sharded over a mesh of one dimension, got {p.placements}; use {_WAY_OUT}")
        if p.device_mesh != mesh:
            raise ValueError(
                f"params must be sharded over one mesh, but {name} is over {p.device_mesh} and {names[0]} over {mesh}"
            )
    return mesh


def group_of(process_group: Any) -> Any:
    """Return the group to average over; of a ``DeviceMesh`` that of its one dimension.

    Raises:
        ValueError: if a mesh has not one dimension.
    """
    if not hasattr(process_group, "get_group") or not hasattr(process_group, "ndim"):
        return process_group
    if process_group.ndim != 1:
        raise ValueError(
            f"process_group must have one dimension where it is a DeviceMesh, that of the replicas, got "
            f'{process_group.ndim}: {process_group}; pass a part of it, such as mesh["replicate"]'
        )
    return process_group.get_group()


def levels(hierarchy: Any, world: Transport, device: torch.device) -> tuple[Transport, Transport]:
    """Return the ranks between nodes and those inside one, from a ``DeviceMesh`` of two dimensions or two groups.

    Raises:
        TypeError, ValueError: if it is neither, or the two do not make up ``world``, node by node.
    """
    if hasattr(hierarchy, "get_group") and hasattr(hierarchy, "ndim"):
        if hierarchy.ndim != 2:
            raise ValueError(
                f"hierarchy must have two dimensions, between nodes and inside one, got {hierarchy.ndim}: {hierarchy}"
            )
        groups = (hierarchy.get_group(0), hierarchy.get_group(1))
    elif isinstance(hierarchy, (tuple, list)) and len(hierarchy) == 2:
        groups = tuple(side.get_group() if hasattr(side, "get_group") else side for side in hierarchy)
    else:
        raise TypeError(
            f"hierarchy must be a DeviceMesh of two dimensions, or the groups between nodes and inside one, got "
            f"{type(hierarchy).__name__}"
        )
    between, inside = (make_transport(group, device) for group in groups)
    place = between.rank * inside.world_size + inside.rank
    if between.world_size * inside.world_size != world.world_size or place != world.rank:
        raise ValueError(
            f"hierarchy must make up all {world.world_size} ranks, node by node, got {between.world_size} nodes of "
            f"{inside.world_size}, in which rank {world.rank} would be rank {place}"
        )
    _check_levels(between, inside, world)
    between.traffic = world.traffic  # what the network between nodes has to carry
    return between, inside


def _check_levels(between: Transport, inside: Transport, world: Transport) -> None:
    """Raise ValueError if some rank has its place in the two groups, but not among the ranks that belong there."""
    ranks, nodes = list(range(world.world_size)), inside.world_size
    if isinstance(world, TorchTransport):
        ranks = dist.get_process_group_ranks(world.group)
    first = world.rank - inside.rank
    for name, level, expected in (
        ("between nodes", between, ranks[inside.rank :: nodes]),
        ("inside one", inside, ranks[first : first + nodes]),
    ):
        found = dist.get_process_group_ranks(level.group) if isinstance(level, TorchTransport) else expected
        if found != expected:
            raise ValueError(
                f"hierarchy must make up all {world.world_size} ranks, node by node, but rank {ranks[world.rank]}'s "
                f"group {name} has ranks {found}, where {expected} were expected"
            )


def check_groups(sharded_over: Any, averaged_over: Any, world_size: int) -> None:
    """Raise ValueError if ranks that hold different shards are to average them."""
    if world_size == 1:
        return
    shards, averaging = (dist.get_process_group_ranks(group) for group in (sharded_over, averaged_over))
    if len(set(shards) & set(averaging)) > 1:
        raise ValueError(
            f"ranks {shards} hold different shards of the parameters, but ranks {averaging} were to average theirs; "
            f"use {_WAY_OUT}"
        )
