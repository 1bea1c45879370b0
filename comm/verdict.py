"""Says what ranks make of a step: the flags for which all skip it, what no rank has, and a checksum of what arrived.

A step's flags go one way. ``found`` are this rank's own, which travel in its messages; ``agreed`` are what a server
sees in those of all workers, and passes on; ``flags`` are what all ranks know when servers' messages are there.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout, receive
from ..triton_kernels.nouns import Arrived, Digest, Limit, Side
from ..triton_kernels.receive import spans_of
from .message import Messages, StepContext


class Scaled:
    """Has scales of blocks, as workers or servers keep them; attributes as of ``ErrorFeedback``."""

    segment: Tensor
    measured: Tensor
    scale: Tensor
    settled: Tensor

    @cached_property
    def scales(self) -> Side:
        """Return them as ops take them; nobody asks before all are there."""
        return Side(self.segment, self.measured, self.scale, self.settled)


class Verdict:
    """What ranks make of the present step, or have made of the last one, on the device.

    Args:
        device: Where everything lies.
        digest: int64 [parts] to use; None: nobody compares what has arrived.
        programs: Of the op ``receive``, as many as there are partial sums of the result's square.

    Attributes:
        none: int32 [1], no flag; so are all others, ``Flag`` bits.
        hold: Flags for which the present step changes nothing.
        own, found: This rank's; ``compress`` sets ``found``, which are others' where a round has gathered them.
        agreed: Those that a server has seen in workers' messages.
        of_all: Those of all ranks, which the last launch of a step writes.
        flags: Those of the last step, equal on all ranks; within a step, what is known so far.
        absent: Of which tensors no rank had a gradient, bool [tensors]; None where this rank had all: then there are
            none.
        digest: Checksums of what all ranks have received alike, which the next messages carry: int64 [parts].
        ticket, total, squares: Of the op ``receive``.
    """

    def __init__(self, device: torch.device, digest: Tensor | None, programs: int = 0) -> None:
        self.none, self.own, self.agreed, self.of_all, self.ticket = (
            torch.zeros(1, dtype=torch.int32, device=device) for _ in range(5)
        )
        self.hold, self.found, self.flags = self.none, self.own, self.of_all
        self.absent: Tensor | None = None
        self.digest = digest
        self.total = torch.zeros(1 if digest is None else len(digest), dtype=torch.int64, device=device)
        self.squares = torch.zeros(programs, dtype=torch.float64, device=device)

    def share(self, flags: Tensor) -> None:
        """Keep what all ranks know in ``flags`` int32 [1], beside which other parts have theirs."""
        self.flags = self.of_all = flags

    def receive(
        self, gathered: Messages, served: Messages, sides: tuple[Scaled, Scaled], rank: int, scale: Tensor,
        context: StepContext, limit: Limit | None,
    ) -> None:  # fmt: skip
        """Take up servers' messages: scales of both ``sides``, and of the result, and the flags; see the op."""
        assert self.digest is not None
        worker, server = sides
        # All ranks know the same flags, unless a server's message is of another step or length: then those that
        # have got it skip, and the next step's digests tell the others.
        receive(
            Arrived(gathered.words, served.words, gathered.front if context.sums else gathered.buffer, gathered.scales),
            worker.scales,
            server.scales,
            rank,
            scale,
            self.hold,
            self.of_all,
            Digest(self.digest, self.total, context.updates),
            self.ticket,
            limit,
            None if limit is None else self.squares,
        )


def programs_of(layout: FlatLayout) -> int:
    """Return how many programs of the op ``receive`` take up a layout's messages."""
    return layout.world_size * spans_of(layout.blocks_per_chunk)
