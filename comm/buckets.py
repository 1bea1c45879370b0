"""Averages a line that is cut into parts; in buckets, each sent as soon as it is there.

Each part has a ``CompressedAllReduce`` of its own; its messages become rows of one buffer, so that kernels find the
signs of the whole result in one place, as if there were no parts.

A backward pass fills the line from its end. Bucket k can travel while bucket k - 1 is not there yet; only the first
bucket, which comes last, waits for the step: in it every rank hears whether all can take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout, LiveTable, ScaleScope, block_table, live_table
from .allreduce import CompressedAllReduce
from .message import Messages, union
from .partition import Part
from .reducer import Compress, FeedbackReducer, Told
from .shards import ShardGroup
from .transport import LocalTransport, Transport


class PartedAllReduce(FeedbackReducer):
    """Skeleton of a ``FeedbackReducer`` in parts.

    Args:
        layout: The whole line, with as many chunks as all parts have.
        count: Into how many parts it is cut.
        here: Those that this rank takes part in.
        transport: Between the ranks that average a part.
        device, scale_norm, scale_scope, compensated, live, ternary, shards: See ``CompressedAllReduce``.
    """

    shares_messages = True
    """Whether the messages of a part that is here are rows of ``gathered``."""

    def __init__(
        self,
        layout: FlatLayout,
        count: int,
        here: Sequence[Part],
        transport: Transport,
        *,
        device: torch.device,
        scale_norm: str,
        scale_scope: ScaleScope,
        compensated: Tensor,
        live: LiveTable | None = None,
        ternary: bool = False,
        shards: ShardGroup | None = None,
    ) -> None:
        self.layout, self.device, self.count = layout, device, count
        self.shards = shards or ShardGroup()
        slots = [Part(layout, i, count).layout.scale_slots(scale_scope) for i in range(count)]
        self._slot = torch.cat([slot for slot, _ in slots]).view(layout.world_size, -1).to(device)
        most = max(n for _, n in slots)
        self.gathered = Messages(layout.world_size, most, layout, device, ternary)
        self.block_tensor = block_table(layout, device)
        self.scale = torch.zeros(layout.n_blocks, device=device)
        self._served = torch.zeros(len(here), layout.chunk_numel, device=device)
        self.worker_residual = compensated
        self.flags = torch.zeros(1, dtype=torch.int32, device=device)
        self._parts = [
            CompressedAllReduce(
                part.layout,
                transport,
                device=device,
                scale_norm=scale_norm,
                scale_scope=scale_scope,
                compensated=compensated[part.elements],
                ternary=ternary,
                part=part,
                gathered=self.gathered.rows(part.chunks, part.layout)
                if self.shares_messages
                else Messages(transport.world_size, most, part.layout, device, ternary),
                scale=self.scale[part.blocks],
                served=served,
            )
            for part, served in zip(here, self._served, strict=True)
        ]
        self.kept = []
        self.set_live(live_table(layout).to(device) if live is None else live)

    def set_live(self, live: LiveTable) -> None:
        self.live = live
        for each in self.parts:
            each.set_live(each.part.live(live))

    def refuse(self, flags: Tensor) -> None:
        for part in self.parts:
            part.refuse(flags)
        self.scale *= ((self.flags != 0) | (flags == 0)).float()
        self.flags = self.flags | flags

    @property
    def parts(self) -> list[CompressedAllReduce]:
        return self._parts

    @property
    def server_residual(self) -> Tensor:
        return self._served


class BucketedAllReduce(PartedAllReduce):
    """A ``CompressedAllReduce`` of equal ranges of the line, one after the other, or each when it is told to.

    Args:
        layout: The whole line; its ``world_size`` is ``count`` times the transport's.
        count: How many buckets.
        transport: How messages travel; None for world size 1.
        options: See ``CompressedAllReduce``.

    Attributes:
        under_way: Buckets that have been started since the last step.
    """

    def __init__(self, layout: FlatLayout, count: int, transport: Transport | None = None, **options: Any) -> None:
        self.transport: Transport = transport if transport is not None else LocalTransport()
        super().__init__(layout, count, [Part(layout, i, count) for i in range(count)], self.transport, **options)
        self.under_way: set[int] = set()

    def start(self, bucket: int, compress: Compress, told: Told) -> None:
        """Average one bucket; ``synchronise`` averages the others. All ranks start buckets in the same order."""
        self.under_way.add(bucket)
        part = self.parts[bucket]
        # A bucket that was sent earlier knew nothing of tensors outside of it: none speaks for others'.
        part.synchronise(compress, told._replace(missing=[i for i in told.missing if part.layout.sizes[i]]))

    def synchronise(self, compress: Compress, told: Told) -> None:
        """Average the buckets that have not been started, the last first; all are skipped, or none."""
        for bucket in reversed(range(self.count)):
            if bucket not in self.under_way:
                self.start(bucket, compress, told)
        self.under_way.clear()
        flags = union(torch.cat([part.flags for part in self.parts]))
        for part in self.parts:
            part.refuse(flags)
        self.flags = flags
        absent = [part.absent for part in self.parts if part.absent is not None]
        self.absent = torch.stack(absent).any(0) if absent else None
        self._skip_with_shards(told)

    def check_idle(self) -> None:
        """Raise RuntimeError if some buckets have been started and not all: what they were made from is gone."""
        if self.under_way:
            raise RuntimeError(
                f"{len(self.under_way)} of {self.count} buckets have been sent by the backward pass: between it and "
                "step() there is no state that could be saved, loaded or looked at; do that after step()"
            )

    def settle(self) -> None:
        self.check_idle()
        super().settle()

    def take_residuals(self, out: Tensor) -> None:
        for each in self.parts:
            each.take_residuals(out[each.part.elements])
