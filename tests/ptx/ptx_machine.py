"""Builds the emulator with the machine's C++ compiler, and runs programs on memory of this process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ptx_instructions import cpp
from ptx_program import DTYPE, Program

SOURCE = Path(__file__).with_name("emulator.cpp")
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-ffp-contract=off")
NOTES = ("the same again from another ", "an unused load of what is stored by another ")
"""What several warps or blocks do to one word without a barrier between, and what makes it no fault."""
MOST = 10**9  # instructions of warps: more than any launch of tests takes


class Order(IntEnum):
    """In which order blocks run, and warps between two barriers; or some blocks at once, as a seed draws it."""

    FORWARD = 0
    BACKWARD = 1
    MIXED = 2


class Range(NamedTuple):
    """Bytes that a kernel may read, and write if it says so; no two overlap."""

    low: int
    high: int
    writable: bool


def compiler() -> str:
    """Returns the path of a C++ compiler, or "" if there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), "")


@cache
def _library() -> ctypes.CDLL:
    cases = cpp()
    named = hashlib.sha256((SOURCE.read_text() + cases + compiler()).encode()).hexdigest()[:16]
    folder = Path(__file__).parents[2] / "build" / "ptx"
    built = folder / f"emulator-{named}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            Path(unfinished, "instructions.inc").write_text(cases)
            made = Path(unfinished, "emulator.so")
            subprocess.run([compiler(), *FLAGS, f"-I{unfinished}", str(SOURCE), "-o", str(made)], check=True)
            os.replace(made, built)
    library = ctypes.CDLL(str(built))
    assert library.size_of_instruction() == DTYPE.itemsize
    return library


def execute(
    program: Program,
    params: Sequence[int],
    grid: int,
    ranges: Sequence[Range],
    order: Order = Order.FORWARD,
    *,
    shared: int = 0,
    seed: int = 0,
    most: int = MOST,
) -> list[str]:
    """Runs a kernel; returns what is wrong with it, and ``NOTES``: an item for each line of the PTX and kind.

    A load of what another warp stores gets garbage: it is unused if what the kernel leaves is right all the same.

    Args:
        program: The kernel.
        params: Its arguments, addresses among them, as bits.
        grid: Blocks.
        ranges: All that it may touch, sorted.
        order: Of blocks and warps.
        shared: Bytes of shared memory.
        seed: Of a mixed order.
        most: Instructions of warps, after which it is stopped.
    """
    given = np.array([*(param % 2**64 for param in params), 0], np.uint64)
    allowed, said = np.array(ranges, np.uint64), ctypes.create_string_buffer(1 << 14)
    launch = [
        *(program.code.ctypes.data, program.registers, len(program.constants), program.constants.ctypes.data),
        *(given.ctypes.data, program.threads // 32, grid, shared, allowed.ctypes.data, len(ranges)),
        *(order, seed, most, ctypes.addressof(said), len(said)),
    ]
    _library().execute((ctypes.c_int64 * len(launch))(*launch))  # ``Launch`` of the emulator
    faults = (line.split(" ", 2) for line in said.value.decode().splitlines())
    return [f"{what}, {times} times, {program.where(int(line))}" for line, times, what in faults]
