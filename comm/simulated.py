"""Runs several ranks as threads of one process, on one device: for tests, benchmarks and looking around.

    group = SimulatedGroup(4)
    group.run(lambda rank, transport: train(OneBitAdam(..., process_group=transport)))

On CUDA all ranks must work on the same stream (threads do, unless told otherwise): it orders the copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from .transport import CollectiveError, Pending, Traffic

T = TypeVar("T")


class SimulatedGroup:
    """``world_size`` ranks that meet in shared memory, and wait for each other ``timeout`` seconds at most."""

    def __init__(self, world_size: int, timeout: float = 120.0) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._meeting = threading.Condition()
        self.offers: list[tuple[str, Tensor]] = []

    def transport(self, rank: int) -> SimulatedTransport:
        """Return what rank ``rank`` passes as ``process_group``; for that rank's thread only."""
        return SimulatedTransport(self, rank)

    def run(self, function: Callable[[int, SimulatedTransport], T]) -> list[T]:
        """Calls ``function(rank, transport)`` on a thread per rank; returns what each returned.

        The first error of any rank is raised. Ranks that wait for one that has raised, or returned,
        get a ``CollectiveError``.
        """
        results: list[Any] = [None] * self.world_size
        errors: list[BaseException] = []
        self.offers = [("", Tensor())] * self.world_size
        self._arrived, self._meetings, self._left = 0, 0, False
        self._turn = threading.Semaphore()

        def call(rank: int) -> None:
            self._turn.acquire()
            try:
                results[rank] = function(rank, self.transport(rank))
            except BaseException as error:
                errors.append(error)
            self._turn.release()
            with self._meeting:
                self._left = True
                self._meeting.notify_all()

        with ThreadPoolExecutor(self.world_size) as threads:
            list(threads.map(call, range(self.world_size)))
        if errors:
            raise errors[0]
        return results

    def meet(self, what: str) -> None:
        """Returns once all ranks have called it; CollectiveError if one can't come, or not in time."""
        # One rank computes at a time: threads that fight for the interpreter's lock make 64 ranks ten times slower.
        self._turn.release()
        # Not a threading.Barrier: breaking that can fail ranks that it had already let through.
        with self._meeting:
            number = self._meetings
            self._arrived += 1
            if self._arrived == self.world_size:
                self._arrived, self._meetings = 0, number + 1
                self._meeting.notify_all()
            self._meeting.wait_for(lambda: self._meetings > number or self._left, self.timeout)
            if self._meetings == number:
                why = "another rank has left" if self._left else f"not all ranks came within {self.timeout:g} s"
                raise CollectiveError(f"{what} of {self.world_size} simulated ranks failed: {why}")
        # Not on failure: the rank that did not come may be the one whose turn it is.
        self._turn.acquire()


class SimulatedTransport:
    """The ``Transport`` of one ``rank`` of a ``SimulatedGroup``, ``group``; counts bytes as ``TorchTransport`` does."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self.group, self.rank, self.world_size = group, rank, group.world_size
        self.traffic, self._others = Traffic(), group.world_size - 1

    def offered(self, what: str, sent: Tensor, nbytes: int, alike: bool = True) -> list[Tensor]:
        """Return what all ranks send, once all have come; they may overwrite it after the next meeting."""
        if not self.group.offers:
            raise RuntimeError("simulated ranks can only meet inside SimulatedGroup.run(function)")
        self.group.offers[self.rank] = (what, sent)
        self.group.meet(what)
        kinds = {(name, tensor.dtype, tensor.shape if alike else None) for name, tensor in self.group.offers}
        if len(kinds) > 1:
            called = ", ".join(f"{name} of {t.dtype} {tuple(t.shape)}" for name, t in self.group.offers)
            raise CollectiveError(f"ranks called different collectives: {called}")
        self.traffic.add(nbytes)
        return [tensor for _, tensor in self.group.offers]

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """See ``Transport``."""
        for row, theirs in zip(received, self.offered("all_to_all", sent, sent.nbytes - sent[0].nbytes), strict=True):
            row.copy_(theirs[self.rank])
        self.group.meet("all_to_all")

    def all_gather(self, gathered: Tensor, sent: Tensor) -> None:
        """See ``Transport``."""
        for row, theirs in zip(gathered, self.offered("all_gather", sent, self._others * sent.nbytes), strict=True):
            row.copy_(theirs[0])
        self.group.meet("all_gather")

    def all_reduce(self, tensor: Tensor) -> None:
        """See ``Transport``; adds in rank order."""
        nbytes = 2 * tensor.nbytes * self._others // self.world_size
        first, *others = self.offered("all_reduce", tensor, nbytes)
        total = sum(others, first.clone())
        self.group.meet("all_reduce")
        tensor.copy_(total)

    def reduce_scatter(self, received: Tensor, sent: Tensor) -> None:
        """See ``Transport``; adds in rank order."""
        n = received.numel()
        first, *others = self.offered("reduce_scatter", sent, sent.nbytes - received.nbytes)
        own = slice(self.rank * n, (self.rank + 1) * n)
        received.copy_(sum((other[own] for other in others), first[own].clone()))
        self.group.meet("reduce_scatter")

    def broadcast(self, tensor: Tensor) -> None:
        """See ``Transport``."""
        tensor.copy_(self.offered("broadcast", tensor, 0 if self.rank else tensor.nbytes)[0])
        self.group.meet("broadcast")

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Pending:
        """See ``Transport``; ranks meet when they wait."""
        return _Exchange(self, received, source, sent)

    def __repr__(self) -> str:
        return f"simulated (rank {self.rank} of {self.world_size})"


class _Exchange:
    """What a simulated rank has sent and is about to receive."""

    def __init__(self, transport: SimulatedTransport, received: Tensor, source: int, sent: Tensor) -> None:
        self._transport, self._received, self._source, self._sent = transport, received, source, sent

    def wait(self) -> None:
        """See ``Pending``."""
        theirs = self._transport.offered("exchange", self._sent, self._sent.nbytes, alike=False)
        self._received.copy_(theirs[self._source])
        self._transport.group.meet("exchange")
