"""What tests share: their options and markers, and the folders from which they and their ranks import helpers."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Before anything imports triton: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Ranks are processes: they import the tests by name, from here.
BELOW = ("tests", "tests/wire", "tests/ptx", "benchmarks/lab/tests")
FOLDERS = [str(Path(__file__).parent / folder) for folder in BELOW]
os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
sys.path[:0] = FOLDERS

if os.environ.get("TRITON_INTERPRET") == "1":
    importlib.import_module("interpreter")

try:
    import hypothesis
except ImportError:  # tests/gpu needs only torch and pytest
    pass
else:
    hypothesis.settings.register_profile("default", deadline=None, print_blob=True, derandomize=True)
    hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run what `make test` leaves out, but for what takes minutes")
    parser.addoption("--full", action="store_true", help="run all tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    later = _later(items)
    of_minutes = {item for item in later if any(marker.kwargs.get("full") for marker in item.iter_markers("long"))}
    if config.getoption("--long"):
        config.hook.pytest_deselected(items=[item for item in items if item not in later - of_minutes])
        items[:] = [item for item in items if item in later - of_minutes]
        return
    minutes = pytest.mark.skip(reason="takes minutes: run `make test-full`")
    seconds = pytest.mark.skip(reason="takes seconds: run `make test-long`")
    for item in items:
        if item.get_closest_marker("full") or item in of_minutes:
            item.add_marker(minutes)
        elif item in later:
            item.add_marker(seconds)


def _later(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of tests marked ``long`` that ``make test`` leaves out; see the marker in pyproject.toml."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("full"):
            cases.setdefault((item.path, item.nodeid.split("[")[0]), []).append(item)
    later: set[pytest.Item] = set()
    for several in cases.values():
        (marker,) = several[0].iter_markers("long")
        but = marker.kwargs.get("but", 0)
        if isinstance(but, int):  # spread over the grid, the first among them
            kept = {several[n * len(several) // but].nodeid for n in range(min(but, len(several)))}
        else:
            kept = {item.nodeid for item in several if item.nodeid.partition("[")[2].removesuffix("]") in but}
        later.update(item for item in several if item.nodeid not in kept)
    return later


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    before = os.environ.get("TRITON_INTERPRET")
    report = yield
    assert os.environ.get("TRITON_INTERPRET") == before, f"{collector.nodeid}: an import switches Triton's interpreter"
    return report


@pytest.fixture(autouse=True)
def _interpreter_stays() -> Iterator[None]:
    """What switches it off would fail hundreds of later tests of the same process, and be none of them."""
    before = os.environ.get("TRITON_INTERPRET")
    yield
    after = os.environ.get("TRITON_INTERPRET")
    if before is not None:
        os.environ["TRITON_INTERPRET"] = before
    assert after == before, "this test has switched Triton's interpreter for its whole process"


@pytest.fixture(scope="session", autouse=True)
def _rank_processes() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    import mpi_ranks
    import ranks

    ranks.shut_down()
    mpi_ranks.shut_down()


@pytest.fixture(scope="session")
def torch_alone() -> Iterator[Any]:
    """Runs programs in forks of a process that has imported torch alone; see ``fresh.Server``."""
    import fresh

    with fresh.Server() as server:
        yield server


def _missing(marker: str) -> str:
    """What tests with a marker lack here, and how to get it; "" if nothing."""
    if marker == "needs_mpi":
        import mpi_ranks

        return mpi_ranks.missing()
    if marker == "needs_browser":
        import report_pages

        return "" if report_pages.BROWSER else "no chromium here: apt-get install chromium"
    from fusedonebit.triton_kernels import native

    return "" if native.library() else f"{native.reason()}: for instance apt-get install gcc; then make test-compiler"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in ("needs_mpi", "needs_compiler", "needs_browser"):
        if item.get_closest_marker(marker) and (missing := _missing(marker)):
            pytest.skip(missing)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    yield  # last, where it is seen
    stats = terminalreporter.stats
    for report in stats.get("passed", []):
        if "full" in report.keywords and report.capstdout:  # how close it was, after minutes
            terminalreporter.write_line(f"{report.nodeid}:\n{report.capstdout.rstrip()}")
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", []))
    lines = [f"SKIPPED: {count} tests: {reason}" for reason, count in reasons.items() if "takes " not in reason]
    kernels = sum("kernels" in report.keywords for report in stats.get("passed", []))
    if kernels and (missing := _missing("kernels")):
        lines.append(f"NOT COMPARED: the C kernels, in {kernels} tests: {missing}")
    for line in lines:
        terminalreporter.write_line(line, red=True, bold=True)


@pytest.fixture
def migrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def run(config: Any) -> tuple[int, str, str]:
        """Status, output and error for a config, or its text."""
        file = tmp_path / "ds_config.json"
        file.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
        from fusedonebit.apps.cli import main

        status = main(["migrate", str(file)])
        told = capsys.readouterr()
        return status, told.out, told.err

    return run
