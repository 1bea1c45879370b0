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

if TYPE_CHECKING:
    from .onebit import OneBitOptimizer

OWN = ("worker_error", "server_error", "rank")


def save(optimizer: OneBitOptimizer) -> dict[str, Tensor]:
    """The lines as rows (``rows.Rows``): bits and scales of the momenta, and this rank's residuals."""
    rows = optimizer._rows
    shared = {name: rows.of_each_shard(line) for name, line in _shared(optimizer).items()}
    return shared | {name: rows.of_each(line) for name, line in _own(optimizer).items()}


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
    own = {"worker_error": reduce.worker.compensated, "server_error": reduce.server.compensated}
    return own | {"rank": optimizer._rows.rank()}


def template(optimizer: OneBitOptimizer, header: Mapping[str, Any]) -> dict[str, Tensor]:
    """Room for the lines of a checkpoint with this header, for ``torch.distributed.checkpoint`` to fill."""
    rows, replicas, numel = optimizer._rows, header["world_size"], header["line"]
    lengths = dict.fromkeys(_planes(optimizer), numel // 8)
    lengths |= {f"{name}_scale": numel // header["block_size"] for name in optimizer._momenta()}
    kinds = _shared(optimizer)
    room = {
        name: rows.of_each_shard(torch.zeros(length, dtype=kinds[name].dtype, device=optimizer.device))
        for name, length in lengths.items()
    }
    worker = torch.zeros(numel, device=optimizer.device)
    server = torch.zeros(numel // replicas, device=optimizer.device)
    rank = torch.zeros_like(rows.rank())
    if replicas == rows.shape[0]:
        return room | {name: rows.of_each(part) for name, part in zip(OWN, (worker, server, rank), strict=True)}
    spread = {"worker_error": rows.spread(replicas, worker), "rank": rows.spread(replicas, rank)}
    return room | spread | {"server_error": rows.whole(replicas, server)}


def check(optimizer: OneBitOptimizer, state: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Raises ValueError or TypeError if the lines in ``state`` are not those of this model on these ranks."""
    numel, replicas = header["line"], header["world_size"]
    if numel < optimizer.layout.first_block[-1] * optimizer.layout.block_size:
        raise ValueError(f"checkpoint of another model: its line has only {numel} elements")
    widths = dict.fromkeys(_planes(optimizer), numel // 8)
    widths |= {f"{name}_scale": numel // header["block_size"] for name in optimizer._momenta()}
    widths |= {"worker_error": numel, "server_error": numel // replicas, "rank": 1}
    for name, width in widths.items():
        if not isinstance(state[name], Tensor):
            raise TypeError(f"{name} in the checkpoint must be a tensor, got {type(state[name]).__name__}")
        if state[name].shape[-1] != width:
            raise ValueError(f"{name} in the checkpoint must have {width} columns, got {tuple(state[name].shape)}")
    for name in ("worker_error", "server_error"):
        optimizer._rows.check(state[name], state["rank"], replicas)


def fill(optimizer: OneBitOptimizer, state: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Takes the lines up, on these ranks; all call it."""
    shared, planes, reduce = _shared(optimizer), _planes(optimizer), optimizer._reduce
    for name, line in shared.items():
        kept = _cut(_here(optimizer._rows.own_of_shard(state[name]), name), 0, line.numel()).to(line)
        target = planes.get(name, line)
        target.copy_(kept.view(target.shape))
    worker, server = reduce.worker.compensated, reduce.server.compensated
    if header["world_size"] == optimizer._rows.shape[0]:
        worker.copy_(_here(optimizer._rows.own(state["worker_error"]), "worker_error"))
        server.copy_(_here(optimizer._rows.own(state["server_error"]), "server_error"))
        return
    mean = optimizer._rows.mean(state["worker_error"], header["world_size"])
    worker.copy_(_cut(mean, 0, worker.numel()))
    line = optimizer._rows.of_this_shard(state["server_error"]).reshape(-1)  # all servers', in the order of the line
    server.copy_(_cut(line, optimizer._rows.place[0] * server.numel(), server.numel()))


def _here(line: Tensor | None, name: str) -> Tensor:
    assert line is not None, name  # ``check`` has seen to it
    return line


def _cut(line: Tensor, start: int, length: int) -> Tensor:
    """``length`` elements of the line from ``start``; beyond its end there is padding."""
    part = line[start : start + length]
    return torch.nn.functional.pad(part, (0, length - len(part)))
