"""Counts what a step asks of a GPU: launches of ours, torch's kernels, copies and fills, collectives, and words read.

Counted on the CPU, where Triton's kernels are interpreted, or left out: each operation of torch's that is no view and
allocates more than memory, also within the implementation of an op of ours, but for what the interpreter does. What the
host reads is a copy on a GPU, and a tensor made of its numbers is an upload.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fusedonebit.comm.simulated import SimulatedTransport
from fusedonebit.triton_kernels.op import OPS, Op


class Operations(TorchDispatchMode):
    """The device operations of one thread, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self._uploaded: dict[int, Tensor] = {}  # kept, so that no other tensor comes to lie there
        self._thread = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name == "lift_fresh":
            self._uploaded[result.data_ptr()] = result
        if func.namespace == "aten" and not self._is_free(func, name, args):
            self.counted[f"{name} {_shapes(args)}"] += 1
        return result

    def _is_free(self, func: Any, name: str, args: Sequence[Any]) -> bool:
        """Tell whether no device would do anything: for views, memory, and the upload's second half."""
        returned = [each.alias_info for each in func._schema.returns]
        if name == "copy_" and args[1].data_ptr() in self._uploaded:
            return True
        is_view = bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
        return name.startswith(("empty", "new_empty")) or (is_view and name != "lift_fresh")

    def is_mine(self) -> bool:
        """Tell whether this thread is the one that is counted."""
        return threading.get_ident() == self._thread


def _shapes(args: Sequence[Any]) -> str:
    return ", ".join(str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in args)


class NotRun:
    """Stands in for a kernel, which would run for minutes where there are many blocks."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *arguments, **constants: None


@contextmanager
def without_kernels() -> Iterator[None]:
    """Launch kernels of all ranks, and run none."""
    with pytest.MonkeyPatch.context() as patch:
        for op in OPS.values():
            patch.setattr(op.kernel, "_compiled", NotRun())
        yield


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the device operations of this thread, which is a simulated rank or the only one."""
    operations = Operations()
    bind, call, exchange = Op.bind, SimulatedTransport._call, SimulatedTransport.exchange

    def bound(self: Op, arguments: Sequence[Any]) -> dict[str, Any]:
        if not operations.is_mine():
            return bind(self, arguments)
        operations.counted[f"kernel {self.name}"] += 1
        with operations:  # off while the implementation of an op runs
            return bind(self, arguments)

    def called(self: SimulatedTransport, collective: str, nbytes: int, *tensors: Tensor) -> None:
        if operations.is_mine():
            operations.counted[f"collective {collective}"] += 1
        with _disable_current_modes():
            call(self, collective, nbytes, *tensors)

    def exchanged(self: SimulatedTransport, *arguments: Any) -> Any:
        if operations.is_mine():
            operations.counted["collective exchange"] += 1
        pending = exchange(self, *arguments)
        wait = pending.wait

        def waiting() -> None:
            with _disable_current_modes():
                wait()

        pending.wait = waiting  # type: ignore[method-assign]
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "bind", bound)
        patch.setattr(SimulatedTransport, "_call", called)
        patch.setattr(SimulatedTransport, "exchange", exchanged)
        with operations:
            yield operations.counted
