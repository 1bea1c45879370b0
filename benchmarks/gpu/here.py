"""What there is to plan with, told without torch, which may be what is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache


def cores() -> int:
    """Return how many this process may use."""
    return len(os.sched_getaffinity(0))


@cache
def gpus() -> int:
    """Return how many GPUs programs see here; 1 where nobody tells."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = None if visible is None else [each.strip() for each in visible.split(",")]
    try:
        told = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return 1 if named is None else len(_valid(named, sys.maxsize))
    there = sum(line.startswith("GPU ") for line in told.splitlines())  # parts of one are indented
    return there if named is None else len(_valid(named, there))


def _valid(named: list[str], there: int) -> list[str]:
    """Return those before the first that is none, as CUDA reads them: a number, or an id."""
    for i, name in enumerate(named):
        number = int(name) if name.removeprefix("-").isdigit() else 0 if name else -1
        if not 0 <= number < there:
            return named[:i]
    return named
