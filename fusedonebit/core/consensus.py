"""What is checked when an optimizer is made: its masks, its device, and that all ranks mean the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..comm import CollectiveError, ShardGroup, Transport, agree, checksum, make_transport
from ..comm.agreement import Fact
from ..triton_kernels import FlatLayout, LiveTable, choose_block_size, live_table
from .options import numbers, stated
from .params import ParameterList, materialise_group
from .sharding import check_groups, levels, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .state.keeper import Keeper


def check_device(device: torch.device) -> None:
    """Raise RuntimeError if there are no kernels for ``device``."""
    if device.type == "cuda" and torch.version.hip is None:
        try:
            import triton  # noqa: F401
        except ImportError as missing:
            raise RuntimeError("params on cuda need triton, which is not installed: pip install triton") from missing


def shards_of(mesh: DeviceMesh | None, device: torch.device) -> ShardGroup:
    """Return the ranks that hold the other shards of parameters sharded over ``mesh``."""
    return ShardGroup() if mesh is None else ShardGroup(make_transport(mesh.get_group(), device))


def levels_of(optimizer: Keeper, hierarchy: Any) -> tuple[Transport, Transport] | None:
    """Return the ranks between nodes and those inside one, or None.

    Raises:
        TypeError, ValueError: if ``hierarchy`` is not to be had.
    """
    if hierarchy is None:
        return None
    optimizer.check_levels()
    if optimizer.shards.count > 1:
        raise ValueError("hierarchy must be None where parameters are sharded: fully_shard is one already")
    return levels(hierarchy, optimizer.transport, optimizer.device)


def check_shards(optimizer: Keeper) -> None:
    """Raise ValueError if parameters are sharded and can't be, or over ranks that are to be averaged over."""
    params, transport = optimizer.parameters, optimizer.transport
    if params.mesh is None:
        return
    if not optimizer.takes_shards:
        raise ValueError(
            f"parameters of {type(optimizer).__name__} must be whole, but {params.names[0]} is a DTensor; "
            "use OneBitAdam or OneBitLamb for a model that fully_shard() has sharded"
        )
    check_groups(params.mesh.get_group(), getattr(transport, "group", None), transport.world_size)


def check_masks(masks: Mapping[Tensor, Tensor], params: ParameterList) -> None:
    """Raise TypeError or ValueError for the first mask that fits no trainable parameter."""
    if not isinstance(masks, Mapping):
        raise TypeError(f"mask must map parameters to bool tensors, got {type(masks).__name__}")
    known = {id(p) for p in params.owners}
    for p, mask in masks.items():
        if not isinstance(p, Tensor) or not isinstance(mask, Tensor):
            raise TypeError(f"mask must map parameters to bool tensors, got {type(p).__name__}: {type(mask).__name__}")
        if id(p) not in known:
            raise ValueError(f"mask names a tensor of shape {tuple(p.shape)} that is no trainable parameter")
        here, shard = local(mask), local(p)
        if mask.dtype is not torch.bool or here.shape != shard.shape:
            what = "parameter's" if shard is p else "parameter's shard's, as this rank holds it,"
            raise ValueError(
                f"a mask must be a bool tensor of its {what} shape {tuple(shard.shape)}, "
                f"got {mask.dtype} {tuple(here.shape)}"
            )


def check_rounding(stochastic: bool, params: ParameterList) -> None:
    """Raise ValueError if stochastic rounding was asked for and can't be had for every 16-bit parameter."""
    if not stochastic:
        return
    for p, name in zip(params.params, params.names, strict=True):
        if p.dtype is torch.float16:
            raise ValueError(
                f"stochastic_rounding must be False where a parameter is float16, got True and {name} of float16; "
                "use bfloat16, or Numerics(master_weights=True)"
            )
    if params.params and all(p.dtype is not torch.bfloat16 for p in params.params):
        raise ValueError(
            "stochastic_rounding must be False without bfloat16 parameters, got True and parameters of float32 only: "
            "those are not rounded; cast the model to bfloat16, or leave the option out"
        )


def agree_on(
    optimizer: Keeper, facts: list[Fact], of_shards: Sequence[Fact] = (), error: Exception | None = None, hint: str = ""
) -> None:
    """Return on all ranks, or raise on all; ``of_shards`` is what ranks with other shards have alike too."""
    of_replicas = failure(lambda: agree(optimizer.transport, facts, optimizer.device, error, hint))
    agree(optimizer.shards.transport, of_shards, optimizer.device, of_replicas, hint, "shard")


def agree_on_everything(optimizer: Keeper, error: Exception | None, broadcast: bool) -> None:
    """Return on all ranks if all mean the same and none has an ``error``; else raise on all.

    Values come last. Those of different shards differ; all else they have in common.
    """
    stated = [] if error else facts(optimizer)
    names = [] if error else optimizer.parameters.names
    of_a_shard = {what for name in names for what in (name, f"the mask of {name}")}
    of_all = [fact for fact in stated if fact[0] not in of_a_shard]
    agree_on(optimizer, stated, of_all, error, "construct the optimizer alike on every rank")
    if broadcast:
        optimizer.parameters.before_update()
        for dense in optimizer.parameters.dense:
            optimizer.transport.broadcast(dense.detach().as_strided((dense.numel(),), (1,)))
        with torch.no_grad():
            optimizer.parameters.after_update()
    agree_on_values(
        optimizer,
        "seed all ranks alike, load the same checkpoint, or pass Wire(broadcast_parameters=True) to use rank 0's",
    )


def agree_on_values(optimizer: Keeper, hint: str) -> None:
    """Return on all ranks if all have the same parameters; else raise on all, naming the first that differs."""
    agree_on(optimizer, optimizer.parameters.values(), hint=hint)


def agree_on_loaded(optimizer: Keeper) -> None:
    """As ``agree_on_values``, at the first step after a checkpoint was loaded: models may be loaded later than that.

    Nothing to do for one rank alone; nor within a round, where each rank has parameters of its own, and will take
    those of the round's beginning, on which all have agreed while they loaded.
    """
    if optimizer.transport.world_size > 1 and optimizer.synchronised:
        agree_on_values(
            optimizer,
            "the checkpoint's model must be loaded alike on every rank. This was found at the first step after "
            "load_state_dict(), and no parameter was changed",
        )


def failure(call: Callable[[], object]) -> Exception | None:
    """Return the exception that a call raises, to be raised where all ranks can."""
    try:
        call()
    except CollectiveError:
        raise
    except Exception as error:
        return error
    return None


def facts(optimizer: Keeper) -> list[tuple[str, str]]:
    """Return everything but values that must be equal on all ranks."""
    options, plist = optimizer.options, optimizer.parameters
    groups = [
        (f"{key} of group {i}", repr(value.tolist() if isinstance(value := group[key], Tensor) else value))
        for i, group in enumerate(map(numbers, optimizer.param_groups))
        for key in optimizer.hyper_parameters
    ]
    checksums = {p: f"checksum {checksum(local(mask).contiguous())}" for p, mask in optimizer.masks.items()}
    named = list(zip(plist.owners, plist.names, strict=True))
    return [
        ("the optimizer", type(optimizer).__name__),
        *((name, stated(getattr(options, name))) for name in options.names()),
        ("the number of ranks of a node", str(optimizer.inside.world_size)),
        *plist.facts(),
        ("the number of groups", str(len(optimizer.param_groups))),
        *((f"the group of {name}", str(n)) for name, n in zip(plist.names, plist.group_of, strict=True)),
        *groups,
        *((f"the mask of {name}", checksums.get(p, "none")) for p, name in named),
    ]


def add_group(optimizer: Keeper, param_group: dict[str, Any], add: Callable[[dict[str, Any]], None]) -> None:
    """Lay everything out anew, with one more group, and keep all state; ``add`` is torch's own part of it."""
    optimizer.catch_up()
    optimizer.parameters.refresh_masters()
    kept = {
        p: {k: v.clone() for k, v in optimizer.state[p].items() if k in optimizer.published}
        for p in optimizer.parameters.owners
    }
    outcomes, updates = optimizer.outcomes, optimizer.updates
    old_list, old_groups = optimizer.parameters, list(optimizer.param_groups)
    owners = enumerate(optimizer.parameters.owners)
    specs = [spec for spec in optimizer.specs() if spec.per == "tensor"]
    tables = {id(p): [spec.tensor(optimizer)[..., i] for spec in specs] for i, p in owners}
    error: Exception | None = None
    try:
        add(materialise_group(param_group))
        for i, group in enumerate(optimizer.param_groups):  # all: laid out anew, no step sees what was changed before
            optimizer.check_group(numbers(group), f"group {i}")
        optimizer.put_lr_on_the_device()
        optimizer.parameters = ParameterList(optimizer.param_groups, optimizer.options.master_weights)
        check_rounding(optimizer.options.stochastic_rounding, optimizer.parameters)
    except Exception as caught:
        error = caught
    try:
        agree_on_everything(optimizer, error, broadcast=False)
    except Exception:
        optimizer.param_groups, optimizer.parameters = old_groups, old_list
        raise
    optimizer.given_block_size = None  # a checkpoint's was for the old groups; a run that has loaded none chooses anew
    optimizer.build()
    optimizer.outcomes, optimizer.updates = outcomes, updates
    for i, p in enumerate(optimizer.parameters.owners):
        for spec, column in zip(specs, tables.get(id(p), ()), strict=False):
            spec.tensor(optimizer)[..., i] = column
    for p, state in kept.items():
        for key, value in state.items():
            optimizer.state[p][key].copy_(value)


def layout_of(optimizer: Keeper, chunks: int) -> FlatLayout:
    """Return the flat index space; as long for each shard, so that checkpoints are rectangular."""
    sizes = optimizer.parameters.sizes
    given = optimizer.options.block_size or optimizer.given_block_size
    block_size = given or choose_block_size(sizes, chunks)
    if optimizer.shards.count == 1:
        return FlatLayout(sizes, chunks, block_size)
    if given is None:
        block_size = -int(optimizer.shards.max(torch.tensor([-block_size], device=optimizer.device)))
    blocks = torch.tensor([FlatLayout(sizes, chunks, block_size).n_blocks], device=optimizer.device)
    return FlatLayout(sizes, chunks, block_size, int(optimizer.shards.max(blocks)))


def live_of(optimizer: Keeper, excluded: Sequence[int] = ()) -> LiveTable:
    """Which elements count: those no mask keeps still, of tensors that are not excluded."""
    masks = {}
    for i, (owner, p) in enumerate(zip(optimizer.parameters.owners, optimizer.parameters.params, strict=True)):
        if owner in optimizer.masks:
            ordered = torch.empty_strided(p.shape, optimizer.parameters.dense[i].stride(), dtype=torch.bool)
            masks[i] = ordered.copy_(local(optimizer.masks[owner])).as_strided((p.numel(),), (1,))
    return live_table(optimizer.layout, masks, excluded).to(optimizer.device)
