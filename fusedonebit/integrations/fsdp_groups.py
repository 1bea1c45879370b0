"""Knows FSDP2's groups of parameters: here alone are attributes of torch that are not public."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..comm.transport import in_flight
from ..core.compression import plain
from ..triton_kernels import FlatLayout


class Rows:
    """Lies between the parameters of a group and its flat tensor.

    Args:
        shapes: Of the parameters, unsharded.
        ranks: How many rows.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], ranks: int) -> None:
        self.shapes, self.ranks = [tuple(shape) for shape in shapes], ranks
        # Of each parameter, how many of its rows a rank has, padding included, and how many elements a row has.
        self._parts = [(math.ceil(shape[0] / ranks), math.prod(shape[1:])) for shape in self.shapes]
        self.length = sum(rows * width for rows, width in self._parts)

    def layout(self, block_size: int) -> FlatLayout:
        """Return that of messages: a tensor for each rank."""
        return FlatLayout((self.length,) * self.ranks, self.ranks, block_size)

    def split(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters' own of a flat tensor's rows, of each a copy."""
        flat, found, at = torch.stack(list(rows)), [], 0
        for shape, (count, width) in zip(self.shapes, self._parts, strict=True):
            whole = flat[:, at : at + count * width].reshape(self.ranks * count, width)
            found.append(whole[: shape[0]].reshape(shape))
            at += count * width
        return found

    def join(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Undo ``split``: zeros are padding."""
        parts = []
        for x, shape, (count, width) in zip(params, self.shapes, self._parts, strict=True):
            padded = x.new_zeros(self.ranks * count, width)
            padded[: shape[0]] = x.reshape(shape[0], width)
            parts.append(padded.view(self.ranks, count * width))
        return list(torch.cat(parts, 1))


class Trained(NamedTuple):
    """Parameters that require gradients: their names, and where they lie in FSDP2's flat tensor."""

    names: list[str]
    rows: Rows


class Group:
    """Parameters whose gradients FSDP2 reduces together. It does not keep them.

    Args:
        of: What torch has of them.
        prefixes: Of the names of each module's parameters.

    Attributes:
        device: Where gradients are; parameters may be offloaded.
        process_group: The ranks that have a shard each.
        mesh_ranks: All ranks of the mesh of which that is a part.
    """

    def __init__(self, of: Any, prefixes: Mapping[nn.Module, str]) -> None:
        self._of = weakref.ref(of)
        self.device: torch.device = of.device
        self.process_group: dist.ProcessGroup = of._reduce_scatter_process_group
        self.mesh_ranks: list[int] = of.mesh_info.mesh._get_root_mesh().mesh.flatten().tolist()
        # Not ``named_parameters()``: after a forward pass the root's are other objects.
        places: list[Any] = [vars(p)["_module_info"] for p in of.fsdp_params]
        self._names = [plain(f"{prefixes[each.module]}{each.param_name}") for each in places]
        self._before = of._reduce_scatter_comm
        self._which: list[bool] | None = None
        self._trained = Trained([], Rows([], 1))

    @property
    def of(self) -> Any:
        """Return what torch has; None where the model is gone."""
        return self._of()

    @property
    def trained(self) -> Trained:
        """Return the parameters that require gradients now."""
        which = [p.sharded_param.requires_grad for p in self.of.fsdp_params]
        if which != self._which:  # asked for in each pass
            params = zip(self._names, self.of.fsdp_params, which, strict=True)
            shapes = {name: tuple(p._orig_size) for name, p, trains in params if trains}
            self._which = which
            self._trained = Trained(list(shapes), Rows(list(shapes.values()), self.process_group.size()))
        return self._trained

    @property
    def weight(self) -> float:
        """Return what each rank's gradient is multiplied with in the sum over ranks."""
        return 1.0 / (self.of.gradient_divide_factor or self.process_group.size())

    @property
    def taken_by(self) -> tuple[Any, Any]:
        """Return what reduces, and what averages that over replicas, None if nothing does."""
        return self.of._reduce_scatter_comm, self.of._all_reduce_hook

    def give(self, scatter: Any, mean: Any, stream: torch.cuda.Stream | None) -> None:
        """Let ``scatter`` reduce, and ``mean`` average what that returns, on a stream; None: nothing does."""
        self.of._reduce_scatter_comm = scatter
        self._average_by(mean, stream)

    def leave(self, replicas: dist.ProcessGroup | None) -> None:
        """Let torch reduce as ever; and where shards have replicas these be averaged exactly."""
        if self.of is not None:
            self.of._reduce_scatter_comm = self._before
            self._average_by(None if replicas is None else ReplicaMean(replicas), None)

    def _average_by(self, mean: Any, stream: torch.cuda.Stream | None) -> None:
        self.of._all_reduce_hook, self.of._all_reduce_hook_stream = mean, stream


class ReplicaMean:
    """Averages shards over their replicas, in their own dtype: who has detached compression has models alike.

    Args:
        replicas: The ranks that have the same shard.
    """

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        self._replicas = replicas

    def __call__(self, shard: Tensor) -> None:
        """Do it in place; as DDP, multiplied before the sum."""
        dist.all_reduce(in_flight(shard.mul_(1.0 / self._replicas.size())), group=self._replicas)


def groups_of(model: nn.Module) -> list[Group]:
    """Return the groups of a model that ``fully_shard`` has sharded, each once."""
    prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    states: list[Any] = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    # Older torches have one group a module at most; several modules may share one.
    each = [of for s in states for of in getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group]]
    return [Group(of, prefixes) for of in {id(of): of for of in each if of is not None}.values()]


def ranks_of(groups: Sequence[Group]) -> dist.ProcessGroup | None:
    """Return the ranks of all meshes of which a model's groups have a dimension; None: those of the default group."""
    ranks = sorted({rank for group in groups for rank in group.mesh_ranks})
    if len(ranks) == dist.get_world_size():
        return None
    first = groups[0].process_group
    if dist.get_process_group_ranks(first) == ranks:
        return first
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made


def check_group(group: Group, feedback: str | None) -> None:
    """Raise ValueError if a group's gradients can't be compressed."""
    of = group.of
    if of.mesh_info.replicate_mesh_dim is not None:
        raise ValueError(
            "model must be sharded over a mesh of one dimension, got one of two: torch all-reduces over replicas "
            "before anybody could compress that; call fully_shard(mesh=mesh['shard']), and "
            "compress(model, replicas=mesh['replicate'].get_group())"
        )
    if feedback is None:
        return
    if any(p.fsdp_placement.dim for p in of.fsdp_params):
        raise ValueError(
            "feedback must be None where parameters are sharded along another dimension than the first, "
            f"got {feedback!r}"
        )
    if any(p.is_dtensor for p in of.fsdp_params):
        raise ValueError(
            "feedback must be None where parameters were DTensors before fully_shard(), as tensor parallelism has "
            f"them, got {feedback!r}: another number of ranks could not take residuals of parts over"
        )


def factor_of(op: Any, ranks: int) -> float:
    """Return what a sum is multiplied with; ValueError for what is no sum."""
    plain_op = isinstance(op, dist.ReduceOp.RedOpType)
    kind, factor = (op, None) if plain_op else op.__getstate__()
    if kind == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if kind == dist.ReduceOp.SUM:
        return 1.0
    if kind == dist.ReduceOp.PREMUL_SUM and isinstance(factor, float):
        return factor
    raise ValueError(f"the reduce-scatter's op must be AVG, SUM or PREMUL_SUM by a number, got {op}")
