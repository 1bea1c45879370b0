"""Computes how much of a step's messages the backward pass hides.

Messages travel in buckets, one after the other, each as soon as its gradients are complete. The backward pass fills
them at an even pace, so the first is on its way when it is full, and the last can't begin before the pass is over:

    backward pass   [first|  ...  |  ...  |  last]
    messages               [first ][  ...  ][  ...  ][  last]
                                                  [ exposed ]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BACKWARD = 2 / 3
"""Of the compute: a backward pass takes two multiplications where the forward pass takes one (Kaplan et al., 2020,
section 2.1). The optimizer's own part, a few percent, is neglected."""

MIB = 2**20
DDP_FIRST, DDP_OTHERS = 1 * MIB, 25 * MIB
"""Bytes of float32 gradients in a bucket of ``DistributedDataParallel`` (``bucket_cap_mb``), whatever a hook sends."""
OURS = 4
"""Buckets of equal size that ``Wire(overlap=True)`` makes."""


@dataclass(frozen=True)
class Buckets:
    """How messages are cut: into how many, and the shares of the gradient in the first and the last."""

    count: int
    first: float
    last: float

    def exposed(self, messages: float, backward: float) -> float:
        """Return the seconds of ``messages`` that are left when the backward pass of ``backward`` seconds is over.

        Either the network waits for the last bucket, and sends that alone; or it has been busy since the first.
        """
        return max(self.last * messages, messages - (1 - self.first) * backward)


def whole(parameters: float) -> Buckets:
    """Cut nothing: all is sent when the backward pass is over."""
    return Buckets(1, 1.0, 1.0)


def ddp(parameters: float) -> Buckets:
    """Cut as ``DistributedDataParallel`` does by default."""
    nbytes = 4 * parameters
    rest = nbytes - DDP_FIRST
    if rest <= 0:
        return whole(parameters)
    return Buckets(1 + math.ceil(rest / DDP_OTHERS), DDP_FIRST / nbytes, min(rest, DDP_OTHERS) / nbytes)


def ours(parameters: float) -> Buckets:
    """Cut as ``Wire(overlap=True)`` does."""
    return Buckets(OURS, 1 / OURS, 1 / OURS)
