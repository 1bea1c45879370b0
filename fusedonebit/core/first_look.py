"""Whether gradients arrive averaged already, seen at the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Transport
from ..errors import warn

LOOKS = 3
"""In how many steps gradients are looked at that say nothing: zeros, or not finite."""


class FirstLook:
    """Compares the ranks' gradients, in the first step that has any: 16 bytes to each rank.

    ``DistributedDataParallel`` leaves no mark on parameters. But gradients of different data are never equal on all
    ranks, bit for bit, unless somebody has averaged them.

    Args:
        transport: Between the ranks.
        compresses: Whether averages made beforehand leave nothing to save; else there is nothing to look for.

    Attributes:
        averaged: Whether all ranks had the same.
        pending: Whether nothing is known yet; the same on all ranks.
    """

    def __init__(self, transport: Transport, compresses: bool) -> None:
        self._transport = transport
        self._left = LOOKS if compresses and transport.world_size > 1 else 0
        self.averaged = False

    @property
    def pending(self) -> bool:
        """Whether to look at the coming step's gradients."""
        return self._left > 0

    def look(self, grads: Sequence[Tensor]) -> None:
        """Compares this step's gradients; every rank calls it. Waits for the device."""
        norms = torch.stack(torch._foreach_norm(list(grads), 1, torch.float32))
        places = torch.arange(1, 2 * len(norms), 2, device=norms.device)
        told = (norms.view(torch.int32) * places).sum()
        row = torch.stack([told, (norms.isfinite().all() & norms.any()).long()])
        rows = row.new_empty(self._transport.world_size, 2)
        self._transport.all_gather(rows, row[None])
        sums, says = rows.T.tolist()
        self._left = 0 if all(says) else self._left - 1
        self.averaged = all(says) and len(set(sums)) == 1

    def sent(self, grads: Sequence[Tensor]) -> int:
        """Bytes that averaging ``grads`` beforehand has sent from this rank, as a ring sends them; 0 if nobody has."""
        ranks = self._transport.world_size
        return 2 * sum(g.nbytes for g in grads) * (ranks - 1) // ranks if self.averaged else 0


def warn_of_averages() -> None:
    """Says what to do about gradients that are the same on all ranks."""
    warn(
        "all ranks had the same gradients at the first step: something has averaged them already, so that compression "
        "saves nothing, or all ranks see the same data. With DistributedDataParallel write "
        "fusedonebit.ddp.attach(model, optimizer) after making both"
    )
