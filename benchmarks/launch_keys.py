"""Compiles recorded launch keys ahead of time, without a GPU: each for what Triton's launcher would compile it for.

``tests/launch_keys.py`` records them of whole steps of all optimizers. Exits with 1 where a kernel does not compile for
some key, spills registers, or has a race between warps (``benchmarks.races``). Nothing is measured:
``benchmarks.audit`` has the numbers of the variants among them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget

from benchmarks.audit import TARGETS as AUDITED
from benchmarks.audit import compile_kernel, spilled
from benchmarks.races import races
from fusedonebit.triton_kernels.op import OPS
from fusedonebit.triton_kernels.user_tensors import ALIGNED, FP16, FP32

TARGETS = {"sm_75": GPUTarget("cuda", 75, 32)} | AUDITED
Key = list[Any]
"""An op's name, the number of warps, and of each argument name, type and value: ``Key`` of ``tests/launch_keys.py``."""


class Compiled(NamedTuple):
    """What became of a key.

    Attributes:
        op: Whose kernel it is.
        seconds: That it took; next to none where Triton has it in its cache.
        spills: Bytes of registers that did not fit.
        error: Of the compiler; "" if none.
        races: Loads of what another warp stores.
    """

    op: str
    seconds: float
    spills: int
    error: str
    races: list[str]

    @property
    def wrong(self) -> str:
        """What must not be; "" if nothing."""
        spills = f"spills {self.spills} bytes" if self.spills else ""
        return self.error or "; ".join(filter(None, [spills, *(f"races: {race}" for race in self.races)]))


def compiled(key: Key, target: GPUTarget) -> Any:
    """Returns what Triton compiles for a key; raises whatever its passes and tools do."""
    op, num_warps, arguments = key
    types = {name: kind for name, kind, _ in arguments}
    constants = {name: value for name, kind, value in arguments if kind == "constexpr"}
    multiples = [name for name, kind, value in arguments if kind != "constexpr" and value == "D"]
    return compile_kernel(OPS[op].kernel.triton, types, constants, num_warps, target, multiples)


def compile_key(key: Key, target: str) -> Compiled:
    """Compiles a key for one of ``TARGETS``, and looks at what it has become."""
    began, found = time.perf_counter(), []
    try:
        made = compiled(key, TARGETS[target])
        spills, error, found = spilled(made, TARGETS[target]), "", races(made.asm["ttgir"])
    except Exception as failed:  # whatever the compiler's passes and tools raise: every other key is tried as well
        spills, error = 0, f"{type(failed).__name__}: {failed}"
    return Compiled(key[0], time.perf_counter() - began, spills, error, found)


def once_per_kernel(keys: Iterable[Key]) -> list[Key]:
    """Returns of each op the key with most operands, the last of those in their order; another one with bfloat16."""
    found: dict[tuple[str, bool], Key] = {}
    for key in keys:
        which = key[0], _has_bfloat16(key)
        if which not in found or _operands(key) >= _operands(found[which]):
            found[which] = key
    return list(found.values())


def _has_bfloat16(key: Key) -> bool:
    stored = {value % ALIGNED for name, _, value in key[2] if name in ("PARAMS", "GRADS", "TENSORS")}
    return bool(stored - {FP32, FP16}) or any(kind == "*bf16" for _, kind, _ in key[2])


def _operands(key: Key) -> int:
    return sum(kind != "constexpr" for _, kind, _ in key[2])


def said(key: Key) -> str:
    """Writes a key for a reader."""
    op, num_warps, arguments = key
    return f"{op}, {num_warps} warps: " + ", ".join(
        f"{name}={value!r}" if kind == "constexpr" else f"{name}: {kind}{' of 16' * (value == 'D')}"
        for name, kind, value in arguments
    )


def unlinked(key: Key) -> str:
    """Goes without linking for AMD where that fails here, to assembly; returns why, "" where nothing is left out."""
    from triton import knobs
    from triton.backends.amd.compiler import HIPBackend

    first = compile_key(key, "gfx942").error
    if not first:
        return ""
    HIPBackend.make_hsaco = staticmethod(lambda assembly, metadata, options: b"")
    knobs.cache.dir = tempfile.mkdtemp()  # no other program shall find what is not linked
    if compile_key(key, "gfx942").error:
        raise RuntimeError(f"gfx942 can't be compiled to assembly: {said(key)}: {first}")
    return first


def _compile_all(keys: list[Key], target: str, processes: int) -> Iterator[Compiled]:
    work = partial(compile_key, target=target)
    if processes == 1:
        yield from map(work, keys)
        return
    with mp.get_context("fork").Pool(processes) as pool:
        yield from pool.imap(work, keys)


def run(keys: list[Key], target: str, processes: int, any_spills: bool = False) -> list[str]:
    """Compiles keys, printing as it goes, then a table; returns what failed, races, or spills, each with its key."""
    wrong: list[str] = []
    compiled = 0
    of_op: dict[str, list[Compiled]] = defaultdict(list)
    if target == "gfx942" and (why := unlinked(keys[0])):
        print(f"gfx942 can't be linked here, and is compiled to assembly: {why}")
    for number, (key, each) in enumerate(zip(keys, _compile_all(keys, target, processes), strict=True), 1):
        of_op[each.op].append(each)
        compiled += not each.error
        if any_spills:
            each = each._replace(spills=0)
        if each.wrong:
            wrong.append(f"{target}: {each.wrong}\n  {said(key)}")
            print(wrong[-1], flush=True)
        if number % 25 == 0:
            print(f"{number} of {len(keys)} keys for {target}", flush=True)
    print(f"{'kernel':20} {'target':7} {'keys':>4} {'slowest s':>9} {'spills':>6}")
    for op, found in sorted(of_op.items()):
        slowest, spills = max(each.seconds for each in found), sum(each.spills > 0 for each in found)
        print(f"{op:20} {target:7} {len(found):4} {slowest:9.2f} {spills:6}")
    print(f"{len(keys)} keys for {target}: {len(wrong)} wrong", flush=True)
    print(f"{compiled} of {len(keys)} keys compiled for {target} with Triton {triton.__version__}", flush=True)
    return wrong


def main() -> int:
    """Compiles; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Compile recorded launch keys.")
    parser.add_argument("keys", type=Path, help="JSON that tests/launch_keys.py has written")
    parser.add_argument("--target", choices=TARGETS, action="append", required=True, help="may be given again")
    parser.add_argument("--once-per-kernel", action="store_true", help="of each kernel the key with most operands")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--any-spills", action="store_true", help="another compiler's spills are its own affair")
    arguments = parser.parse_args()
    keys = json.loads(arguments.keys.read_text())
    if arguments.once_per_kernel:
        keys = once_per_kernel(keys)
    how = arguments.processes, arguments.any_spills
    wrong = [text for target in arguments.target for text in run(keys, target, *how)]
    print("\n".join(wrong) or "all keys compile" + ", and none spills" * (not arguments.any_spills))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
