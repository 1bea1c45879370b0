"""Runs several ranks as threads of one process, on one device: for tests, benchmarks and experiments.

    group = SimulatedGroup(4)
    group.run(lambda rank, transport: train(OneBitAdam(..., process_group=transport)))

On CUDA all ranks must work on the same stream (threads do, unless told otherwise): it orders the copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from .transport import CollectiveError, CountingTransport, Pending, Waiting

T = TypeVar("T")


class SimulatedGroup:
    """Joins ``world_size`` ranks in shared memory, which wait for each other ``timeout`` seconds at most."""

    def __init__(self, world_size: int, timeout: float = 120.0) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._meeting = threading.Condition()
        self.offers: list[tuple[str, Tensor]] = []

    def transport(self, rank: int) -> SimulatedTransport:
        """Return what rank ``rank`` passes as ``process_group``; for that rank's thread only."""
        return SimulatedTransport(self, rank)

    def run(self, function: Callable[[int, SimulatedTransport], T]) -> list[T]:
        """Call ``function(rank, transport)`` on a thread per rank; return what each returned.

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
        """Return once all ranks have called it; CollectiveError if one has left, or is late."""
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


class SimulatedTransport(CountingTransport):
    """The ``Transport`` of one ``rank`` of a ``SimulatedGroup``, ``group``; counts bytes as ``TorchTransport`` does."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        super().__init__(rank, group.world_size)
        self.group = group

    def _offered(self, what: str, sent: Tensor, alike: bool = True) -> list[Tensor]:
        """Return what all ranks send, once all have come; they may overwrite it after the next meeting."""
        if not self.group.offers:
            raise RuntimeError("simulated ranks can only meet inside SimulatedGroup.run(function)")
        self.group.offers[self.rank] = (what, sent)
        self.group.meet(what)
        kinds = {(name, tensor.dtype, tensor.shape if alike else None) for name, tensor in self.group.offers}
        if len(kinds) > 1:
            called = ", ".join(f"{name} of {t.dtype} {tuple(t.shape)}" for name, t in self.group.offers)
            raise CollectiveError(f"ranks called different collectives: {called}")
        return [tensor for _, tensor in self.group.offers]

    def _call(self, collective: str, nbytes: int, *tensors: Tensor) -> None:
        received, sent = tensors[0], tensors[-1]
        theirs = self._offered(collective, sent)
        self.traffic.add(nbytes)
        if collective == "all_to_all":
            result = torch.stack([rows[self.rank] for rows in theirs])
        elif collective == "all_gather":
            result = torch.cat(theirs)
        elif collective == "broadcast":
            result = theirs[0].clone()
        else:  # sums, in rank order
            own = slice(self.rank * received.numel(), (self.rank + 1) * received.numel())
            first, *others = [each[own] for each in theirs] if collective == "reduce_scatter" else theirs
            result = sum(others, first.clone())
        self.group.meet(collective)
        received.copy_(result)

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Pending:
        def wait() -> None:  # ranks meet when they wait
            theirs = self._offered("exchange", sent, alike=False)
            self.traffic.add(sent.nbytes)
            received.copy_(theirs[source])
            self.group.meet("exchange")

        return Waiting(wait)

    def __repr__(self) -> str:
        return f"simulated (rank {self.rank} of {self.world_size})"
