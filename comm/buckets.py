"""The 1-bit all-reduce in buckets: a few large ranges of the line, each sent as soon as it is there.

A backward pass fills the line from its end. Bucket k can travel while bucket k - 1 is not there yet;
only the first bucket, which comes last, waits for the step: in it every rank hears whether all can take it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout
from .partition import PartedAllReduce, pieces_of
from .transport import LocalTransport, Transport


class BucketedAllReduce(PartedAllReduce):
    """A ``CompressedAllReduce`` of equal ranges of the line, one after the other, or each when it is told to.

    Args:
        layout: The whole line; its ``world_size`` is ``count`` times the transport's.
        count: How many buckets.
        transport: How messages travel; None for world size 1.
        options: See ``CompressedAllReduce``.

    Attributes:
        under_way: Buckets that have been started since the last call, or ``finish``.
    """

    def __init__(self, layout: FlatLayout, count: int, transport: Transport | None = None, **options: Any) -> None:
        self.transport: Transport = transport if transport is not None else LocalTransport()
        super().__init__(layout, count, range(count), self.transport, **options)
        self.under_way: set[int] = set()

    def bucket_of(self) -> list[range]:
        """The buckets in which each tensor lies."""
        length = self.layout.numel // self.count
        buckets = []
        for i, size in enumerate(self.layout.sizes):
            first = self.layout.offset(i)
            buckets.append(range(first // length, -(-(first + size) // length)) if size else range(0))
        return buckets

    def start(
        self,
        bucket: int,
        tensors: Sequence[Tensor],
        *,
        exp_avg_sq: Tensor | None = None,
        missing: Sequence[int] = (),
        **more: Any,
    ) -> None:
        """Averages one bucket; ``finish`` says how it went. All ranks start buckets in the same order.

        Args:
            bucket: Its index.
            tensors: As for ``CompressedAllReduce``; those that do not lie in the bucket are not looked at.
            exp_avg_sq: float32 [P], or None.
            missing: Those of them that this rank has no gradient of.
            more: As for a call of ``CompressedAllReduce``.
        """
        self.under_way.add(bucket)
        v = None if exp_avg_sq is None else exp_avg_sq[self._elements(bucket)]
        # A bucket that was sent earlier knew nothing of tensors outside of it: none speaks for others'.
        missing = [i for i in missing if self.parts[bucket].layout.sizes[i]]
        pieces = pieces_of(tensors, self._spans[bucket], self.layout.sizes)
        self.parts[bucket](pieces, exp_avg_sq=v, missing=missing, **more)

    def finish(self, start: Callable[[int], None]) -> None:
        """Starts, with ``start(bucket)``, all that have not been; then all buckets are skipped, or none."""
        for bucket in reversed(range(self.count)):
            if bucket not in self.under_way:
                start(bucket)
        self.under_way.clear()
        flags = self.parts[0].flags
        for part in self.parts[1:]:
            flags = flags | part.flags
        for part in self.parts:
            part.refuse(flags)
        self.flags = flags
        told = [part.absent for part in self.parts if part.absent is not None]
        self.absent = torch.stack(told).any(0) if told else None

    def __call__(self, tensors: Sequence[Tensor], **options: Any) -> None:
        """All buckets, the last first; see ``CompressedAllReduce``."""
        self.finish(lambda bucket: self.start(bucket, tensors, **options))

    def check_idle(self) -> None:
        """Raises RuntimeError if some buckets have been started and not all: what they were made from is gone."""
        if self.under_way:
            raise RuntimeError(
                f"{len(self.under_way)} of {self.count} buckets have been sent by the backward pass: between it and "
                "step() there is no state that could be saved, loaded or looked at; do that after step()"
            )

    def settle(self) -> None:
        """See ``CompressedAllReduce`` and ``check_idle``."""
        self.check_idle()
        super().settle()

    def take_residuals(self, out: Tensor) -> None:
        """See ``CompressedAllReduce``; one all-reduce for each bucket."""
        for bucket, part in enumerate(self.parts):
            part.take_residuals(out[self._elements(bucket)])
