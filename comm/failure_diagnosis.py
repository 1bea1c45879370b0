"""Finds out, after a collective has failed, which ranks have caused it.

Nothing of this runs while all goes well, but for one short note when a transport is made. Ranks whose
collective has failed tell each other so through the store in which the process group has met, wait a
moment for the others' notes, and name those that have left none.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

PATIENCE = 3.0
"""Seconds that a failed rank waits for the others' notes, and for the store itself."""

T = TypeVar("T")

Place = tuple[Any, ...]
"""A collective's name, its number among this transport's, and the transport's number among the group's."""


class Witness:
    """Tells the other ranks of a process group what this one, ``rank`` of ``world_size``, has seen."""

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self.rank, self.others = rank, frozenset(range(world_size)) - {rank}
        self._store = store = _prefixed_store(group)
        self._serial = 0
        if store is not None:
            _guarded(lambda: self._introduce(store))

    def _introduce(self, store: dist.Store) -> None:
        """Store this rank's machine and process, to be looked up once it is dead; count the group's transports."""
        self._serial = store.add(f"serial/{self.rank}", 1)
        store.set(f"home/{self.rank}", json.dumps([_machine(), os.getpid()]))

    def report(self, collective: str, number: int) -> str:
        """Leave a note that this rank's ``collective``, the ``number``-th, has failed; return who has caused it.

        Returns:
            Sentences that name ranks that are dead, stopped, silent or elsewhere; "" if nothing is known. Takes
            ``PATIENCE`` seconds at most, and raises nothing: the error that is being explained is more important.
        """
        if (store := self._store) is None:
            return ""
        here: Place = (collective, number, self._serial)
        gone: dict[int, str] = {}  # what is wrong with the processes of ranks on the same machine
        noted: dict[int, Place] = {}  # where the others have failed

        def look_around() -> bool:
            """Look until each rank has left a note, or is known to be unable to, or it is late."""
            deadline = time.monotonic() + 0.8 * PATIENCE
            store.set(f"failed/{self.rank}", json.dumps(here))
            while True:
                for rank in sorted(self.others - noted.keys()):
                    home = f"home/{rank}"
                    if store.check([f"failed/{rank}"]):
                        noted[rank] = tuple(json.loads(store.get(f"failed/{rank}")))
                        gone.pop(rank, None)
                    elif state := _state_of_process(store.get(home) if store.check([home]) else b""):
                        gone[rank] = state
                if not self.others - gone.keys() - noted.keys() or time.monotonic() > deadline:
                    return True
                time.sleep(0.05)

        finished = bool(_guarded(look_around))
        return " ".join(_sentences(here, gone, noted, sorted(self.others - gone.keys() - noted.keys()), finished))


def _sentences(
    here: Place, gone: dict[int, str], noted: dict[int, Place], silent: Sequence[int], finished: bool
) -> list[str]:
    """Say what is known, the surest first; ``finished``: whether the store has answered to the end."""
    said = [f"Rank {rank} {state}." for rank, state in sorted(gone.items())]
    if silent and (finished or gone or noted):
        who = f"Rank {silent[0]}" if len(silent) == 1 else f"Ranks {', '.join(map(str, silent))}"
        why = "may still wait for this collective" if gone else "dead, hanging, busy, or still waiting"
        said.append(f"{who} gave no sign within {PATIENCE:g} s: {why}.")
    if silent and not finished:
        who = "the rank that hosts it (mostly 0) may be dead"
        said.append(f"The process group's store does not answer either: {who}.")
    # Others fail behind a dead rank, a hop earlier or later: that says nothing.
    return said or [_elsewhere(rank, there, here) for rank, there in sorted(noted.items()) if there != here]


def _elsewhere(rank: int, there: Place, here: Place) -> str:
    of = "of another optimizer" if there[2] != here[2] else f"its collective {there[1]}"
    return f"Rank {rank} failed in {there[0]}, {of}; here it was {here[0]}, collective {here[1]}."


_asking: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _guarded(call: Callable[[], T]) -> T | None:
    """Return what ``call`` does; None if it raises, or takes too long: a store may hang with the rank that hosts it."""
    results: list[T] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception:  # what a store raises depends on its kind; all mean that nobody can be asked
            return

    thread = threading.Thread(target=run, daemon=True)
    _asking.add(thread)
    thread.start()
    thread.join(PATIENCE)
    return results[0] if results else None


@atexit.register
def _wait() -> None:
    # A thread that comes back from the store while Python ends would end the process with SIGABRT.
    deadline = time.monotonic() + PATIENCE
    for thread in tuple(_asking):
        thread.join(max(0.0, deadline - time.monotonic()))


def _prefixed_store(group: dist.ProcessGroup) -> dist.Store | None:
    try:
        store = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"fusedonebit/{group.group_name}", store)
    except Exception:  # a group that was made without one
        return None


# ---------------------------------------------------------------- processes of the same machine


EXITING = 0x4
"""Of Linux's flags of a process (``PF_EXITING``)."""


def _machine() -> str:
    """Equal only where a process id means the same process; processes in containers have their own."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""  # not Linux: nothing is said of processes


def _state_of_process(home: bytes) -> str:
    """Say what is wrong with the process of a rank that lives here; "" if nothing is, or nobody knows."""
    machine, pid = json.loads(home) if home else ("", 0)
    if not machine or machine != _machine():
        return ""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *numbers = file.read().rpartition(")")[2].split()
        ended = state in "ZX" or bool(int(numbers[5]) & EXITING)  # that closes its connections first
    except (OSError, ValueError):
        ended, state = True, ""
    if ended:
        return f"has died: its process {pid} is gone"
    return f"is stopped: its process {pid} does not run" if state in "Tt" else ""
