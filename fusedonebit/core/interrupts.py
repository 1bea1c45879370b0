"""Lets signals wait while something is done that must not be done by half.

A handler may raise, as Ctrl-C's does, between any two lines of Python. Within ``SignalsWait`` it is called at the end
instead. A second signal of the kind is handled at once: a collective that hangs can be left.
"""

from __future__ import annotations

# ``signal``'s functions make enumerations of what they return, ten times as slowly.
import _signal  # type: ignore[import-not-found]
import _thread
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = [
    int(getattr(_signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(_signal, name)
]
"""Those whose handlers raise in programs that exist; profilers', and those that ask for nothing, are not held up."""

TOLD_AFTER = 1.0
"""Seconds after which somebody who has pressed Ctrl-C is told what it waits for."""

PATIENCE = 10.0
"""Seconds that any other signal waits at most: an alarm that ends what hangs comes once."""

_handlers: dict[int, Any] = {}
"""The user's, while signals wait."""
_waiting: dict[int, FrameType | None] = {}
"""Signals that have arrived, and in which section."""
_section: FrameType | None = None
"""The frame in which signals wait. If that has ended, another exception has left ``__exit__`` half-way."""


class SignalsWait:
    """Calls the handlers of signals that arrive within it when it ends; elsewhere than in the main thread does nothing.

    Two of them within one another are one. Costs two system calls for each signal that has a handler in Python.
    """

    _mine = False

    def __enter__(self) -> None:
        global _section
        frame = sys._getframe(1)
        if threading.get_ident() != threading.main_thread().ident or (_section is not None and _is_within(frame)):
            return
        _section, self._mine = frame, True
        try:
            for number in SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler) and handler is not _note:
                    _handlers[number] = handler
                    _signal.signal(number, _note)
        except BaseException:  # of a signal that has arrived before its turn
            SignalsWait.__exit__(self)
            raise

    def __exit__(self, *_: object) -> None:
        global _section
        error: BaseException | None = None
        while self._mine:
            try:
                for number, handler in [*_handlers.items()]:
                    if _signal.getsignal(number) is _note:  # else somebody has set another one meanwhile
                        _signal.signal(number, handler)
                    del _handlers[number]
                    if number in _waiting:
                        del _waiting[number]
                        handler(number, sys._getframe())
                _section, self._mine = None, False
            except BaseException as caught:  # the handlers of others are still to be put back
                error = caught
        if error is not None:
            raise error


class Whole(SignalsWait):
    """Also calls ``close`` with whatever exception ends it early."""

    def __init__(self, close: Callable[[BaseException], None]) -> None:
        self._close = close

    def __exit__(self, *raised: Any) -> None:
        if raised[1] is not None:
            self._close(raised[1])
        super().__exit__()


def _is_within(frame: FrameType | None) -> bool:
    while frame is not None and frame is not _section:
        frame = frame.f_back
    return frame is not None


def _note(number: int, frame: FrameType | None) -> None:
    if number in _waiting or not _is_within(frame):
        _waiting.pop(number, None)
        _handlers[number](number, frame)
        return
    _waiting[number] = _section
    # Not a threading.Thread, whose locks the main thread may have at this moment.
    _thread.start_new_thread(_remind, (number, _section))


def _remind(number: int, section: FrameType | None) -> None:
    patience = TOLD_AFTER if number == _signal.SIGINT else PATIENCE
    time.sleep(patience)
    if section is None or _waiting.get(number) is not section:
        return
    if number == _signal.SIGINT:
        text = "\nfusedonebit: finishing the step; Ctrl-C again stops now, and this optimizer can't go on then\n"
        os.write(2, text.encode())
    else:
        _signal.pthread_kill(threading.main_thread().ident, number)  # which wakes it where it sleeps
