"""Collectives over what all W ranks hold: row w of a tensor [W, ...] is rank w's."""

from __future__ import annotations

from torch import Tensor

from ....comm import Transport


class StackedCollectives:
    """Move tensors between ranks that lie in one process, and count what each rank would send and receive.

    Args:
        transport: Rank 0's; what it sends is counted in its ``traffic``.

    Attributes:
        received: Bytes that rank 0 received.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport, self.world_size, self.received = transport, transport.world_size, 0

    def all_reduce(self, rows: Tensor) -> Tensor:
        """Sum ``rows`` [W, ...] in the order of ranks, rounding to their dtype at each hop; counted as a ring's."""
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        self._count(2 * rows[0].nbytes * (self.world_size - 1) // self.world_size)
        return total

    def all_to_all(self, messages: Tensor) -> Tensor:
        """Send ``messages`` [W, W, ...], by sender and receiver; return them by receiver and sender."""
        self._count(messages[0].nbytes - messages[0, 0].nbytes)
        return messages.transpose(0, 1)

    def all_gather(self, messages: Tensor) -> Tensor:
        """Send each rank's message, a row of ``messages`` [W, ...], to all; return what all then have."""
        self._count((self.world_size - 1) * messages[0].nbytes)
        return messages

    def _count(self, nbytes: int) -> None:
        self.transport.traffic.add(nbytes)
        self.received += nbytes  # in each of these a rank receives as much as it sends
