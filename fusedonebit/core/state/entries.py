"""The entries of a checkpoint: how each is kept here, saved, given room, checked, and taken up on any number of ranks.

What is kept along the flat index space is saved with the first parameter. A tensor's place there depends on the block
size alone, not on the number of ranks. So all that is needed for another number of them is to cut the servers'
residuals elsewhere, and to give each new worker the mean of the old ones' residuals: what was compressed away is still
there, all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...triton_kernels import FlatLayout
from ..sharding import local
from .header import is_compressed
from .keeper import Keeper
from .spec import StateSpec

VALUES = ("element", "part", "chunk")
"""What has numbers that may be kept in codes."""

RANK = StateSpec("rank", "rank", "", of_rank=True)
"""Whose file a file is; saved where ranks have rows of their own."""

Header = Mapping[str, Any]
State = Mapping[str, Any]


def of(keeper: Keeper, compressed: bool, names: Collection[str] = ()) -> list[tuple[StateSpec, int]]:
    """Return all entries in a stage but ``step``, each with the parameter that it is saved with.

    Of a checkpoint, which has entries of these ``names``, also what another takes up here.
    """
    tensors, specs = range(len(keeper.parameters)), keeper.specs(compressed)
    specs += [spec for spec in keeper.kept if spec.taken_by and spec.name in names and spec not in specs]
    if any(spec.of_rank for spec in specs):
        specs.append(RANK)
    found = [(spec, i) for spec in specs for i in (tensors if spec.by_parameter else tensors[:1])]
    return found + [(_master(keeper), i) for i in keeper.parameters.with_masters]


def declared(keeper: Keeper) -> dict[str, StateSpec]:
    """Return what there may be, by name."""
    unwanted_first = sorted(keeper.kept, key=lambda spec: spec.wanted(keeper))  # of two of a name one is wanted
    return {spec.name: spec for spec in (*unwanted_first, _master(keeper), RANK)}


def has_row_of_each(keeper: Keeper, spec: StateSpec, header: Header) -> bool:
    """Return whether a checkpoint has a row of each rank, and not what all have alike, as AdamW's does."""
    return spec.of_rank and (not spec.by_parameter or keeper.wrote(header))


def saved(keeper: Keeper, spec: StateSpec, i: int) -> Tensor:
    """Return what this rank saves of parameter ``i``'s entry, in a form that ``torch.distributed.checkpoint`` knows."""
    part = _here(keeper, spec, i)
    if spec.per == "tensor":
        return part.clone()
    if not spec.by_parameter:
        part = part.reshape(-1).to(spec.dtype)
        if spec.of_rank and part.storage_offset():
            part = part.clone()  # a DTensor that begins somewhere else than its memory does can't be copied
    return keeper.ranks.rows.of_each(part) if spec.of_rank else _distributed(keeper, spec, i, part)


def room(keeper: Keeper, spec: StateSpec, i: int, header: Header | None) -> Tensor:
    """Make room for the entry of a checkpoint with this header, None of AdamW's."""
    part = torch.zeros(_shape(keeper, spec, i, header or {}), dtype=spec.dtype, device=keeper.device)
    if not spec.of_rank:
        return _distributed(keeper, spec, i, part)
    replicas = keeper.ranks.rows.shape[0] if header is None else header["world_size"]
    all_here = spec.per == "chunk" and not (header is not None and keeper.cut_alike(header))
    return (keeper.ranks.rows.whole if all_here else keeper.ranks.rows.spread)(replicas, part)


def check(keeper: Keeper, states: Sequence[State], header: Header, required: Collection[int]) -> None:
    """Raise ValueError or TypeError for the first entry that is not one of this model on these ranks.

    ``required`` are the parameters that must have a state.
    """
    found = of(keeper, is_compressed(header), header["names"])
    for spec, i in found:
        if spec.by_parameter and i in required and (spec.name in states[i] or not _may_lack(keeper, spec, header)):
            _check_entry(keeper, spec, i, states, header)
    if not is_compressed(header):
        return
    # In the checkpoint's blocks: these ranks' own may be larger, as their padding is.
    if header["line"] < FlatLayout(keeper.parameters.sizes, 1, header["block_size"]).numel:
        raise ValueError(f"checkpoint of another model: its flat index space has only {header['line']} elements")
    flat = [
        spec for spec, _ in found if not (spec.by_parameter or (spec.taken_by and spec.name not in header["names"]))
    ]
    for spec in flat:
        _check_entry(keeper, spec, 0, states, header)
    chunks = [states[0][spec.name] for spec in flat if spec.per == "chunk"]
    if not keeper.cut_alike(header) and any(len(local(rows)) != header["world_size"] for rows in chunks):
        raise ValueError(
            f"the checkpoint was written with {_describe(header)}, but here they are {_describe(keeper.cut())}; "
            "load it through torch.distributed.checkpoint (fusedonebit.dcp), or construct the optimizer as it was"
        )


def take(keeper: Keeper, spec: StateSpec, i: int, state: State, header: Header) -> None:
    """Take up parameter ``i``'s entry, if there is one; all ranks call it."""
    if spec is RANK:
        return
    part = _for_this_rank(keeper, spec, state[spec.name], header) if spec.name in state else None
    if spec.name == "master":
        keeper.parameters.load_master(i, part)
    elif spec.taken_by and not spec.wanted(keeper):
        by = declared(keeper)[spec.taken_by]
        target = _here(keeper, by, i)
        target += _found(part).to(target.device).view(target.shape)
        keeper.keep_part(by, i, target)
    elif part is not None:
        target = _here(keeper, spec, i)
        target.copy_(part.to(target.device).view(target.shape))
        if spec.per in VALUES:
            keeper.keep_part(spec, i, target)
    elif spec.taken_by:
        spec.tensor(keeper).zero_()


def _master(keeper: Keeper) -> StateSpec:
    return StateSpec("master", "element", "", of_rank=keeper.masters_of_rank, holds_parameters=True)


def _here(keeper: Keeper, spec: StateSpec, i: int) -> Tensor:
    """Return what this rank keeps."""
    if spec is RANK:
        return keeper.ranks.rows.rank()
    if spec.name == "master":
        return keeper.parameters.master(i)
    if spec.per in VALUES:
        return keeper.part_of(spec, i)
    kept = spec.tensor(keeper)
    return kept[..., i] if spec.per == "tensor" else kept


def _distributed(keeper: Keeper, spec: StateSpec, i: int, part: Tensor) -> Tensor:
    """Return what all replicas have alike, distributed over the shards."""
    if not spec.by_parameter:
        return keeper.ranks.rows.of_each_shard(part)
    return keeper.parameters.published(part, i) if spec.per == "element" else part


def _shape(keeper: Keeper, spec: StateSpec, i: int, header: Header) -> tuple[int, ...]:
    """Return the shape of this rank's part in a checkpoint with this header."""
    if spec.per == "element":
        return tuple(keeper.parameters.params[i].shape)
    if spec.per == "tensor":
        return tuple(spec.tensor(keeper).shape[:-1])
    if spec is RANK:
        return (1,)
    per = {"bit": 8, "block": header["block_size"], "part": header["inside"], "chunk": header["world_size"]}
    return (int(header["line"]) // int(per[spec.per]),)


def _may_lack(keeper: Keeper, spec: StateSpec, header: Header) -> bool:
    """Return whether a checkpoint may be without: AdamW's has nothing of LAMB's per tensor, or of rounds."""
    if spec.name == "master":
        return True
    if keeper.wrote(header):
        return not spec.is_in(header)
    return spec.optional or (spec.per == "tensor" and not is_compressed(header))


def _check_entry(keeper: Keeper, spec: StateSpec, i: int, states: Sequence[State], header: Header) -> None:
    value, expected = states[i][spec.name], _shape(keeper, spec, i, header)
    of_rank = has_row_of_each(keeper, spec, header)
    if not isinstance(value, Tensor):
        raise TypeError(f"{spec.name} in the checkpoint must be a tensor, got {type(value).__name__}")
    if spec.by_parameter and (shape := tuple(local(value).shape)[2 * of_rank :]) != expected:
        writer, own = header.get("algorithm"), type(keeper).__name__
        if writer not in (None, own) and shape[2:] == expected:  # of each of its ranks
            raise ValueError(f"the checkpoint is of {writer}, from which {own} can't go on")
        raise ValueError(
            f"checkpoint of another model: {spec.name} of {keeper.parameters.names[i]} must have shape {expected}, got "
            f"{shape}"
        )
    if not spec.by_parameter and value.shape[-1:] != expected:
        raise ValueError(f"{spec.name} in the checkpoint must have {expected[0]} columns, got {tuple(value.shape)}")
    if of_rank:
        keeper.ranks.rows.check(value, states[0][RANK.name], header["world_size"])


def _for_this_rank(keeper: Keeper, spec: StateSpec, rows: Tensor, header: Header) -> Tensor:
    """Return what this rank takes of what was saved."""
    if not has_row_of_each(keeper, spec, header):
        if spec.by_parameter:
            return local(rows)
        return _cut(_found(keeper.ranks.rows.own_of_shard(rows)), spec.tensor(keeper).numel())
    as_it_was = header["world_size"] == keeper.ranks.rows.shape[0] if spec.by_parameter else keeper.cut_alike(header)
    if as_it_was:
        return _found(keeper.ranks.rows.own(rows))
    if spec.by_parameter:
        return keeper.ranks.rows.mean(rows, header["world_size"])
    return (_share if spec.per == "chunk" else _mean)(keeper, rows, header)


def _mean(keeper: Keeper, rows: Tensor, header: Header) -> Tensor:
    """Return the old workers' mean, of which a rank of a node has a part."""
    inside = keeper.cut()["inside"]
    mean = keeper.ranks.rows.mean(rows, header["world_size"], header["inside"])
    return _cut(mean, keeper.layout.numel).view(inside, -1)[keeper.ranks.rows.place[0] % inside]


def _share(keeper: Keeper, rows: Tensor, header: Header) -> Tensor:
    """Return what this rank serves now: its chunk of each bucket, or of the part that it has of its node's."""
    nodes, parts = header["world_size"] // header["inside"], header["inside"] * header["buckets"]  # one of them is 1
    in_order = keeper.ranks.rows.of_this_shard(rows).view(nodes, parts, -1).transpose(0, 1).reshape(-1)
    flat, cut, rank = _cut(in_order, keeper.layout.numel), keeper.cut(), keeper.ranks.rows.place[0]
    inside, world_size = cut["inside"], cut["world_size"]
    if inside > 1:
        return flat.view(inside, world_size // inside, -1)[rank % inside, rank // inside]
    return flat.view(cut["buckets"], world_size, -1)[:, rank]


def _describe(cut: Header) -> str:
    return f"{cut['world_size']} ranks, {cut['inside']} in a node, and {cut['buckets']} buckets"


def _found(part: Tensor | None) -> Tensor:
    assert part is not None  # ``check`` has seen to it
    return part


def _cut(flat: Tensor, length: int) -> Tensor:
    """Return the first elements; beyond the end there is padding."""
    return torch.nn.functional.pad(flat[:length], (0, max(0, length - len(flat))))
