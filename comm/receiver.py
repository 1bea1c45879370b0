"""Takes up what servers have sent, in one launch, of one part of the index space or of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout, receive
from ..triton_kernels.nouns import Arrived, Digest
from ..triton_kernels.receive import spans_of
from .error_feedback import Scaled
from .feedback import FeedbackReducer
from .message import Messages, StepContext
from .transport import Transport


class Receiver(FeedbackReducer):
    """Skeleton of what takes up the messages of all parts that are here together.

    Attributes:
        transport: Between the servers.
        worker: This rank's worker.
        server: Its server, of the chunk of each part which it serves.
        sides: The worker, and the server where there is one; what the last compresses is the result.
        served: The server's messages, one for each part.
        hold: int32 [1], flags for which the present step changes nothing.
    """

    layout: FlatLayout
    device: torch.device
    transport: Transport
    worker: Scaled
    server: Scaled
    served: Messages
    hold: Tensor
    _no_flags: Tensor

    def make_room(self, parts: int) -> None:
        """Allocate what ``receive`` needs for so many parts."""
        device = self.device
        self._received, self._ticket = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        self.flags = self._received
        self._total = torch.zeros(parts, dtype=torch.int64, device=device)
        programs = self.layout.world_size * spans_of(self.layout.blocks_per_chunk)
        self._squares = torch.zeros(programs, dtype=torch.float64, device=device)

    @property
    def sides(self) -> Sequence[Scaled]:
        """Return the worker, and the server where there is one; what the last compresses is the result."""
        raise NotImplementedError

    def receive(self, context: StepContext) -> None:
        assert self.digest is not None
        limit = self._limit(context)
        summed = self.gathered.front if context.sums else self.gathered.buffer
        # All ranks know the same flags, unless a server's message is of another step or length: then those that
        # have got it skip, and the next step's digests tell the others.
        receive(
            Arrived(self.gathered.words, self.served.words, summed, self.gathered.scales),
            self.worker.scales,
            self.server.scales,
            self.transport.rank,
            self.scale,
            self.hold,
            self._received,
            Digest(self.digest, self._total, context.updates),
            self._ticket,
            limit,
            None if limit is None else self._squares,
        )
        self._end(context)

    def _end(self, context: StepContext) -> None:
        """Take note of what the last launch of a synchronisation has found."""
        self.flags = self._received
        self.hold = self._no_flags
        if self.shards.count > 1:
            self._skip_with_shards(context)
            self._refuse_beyond(context.limit)

    def refuse(self, flags: Tensor) -> None:
        kept = ((self.flags != 0) | (flags == 0)).float()
        self.flags |= flags
        for scale in (self.scale, self.sides[-1].scale):
            scale *= kept
