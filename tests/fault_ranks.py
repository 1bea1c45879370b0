"""Ranks that may die: real gloo processes, forked from one that has imported everything, so that they are cheap.

A rank trains a small model, saves every second step, and, if it is the victim, kills, stops or tampers with
itself at one point of one step. The others tell how their step ended, and stay until all have told.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from observe import fingerprint, give_gradients, named
from ranks import forked
from torch import Tensor
from torch.nn import Parameter

from fusedonebit import CollectiveError, Faults, MarsitSGD, OneBitAdam, Rounds
from fusedonebit.comm import TorchTransport
from fusedonebit.comm.transport import Pending
from fusedonebit.core.optimizer import DistributedOptimizer

WORLD_SIZE = 4
STEPS = 9
GROUP_TIMEOUT = 5.0
CLOSING = 1.0  # seconds, on a busy machine
DIED = "died"


@dataclass(frozen=True)
class Fault:
    """What the victim does to itself, and where: ``method`` "" is before its step's first collective.

    ``call`` counts the calls of ``method`` in that step. ``when`` is "before", "within" (under way) or "after" it, or
    "saving" (half a file is written). ``how`` is "kill", "stop", or bytes by which its message is longer (or shorter).
    """

    name: str
    step: int
    method: str = ""
    call: int = 0
    when: str = "before"
    how: str | int = "kill"


class Doomed(TorchTransport):
    """A rank's transport that brings the fault about when its step has come."""

    fault: Fault | None = None

    def arm(self, fault: Fault) -> None:
        self.fault, self._calls = fault, 0
        if not fault.method and fault.when != "saving":
            fall(fault)

    @contextmanager
    def _around(self, method: str) -> Iterator[bool]:
        """Yields whether the fault belongs into this call."""
        fault = self.fault
        due = fault is not None and fault.method == method and fault.call == self._calls
        self._calls = getattr(self, "_calls", 0) + (fault is not None and fault.method == method)
        if due and fault.when == "before" and isinstance(fault.how, str):
            fall(fault)
        yield due
        if due and fault.when == "after":
            fall(fault)

    def _resized(self, tensor: Tensor) -> Tensor:
        """As ``tensor``, but each row is longer or shorter."""
        other = torch.ones(len(tensor) if tensor.dim() > 1 else 1, tensor.shape[-1] + int(self.fault.how))
        other = other.to(tensor.dtype)
        width = min(other.shape[-1], tensor.shape[-1])
        other[:, :width] = tensor.view(len(other), -1)[:, :width]
        return other if tensor.dim() > 1 else other[0]

    def _call(self, collective: str, nbytes: int, *tensors: Tensor) -> None:
        with self._around(collective) as due:
            if due and self.fault.when == "within":
                dist.all_reduce(*tensors, group=self.group, async_op=True)
                fall(self.fault)
            if due and isinstance(self.fault.how, int):
                tensors = tuple(map(self._resized, tensors))
            super()._call(collective, nbytes, *tensors)

    def exchange(self, received: Tensor, source: int, sent: Tensor, destination: int) -> Pending:
        with self._around("exchange") as due:
            if due and isinstance(self.fault.how, int):
                received, sent = self._resized(received), self._resized(sent)
            pending = super().exchange(received, source, sent, destination)
            if due and self.fault.when == "within":
                fall(self.fault)
            if due and self.fault.when == "after":
                pending.wait()
            return pending


def fall(fault: Fault) -> None:
    """Ends or stops this process, which notices nothing."""
    os.kill(os.getpid(), signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)


# ---------------------------------------------------------------- training


def make(name: str, transport: TorchTransport | None) -> tuple[DistributedOptimizer, list[Parameter]]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in ((40, 30), (7,))]
    if name == "onebit-adam":
        return OneBitAdam(params, 1e-3, freeze_step=3, process_group=transport, faults=Faults(guard="off")), params
    rounds = Rounds(full_precision_every=4)
    return MarsitSGD(params, 1e-2, rounds=rounds, topology=name, process_group=transport), params


def latest(folder: Path) -> int:
    """The last step of which every rank has a whole file; 0 if there is none."""
    whole = [f for f in folder.glob("step-*") if len(list(f.glob("rank-*.pt"))) == WORLD_SIZE]
    return max((int(f.name.removeprefix("step-")) for f in whole), default=0)


def save(optimizer: DistributedOptimizer, params: list[Parameter], path: Path, fault: Fault | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    torch.save({"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, partial)
    if fault is not None and fault.when == "saving":
        whole = partial.read_bytes()
        partial.write_bytes(whole[: len(whole) // 2])
        fall(fault)
    os.replace(partial, path)


def train(rank: int, name: str, folder: Path, fault: Fault | None = None, victim: int = -1) -> dict[str, Any]:
    """Trains from the last checkpoint to the last step, or to the first that fails; tells how it ended."""
    dist.barrier()  # until here a busy machine may take its time
    transport = Doomed(dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT)), torch.device("cpu"))
    optimizer, params = make(name, transport)
    first = latest(folder)
    if first:
        state = torch.load(folder / f"step-{first}" / f"rank-{rank}.pt", weights_only=True)
        with torch.no_grad():
            for p, saved in zip(params, state["params"], strict=True):
                p.copy_(saved)
        optimizer.load_state_dict(state["optimizer"])
    for step in range(first, STEPS):
        give_gradients(optimizer, rank, step)
        before, start = fingerprint(params), time.perf_counter()
        due = fault if fault is not None and step == fault.step and rank == victim else None
        try:
            if due is not None:
                transport.arm(due)
            optimizer.step()
        except Exception as error:
            waited = time.perf_counter() - start
            return autopsy(optimizer, params, error, before == fingerprint(params), step) | {"waited": waited}
        if (step + 1) % 2 == 0:
            save(optimizer, params, folder / f"step-{step + 1}" / f"rank-{rank}.pt", due)
    return {"params": fingerprint(params), "state": state_of(optimizer), "first": first}


def state_of(optimizer: DistributedOptimizer) -> str:
    """Of this rank's whole state."""
    states = sorted(optimizer.state_dict()["state"].items())
    return fingerprint([torch.as_tensor(v) for _, state in states for _, v in sorted(state.items())])


def autopsy(
    optimizer: DistributedOptimizer, params: list[Parameter], error: Exception, still: bool, step: int
) -> dict[str, Any]:
    """How a step failed, and what may be done with the optimizer afterwards."""
    counted = optimizer.stats()["step"] == step
    later = []
    # After an error that it has raised on all ranks an optimizer may go on: then a step here would wait for others.
    for call in (optimizer.step, optimizer.state_dict) if isinstance(error, CollectiveError) else ():
        later.append(": ".join(named(call)))
    return {
        "step": step,
        "kind": type(error).__name__,
        "message": str(error),
        "still": still and counted,
        "later": later,
        "params": fingerprint(params),
    }


# ---------------------------------------------------------------- processes


class Ranks:
    """The processes of one run; ``results`` has what each returned, or None where it has died or stopped."""

    def __init__(self, function: Callable[..., Any], *args: Any, init: str = ""):
        context = forked()
        self._folder = tempfile.TemporaryDirectory()
        init = init or f"file://{self._folder.name}/store"
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []
        for rank in range(WORLD_SIZE):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, function, rank, init, args), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def results(self, within: float, victim: int | None = None) -> list[Any]:
        """What each rank returned, ``DIED``, or None; ends them all, after ``within`` seconds at the latest.

        The ``victim`` is waited for as long as a killed one needs to close its end: survivors see that it exits before
        it has. One that has stopped never does.
        """
        deadline = time.monotonic() + within
        told: list[Any] = [None] * WORLD_SIZE
        for rank in sorted(range(WORLD_SIZE), key=lambda rank: rank == victim):
            connection = self._ranks[rank][1]
            try:
                if connection.poll(CLOSING if rank == victim else max(0.0, deadline - time.monotonic())):
                    told[rank] = connection.recv()
            except EOFError:
                told[rank] = DIED
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._folder.cleanup()
        for rank, result in enumerate(told):
            if isinstance(result, str) and result != DIED:
                raise AssertionError(f"rank {rank}:\n{result}")
        return told


def _serve(connection: Connection, function: Callable[..., Any], rank: int, init: str, args: tuple) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=WORLD_SIZE)
        result = function(rank, *args)
    except BaseException:
        result = traceback.format_exc()
    connection.send(result)
    # A rank that ends closes its connections, which the others notice: here nobody may be helped by that.
    time.sleep(3600)
