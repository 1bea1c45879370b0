"""Counts W workers' votes, on the wire of the 1-bit all-reduce (distributed Lion, Liu et al., 2024)."""

from __future__ import annotations

from typing import Any, Literal

from .allreduce import CompressedAllReduce

Aggregation = Literal["majority", "mean"]


class SignVote(CompressedAllReduce):
    """Vote on signs: their majority, or their mean. ``compress`` writes a worker's to ``to_servers.bits``.

    Majority: one bit each way, and nothing is kept. Where votes tie the tie breaker's counts, which is another worker
    in each step: a tie that always were +1 would let coordinates drift. Mean: servers send the mean's signs and
    scales, with error feedback on their side.

    Args:
        arguments: ``layout`` and ``transport``, as for ``CompressedAllReduce``.
        aggregation: "majority" or "mean".
        options: As for ``CompressedAllReduce``. ``compensated`` is left alone.

    Attributes:
        weights: float32 [W, slots], which ``compress`` writes; None where all votes weigh 1.
    """

    def __init__(self, *arguments: Any, aggregation: Aggregation, **options: Any) -> None:
        measures = (False, aggregation == "mean")  # workers' scales are the weights of votes
        super().__init__(*arguments, scale_norm="contractive", scale_scope="block", measures=measures, **options)
        self.aggregation = aggregation
        self.weights = self.to_servers.scales if aggregation == "majority" else None
        self.to_servers.scales.fill_(1.0)
        if aggregation == "majority":  # nothing is left of a vote
            self.server.compensated = self.server.compensated.new_empty(0)
            self.server.measured.fill_(1.0)
            self.served.scales.fill_(1.0)

    def residual_ratio(self) -> float:
        """Return what servers keep, as if all kept as much as this one, over the last result; waits for the device."""
        if not len(self.server.compensated):
            return 0.0
        update = float(self.result().norm())
        return self.server.norms()[1] * self.transport.world_size**0.5 / update if update > 0 else 0.0

    def norms(self) -> tuple[float, float, float]:
        """Return the norms of ``FeedbackReducer.norms``; workers keep nothing."""
        return 0.0, 0.0, self.server.norms()[1] if len(self.server.compensated) else 0.0
