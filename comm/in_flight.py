"""Waits, at Python's end, for tensors that the threads of a communication library still hold.

A collective of gloo runs on a thread of torch's, which lets go of its tensors a moment after the collective is done.
Where Python knows a tensor, that takes the interpreter's lock; and if the interpreter ends in that moment, the thread
is ended within a destructor, and with it the process ("terminate called without an active exception"). On a busy
machine the moment is long. So collectives are given aliases, and Python's end waits until nobody holds one any more.
"""

from __future__ import annotations

import atexit
import time
import weakref

from torch import Tensor

LIMIT = 5.0
"""Seconds that the end of Python waits at most: a collective that never ends holds its tensors for ever."""

_in_flight: set[weakref.ref[Tensor]] = set()


def in_flight(tensor: Tensor) -> Tensor:
    """Return an alias of ``tensor`` to give to a collective, and to nobody else."""
    alias = tensor.detach()
    # Python's object lives as long as anybody holds the alias, on whatever thread.
    _in_flight.add(weakref.ref(alias, _in_flight.discard))
    return alias


@atexit.register
def _wait() -> None:
    deadline = time.monotonic() + LIMIT
    while _in_flight and time.monotonic() < deadline:
        time.sleep(0.001)  # which gives up the interpreter's lock
