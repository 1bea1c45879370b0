"""Runs a function on several ranks: threads that share memory (``simulate``), or gloo processes (``run_ranks``).

``simulate`` costs half as much: use it where nothing depends on processes. ``run_ranks`` takes a module-level function,
which each rank calls inside a fresh process group (it meets in a file, on the loopback interface); its return value
comes back. The processes are started once and reused. An exception on any rank is raised in the test with that rank's
traceback; a rank that hangs is killed.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

WORLD_SIZES = (2, 4)


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


def forked() -> ForkServerContext:
    """Starts processes within milliseconds: they are forked from one that has imported all that a rank needs."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["rank_preload"])
    return context


class _Pool:
    def __init__(self) -> None:
        self._workers: list[tuple[ForkServerProcess, Connection]] = []

    def grow(self, count: int) -> list[Connection]:
        context = forked()
        while len(self._workers) < count:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))
        return [connection for _, connection in self._workers[:count]]

    def shut_down(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []


_POOL = _Pool()


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, group_timeout: float = 60.0
) -> list[Any]:
    """Calls ``function(rank, world_size, *args)`` on every rank; returns what each returned."""
    connections = _POOL.grow(world_size)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        for rank, connection in enumerate(connections):
            # By name: pytest's own module objects don't pickle in every import mode.
            job = (function.__module__, function.__qualname__, rank, world_size, store, group_timeout, args)
            connection.send(job)
        results = []
        for rank, connection in enumerate(connections):
            if not connection.poll(timeout):
                _POOL.shut_down()
                raise RankError(f"rank {rank} of {world_size} did not finish within {timeout} s")
            results.append(connection.recv())
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
    if failures:
        _POOL.shut_down()
        raise RankError("\n".join(failures))
    return [value for _, value in results]


def simulate(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Calls ``function(rank, transport, *args)`` on every rank of a ``SimulatedGroup``; returns what each returned.

    Warnings are no errors there, as they are not in ``run_ranks``' processes; ``warned`` records a rank's.
    """
    from fusedonebit.comm import SimulatedGroup

    def show(*warning: Any) -> None:
        _WARNED.get(threading.get_ident(), []).append(warnings.WarningMessage(*warning))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        return SimulatedGroup(world_size).run(lambda rank, transport: function(rank, transport, *args))


_WARNED: dict[int, list[warnings.WarningMessage]] = {}


@contextmanager
def warned() -> Iterator[list[warnings.WarningMessage]]:
    """Records all warnings, on simulated ranks each rank's own, which ``warnings.catch_warnings`` would mix up."""
    if threading.current_thread() is threading.main_thread():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield seen
    else:
        _WARNED[threading.get_ident()] = []
        yield _WARNED[threading.get_ident()]
        del _WARNED[threading.get_ident()]


def shut_down() -> None:
    """Ends the processes."""
    _POOL.shut_down()


def _serve(connection: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            module, name, rank, world_size, store, group_timeout, args = connection.recv()
        except EOFError:
            return
        try:
            function = getattr(importlib.import_module(module), name)
            # A rank that fails at once must not leave while others still connect to it: they would fail of that.
            os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=group_timeout),
            )
            del os.environ["TORCH_DIST_INIT_BARRIER"]
            try:
                result = (True, function(rank, world_size, *args))
            finally:
                dist.destroy_process_group()
        except BaseException:
            result = (False, traceback.format_exc())
        connection.send(result)
