"""What is kept along the flat index space, as a checkpoint has it, for these ranks or another number of them.

A tensor's place in the index space depends on the block size alone, not on the number of ranks. So all that is needed
for another number of them is to cut the servers' residuals elsewhere, and to give each new worker the mean of the old
ones' residuals: what was compressed away is still there, all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...triton_kernels import FlatLayout
from ..sharding import local
from .keeper import Keeper
from .spec import StateSpec

RANK = "rank"
"""The row that says whose file a file is, int64 [1]; saved where ranks have rows of their own."""

Header = Mapping[str, Any]


def own_names(keeper: Keeper) -> set[str]:
    """Return what each rank has of its own along the index space."""
    return {spec.name for spec in keeper.kept if spec.of_rank and not spec.by_parameter} | {RANK}


def rows(keeper: Keeper) -> dict[str, Tensor]:
    """Return the rows (``Rows``) that this rank saves."""
    found = {}
    for spec in _specs(keeper, keeper.compressed):
        line = spec.tensor(keeper).reshape(-1)
        if spec.of_rank:  # a DTensor that begins somewhere else than its memory does can't be copied
            found[spec.name] = keeper.rows.of_each(line.clone() if line.storage_offset() else line)
        else:
            found[spec.name] = keeper.rows.of_each_shard(line)
    if _has_rank(keeper, keeper.compressed):
        found[RANK] = keeper.rows.of_each(keeper.rows.rank())
    return found


def room(keeper: Keeper, header: Header | None, compressed: bool) -> dict[str, Tensor]:
    """Make room for the rows of a checkpoint with this header, for ``torch.distributed.checkpoint`` to fill."""
    grid, found = keeper.rows, {}
    replicas = grid.shape[0] if header is None else header["world_size"]
    alike = header is not None and compressed and _cut_alike(keeper, header)
    for spec in _specs(keeper, compressed):
        line = torch.zeros(_width(spec, header or {}), dtype=spec.dtype, device=keeper.device)
        if not spec.of_rank:
            found[spec.name] = grid.of_each_shard(line)
        elif alike:
            found[spec.name] = grid.of_each(line)
        else:
            found[spec.name] = (grid.whole if spec.per == "chunk" else grid.spread)(replicas, line)
    if _has_rank(keeper, compressed):
        rank = torch.zeros_like(grid.rank())
        found[RANK] = grid.of_each(rank) if alike else grid.spread(replicas, rank)
    return found


def check(keeper: Keeper, state: Mapping[str, Any], header: Header) -> None:
    """Raise ValueError or TypeError if the rows in ``state`` are not those of this model on these ranks."""
    # In the checkpoint's blocks: these ranks' own may be larger, as their padding is.
    if header["line"] < FlatLayout(keeper.parameters.sizes, 1, header["block_size"]).numel:
        raise ValueError(f"checkpoint of another model: its line has only {header['line']} elements")
    specs = _specs(keeper, True)
    widths = {spec.name: _width(spec, header) for spec in specs} | ({RANK: 1} if _has_rank(keeper, True) else {})
    for name, width in widths.items():
        if not isinstance(state[name], Tensor):
            raise TypeError(f"{name} in the checkpoint must be a tensor, got {type(state[name]).__name__}")
        if state[name].shape[-1] != width:
            raise ValueError(f"{name} in the checkpoint must have {width} columns, got {tuple(state[name].shape)}")
    for spec in specs:
        if spec.of_rank:
            keeper.rows.check(state[spec.name], state[RANK], header["world_size"])
    chunks = [state[spec.name] for spec in specs if spec.per == "chunk"]
    if not _cut_alike(keeper, header) and any(len(local(rows)) != header["world_size"] for rows in chunks):
        raise ValueError(
            f"the checkpoint was written with {_describe(header)}, but here they are {_describe(keeper.cut())}; "
            "load it through torch.distributed.checkpoint (fusedonebit.dcp), or construct the optimizer as it was"
        )


def fill(keeper: Keeper, state: Mapping[str, Tensor], header: Header) -> None:
    """Take the rows up, on these ranks; all call it."""
    alike = _cut_alike(keeper, header)
    for spec in _specs(keeper, True):
        target, saved = spec.tensor(keeper), state[spec.name]
        if not spec.of_rank:
            line = _cut(_here(keeper.rows.own_of_shard(saved), spec), target.numel())
        elif alike:
            line = _here(keeper.rows.own(saved), spec)
        else:
            line = (_share if spec.per == "chunk" else _mean)(keeper, saved, header)
        target.copy_(line.to(target).view(target.shape))


def in_order(rows: Tensor, cut: Header) -> Tensor:
    """Put all servers' residuals in the order of the index space, from their rows [ranks, n]."""
    nodes, inside, buckets = cut["world_size"] // cut["inside"], cut["inside"], cut["buckets"]
    if inside > 1:
        return rows.view(nodes, inside, -1).transpose(0, 1).reshape(-1)
    return rows.view(nodes, buckets, -1).transpose(0, 1).reshape(-1)


def _mean(keeper: Keeper, saved: Tensor, header: Header) -> Tensor:
    """Return the old workers' mean, of which a rank of a node has a part."""
    inside = keeper.cut()["inside"]
    mean = keeper.rows.mean(saved, header["world_size"], header["inside"])
    return _cut(mean, keeper.layout.numel).view(inside, -1)[keeper.rows.place[0] % inside]


def _share(keeper: Keeper, saved: Tensor, header: Header) -> Tensor:
    """Return what this rank serves now: its chunk of each bucket, or of the part that it has of its node's."""
    cut, rank = keeper.cut(), keeper.rows.place[0]
    line = _cut(in_order(keeper.rows.of_this_shard(saved), header), keeper.layout.numel)
    inside, world_size = cut["inside"], cut["world_size"]
    if inside > 1:
        return line.view(inside, world_size // inside, -1)[rank % inside, rank // inside]
    return line.view(cut["buckets"], world_size, -1)[:, rank]


def _specs(keeper: Keeper, compressed: bool) -> list[StateSpec]:
    return [spec for spec in keeper.specs(compressed) if not spec.by_parameter]


def _has_rank(keeper: Keeper, compressed: bool) -> bool:
    return any(spec.of_rank for spec in keeper.specs(compressed))


def _width(spec: StateSpec, header: Header) -> int:
    """Return how long a row is in a checkpoint with this header."""
    per = {"bit": 8, "block": header["block_size"], "part": header["inside"], "chunk": header["world_size"]}
    return int(header["line"]) // int(per[spec.per])


def _cut_alike(keeper: Keeper, header: Header) -> bool:
    return all(header[key] == value for key, value in keeper.cut().items())


def _describe(cut: Header) -> str:
    return f"{cut['world_size']} ranks, {cut['inside']} in a node, and {cut['buckets']} buckets"


def _here(line: Tensor | None, spec: StateSpec) -> Tensor:
    assert line is not None, spec.name  # ``check`` has seen to it
    return line


def _cut(line: Tensor, length: int) -> Tensor:
    """Return the first elements; beyond the end there is padding."""
    return torch.nn.functional.pad(line[:length], (0, max(0, length - len(line))))
