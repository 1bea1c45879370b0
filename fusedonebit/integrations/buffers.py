"""Buffers, such as BatchNorm's running statistics, made equal on all ranks: gradients alone don't do that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..comm import LocalTransport, ShardGroup, Transport, agree, make_transport
from ..core.consensus import failure
from ..core.optimizer import DistributedOptimizer, frame_of
from ..core.options import is_int
from ..core.sharding import group_of, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def broadcast_buffers(
    model: nn.Module,
    optimizer: DistributedOptimizer | None = None,
    *,
    every: int | None = None,
    process_group: dist.ProcessGroup | Transport | DeviceMesh | None = None,
) -> RemovableHandle | None:
    """Overwrite the buffers of ``model`` with rank 0's, as ``DistributedDataParallel`` does; all ranks call it.

    Without DDP each rank's BatchNorm follows its own data, and running statistics part from rank to rank. Buffers of
    all dtypes travel as bytes in one message, after 32 bytes in which ranks compare names, shapes and dtypes.

    Args:
        model: Whose buffers, whatever their dtypes; those that are not saved with the model are among them.
        optimizer: Any of this package, to broadcast over its ranks (and those with its other shards).
        every: Do it again after each ``every``-th step of ``optimizer``; None: only now.
        process_group: The ranks, where there is no ``optimizer``; as for an optimizer.

    Returns:
        With ``every``, a handle: its ``remove()`` ends it.

    Raises:
        TypeError, ValueError: for bad arguments.
        DisagreementError: on every rank, naming the first buffer that differs in shape or dtype; none was changed.

    Example::

        fusedonebit.broadcast_buffers(model, optimizer, every=100)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    named = [(name, local(buffer)) for name, buffer in model.named_buffers()]
    device = next((buffer.device for _, buffer in named), torch.device("cpu"))
    inside = ShardGroup()
    if optimizer is None:
        if every is not None:
            raise ValueError(
                f"every counts an optimizer's steps: pass optimizer=, or leave it out, got every={every!r}"
            )
        ranks = make_transport(group_of(process_group), device)
    else:
        frame = frame_of(optimizer)
        if frame is None:
            raise TypeError(f"optimizer must be one of fusedonebit's, got {type(optimizer).__name__}")
        if process_group is not None:
            raise ValueError("process_group must be None where optimizer is given: its ranks are meant")
        if every is not None and not (is_int(every) and every >= 1):
            raise ValueError(f"every must be an int >= 1 or None, got {every!r}")
        ranks, inside, device = frame.ranks.transport, frame.ranks.shards, frame.device
    _broadcast(named, ranks, inside, device)
    if optimizer is None or every is None:
        return None
    steps = 0

    def after_step(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps % every == 0:
            _broadcast([(name, local(buffer)) for name, buffer in model.named_buffers()], ranks, inside, device)

    return optimizer.register_step_post_hook(after_step)


@torch.no_grad()
def _broadcast(named: Sequence[tuple[str, Tensor]], ranks: Transport, inside: ShardGroup, device: torch.device) -> None:
    """Send over ``ranks`` from their rank 0, then ``inside`` a replica from its first shard: from one rank to all."""
    levels = [each for each in (ranks, inside.transport) if not isinstance(each, LocalTransport)]
    error = failure(lambda: _check(named))
    facts = [(f"buffer {name}", f"{buffer.dtype} {tuple(buffer.shape)}") for name, buffer in named]
    hint = "build the same model on every rank"
    for level in levels:
        error = failure(lambda level=level, error=error: agree(level, facts, device, error, hint))  # type: ignore[misc]
    if error is not None:
        raise error
    if not named or not levels:
        return
    flat = torch.cat([_bytes(buffer).to(device) for _, buffer in named])
    for level in levels:
        level.broadcast(flat)
    lengths = [buffer.nbytes for _, buffer in named]
    for (_, buffer), part in zip(named, flat.split(lengths), strict=True):
        # Cloned, or its memory might begin where a number of this dtype must not.
        buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _check(named: Sequence[tuple[str, Tensor]]) -> None:
    for name, buffer in named:
        if nn.parameter.is_lazy(buffer) or buffer.layout is not torch.strided or buffer.device.type == "meta":
            raise ValueError(f"buffer {name} must be dense and have memory, got {buffer.layout} on {buffer.device}")


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.contiguous().view(-1).view(torch.uint8)
