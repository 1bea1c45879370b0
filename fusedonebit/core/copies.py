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

from ..comm import LocalTransport, Traffic, Transport, make_transport
from .frame import Frame
from .header import is_compressed
from .hyper_parameters import HyperParameters
from .inputs import first_device
from .sharding import local
from .state.loading import examine, restore
from .state.owner import Owner
from .state.saving import header_of, save
from .world import World


def deep_copy(optimizer: Owner, ranks: World, memo: dict[int, Any]) -> Any:
    """Return a copy over the same ``ranks``, whose traffic is counted apart.

    Where ``overlap=True`` over a process group, every rank must call it: buckets travel over a group of their own.
    """
    copied = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = copied
    transport, levels = _shared(ranks.transport), ranks.levels
    if levels is not None:
        levels = _shared(levels[0]), _shared(levels[1])
    _rebuild(copied, copy.deepcopy(content_of(optimizer), memo), transport, levels)
    return copied


def pickled(content: dict[str, Any], ranks: World) -> dict[str, Any]:
    """Return what a pickle has of an optimizer with this ``content``; TypeError if its ranks can't be made again."""
    transport = ranks.transport
    here = isinstance(transport, LocalTransport)
    group = getattr(transport, "group", None)
    if not here and (ranks.levels is not None or group is None or group is not dist.group.WORLD):
        what = "in a hierarchy of groups" if ranks.levels is not None else f"over {transport!r}"
        raise TypeError(
            f"an optimizer {what} can't be pickled: of process groups only the default one, "
            "torch.distributed.group.WORLD, can be made again; pickle its state_dict(), and load that into a new "
            "optimizer"
        )
    content["apart"] = here and not _alone()  # while the process had other ranks beside it
    content["rank"], content["world_size"] = transport.rank, transport.world_size
    # Of a view pickle writes all the memory that it is a view of.
    content["saved"] = _each_tensor(content["saved"], torch.clone)
    return content


def unpickle(optimizer: Owner, content: dict[str, Any]) -> None:
    """Make a new optimizer what ``pickled`` has told; ValueError, on this rank alone, if the ranks are others."""
    transport = LocalTransport() if content["apart"] else make_transport(None, first_device(content["param_groups"]))
    if (transport.rank, transport.world_size) != (content["rank"], content["world_size"]):
        raise ValueError(
            f"the optimizer was pickled on rank {content['rank']} of {content['world_size']}, but this is rank "
            f"{transport.rank} of {transport.world_size}: unpickle it on as many ranks, after "
            "init_process_group(), or construct a new optimizer and load a checkpoint"
        )
    _rebuild(optimizer, content, transport, None)


def content_of(optimizer: Owner) -> dict[str, Any]:
    """Return all but the ranks; of the state this rank's rows alone, since others name a process group."""
    frame = optimizer.frame
    if frame.ranks.model.count > 1:
        raise TypeError(
            f"{type(optimizer).__name__} of sharded parameters can't be pickled or deep-copied: save it with "
            "fusedonebit.dcp, or its state_dict(), and load that into a new optimizer"
        )
    return {
        "defaults": optimizer.defaults,
        "param_groups": optimizer.param_groups,
        "hyper_parameters": frame.hyper.names,
        "options": frame.options,
        "kind": optimizer.kind,
        "masks": frame.masks,
        "saved": _each_tensor(save(optimizer), local),
    }


def _rebuild(
    optimizer: Owner, content: dict[str, Any], transport: Transport, levels: tuple[Transport, Transport] | None
) -> None:
    groups, saved = content["param_groups"], content["saved"]
    setstate: Any = torch.optim.Optimizer.__setstate__
    setstate(optimizer, {"defaults": content["defaults"], "param_groups": groups, "state": defaultdict(dict)})
    options, device = content["options"], first_device(groups)
    if optimizer.kind is not content["kind"]:  # else that of its class, as the original's
        optimizer.kind = content["kind"]
    frame = optimizer.frame = Frame(optimizer, World(transport, device, levels=levels))
    frame.options, frame.masks = options, content["masks"]
    frame.hyper = HyperParameters(content["hyper_parameters"], device, options.wire.capturable)
    frame.take_parameters()
    header = header_of(saved) or {}
    frame.given_block_size = header["block_size"] if is_compressed(header) else None
    optimizer.set_up()
    restore(optimizer, saved, examine(optimizer.contents, optimizer.check_group, saved))


def _each_tensor(saved: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    def changed(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        return {name: change(value) if isinstance(value, Tensor) else value for name, value in entry.items()}

    return {**saved, "state": {key: changed(entry) for key, entry in saved["state"].items()}}


def _alone() -> bool:
    """Return whether an optimizer that is given no process group works alone here."""
    try:
        return make_transport(None, torch.device("cpu")).world_size == 1
    except (RuntimeError, ValueError):
        return False


def _shared(transport: Transport) -> Transport:
    """Return the same ranks, counted apart."""
    shared = copy.copy(transport)
    shared.traffic = Traffic()
    return shared
