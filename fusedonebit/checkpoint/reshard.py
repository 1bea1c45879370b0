"""What the compression stage keeps along the whole line of elements, as a checkpoint has it.

A tensor's place on the line depends on the block size alone, not on the number of ranks. So all that is
needed for another number of them is to cut the servers' residuals elsewhere, and to give each new worker
the mean of the old ones' residuals: what was compressed away is still there, all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.reducers import cut_of
from ..core.sharding import local
from ..triton_kernels import FlatLayout

if TYPE_CHECKING:
    from ..optim.two_stage import OneBitOptimizer

OWN = ("worker_error", "server_error", "rank")
SHARED = ("_bits", "_nonzero", "_scale")
"""How names of lines end that all replicas have alike."""


def save(optimizer: OneBitOptimizer) -> dict[str, Tensor]:
    """The lines as rows (``rows.Rows``): bits and scales of the momenta, and this rank's residuals."""
    rows = optimizer._rows
    shared = {name: rows.of_each_shard(line) for name, line in _shared(optimizer).items()}
    # A DTensor that begins somewhere else than its memory does can't be copied.
    own = {name: line.clone() if line.storage_offset() else line for name, line in _own(optimizer).items()}
    return shared | {name: rows.of_each(line) for name, line in own.items()}


def _shared(optimizer: OneBitOptimizer) -> dict[str, Tensor]:
    lines = {name: plane.reshape(-1) for name, plane in _planes(optimizer).items()}
    return lines | {f"{name}_scale": scale for name, (_, scale) in optimizer._momenta().items()}


def _planes(optimizer: OneBitOptimizer) -> dict[str, Tensor]:
    """The planes of its momenta's bits, uint8 [chunks, bytes] each, by the names under which they are saved."""
    planes: dict[str, Tensor] = {}
    for name, (bits, _) in optimizer._momenta().items():
        if bits.dim() == 3:
            planes |= {f"{name}_bits": bits[:, 0], f"{name}_nonzero": bits[:, 1]}
        else:
            planes[f"{name}_bits"] = bits
    return planes


def _own(optimizer: OneBitOptimizer) -> dict[str, Tensor]:
    reduce = optimizer._reduce
    own = {"worker_error": reduce.worker_residual, "server_error": reduce.server_residual.reshape(-1)}
    return own | {"rank": optimizer._rows.rank()}


def template(optimizer: OneBitOptimizer, header: Mapping[str, Any]) -> dict[str, Tensor]:
    """Room for the lines of a checkpoint with this header, for ``torch.distributed.checkpoint`` to fill."""
    rows, replicas = optimizer._rows, header["world_size"]
    widths, kinds = _widths(optimizer, header), _shared(optimizer) | _own(optimizer)
    room = {name: kinds[name].new_zeros(width) for name, width in widths.items()}
    shared = {name: rows.of_each_shard(line) for name, line in room.items() if name not in OWN}
    if _cut_alike(optimizer, header):
        return shared | {name: rows.of_each(room[name]) for name in OWN}
    spread = {name: rows.spread(replicas, room[name]) for name in ("worker_error", "rank")}
    return shared | spread | {"server_error": rows.whole(replicas, room["server_error"])}


def _widths(optimizer: OneBitOptimizer, header: Mapping[str, Any]) -> dict[str, int]:
    """Of each line, how long a row of it is."""
    numel = header["line"]
    widths = dict.fromkeys(_planes(optimizer), numel // 8)
    widths |= {f"{name}_scale": numel // header["block_size"] for name in optimizer._momenta()}
    own = {"worker_error": numel // header["inside"], "server_error": numel // header["world_size"], "rank": 1}
    return widths | own


def _cut_alike(optimizer: OneBitOptimizer, header: Mapping[str, Any]) -> bool:
    return all(header[key] == value for key, value in cut_of(optimizer).items())


def check(optimizer: OneBitOptimizer, state: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Raises ValueError or TypeError if the lines in ``state`` are not those of this model on these ranks."""
    # In the checkpoint's blocks: these ranks' own may be larger, as their padding is.
    if header["line"] < FlatLayout(optimizer._list.sizes, 1, header["block_size"]).numel:
        raise ValueError(f"checkpoint of another model: its line has only {header['line']} elements")
    for name, width in _widths(optimizer, header).items():
        if not isinstance(state[name], Tensor):
            raise TypeError(f"{name} in the checkpoint must be a tensor, got {type(state[name]).__name__}")
        if state[name].shape[-1] != width:
            raise ValueError(f"{name} in the checkpoint must have {width} columns, got {tuple(state[name].shape)}")
    for name in ("worker_error", "server_error"):
        optimizer._rows.check(state[name], state["rank"], header["world_size"])
    if not _cut_alike(optimizer, header) and len(local(state["server_error"])) != header["world_size"]:
        raise ValueError(
            f"the checkpoint was written with {_describe(header)}, but here they are {_describe(cut_of(optimizer))}; "
            "load it through torch.distributed.checkpoint (fusedonebit.dcp), or construct the optimizer as it was"
        )


def _describe(cut: Mapping[str, Any]) -> str:
    return f"{cut['world_size']} ranks, {cut['inside']} in a node, and {cut['buckets']} buckets"


def fill(optimizer: OneBitOptimizer, state: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Takes the lines up, on these ranks; all call it."""
    shared, planes, reduce = _shared(optimizer), _planes(optimizer), optimizer._reduce
    for name, line in shared.items():
        kept = _cut(_here(optimizer._rows.own_of_shard(state[name]), name), 0, line.numel()).to(line)
        target = planes.get(name, line)
        target.copy_(kept.view(target.shape))
    worker, server = reduce.worker_residual, reduce.server_residual
    if _cut_alike(optimizer, header):
        worker.copy_(_here(optimizer._rows.own(state["worker_error"]), "worker_error"))
        server.copy_(_here(optimizer._rows.own(state["server_error"]), "server_error").view(server.shape))
        return
    cut, rank, numel = cut_of(optimizer), optimizer._rows.place[0], optimizer.layout.numel
    mean = optimizer._rows.mean(state["worker_error"], header["world_size"], header["inside"])
    mean = _cut(mean, 0, numel).view(cut["inside"], -1)
    worker.copy_(mean[rank % cut["inside"]])
    rows = optimizer._rows.of_this_shard(state["server_error"])
    served = _cut(in_order(rows, header), 0, numel)
    server.copy_(_served(served, cut, rank).view(server.shape))


def in_order(rows: Tensor, cut: Mapping[str, Any]) -> Tensor:
    """All servers' residuals in the order of the line, from their rows [ranks, n]; see ``_served``."""
    nodes, inside, buckets = cut["world_size"] // cut["inside"], cut["inside"], cut["buckets"]
    if inside > 1:
        return rows.view(nodes, inside, -1).transpose(0, 1).reshape(-1)
    return rows.view(nodes, buckets, -1).transpose(0, 1).reshape(-1)


def _served(line: Tensor, cut: Mapping[str, Any], rank: int) -> Tensor:
    """What of a line one rank serves: its chunk of each bucket, or of the part that it has of its node's."""
    inside, world_size = cut["inside"], cut["world_size"]
    if inside > 1:
        return line.view(inside, world_size // inside, -1)[rank % inside, rank // inside]
    return line.view(cut["buckets"], world_size, -1)[:, rank]


def _here(line: Tensor | None, name: str) -> Tensor:
    assert line is not None, name  # ``check`` has seen to it
    return line


def _cut(line: Tensor, start: int, length: int) -> Tensor:
    """``length`` elements of the line from ``start``; beyond its end there is padding."""
    part = line[start : start + length]
    return torch.nn.functional.pad(part, (0, length - len(part)))
