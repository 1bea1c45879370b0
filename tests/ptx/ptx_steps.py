"""Executes what whole steps launch as PTX: ``make test-ptx``. No GPU is needed, but a C++ compiler.

Takes the steps of ``whole_steps`` on small tensors. What is compiled is kept where Triton keeps it, for
``benchmarks.tritons`` as well. Exits with 1 where a launch differs, or is wrong by itself.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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

LEAST = 500
"""Launch keys, and three times as many launches, that are executed unless somebody asks for fewer."""
SIZES = (9100, 1100, 17, 1, 0)
"""Of tensors of small steps: fourteen blocks, with rows of messages that are no multiples of 16 words, as usually."""

ONE_STORES = r"advance|apply_momentum|follow_level|lamb_\w+|merge_signs|quantise|renew|scale_coefficients"
LIE_TWICE = r"advance|dequantise|outer_mean|outer_scales|requantise|server_reduce|tell_level"
REASONS = {
    rf"({ONE_STORES}): an unused load .* another warp": "all warps load what one replaces; the others drop it",
    rf"({LIE_TWICE}): the same again .* another warp": "a vector shorter than a block lies twice",
    r"local_update: the same again .* another block": "chunks that share a header all write it, and all the same",
}
"""Why several warps or blocks may touch a word without a barrier between; whatever else does is wrong."""


def _told(found: Found, note: str) -> str:
    return f"{found.op}: {re.sub(r', [0-9]+ times', '', note)}"


def unexplained(found: Iterable[Found]) -> list[str]:
    """Returns notes for which there is no reason."""
    notes = {_told(each, text) for each in found for text in each.notes}
    return sorted(note for note in notes if not any(re.match(reason, note) for reason in REASONS))


def small(run: whole_steps.Run) -> whole_steps.Run:
    """Returns a run on tensors of a few blocks, with the launch keys of large ones."""
    if run.sizes != whole_steps.USUAL:
        return run
    # A single vector beside matrices, as usually; the second one's update begins at a multiple of 16 bytes, as there.
    sizes = (9120, *SIZES[1:3]) if run.kind is whole_steps.MUON.kind else SIZES
    return replace(run, sizes=sizes, options={"block_size": 1024} | run.options)


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
    notes = Counter(told for each in found for told in {_told(each, text) for text in each.notes})
    print("\n".join(f"{text} ({count} keys)" for text, count in sorted((wrong | notes).items())))
    races = unexplained(found)
    print("\n".join(f"NO REASON IS KNOWN: {note}" for note in races))
    launches, equal = sum(each.launches for each in found), sum(each.equal for each in found)
    keys = len({each.key for each in found})  # several processes may have had the same one
    print(f"{keys} launch keys of Triton {given.triton} executed as PTX: {launches} launches, {equal} equal")
    print(f"{sum('bounds' in text for text in wrong)} accesses out of bounds, {len(races)} races without a reason")
    least = 1 if given.only or given.keys < LEAST else LEAST
    return int(bool(wrong or races) or equal != launches or keys < least or launches < 3 * least)


if __name__ == "__main__":
    import ptx_steps  # ranks know its functions by this name

    sys.exit(ptx_steps.main())
