"""Ranks end as their scripts do, and no thread of the process group makes that an abort."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def count(*arguments: str, within: float) -> str:
    """What ``endings.py`` prints last."""
    script = Path(__file__).parents[1] / "endings.py"
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=within)
    assert "terminate called" not in done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.full
@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"), reason="needs a C compiler: install gcc or clang"
)
def test_ranks_whose_threads_are_late_end_without_an_abort():
    told = count("--late", "--runs", "2", "--ranks", "2", "--steps", "2", within=120)
    assert told == "2 runs of 2 ranks: 0 ended by a signal, 0 with an error"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_forty_runs_of_four_ranks_end_without_an_abort():
    told = count("--runs", "40", within=900)
    assert told == "40 runs of 4 ranks: 0 ended by a signal, 0 with an error"
