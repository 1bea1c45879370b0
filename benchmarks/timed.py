"""A transport that notes when its rank is inside of a collective, whatever library carries the messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fusedonebit.comm import Traffic, Transport
from fusedonebit.comm.transport import Pending


class Timed:
    """Another transport, and from when until when this rank was in its calls.

    Args:
        transport: What the messages go by.

    Attributes:
        spans: Of each call, and of each wait for an exchange, ``time.perf_counter`` at its begin and end.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank, self.world_size = transport.rank, transport.world_size
        self.spans: list[tuple[float, float]] = []

    @property
    def traffic(self) -> Traffic:
        """The other transport's."""
        return self._transport.traffic

    @property
    def seconds(self) -> float:
        """In all spans."""
        return sum(end - begin for begin, end in self.spans)

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        result = call(*arguments)
        self.spans.append((began, time.perf_counter()))
        return result

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """See ``Transport``."""
        self._call(self._transport.all_to_all, received, sent)

    def all_gather(self, gathered: Tensor, sent: Tensor) -> None:
        """See ``Transport``."""
        self._call(self._transport.all_gather, gathered, sent)

    def all_reduce(self, tensor: Tensor) -> None:
        """See ``Transport``."""
        self._call(self._transport.all_reduce, tensor)

    def reduce_scatter(self, received: Tensor, sent: Tensor) -> None:
        """See ``Transport``."""
        self._call(self._transport.reduce_scatter, received, sent)

    def broadcast(self, tensor: Tensor) -> None:
        """See ``Transport``."""
        self._call(self._transport.broadcast, tensor)

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Pending:
        """See ``Transport``."""
        return _TimedPending(self, self._call(self._transport.exchange, received, source, sent, destination))


class _TimedPending:
    def __init__(self, transport: Timed, pending: Pending) -> None:
        self._transport, self._pending = transport, pending

    def wait(self) -> None:
        self._transport._call(self._pending.wait)
