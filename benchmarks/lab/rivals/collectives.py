"""Collectives over what all W ranks hold: row w of a tensor [W, ...] is rank w's."""

from __future__ import annotations

from torch import Tensor

from fusedonebit.comm import Transport


class StackedCollectives:
    """Move tensors between ranks that lie in one process, and count what a rank sends and receives, on average.

    Args:
        transport: Rank 0's; what is sent is counted in its ``traffic``.

    Attributes:
        received: Bytes that a rank received.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport, self.world_size, self.received = transport, transport.world_size, 0

    def all_reduce(self, rows: Tensor) -> Tensor:
        """Sum ``rows`` [W, ...] in the order of ranks, rounding to their dtype at each hop; counted as a ring's."""
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        self._count(2 * rows[0].nbytes)
        return total

    def all_to_all(self, messages: Tensor, unused: int = 0) -> Tensor:
        """Send ``messages`` [W, W, ...], by sender and receiver; return them by receiver and sender.

        Of a sender's W messages together ``unused`` bytes only make them equally long, and are not counted.
        """
        self._count(messages[0].nbytes - unused)
        return messages.transpose(0, 1)

    def all_gather(self, messages: Tensor, unused: int = 0) -> Tensor:
        """Send each rank's message, a row of ``messages`` [W, ...], to all; return what all then have.

        Of all of them together ``unused`` bytes only make them equally long, and are not counted.
        """
        self._count(messages.nbytes - unused)
        return messages

    def _count(self, nbytes: int) -> None:
        """Count all but a W-th of ``nbytes``: that stays where it is."""
        nbytes = nbytes * (self.world_size - 1) // self.world_size
        self.transport.traffic.add(nbytes)
        self.received += nbytes  # in each of these a rank receives as much as it sends
