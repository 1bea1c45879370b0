"""Executes launches as the PTX that Triton compiles of them, and compares them with plain torch, or C.

Each launch is executed on the memory that it was given: the first of a launch key with blocks and warps in order,
backward and mixed, later ones in one of these orders. What it leaves must be what the op's eager function, or its C,
leaves, bit for bit; but NaNs are alike, and float64 sums may be added up in another order.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch_keys import Key, Noting
from ptx_machine import NOTES, Order, Range, execute
from ptx_program import Program
from torch import Tensor

from fusedonebit.triton_kernels import native, using
from fusedonebit.triton_kernels.op import OPS, Op

EACH = 3
"""Launches of a key that are executed."""
EXACT = ("steps", "entered", "updates", "mean_sq", "groups")
"""What is float64, and no sum over elements."""
ROOT = Path(__file__).parents[2]

COMPILER = """
import json, sys
from benchmarks.launch_keys import TARGETS, compiled
for line in sys.stdin:
    try:
        made = compiled(json.loads(line), TARGETS["sm_90"])
        print(json.dumps([made.asm["ptx"], made.metadata.shared]), flush=True)
    except Exception as error:
        print(json.dumps([f"{type(error).__name__}: {error}", None]), flush=True)
"""


Compile = Callable[[Any], tuple[str, int]]
"""Returns the PTX of a launch key, and how many bytes of shared memory it has; RuntimeError if it does not compile."""


@contextmanager
def compiling(folder: Path | None = None) -> Iterator[Compile]:
    """Compile in a process of its own: where Triton is interpreted, it compiles nothing.

    ``folder`` is where the Triton is installed; None: the one that is here anyway.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*([str(folder)] if folder else []), str(ROOT)])
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-W", "ignore", "-c", COMPILER]
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:

        def ptx_of(key: Any) -> tuple[str, int]:
            print(json.dumps(key), file=process.stdin, flush=True)
            ptx, shared = json.loads(process.stdout.readline())
            if shared is None:
                raise RuntimeError(f"{key[0]} does not compile: {ptx}")
            return ptx, shared

        yield ptx_of


class Executing(Noting):
    """Stands in for a kernel, and executes its PTX."""

    def __init__(self, op: Op, launches: Launches) -> None:
        self._noted: set[Key] = set()
        super().__init__(op, self._noted)
        self._launches = launches

    def __getitem__(self, grid: tuple[int]) -> Any:
        return partial(self._execute, grid[0])

    def _execute(self, grid: int, *given: Any, **options: Any) -> None:
        self._noted.clear()
        self._note(*given, **options)
        self._launches.execute(*self._noted, given, grid)


@dataclass
class Found:
    """What became of a key's launches: how many were executed, and were equal; what is wrong, and ``NOTES``."""

    op: str
    key: Key | None = None
    launches: int = 0
    equal: int = 0
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Launches:
    """Executes launches, one at a time; ``found`` is what became of each key's.

    Args:
        compile: What makes PTX of keys.
        patch: Changes it.
    """

    def __init__(self, compile: Compile, patch: Callable[[str], str] = str) -> None:
        self.found: dict[Key, Found] = {}
        self._compile, self._patch = compile, patch
        self._programs: dict[Key, tuple[Program, int]] = {}
        self._lock = threading.RLock()  # ranks are threads
        self._named: dict[str, Tensor] = {}
        self._writes: set[str] = set()
        self._outcomes: list[tuple[Order, list[np.ndarray]]] = []

    @contextmanager
    def executing(self) -> Iterator[None]:
        """Execute all launches within it; what they compute, C or plain torch computes in the end."""
        launch = Op.launch

        def launched(op: Op, arguments: Sequence[Any], on: str) -> None:
            with self._lock:
                self._take(op, arguments)
                launch(op, arguments, "triton")
                if op.name in native.KERNELS and native.library() is not None:
                    launch(op, arguments, "native")
                else:
                    op.eager(*arguments)
                if self._outcomes:
                    differing = [text for outcome in self._outcomes for text in self._differences(*outcome)]
                    self._last.wrong += differing
                    self._last.equal += not differing

        with pytest.MonkeyPatch.context() as patch, using("triton"):
            for op in OPS.values():
                patch.setattr(op.kernel, "_compiled", Executing(op, self))
            patch.setattr(Op, "launch", launched)
            yield

    def _take(self, op: Op, arguments: Sequence[Any]) -> None:
        """Note the tensors among an op's arguments by name."""
        self._named, self._writes, self._outcomes = {}, set(), []
        for name, value in zip(op.arguments, arguments, strict=False):
            several = {f"{name}[{i}]": each for i, each in enumerate(value)} if isinstance(value, list | tuple) else {}
            tensors = {at: x for at, x in ({name: value} | several).items() if isinstance(x, Tensor) and x.numel()}
            self._named |= tensors
            self._writes |= tensors.keys() if name in op.writes else set()

    def execute(self, key: Key, given: Sequence[Any], grid: int) -> None:
        """Execute a launch in one or all orders, and leave memory as it was."""
        self._last = found = self.found.setdefault(key, Found(key.op, key))
        if found.launches >= EACH or not grid:
            return
        if key not in self._programs:
            ptx, shared = self._compile(key)
            self._programs[key] = Program(self._patch(ptx)), shared
        program, shared = self._programs[key]
        passed = [(*what[:2], x) for what, x in zip(key.arguments, given, strict=True) if what[1] != "constexpr"]
        tables = {f"{name} of the kernel": x for name, _, x in passed if isinstance(x, Tensor)} | self._named
        self._memory = _storages(tables.values())
        before = [memory.copy() for memory in self._memory]
        params = [_bits(x, kind) for _, kind, x in passed]
        params += [0] * (len(program.params) - len(params))  # Triton's own scratch memory, which no kernel has
        for order in Order if not found.launches else [Order(found.launches % 3)]:
            how: dict[str, Any] = {"shared": shared, "seed": found.launches}
            told = execute(program, params, grid, self._ranges(tables), order, **how)
            found.wrong += [f"{order.name}, {grid} blocks: {each}" for each in told if not each.startswith(NOTES)]
            found.notes += [each.partition(" (line")[0] for each in told if each.startswith(NOTES)]
            self._outcomes.append((order, [memory.copy() for memory in self._memory]))
            for memory, content in zip(self._memory, before, strict=True):
                memory[:] = content
        found.launches += 1

    def _ranges(self, tensors: dict[str, Tensor]) -> list[Range]:
        joined: list[Range] = []
        spans = [(*_span(x), name in self._writes) for name, x in tensors.items() if x.numel()]
        for low, high, writable in sorted(spans):
            if joined and low < joined[-1].high:
                last = joined.pop()
                joined.append(Range(last.low, max(high, last.high), writable or last.writable))
            else:
                joined.append(Range(low, high, writable))
        return joined

    def _differences(self, order: Order, contents: list[np.ndarray]) -> Iterator[str]:
        """Compare what was executed with what there is now."""
        outside = [memory != content for memory, content in zip(self._memory, contents, strict=True)]
        if not any(each.any() for each in outside):
            return
        most = max(x.numel() for x in self._named.values())
        for name, theirs in self._named.items():
            low, high = _span(theirs)
            i = next(i for i, x in enumerate(self._memory) if x.ctypes.data <= low < x.ctypes.data + x.nbytes)
            place = slice(low - self._memory[i].ctypes.data, high - self._memory[i].ctypes.data)
            outside[i][place] = False
            ours = torch.from_numpy(contents[i][place].copy()).view(theirs.dtype)
            ours = ours.as_strided(theirs.shape, theirs.stride())
            word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[theirs.element_size()]
            differs = ours.contiguous().view(word) != theirs.detach().contiguous().view(word)
            if theirs.is_floating_point():
                differs &= ~(ours.isnan() & theirs.isnan())
            if theirs.dtype is torch.float64 and name not in EXACT:  # of terms that are not negative, Higham (4.4)
                differs &= (ours - theirs).abs() > 2 * most * 2.0**-53 * theirs.abs()
            if differs.any():
                at = int(differs.flatten().nonzero()[0])
                both = f"{ours.flatten()[at].item()!r} for {theirs.detach().flatten()[at].item()!r}"
                yield f"{order.name}: {name} differs in {int(differs.sum())} of {theirs.numel()}, at {at}: {both}"
        if any(each.any() for each in outside):
            yield f"{order.name}: memory beside the arguments differs"


def _bits(value: Any, kind: str) -> int:
    """Returns an argument as a kernel gets it."""
    if kind in ("fp32", "fp64"):
        return int(np.float32(value).view(np.uint32) if kind == "fp32" else np.float64(value).view(np.uint64))
    return value.data_ptr() if isinstance(value, Tensor) else int(value)


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _storages(tensors: Any) -> list[np.ndarray]:
    """Returns the bytes of all storages of tensors."""
    found = {each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in tensors)}
    memory = [(ctypes.c_uint8 * length).from_address(at) for at, length in found.items() if length]
    return [np.frombuffer(each, np.uint8) for each in memory]
