"""DistributedDataParallel with an optimizer that averages by itself."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..comm import agree, make_transport
from ..comm.transport import in_flight
from ..core.optimizer import DistributedOptimizer


def attach(model: DistributedDataParallel, optimizer: DistributedOptimizer) -> None:
    """Make DDP average gradients only while the optimizer wants averaged ones.

    In the warm-up DDP's buckets are averaged during the backward pass as ever (in float32; 16-bit
    gradients are rounded again afterwards), and the optimizer does not do it again. It only compares a
    checksum: all ranks must find the same averages in their gradients when they step. In the
    compression stage nothing is sent in the backward pass: the optimizer compresses the local
    gradients. The stage then changes in the backward pass before the step, and what the freeze warns
    of or raises comes from there. ``no_sync()``, ``find_unused_parameters`` and ``static_graph`` work
    as ever. Call it on every rank, once, before the first backward pass.

    Args:
        model: Wrapped by DDP, over the optimizer's ranks.
        optimizer: Any of this package, over all trainable parameters of ``model`` and no others.

    Raises:
        TypeError, ValueError: on every rank, if the two don't belong together.
        RuntimeError: if the optimizer is attached already, or DDP has another communication hook.
    """
    error: Exception | None = None
    try:
        _check(model, optimizer)
    except Exception as caught:
        error = caught
    if isinstance(optimizer, DistributedOptimizer):
        transport, device = optimizer.transport, optimizer.device
    else:  # then the others' optimizers most likely use the default group
        nccl = dist.is_initialized() and "nccl" in dist.get_backend()
        device = torch.device("cuda" if nccl else "cpu")
        transport = make_transport(None, device)
    agree(transport, [], device, error, "attach the same model on every rank")
    optimizer.ddp_attached = True
    optimizer.parameters.name(model.module.named_parameters())
    # DDP refuses hooks whose annotations are text, as all of this file are; a lambda has none.
    model.register_comm_hook(optimizer, lambda optimizer, bucket: _average_in_the_warm_up(optimizer, bucket))


def _check(model: DistributedDataParallel, optimizer: DistributedOptimizer) -> None:
    if not isinstance(optimizer, DistributedOptimizer):
        raise TypeError(f"optimizer must be one of fusedonebit's, got {type(optimizer).__name__}")
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model must be wrapped in DistributedDataParallel, got {type(model).__name__}; attach first, compile then"
        )
    if optimizer.ddp_attached:
        raise RuntimeError(f"this {type(optimizer).__name__} is attached already; call attach() once, before training")
    ours = dict(zip(map(id, optimizer.parameters.owners), optimizer.parameters.names, strict=True))
    named = list(model.module.named_parameters())
    theirs = {id(p): f"{name} of model" for name, p in named if p.requires_grad}
    if late := [name for name, p in named if id(p) in ours and not p.requires_grad]:
        raise ValueError(
            f"parameters must be frozen after attach(), or before the optimizer is made, but {late[0]} was between; "
            "DDP leaves out what is frozen when it is made, and ranks would train it apart once it is unfrozen. For "
            "layers that are unfrozen later: DDP(model, find_unused_parameters=True), attach(), then freeze"
        )
    for key in ours.keys() ^ theirs.keys():
        raise ValueError(
            f"optimizer and model must have the same parameters, but only one has {ours.get(key) or theirs[key]}; "
            "make the optimizer from model.parameters()"
        )
    averaged, compressed = dist.get_process_group_ranks(model.process_group), _ranks(optimizer)
    if averaged != compressed:
        raise ValueError(
            f"model and optimizer must average over the same ranks, got {averaged} and {compressed}; "
            "pass the same process_group to both"
        )


def _group(optimizer: DistributedOptimizer) -> dist.ProcessGroup | None:
    return getattr(optimizer.transport, "group", None)  # a transport of one rank has none


def _ranks(optimizer: DistributedOptimizer) -> list[int]:
    group = _group(optimizer)
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def _average_in_the_warm_up(optimizer: DistributedOptimizer, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    # The stage of the coming step must be known before its gradients are averaged.
    optimizer.begin_step()
    buffer, world_size = bucket.buffer(), optimizer.transport.world_size
    if not optimizer.averages_gradients or world_size == 1:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
    optimizer.averaged = True
    # As ``flatten`` does: divided before the sum, in float32.
    wide = buffer.float().mul_(1.0 / world_size) if buffer.dtype != torch.float32 else buffer.mul_(1.0 / world_size)
    optimizer.transport.traffic.add(2 * wide.nbytes * (world_size - 1) // world_size)
    work = dist.all_reduce(in_flight(wide), group=_group(optimizer), async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
    return averaged
