"""Keeps what has been measured of a record that is not complete yet, so that an interrupted lab goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..pages import keep, read

FOLDER = Path(__file__).parents[2] / "runs" / "netlab"


class Parts:
    """Results by what was asked for, in a file that each new one is added to; None: nowhere.

    What is asked for is all that a result follows from, but for the code: who changes that begins afresh.
    """

    def __init__(self, path: Path | None = FOLDER / "parts.json", afresh: bool = False) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: dict[str, Any] = {}
        if path is not None and path.exists() and not afresh:
            self._known = read(path)

    def get(self, asked: Any, make: Callable[[], Any]) -> Any:
        """Return what is known of what is ``asked``, or make and keep it."""
        key = json.dumps(asked)
        if key not in self._known:
            self.put(asked, make())
        return self._known[key]

    def has(self, asked: Any) -> bool:
        return json.dumps(asked) in self._known

    def put(self, asked: Any, found: Any) -> None:
        """Keep a result."""
        with self._lock:
            self._known[json.dumps(asked)] = found
            if self._path is not None:
                keep(self._known, self._path)

    def forget(self) -> None:
        """Remove the file: its results are in a record."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
