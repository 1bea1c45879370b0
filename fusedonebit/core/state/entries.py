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
from ..frame import Frame
from ..header import is_compressed
from ..sharding import local
from ..state_tensor import MASTER, RANK, StateTensor

VALUES = ("element", "part", "chunk")
"""What has numbers that may be kept in codes."""

Header = Mapping[str, Any]
State = Mapping[str, Any]


def of(frame: Frame, kept: Sequence[StateTensor], names: Collection[str] = ()) -> list[tuple[StateTensor, int]]:
    """Return all entries of what is kept but ``step``, each with the parameter that it is saved with.

    Of a checkpoint, which has entries of these ``names``, also what another takes up here.
    """
    tensors = range(len(frame.parameters))
    specs = [s for s in kept if s.wanted or (s.taken_by and s.name in names)]
    if any(spec.of_rank for spec in specs) and (not names or RANK.name in names):
        specs.append(RANK)
    found = [(spec, i) for spec in specs for i in (spec.of(tensors) if spec.by_parameter else tensors[:1])]
    return found + [(spec, i) for spec in kept if spec.name == MASTER for i in frame.parameters.with_masters]


def has_row_of_each(frame: Frame, spec: StateTensor, header: Header) -> bool:
    """Return whether a checkpoint has a row of each rank, and not what all have alike, as AdamW's does."""
    return spec.of_rank and (not spec.by_parameter or frame.wrote(header))


def saved(frame: Frame, spec: StateTensor, i: int) -> Tensor:
    """Return what this rank saves of parameter ``i``'s entry, in a form that ``torch.distributed.checkpoint`` knows."""
    part = _here(frame, spec, i)
    if spec.per == "tensor":
        return part.clone()
    if not spec.by_parameter:
        part = part.reshape(-1).to(spec.dtype)
        if spec.of_rank and part.storage_offset():
            part = part.clone()  # a DTensor that begins somewhere else than its memory does can't be copied
    if not spec.of_rank:
        return _distributed(frame, spec, i, part)
    if spec.per == "element" and part.shape != (most := frame.parameters.largest_shard(i)):
        part = torch.nn.functional.pad(part, [0, 0] * (part.dim() - 1) + [0, most[0] - len(part)])
    return frame.ranks.rows.of_each(part)


def room(frame: Frame, spec: StateTensor, i: int, header: Header | None) -> Tensor:
    """Make room for the entry of a checkpoint with this header, None of AdamW's."""
    part = torch.zeros(_shape(frame, spec, i, header or {}), dtype=spec.dtype, device=frame.device)
    if not spec.of_rank:
        return _distributed(frame, spec, i, part)
    replicas = frame.ranks.rows.shape[0] if header is None else header["world_size"]
    all_here = spec.per == "chunk" and not (header is not None and frame.cut_alike(header))
    return (frame.ranks.rows.whole if all_here else frame.ranks.rows.spread)(replicas, part)


def check(frame: Frame, kept: Sequence[StateTensor], states: Sequence[State], header: Header) -> None:
    """Raise ValueError or TypeError for the first entry that is not one of this model on these ranks."""
    trained = header["trained"] if frame.wrote(header) and "trained" in header else ()
    # AdamW has none for a parameter that never had a gradient, nor have we for one that was frozen.
    places = zip(states, frame.parameters.index_of, strict=True)
    required = {i for i, (state, index) in enumerate(places) if state or is_compressed(header) or index in trained}
    found = of(frame, kept, header["names"])
    for spec, i in found:
        if spec.by_parameter and i in required and (spec.name in states[i] or not _may_lack(frame, spec, header)):
            _check_entry(frame, spec, i, states, header)
    if not is_compressed(header):
        return
    # In the checkpoint's blocks: these ranks' own may be larger, as their padding is.
    if header["line"] < FlatLayout(frame.parameters.sizes, 1, header["block_size"]).numel:
        raise ValueError(f"checkpoint of another model: its flat index space has only {header['line']} elements")
    flat = [
        spec for spec, _ in found if not (spec.by_parameter or (spec.taken_by and spec.name not in header["names"]))
    ]
    for spec in flat:
        _check_entry(frame, spec, 0, states, header)
    chunks = [states[0][spec.name] for spec in flat if spec.per == "chunk"]
    if not frame.cut_alike(header) and any(len(local(rows)) != header["world_size"] for rows in chunks):
        raise ValueError(
            f"the checkpoint was written with {_describe(header)}, but here they are {_describe(frame.cut())}; "
            "load it through torch.distributed.checkpoint (fusedonebit.dcp), or construct the optimizer as it was"
        )


def fill(frame: Frame, kept: Sequence[StateTensor], states: Sequence[State], header: Header) -> None:
    """Take up all entries that a checkpoint has; all ranks call it."""
    for spec, i in of(frame, kept, header["names"]):
        if spec is RANK:
            continue
        part = _for_this_rank(frame, spec, states[i][spec.name], header) if spec.name in states[i] else None
        if spec.name == MASTER:
            frame.parameters.load_master(i, part)
        elif spec.taken_by and not spec.wanted:
            (by,) = (each for each in kept if each.name == spec.taken_by)
            target = _here(frame, by, i)
            target += _found(part).to(target.device).view(target.shape)
            by.keep(frame, i, target)
        elif part is not None:
            target = _here(frame, spec, i)
            if spec.of_rank and spec.per == "element" and part.shape != target.shape:
                part = part[: len(target)]  # of a smaller shard
            target.copy_(part.to(target.device).view(target.shape))
            if spec.per in VALUES:
                spec.keep(frame, i, target)
        elif spec.taken_by:
            spec.tensor.zero_()


def _here(frame: Frame, spec: StateTensor, i: int) -> Tensor:
    """Return what this rank keeps."""
    if spec is RANK:
        return frame.ranks.rows.rank()
    if spec.name == MASTER:
        return frame.parameters.master(i)
    if spec.per in VALUES:
        return spec.part(frame, i)
    kept = spec.tensor
    return kept[..., i] if spec.per == "tensor" else kept


def _distributed(frame: Frame, spec: StateTensor, i: int, part: Tensor) -> Tensor:
    """Return what all replicas have alike, distributed over the shards."""
    if not spec.by_parameter:
        return frame.ranks.rows.of_each_shard(part)
    return frame.parameters.published(part, i) if spec.per == "element" else part


def _shape(frame: Frame, spec: StateTensor, i: int, header: Header) -> tuple[int, ...]:
    """Return the shape of this rank's part in a checkpoint with this header."""
    if spec.per == "element":
        return frame.parameters.largest_shard(i) if spec.of_rank else tuple(frame.parameters.params[i].shape)
    if spec.per == "tensor":
        return tuple(spec.tensor.shape[:-1])
    if spec is RANK:
        return (1,)
    per = {"bit": 8, "block": header["block_size"], "part": header["inside"], "chunk": header["world_size"]}
    return (int(header["line"]) // int(per[spec.per]),)


def _may_lack(frame: Frame, spec: StateTensor, header: Header) -> bool:
    """Return whether a checkpoint may be without: AdamW's has nothing of LAMB's per tensor, or of rounds."""
    if spec.name == MASTER:
        return True
    if frame.wrote(header):
        return not spec.is_in(header)
    return spec.optional or (spec.per == "tensor" and not is_compressed(header))


def _check_entry(frame: Frame, spec: StateTensor, i: int, states: Sequence[State], header: Header) -> None:
    value, expected = states[i][spec.name], _shape(frame, spec, i, header)
    of_rank = has_row_of_each(frame, spec, header)
    if not isinstance(value, Tensor):
        raise TypeError(f"{spec.name} in the checkpoint must be a tensor, got {type(value).__name__}")
    if spec.by_parameter and (shape := tuple(local(value).shape)[2 * of_rank :]) != expected:
        writer, own = header.get("algorithm"), frame.name
        if writer not in (None, own) and shape[2:] == expected:  # of each of its ranks
            raise ValueError(f"the checkpoint is of {writer}, from which {own} can't go on")
        raise ValueError(
            f"checkpoint of another model: {spec.name} of {frame.parameters.names[i]} must have shape {expected}, got "
            f"{shape}"
        )
    if not spec.by_parameter and value.shape[-1:] != expected:
        raise ValueError(f"{spec.name} in the checkpoint must have {expected[0]} columns, got {tuple(value.shape)}")
    if of_rank:
        frame.ranks.rows.check(value, states[0][RANK.name], header["world_size"])


def _for_this_rank(frame: Frame, spec: StateTensor, rows: Tensor, header: Header) -> Tensor:
    """Return what this rank takes of what was saved."""
    if not has_row_of_each(frame, spec, header):
        if spec.by_parameter:
            return local(rows)
        return _cut(_found(frame.ranks.rows.own_of_shard(rows)), spec.tensor.numel())
    as_it_was = header["world_size"] == frame.ranks.rows.shape[0] if spec.by_parameter else frame.cut_alike(header)
    if as_it_was:
        return _found(frame.ranks.rows.own(rows))
    if spec.by_parameter:
        return frame.ranks.rows.mean(rows, header["world_size"])
    return (_share if spec.per == "chunk" else _mean)(frame, rows, header)


def _mean(frame: Frame, rows: Tensor, header: Header) -> Tensor:
    """Return the old workers' mean, of which a rank of a node has a part."""
    inside = frame.cut()["inside"]
    mean = frame.ranks.rows.mean(rows, header["world_size"], header["inside"])
    return _cut(mean, frame.layout.numel).view(inside, -1)[frame.ranks.rows.place[0] % inside]


def _share(frame: Frame, rows: Tensor, header: Header) -> Tensor:
    """Return what this rank serves now: its chunk of each bucket, or of the part that it has of its node's."""
    nodes, parts = header["world_size"] // header["inside"], header["inside"] * header["buckets"]  # one of them is 1
    in_order = frame.ranks.rows.of_this_shard(rows).view(nodes, parts, -1).transpose(0, 1).reshape(-1)
    flat, cut, rank = _cut(in_order, frame.layout.numel), frame.cut(), frame.ranks.rows.place[0]
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
