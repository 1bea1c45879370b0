"""Copies of an optimizer, by ``copy.deepcopy`` and by pickle: what a checkpoint has, with the parameters themselves.

Copied together with its model, an optimizer stays tied to it, as torch's do; hooks are not copied, as theirs are not.
A deep copy works over the same ranks. A pickle has no process group: it is made again from the default one.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import LocalTransport, ShardGroup, Traffic, Transport, make_transport
from .params import ParameterList, first_device
from .sharding import local
from .state.keeper import Keeper
from .state.loading import take_state
from .state.saving import has_lines, header_of, save


def content_of(optimizer: Keeper) -> dict[str, Any]:
    """All that ``rebuild`` needs.

    Raises:
        TypeError: if parameters are sharded.
    """
    if optimizer.shards.count > 1:
        raise TypeError(
            f"{type(optimizer).__name__} of sharded parameters can't be pickled or deep-copied: save it with "
            "fusedonebit.dcp, or its state_dict(), and load that into a new optimizer"
        )
    return {
        "defaults": optimizer.defaults,
        "param_groups": optimizer.param_groups,
        "hyper_parameters": optimizer.hyper_parameters,
        "options": optimizer.options,
        "masks": list(optimizer.masks.items()),
        "ranks": Ranks(optimizer.transport, optimizer.levels),
        "saved": Saved(save(optimizer)),
    }


def rebuild(optimizer: Keeper, content: dict[str, Any]) -> None:
    """Makes a new optimizer what another one was; what is wrong is raised on this rank alone.

    Where ``overlap=True`` over a process group, every rank must call it: buckets travel over a group of their own.
    """
    groups, ranks = content["param_groups"], content["ranks"]
    torch.optim.Optimizer.__setstate__(
        optimizer, {"defaults": content["defaults"], "param_groups": groups, "state": defaultdict(dict)}
    )
    optimizer.lr_tensors = []
    optimizer.options, optimizer.hyper_parameters = content["options"], content["hyper_parameters"]
    optimizer.parameters = ParameterList(groups, optimizer.options.master_weights)
    optimizer.device = first_device(groups)
    optimizer.masks = dict(content["masks"])
    optimizer.transport, optimizer.levels = ranks.transports(optimizer.device)
    optimizer.shards = ShardGroup()
    optimizer.inside = optimizer.shards.transport if optimizer.levels is None else optimizer.levels[1]
    saved = content["saved"].state_dict
    header = header_of(saved) or {}
    optimizer.set_up(header["block_size"] if has_lines(header) else None)
    take_state(optimizer, saved)


class Saved:
    """A checkpoint that is part of a copy, with this rank's rows alone: others name a process group."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict = _each_tensor(state_dict, local)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of a view pickle writes all the memory that it is a view of.
        return Saved, (_each_tensor(self.state_dict, torch.clone),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Saved:
        return Saved(copy.deepcopy(self.state_dict, memo))


def _each_tensor(saved: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    def changed(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        return {name: change(value) if isinstance(value, Tensor) else value for name, value in entry.items()}

    return {**saved, "state": {key: changed(entry) for key, entry in saved["state"].items()}}


class Ranks:
    """Over which ranks an optimizer works, to go into a copy.

    Args:
        transport: Between all of them.
        levels: Between nodes and inside one, where there is a hierarchy.
    """

    def __init__(self, transport: Transport, levels: tuple[Transport, Transport] | None) -> None:
        self._transport, self._levels = transport, levels

    def transports(self, device: torch.device) -> tuple[Transport, tuple[Transport, Transport] | None]:
        """What was given, or the same made again from the default group."""
        return self._transport, self._levels

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        levels = self._levels
        return Ranks(_shared(self._transport), None if levels is None else (_shared(levels[0]), _shared(levels[1])))

    def __reduce__(self) -> tuple[Any, ...]:
        transport = self._transport
        if isinstance(transport, LocalTransport):
            return Again, (0, 1, not _alone())
        group = getattr(transport, "group", None)
        if self._levels is not None or group is None or group is not dist.group.WORLD:
            what = "in a hierarchy of groups" if self._levels is not None else f"over {transport!r}"
            raise TypeError(
                f"an optimizer {what} can't be pickled: of process groups only the default one, "
                "torch.distributed.group.WORLD, can be made again; pickle its state_dict(), and load that into a new "
                "optimizer"
            )
        return Again, (transport.rank, transport.world_size, False)


class Again:
    """The ranks of a pickled optimizer: those of the default group.

    Args:
        rank: Of the one that was pickled.
        world_size: How many there were.
        apart: Whether it was alone while the process had others beside it.
    """

    def __init__(self, rank: int, world_size: int, apart: bool) -> None:
        self.rank, self.world_size, self.apart = rank, world_size, apart

    def transports(self, device: torch.device) -> tuple[Transport, None]:
        """That group's transport; ValueError if it is another one."""
        transport = LocalTransport() if self.apart else make_transport(None, device)
        if (transport.rank, transport.world_size) != (self.rank, self.world_size):
            raise ValueError(
                f"the optimizer was pickled on rank {self.rank} of {self.world_size}, but this is rank "
                f"{transport.rank} of {transport.world_size}: unpickle it on as many ranks, after "
                "init_process_group(), or construct a new optimizer and load a checkpoint"
            )
        return transport, None


def _alone() -> bool:
    """Whether an optimizer that is given no process group works alone here."""
    try:
        return make_transport(None, torch.device("cpu")).world_size == 1
    except (RuntimeError, ValueError):
        return False


def _shared(transport: Transport) -> Transport:
    """The same ranks, counted apart."""
    shared = copy.copy(transport)
    shared.traffic = Traffic()
    return shared
