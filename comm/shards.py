"""Adds up over ranks that hold different shards of the same tensors.

Where a model is sharded (FSDP2), each rank compresses with those that hold the same shard as it does.
What an optimizer must know of a whole tensor, or of all of them, is added up here: a few numbers per
tensor, never values of elements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..triton_kernels.headers import union
from .transport import LocalTransport, Transport


class ShardGroup:
    """Adds up over the ranks that together hold all shards of one replica.

    Args:
        transport: Between them; None where every rank holds everything.

    Attributes:
        count: How many shards there are; 1: everything is here.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self.transport: Transport = LocalTransport() if transport is None else transport
        self.count = self.transport.world_size

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the shards, in their order: of the shape and dtype of ``values``, equal on all ranks."""
        return values if self.count == 1 else self._gathered(values).sum(0).view_as(values)

    def max(self, values: Tensor) -> Tensor:
        """Return maxima over the shards: of the shape and dtype of ``values``."""
        return values if self.count == 1 else self._gathered(values).amax(0).view_as(values)

    def union(self, flags: Tensor) -> Tensor:
        """Return all flags that any of them has set: int32 [1], from int32 [1]."""
        return flags if self.count == 1 else union(self._gathered(flags)[:, 0])

    def unite(
        self, flags: Tensor, tag: int | Tensor, absent: Tensor | None, tensors: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the flags int32 [1] that any shard has set, and the ``absent`` bool [tensors] in all; one exchange.

        ``MISMATCH`` is set where tags differ. ``absent`` tensors have no gradient in any replica; None: there are none.
        """
        if self.count == 1:
            return flags, absent
        here = flags.new_zeros(tensors) if absent is None else absent.int()
        rows = self._gathered(torch.cat([flags, torch.empty_like(flags).fill_(tag), here]))
        flags = union(rows[:, 0], rows[:, 1] != rows[0, 1])
        return flags, None if absent is None else rows[:, 2:].bool().all(0)

    def _gathered(self, values: Tensor) -> Tensor:
        row = values.reshape(1, -1).contiguous()
        rows = torch.empty(self.count, row.shape[1], dtype=row.dtype, device=row.device)
        self.transport.all_gather(rows, row)
        return rows


class ModelGroup:
    """Adds up over all ranks that hold parts of one model.

    Args:
        groups: This rank's, from inside out: each adds up what those before it have.
    """

    def __init__(self, *groups: ShardGroup) -> None:
        self.groups = groups

    @property
    def count(self) -> int:
        """Return how many ranks these are; 1: everything is here."""
        return math.prod(group.count for group in self.groups)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in their order: of the shape and dtype of ``values``, equal on all."""
        for group in self.groups:
            values = group.sum(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Return maxima over the ranks: of the shape and dtype of ``values``."""
        for group in self.groups:
            values = group.max(values)
        return values

    def unite(self, flags: Tensor, tag: int | Tensor) -> Tensor:
        """Return the flags int32 [1] that any rank has set, and ``MISMATCH`` where tags differ."""
        for group in self.groups:
            flags, _ = group.unite(flags, tag, None, 0)
        return flags
