"""What DistributedDataParallel does with the gradients of an optimizer, with our hook or without."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..comm import Transport
from ..errors import warn


class UnderDdp:
    """What is known of DDP and one optimizer.

    Attributes:
        attached: Whether ``ddp.attach`` has given DDP our hook.
        averaged: Whether that hook has averaged the gradients of the coming step.
        elsewhere: Whether DDP averages gradients without it; None until the first step.
    """

    def __init__(self) -> None:
        self.attached = self.averaged = False
        self.elsewhere: bool | None = None

    def notice(self, owners: Sequence[Tensor], grads: Sequence[Tensor], transport: Transport, compresses: bool) -> bool:
        """Count what DDP has sent without our hook; tell whether that has just been noticed, at the first step."""
        if self.attached:
            return False
        looking, ranks = self.elsewhere is None, transport.world_size
        if looking:
            self.elsewhere = compresses and ranks > 1 and ddp_averages(owners)
        if self.elsewhere:
            transport.traffic.add(2 * sum(g.nbytes for g in grads) * (ranks - 1) // ranks)  # as a ring sends them
        return looking and bool(self.elsewhere)


def ddp_averages(params: Sequence[Tensor]) -> bool:
    """Return whether a ``DistributedDataParallel`` without a communication hook averages gradients of ``params``.

    DDP leaves no mark on parameters that Python sees, so all objects are looked through, once: some 40 ms. There is
    none without a process group, as on simulated ranks.
    """
    if not dist.is_initialized():
        return False
    ours, objects = set(map(id, params)), gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, DistributedDataParallel)}
    found = [each for each in objects if type(each) in kinds] if kinds else []
    # One whose construction has failed lacks some of this. Our hook averages too, where nobody is attached.
    hooks = [(ddp, getattr(ddp, "_comm_hooks", [(None, None)])) for ddp in found]
    found = [ddp for ddp, those in hooks if all(getattr(hook, "averages_as_ddp", False) for _, hook in those)]
    return any(id(p) in ours for ddp in found if ddp.process_group.size() > 1 for p in ddp.parameters())


def warn_of_averages() -> None:
    """Say what to do about gradients that DDP averages before they could be compressed."""
    warn(
        "DistributedDataParallel averages the gradients already, so that compression saves nothing: write "
        "fusedonebit.ddp.attach(model, optimizer) after making both; where compress() averages, detach() it first"
    )
