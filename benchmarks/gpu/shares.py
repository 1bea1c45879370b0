"""A plugin of pytest (``-p benchmarks.gpu.shares``): takes a share of the tests, smallest first, and notes each.

One case of each function, and of each ``name`` that it is called with, comes before any second, cases in an order that
mixes their parameters, and the largest shapes last, so that a run which is ended has seen something of everything. The
record is replaced at each test: what ends the process ends no other test's result.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ..pages import keep

LARGE = 50_000
"""Elements of a parameter of a test, from which on it comes later."""
LAST = "far"
"""In the name of files of the largest shapes."""
SPARE = 25.0
"""Seconds of a job in which it begins no test: those of its imports and of its last test."""
EVERY = 0.5
"""Seconds between two records, unless a test takes longer."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", default="0/1", help="K/N: of the tests in their order those from the K-th on, each N-th"
    )
    parser.addoption(
        "--most", type=int, default=sys.maxsize, help="cases of each function, and as many of large shapes"
    )
    parser.addoption("--seconds", type=float, help="what the job has; tests that it does not suffice for are left out")
    parser.addoption("--record", type=Path, help="what became of each test, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record"):
        config.pluginmanager.register(_Record(config.getoption("--record")), "gpu-record")
    if config.getoption("--seconds"):
        config.pluginmanager.register(_Limit(config.getoption("--seconds") - SPARE), "gpu-limit")


def elements(parameters: dict[str, Any]) -> int:
    """Of the largest number, or tuple of numbers, among a test's parameters."""
    found = [0]
    for value in parameters.values():
        numbers = value if isinstance(value, tuple) else (value,)
        if all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
            found.append(sum(numbers))
    return max(found)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: Counter[tuple[str, bool]] = Counter()
    keyed = []
    for item in random.Random(0).sample(items, len(items)):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        large = elements(parameters) >= LARGE
        kind = f"{item.nodeid.partition('[')[0]} {parameters.get('name', '')}", large
        keyed.append(((LAST in item.path.stem, large, seen[kind]), item))
        seen[kind] += 1
    share, of = map(int, config.getoption("--share").split("/"))
    ordered = sorted((pair for pair in keyed if pair[0][-1] < config.getoption("--most")), key=lambda pair: pair[0])
    chosen = [item for _, item in ordered][share::of]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


class _Limit:
    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """Take the place of a test for which no time is left: it stays one that was not reached."""
        return True if time.monotonic() > self._ends else None


class _Record:
    def __init__(self, path: Path) -> None:
        self._path, self._written = path, 0.0
        self._tests: dict[str, dict[str, Any]] = {}

    def _write(self, complete: bool = False, at_once: bool = True) -> None:
        if at_once or time.monotonic() - self._written > EVERY:
            keep({"complete": complete, "tests": self._tests}, self._path, str)
            self._written = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tests = {item.nodeid: {"outcome": None} for item in session.items}
        self._write()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tests[nodeid]["running"] = True
        self._write()  # also for the one that ends the process

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests[report.nodeid]
        test["seconds"] = round(test.get("seconds", 0.0) + report.duration, 3)
        if report.when == "call" or report.outcome != "passed":
            outcome = report.outcome if report.when == "call" or report.skipped else "error"
            if test["outcome"] in (None, "passed"):
                test |= (
                    {"outcome": outcome, "message": _message(report)} if outcome != "passed" else {"outcome": outcome}
                )

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tests[nodeid].pop("running", None)
        self._write(at_once=False)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._write(complete=exitstatus in (0, 1))


def _message(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return (f"{crash.message}\n\n" if crash else "") + report.longreprtext[-3000:]
