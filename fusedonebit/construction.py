"""What is checked when an optimizer is made: its masks, its device, and that all ranks mean the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .comm import CollectiveError, ShardGroup, Transport, agree, checksum, make_transport
from .parameters import ParameterList
from .sharding import check_groups, local

if TYPE_CHECKING:
    from .distributed import DistributedOptimizer


def check_device(device: torch.device) -> None:
    """Raises RuntimeError if there are no kernels for ``device``."""
    if device.type == "cuda" and torch.version.hip is None:
        try:
            import triton  # noqa: F401
        except ImportError as missing:
            raise RuntimeError("params on cuda need triton, which is not installed: pip install triton") from missing


def shards_of(params: ParameterList, transport: Transport, device: torch.device) -> ShardGroup:
    """The ranks that hold the other shards of the parameters.

    Raises:
        ValueError: if some of them are to be averaged over.
    """
    if params.mesh is None:
        return ShardGroup()
    group = params.mesh.get_group()
    check_groups(group, getattr(transport, "group", None), transport.world_size)
    return ShardGroup(make_transport(group, device))


def check_masks(masks: Mapping[Tensor, Tensor], params: ParameterList) -> None:
    """Raises TypeError or ValueError for the first mask that fits no trainable parameter."""
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
    """Raises ValueError if stochastic rounding was asked for and can't be had for every 16-bit parameter."""
    if not stochastic:
        return
    for p, name in zip(params.params, params.names, strict=True):
        if p.dtype is torch.float16:
            raise ValueError(
                f"stochastic_rounding must be False where a parameter is float16, got True and {name} of float16; "
                "use bfloat16, or master_weights=True"
            )
    if all(p.dtype is not torch.bfloat16 for p in params.params):
        raise ValueError(
            "stochastic_rounding must be False without bfloat16 parameters, got True and parameters of float32 only: "
            "those are not rounded; cast the model to bfloat16, or leave the option out"
        )


def agree_on_everything(optimizer: DistributedOptimizer, error: Exception | None, broadcast: bool) -> None:
    """Returns on all ranks if all mean the same and none has an ``error``; else raises on all.

    Values come last. Those of different shards differ; all else they have in common.
    """
    transport, device = optimizer._transport, optimizer.device
    hint = "construct the optimizer alike on every rank"
    stated = [] if error else facts(optimizer, broadcast)
    error = failure(lambda: agree(transport, stated, device, error, hint))
    optimizer._shards.agree(_of_all_shards(optimizer, broadcast) if error is None else [], device, error, hint)
    if broadcast:
        optimizer._list.before_update()
        for dense in optimizer._list.dense:
            transport.broadcast(dense.detach().as_strided((dense.numel(),), (1,)))
        with torch.no_grad():
            optimizer._list.after_update()
    hint = "seed all ranks alike, load the same checkpoint, or pass broadcast_parameters=True to use rank 0's"
    values = optimizer._list.values()
    error = failure(lambda: agree(transport, values, device, hint=hint))
    optimizer._shards.agree([], device, error, hint)


def failure(call: Callable[[], object]) -> Exception | None:
    """The exception that a call raises, to be raised where all ranks can."""
    try:
        call()
    except CollectiveError:
        raise
    except Exception as error:
        return error
    return None


def _of_all_shards(optimizer: DistributedOptimizer, broadcast: bool) -> list[tuple[str, str]]:
    """What ranks with different shards have in common: all but the shards' shapes and masks."""
    of_a_shard = {name for name, _ in optimizer._list.facts()[1:]}
    of_a_shard |= {f"the mask of {name}" for name in optimizer._list.names}
    return [fact for fact in facts(optimizer, broadcast) if fact[0] not in of_a_shard]


def facts(optimizer: DistributedOptimizer, broadcast: bool) -> list[tuple[str, str]]:
    """Everything but values that must be equal on all ranks."""
    options, plist, masks = optimizer.options, optimizer._list, optimizer._masks
    groups = [
        (f"{key} of group {i}", repr(_plain(group[key])))
        for i, group in enumerate(optimizer.param_groups)
        for key in optimizer._hyper_parameters
    ]
    named = list(zip(plist.owners, plist.names, strict=True))
    return [
        ("the optimizer", type(optimizer).__name__),
        *((f.name, repr(getattr(options, f.name))) for f in fields(options)),
        ("broadcast_parameters", repr(broadcast)),
        ("the number of ranks of a node", str(optimizer._inside.world_size)),
        *plist.facts(),
        ("the number of groups", str(len(optimizer.param_groups))),
        *((f"the group of {name}", str(n)) for name, n in zip(plist.names, plist.group_of, strict=True)),
        *groups,
        *((f"the mask of {name}", _describe_mask(masks.get(p))) for p, name in named),
    ]


def _describe_mask(mask: Tensor | None) -> str:
    return "none" if mask is None else f"checksum {checksum(local(mask).contiguous())}"


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value
