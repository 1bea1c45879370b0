"""What W workers' signs make together, on the wire of the 1-bit all-reduce (distributed Lion, Liu et al., 2024)."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from .allreduce import CompressedAllReduce
from .message import Word

Aggregation = Literal["majority", "mean"]

CHAIR = 0.5
"""What one vote weighs more than the others: it decides where they tie, and nowhere else."""


class SignVote(CompressedAllReduce):
    """The majority of signs, or their mean; a caller writes its own signs into ``to_servers.bits`` beforehand.

    Majority: one bit each way, and nothing is kept. Where the votes tie the chair's counts, which is another worker
    in each step: a tie that always were +1 would let coordinates drift. Mean: servers send the mean's signs and
    scales, with error feedback on their side.

    Args:
        arguments: ``layout`` and ``transport``, as for ``CompressedAllReduce``.
        aggregation: "majority" or "mean".
        options: As for ``CompressedAllReduce``. ``compensated`` is left alone.
    """

    def __init__(self, *arguments: Any, aggregation: Aggregation, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.aggregation = aggregation
        if aggregation == "majority":  # nothing is left of a vote
            self.server.compensated = self.server.compensated.new_empty(0)

    def vote(
        self,
        turn: Tensor,
        *,
        tag: int,
        abort: bool,
        hold: Tensor | None,
        flags: Tensor,
        number: int | Tensor | None = None,
    ) -> None:
        """One exchange; see ``CompressedAllReduce``.

        Args:
            turn: int64 [], equal on all ranks, says whose chair it is: updates done.
            tag: See ``CompressedAllReduce``.
            abort: See there.
            hold: See there.
            flags: int32 [1], this rank's.
            number: See ``CompressedAllReduce``.
        """
        chair = int(self.aggregation == "majority") * CHAIR
        mine = (turn + self.transport.rank) % self.layout.world_size == 0

        def compress() -> None:  # the bits are there
            self.to_servers.scales.copy_((1.0 + chair * mine).expand_as(self.to_servers.scales))
            self.to_servers.words[:, Word.FLAGS] = 0

        self._exchange(compress, tag, abort, hold, flags, number)

    def _serve(self, hold: Tensor) -> None:
        super()._serve(hold)
        if self.aggregation == "majority":
            self.server.scale.fill_(1.0)
            self.served.scales.fill_(1.0)

    @property
    def server_residual(self) -> Tensor:
        """That of the chunk which it serves: float32 [P / W]; of a majority zeros, made for who asks."""
        kept = self.server.compensated
        return kept if self.aggregation == "mean" else kept.new_zeros(self.layout.chunk_numel)
