"""Executes what whole steps launch as PTX: ``make test-ptx``. No GPU is needed, but a C++ compiler.

Takes the steps of ``whole_steps`` on small tensors. What is compiled is kept where Triton keeps it, for
``benchmarks.tritons`` as well. Exits with 1 where a launch differs, or is wrong by itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import whole_steps
from ptx_launches import Found, Launches, compiling
from ptx_machine import compiler
from ranks import run_ranks, shut_down

from benchmarks.tritons import installed
from fusedonebit import FusedOneBitWarning

SIZES = (2500, 1024, 17, 1)


def small(run: whole_steps.Run) -> whole_steps.Run:
    """Returns a run on tensors of a few blocks: of the same ops, with other numbers, of which 16 may be a divisor."""
    if run.sizes != whole_steps.USUAL:
        return run
    return replace(run, sizes=SIZES, options={"block_size": 1024} | run.options)


def take(
    names: Sequence[str],
    folder: Path | None = None,
    *,
    patch: Callable[[str], str] = str,
    keys: int = 10**9,
    seconds: float = 1e9,
) -> list[Found]:
    """Take steps of ``whole_steps``, by name; return what became of their launches.

    Args:
        names: Of the steps.
        folder: Where the Triton is that compiles them; None: that which is here anyway.
        patch: Changes the PTX of every kernel.
        keys: After how many launch keys no more steps are begun.
        seconds: After how many.
    """
    warnings.simplefilter("ignore", FusedOneBitWarning)
    torch.set_num_threads(1)
    began, runs = time.monotonic(), whole_steps.runs()
    with compiling(folder) as compile, (launches := Launches(compile, patch)).executing():
        for number, name in enumerate(names):
            if time.monotonic() - began > seconds or len(launches.found) >= keys:
                print(f"NOT EXECUTED: {len(names) - number} of {len(names)} steps, by --seconds or --keys", flush=True)
                break
            whole_steps.take(small(runs[name]))
            print(f"{name}: {len(launches.found)} keys", file=sys.stderr, flush=True)
    return list(launches.found.values())


@contextmanager
def executed(folder: Path | None) -> Iterator[list[Found]]:
    """Execute the launches of a rank that is a process; what became of them is there in the end."""
    found: list[Found] = []
    with compiling(folder) as compile, (launches := Launches(compile)).executing():
        yield found
    found += launches.found.values()


def in_processes(folder: Path | None) -> Iterator[Found]:
    """Execute the steps on ranks that are processes; ranks launch alike, so that each launch is counted often."""
    for steps, ranks in whole_steps.IN_PROCESSES:
        changed = [small] if steps is whole_steps.hierarchy else []
        for found in run_ranks(steps, ranks, partial(executed, folder), *changed):
            yield from found


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Execute what whole steps launch as PTX.")
    parser.add_argument("--only", default="", help="steps whose name has this in it")
    parser.add_argument("--triton", default=triton.__version__, help="which compiles")
    parser.add_argument("--keys", type=int, default=10**9, help="after how many no more steps are begun")
    parser.add_argument("--seconds", type=float, default=1e9, help="after how many")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="what was found, as JSON")
    given = parser.parse_args()
    if not compiler():
        parser.error("no C++ compiler was found ($CXX, c++, g++, clang++): for instance apt-get install g++")
    if not (names := [name for name in whole_steps.runs() if given.only in name]):
        parser.error(f"--only must be part of the name of some steps, got {given.only!r}")
    how: dict[str, Any] = {"folder": installed(given.triton), "seconds": given.seconds}
    how["keys"] = -(-given.keys // given.processes)
    with mp.get_context("fork").Pool(given.processes) as pool:
        parts = [names[i :: given.processes] for i in range(given.processes)]
        found = [each for some in pool.map(partial(take, **how), parts) for each in some]
    if not given.only and len(found) < given.keys:
        found += in_processes(how["folder"])
        shut_down()
    wrong = Counter(f"{each.op}: {text}" for each in found for text in each.wrong)
    notes = Counter(f"{each.op}: {re.sub(r', [0-9]+ times', '', text)}" for each in found for text in {*each.notes})
    print("\n".join(f"{text} ({count} keys)" for text, count in sorted((wrong | notes).items())))
    if given.out:
        given.out.write_text(json.dumps([asdict(each) for each in found]))
    launches, equal = sum(each.launches for each in found), sum(each.equal for each in found)
    print(f"{len(found)} launch keys of Triton {given.triton} executed as PTX: {launches} launches, {equal} equal")
    return int(bool(wrong) or not 0 < equal == launches)


if __name__ == "__main__":
    import ptx_steps  # ranks know its functions by this name

    sys.exit(ptx_steps.main())
