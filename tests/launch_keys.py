"""Records for what Triton would compile each launch: its launch key.

A key is what Triton's launcher looks a compiled kernel up by (``triton.runtime.jit``: ``JITFunction.run`` calls the
function that ``create_function_from_signature`` has made, then ``compute_cache_key``): of each argument its type and
what is assumed of its value, and the options. An int of 1 and None become constants; another int is i32 or i64, and may
be known to be divisible by 16; a pointer has the type of its elements, and may be known to be aligned to 16 bytes. It
is Triton's own function that says it here, too, for a CUDA device.

Storages of a GPU are aligned, to 256 bytes or more, those of a CPU to 64. A tensor's address counts from its storage's
begin here, so that no accident of the CPU's memory makes a key; tensors that kernels reach through a table of addresses
must have an aligned storage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from fusedonebit.triton_kernels import native, using
from fusedonebit.triton_kernels.op import OPS, Op

ALIGNMENT = 16  # bytes; of CUDA's and the CPU's allocators more


class Key(NamedTuple):
    """A launch key.

    Attributes:
        op: Whose kernel it is.
        num_warps: Of its programs.
        arguments: Of each its name, type and value: of a "constexpr" the constant, of others "D" where the value, of
            pointers the address, is a multiple of 16, else "".
    """

    op: str
    num_warps: int
    arguments: tuple[tuple[str, str, Any], ...]


class Noting:
    """Stands in for a kernel, runs nothing and notes the keys it is launched with."""

    def __init__(self, op: Op, keys: set[Key]) -> None:
        function = JITFunction(op.kernel.function, **op.kernel._options)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._specialise = create_function_from_signature(function.signature, function.params, backend)
        self._op, self._keys = op, keys

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self._note

    def _note(self, *given: Any, num_warps: int, enable_fp_fusion: bool) -> None:
        assert not enable_fp_fusion
        bound, specialised, _ = self._specialise(*map(_placed, given))
        arguments = [
            (name, kind, value if kind == "constexpr" else value or "")
            for name, (kind, value) in zip(bound, specialised, strict=True)
        ]
        self._keys.add(Key(self._op.name, num_warps, tuple(arguments)))


def _placed(value: Any) -> Any:
    """Return a tensor as it lies in a storage that begins at a multiple of ``ALIGNMENT``."""
    if not isinstance(value, Tensor):
        return value
    offset = value.storage_offset() * value.element_size() % ALIGNMENT
    return _aligned()[offset : offset + value.element_size()].view(value.dtype)


@cache
def _aligned() -> Tensor:
    memory = torch.empty(3 * ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :]


def _check_storages(op: Op, arguments: Sequence[Any]) -> None:
    for name, value in zip(op.arguments, arguments, strict=False):
        for tensor in value if op.arguments[name].schema == "Tensor[]" else ():
            at = tensor.untyped_storage().data_ptr()
            if tensor.numel() and at % ALIGNMENT:
                raise RuntimeError(f"{op.name}: {name} lies in a storage at {at}, which no GPU's allocator returns")


@contextmanager
def recording() -> Iterator[set[Key]]:
    """Note the keys of all launches, as on a GPU; what they compute, C or plain torch computes instead."""
    keys: set[Key] = set()
    launch = Op.launch

    def launched(self: Op, arguments: Sequence[Any], on: str) -> None:
        assert on == "triton"
        _check_storages(self, arguments)
        launch(self, arguments, "triton")
        if self.name in native.KERNELS and native.library() is not None:
            launch(self, arguments, "native")
        else:
            self.eager(*arguments)

    with pytest.MonkeyPatch.context() as patch, using("triton"):
        for op in OPS.values():
            patch.setattr(op.kernel, "_compiled", Noting(op, keys))
        patch.setattr(Op, "launch", launched)
        yield keys


def write(keys: Iterable[Key], path: Path) -> None:
    """Write keys, in an order that does not depend on the run, for ``benchmarks.launch_keys``."""
    path.write_text(json.dumps(sorted(keys, key=repr), indent=None))
