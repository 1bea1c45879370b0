"""Moves bytes: a small interface, one implementation per library.

A transport moves contiguous tensors between the ranks of one group, counts what it moves, and turns
a failed collective into one error that says what was being done.
"""

from __future__ import annotations

import atexit
import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from .failure_diagnosis import Witness


class CollectiveError(RuntimeError):
    """A collective failed: a rank died, hung, or called something else."""


@dataclass
class Traffic:
    """Counts collectives called and bytes sent to other ranks.

    Attributes:
        bytes_total: In all.
        bytes_step: Since ``start_step``.
        collectives_total: In all.
        collectives_step: Since ``start_step``.
    """

    bytes_total: int = 0
    bytes_step: int = 0
    collectives_total: int = 0
    collectives_step: int = 0

    def start_step(self) -> None:
        """Set the counts per step to zero."""
        self.bytes_step = self.collectives_step = 0

    def add(self, nbytes: int) -> None:
        """Count one collective that sent ``nbytes``."""
        self.bytes_total += nbytes
        self.bytes_step += nbytes
        self.collectives_total += 1
        self.collectives_step += 1


class Pending(Protocol):
    """Something under way."""

    def wait(self) -> None:
        """Return when it has arrived (on CUDA: when what is launched next will find it)."""


@runtime_checkable
class Transport(Protocol):
    """Declares what the collectives need of a communication library."""

    rank: int
    world_size: int
    traffic: Traffic

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Send row w of ``sent`` [W, n] to rank w; row w of ``received`` came from rank w."""

    def all_gather(self, gathered: Tensor, sent: Tensor) -> None:
        """Send ``sent`` [1, n] of every rank to the rows of ``gathered`` [W, n] on all."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over all ranks, in place."""

    def reduce_scatter(self, received: Tensor, sent: Tensor) -> None:
        """Sum ``sent`` [W * n] over all ranks; the w-th n elements of the sum are ``received`` by rank w."""

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's."""

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Pending:
        """Start to send ``sent`` to one rank while ``received`` comes from another, in equal lengths there.

        All ranks exchange at the same time, along a ring. Neither tensor may be touched before ``wait``.
        """


class Waiting:
    """A ``Pending`` that is a function."""

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self.wait = wait


class CountingTransport(Transport):
    """Skeleton of a ``Transport``: a subclass moves in ``_move``; what that moves is counted as a ring sends it."""

    library: str
    """The library's name, for errors."""
    errors: type[Exception] = RuntimeError
    """Those of the library that become ``CollectiveError``."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.traffic = rank, world_size, Traffic()

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        self._call("all_to_all", sent.nbytes - sent[0].nbytes, received, sent)

    def all_gather(self, gathered: Tensor, sent: Tensor) -> None:
        self._call("all_gather", sent.nbytes * (self.world_size - 1), gathered, sent)

    def all_reduce(self, tensor: Tensor) -> None:
        self._call("all_reduce", 2 * tensor.nbytes * (self.world_size - 1) // self.world_size, tensor)

    def reduce_scatter(self, received: Tensor, sent: Tensor) -> None:
        self._call("reduce_scatter", sent.nbytes - received.nbytes, received, sent)

    def broadcast(self, tensor: Tensor) -> None:
        self._call("broadcast", tensor.nbytes if self.rank == 0 else 0, tensor)

    def _call(self, collective: str, nbytes: int, *tensors: Tensor) -> None:
        with self.naming(collective):
            self._move(collective, *tensors)
        self.traffic.add(nbytes)

    def _move(self, collective: str, *tensors: Tensor) -> None:
        """Carry out a collective: on the tensor to receive and the one to send, or on the one that is both."""
        raise NotImplementedError

    @contextmanager
    def naming(self, collective: str, number: int | None = None) -> Iterator[None]:
        """Turn errors in here into ``CollectiveError``, which names the collective and who is missing.

        ``number``: which of this rank's collectives it is; None: the one that is not counted yet.
        """
        try:
            yield
        except self.errors as error:
            traceback.clear_frames(error.__traceback__)  # which hold aliases of tensors
            raise self.failed(collective, error, number) from error

    def failed(self, collective: str, error: Exception, number: int | None = None) -> CollectiveError:
        """Return what to raise where the library says ``error``; ``number`` as for ``naming``."""
        diagnosis = self._diagnose(collective, number or self.traffic.collectives_total + 1)
        return CollectiveError(
            f"{collective} of rank {self.rank} of {self.world_size} failed ({self.library}): {error}\n"
            f"{diagnosis + chr(10) if diagnosis else ''}"
            "Another rank has died, hangs, or does not call step() as often as this one. "
            "Restart all ranks from the last checkpoint."
        )

    def _diagnose(self, collective: str, number: int) -> str:
        """Say what the other ranks do; "" where nobody knows."""
        return ""


class LocalTransport(CountingTransport):
    """World size 1: nothing travels, nothing is counted."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _call(self, collective: str, nbytes: int, *tensors: Tensor) -> None:
        if len(tensors) == 2:
            tensors[0].copy_(tensors[1])

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Pending:
        received.copy_(sent)
        return Waiting()

    def __repr__(self) -> str:
        return "local (world size 1)"


# A collective of gloo runs on a thread of torch's, which releases its tensors a moment after the collective is done.
# Where Python knows a tensor, that takes the interpreter's lock; and if the interpreter ends in that moment, the thread
# is ended within a destructor, and with it the process ("terminate called without an active exception"). On a busy
# machine the moment is long. So collectives are given aliases, and Python's end waits until none is held any more.
_in_flight: set[weakref.ref[Tensor]] = set()


def in_flight(tensor: Tensor) -> Tensor:
    """Return an alias of ``tensor`` to give to a collective, and to nobody else."""
    alias = tensor.detach()
    # Python's object lives as long as anybody holds the alias, on whatever thread.
    _in_flight.add(weakref.ref(alias, _in_flight.discard))
    return alias


@atexit.register
def _wait_for_those_in_flight() -> None:
    deadline = time.monotonic() + 5.0  # a collective that never ends holds its tensors for ever
    while _in_flight and time.monotonic() < deadline:
        time.sleep(0.001)  # which gives up the interpreter's lock


class TorchTransport(CountingTransport):
    """Any ``torch.distributed`` group: NCCL for CUDA tensors, gloo for CPU ones.

    Args:
        group: The process group; None is the default group.
        device: Where the tensors to be moved lie.

    Raises:
        ValueError: if the group has no backend for that device, or this process is not in it.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        world = group if group is not None else dist.group.WORLD
        assert world is not None  # make_transport has seen that torch.distributed is initialised
        self.group = world
        super().__init__(dist.get_rank(world), dist.get_world_size(world))
        if self.rank < 0:
            raise ValueError("process_group must contain this process")
        self.library = _backend_for(self.group, device)
        self.device = device
        self._witness = Witness(self.group, self.rank, self.world_size)

    def apart(self) -> TorchTransport:
        """Return the same ranks over a process group of its own, counted with this one; all of them call it."""
        ranks = dist.get_process_group_ranks(self.group)
        options = getattr(self.group._get_backend(self.device), "options", None)
        timeout = getattr(options, "_timeout", None)
        group = dist.new_group(ranks, timeout=timeout, backend=self.library, use_local_synchronization=True)
        other = TorchTransport(group, self.device)
        other.traffic = self.traffic
        return other

    def _move(self, collective: str, *tensors: Tensor) -> None:
        function = getattr(dist, _FUNCTIONS.get(collective, collective))
        more = {"group_src": 0} if collective == "broadcast" else {}
        function(*map(in_flight, tensors), group=self.group, **more)

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Pending:
        with self.naming("exchange"):
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, group=self.group, group_peer=destination),
                    dist.P2POp(dist.irecv, received, group=self.group, group_peer=source),
                ]
            )
        self.traffic.add(sent.nbytes)
        number = self.traffic.collectives_total

        def wait() -> None:
            with self.naming("exchange", number):
                for work in works:
                    work.wait()

        return Waiting(wait)

    def _diagnose(self, collective: str, number: int) -> str:
        return self._witness.report(collective, number)

    def __repr__(self) -> str:
        return f"torch.distributed {self.library} (rank {self.rank} of {self.world_size})"


def make_transport(group: dist.ProcessGroup | Transport | None, device: torch.device) -> Transport:
    """Return the transport for a group: the default group if there is one, else none is needed.

    Args:
        group: Of ``torch.distributed``; None: the default one, if there is one. A ``Transport`` is returned as it
            is: a simulated rank, or a library of the user's own.
        device: On which tensors are: the group must have a backend for it.

    Raises:
        RuntimeError: if a launcher has started several ranks and ``init_process_group()`` was not called.
        TypeError: if it lacks some of what a ``Transport`` has.
        ValueError: see ``TorchTransport``.
    """
    if isinstance(group, Transport):
        return group
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and group is outside:
        raise ValueError("process_group must contain this process")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        hint = "; pass its get_group()" if hasattr(group, "get_group") else ""
        if hasattr(group, "transport"):
            hint = "; pass its transport(rank)"
        if hasattr(group, "all_gather"):  # meant as a transport
            named = [n for n in vars(Transport) if not n.startswith("_")] + ["rank", "world_size", "traffic"]
            missing = ", ".join(name for name in dict.fromkeys(named) if not hasattr(group, name))
            hint = f", which lacks {missing}; see fusedonebit.comm.Transport"
        raise TypeError(
            f"process_group must be a torch.distributed group or a Transport, got {type(group).__name__}{hint}"
        )
    if group is None and not (dist.is_available() and dist.is_initialized()):
        _check_alone()
        return LocalTransport()
    transport = TorchTransport(group, device)
    return transport if transport.world_size > 1 else LocalTransport()


def _check_alone() -> None:
    """Raise RuntimeError where the environment says that there are other ranks: each would train its own model."""
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and world_size.isdecimal() and int(world_size) > 1:
        raise RuntimeError(
            f"torch.distributed must be initialised, but was not, and this is rank {rank} of {world_size} (RANK and "
            "WORLD_SIZE, as torchrun sets them): each rank would train a model of its own. Call "
            "torch.distributed.init_process_group() first; if that is what you want, pass "
            "process_group=fusedonebit.comm.LocalTransport()"
        )


_FUNCTIONS = {
    "all_to_all": "all_to_all_single",
    # torch 2.13 deprecates the other, and older versions lack it.
    "all_gather": "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
}
"""How ``torch.distributed`` calls what has another name there."""


def _backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    # A group's config reads "cpu:gloo,cuda:nccl", or just the backend's name.
    config = str(dist.get_backend_config(group))
    backends = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    name = backends.get(device.type) or (dist.get_backend(group) if not backends else "")
    if not name or name == "undefined":
        raise ValueError(
            f"process_group must have a backend for {device.type} tensors, got {config}; "
            "use nccl for CUDA parameters and gloo for CPU ones"
        )
    return name
