"""Runs a function on real MPI ranks, in processes that ``mpirun`` starts once and that are reused.

As ``ranks`` does for gloo: a test gives ``run_mpi`` a module-level function, each rank calls it with an
``MPITransport``, and its return value comes back. A smaller world is a part of the started one.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from ranks import RankError

LARGEST_WORLD = 4
LOADS = "from mpi4py import rc; rc.initialize = False; from mpi4py import MPI"

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # More ranks than cores, in a container, whoever runs it: of Open MPI 4, and of 5; others don't mind.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    # Containers forbid to read another process' memory, and nothing need listen to the outside.
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMPI_MCA_btl_tcp_if_include": "lo",
}


@cache
def missing() -> str:
    """What MPI tests lack here, and how to get it; "" if nothing."""
    if shutil.which("mpirun") is None:
        return "Open MPI is not installed: apt-get install openmpi-bin; then make test-mpi"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: make test-mpi installs it"
    loads = subprocess.run([sys.executable, "-c", LOADS], stderr=subprocess.DEVNULL)
    return "mpi4py finds no MPI library: apt-get install openmpi-bin" if loads.returncode else ""


def start_mpi(world_size: int, command: Sequence[str], **options: Any) -> subprocess.Popen:
    """``mpirun`` of Python with these arguments, in a process group of its own, for ``end`` to end."""
    return subprocess.Popen(
        ["mpirun", "-n", str(world_size), sys.executable, *command],
        env=os.environ | ENVIRONMENT,
        start_new_session=True,
        text=True,
        **options,
    )


def end(process: subprocess.Popen) -> None:
    """Ends ``mpirun`` and all that it has started."""
    # mpirun ends its ranks, each the leader of a group of its own, if it is asked and not killed.
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            return


class _Pool:
    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._connections: list[Connection] = []

    def start(self) -> list[Connection]:
        if self._process is not None:
            return self._connections
        with tempfile.TemporaryDirectory() as folder, Listener(os.path.join(folder, "socket")) as listener:
            listener._listener._socket.settimeout(1)
            self._process = start_mpi(LARGEST_WORLD, [__file__, listener.address])
            accepted: list[Connection] = []
            deadline = time.monotonic() + 120
            while len(accepted) < LARGEST_WORLD:
                with contextlib.suppress(TimeoutError):
                    accepted.append(listener.accept())
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.shut_down()
                    raise RankError("mpirun's ranks have ended, or did not start within 120 s; see what they wrote")
            by_rank = {_receive(connection): connection for connection in accepted}
        self._connections = [by_rank[rank] for rank in range(LARGEST_WORLD)]
        return self._connections

    def shut_down(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._process is not None:
            end(self._process)
        self._process, self._connections = None, []


_POOL = _Pool()


def run_mpi(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls ``function(rank, transport, *args)`` on every rank; returns what each returned."""
    connections = _POOL.start()
    for connection in connections:
        _send(connection, (function.__module__, function.__qualname__, world_size, args))
    results = []
    for rank, connection in enumerate(connections):
        if not connection.poll(timeout):
            failures = [text for ok, text in results if not ok]
            _POOL.shut_down()
            raise RankError("\n".join([f"rank {rank} of {world_size} did not finish within {timeout} s", *failures]))
        results.append(_receive(connection))
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
    if failures:
        _POOL.shut_down()
        raise RankError("\n".join(failures))
    return [value for _, value in results[:world_size]]


def shut_down() -> None:
    """Ends the processes."""
    _POOL.shut_down()


# Pickled here: a connection's own pickler sends tensors as handles of shared memory, for children only.
def _send(connection: Connection, thing: object) -> None:
    connection.send_bytes(pickle.dumps(thing))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _serve(address: str) -> None:
    import torch
    from mpi4py import MPI

    from fusedonebit.comm import Traffic
    from fusedonebit.comm.mpi import MPITransport

    torch.set_num_threads(1)
    transports: dict[int, MPITransport] = {}
    with Client(address) as connection:
        rank = MPI.COMM_WORLD.Get_rank()
        _send(connection, rank)
        while True:
            try:
                module, name, world_size, args = _receive(connection)
            except EOFError:
                return
            try:
                if world_size not in transports:
                    taken = MPI.COMM_WORLD.Split(0 if rank < world_size else MPI.UNDEFINED, rank)
                    transports[world_size] = MPITransport(taken) if rank < world_size else None
                transport, result = transports[world_size], (True, None)
                if transport is not None:
                    transport.traffic = Traffic()
                    result = (True, getattr(importlib.import_module(module), name)(rank, transport, *args))
            except BaseException:
                result = (False, traceback.format_exc())
            _send(connection, result)


if __name__ == "__main__":
    _serve(sys.argv[1])
