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
_waiting: dict[int, object] = {}
"""Signals that have arrived, and in which section."""
_section: object = None


class SignalsWait:
    """Calls the handlers of signals that arrive within it when it ends; elsewhere than in the main thread does nothing.

    Two of them within one another are one. Costs two system calls for each signal that has a handler in Python.
    """

    _mine = False

    def __enter__(self) -> None:
        global _section
        if _section is not None or threading.get_ident() != threading.main_thread().ident:
            return
        _section, self._mine = self, True
        try:
            for number in SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler) and handler is not _note:
                    _handlers[number] = handler
                    _signal.signal(number, _note)
        except BaseException:  # of a signal that has arrived before its turn
            self.__exit__()
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


def _note(number: int, frame: Any) -> None:
    if number in _waiting:
        _waiting.pop(number)
        _handlers[number](number, frame)
        return
    _waiting[number] = _section
    # Not a threading.Thread, whose locks the main thread may have at this moment.
    _thread.start_new_thread(_remind, (number, _section))


def _remind(number: int, section: object) -> None:
    patience = TOLD_AFTER if number == _signal.SIGINT else PATIENCE
    time.sleep(patience)
    if _waiting.get(number) is not section:
        return
    if number == _signal.SIGINT:
        text = "\nfusedonebit: finishing the step; Ctrl-C again stops now, and this optimizer can't go on then\n"
        os.write(2, text.encode())
    else:
        _signal.raise_signal(number)
