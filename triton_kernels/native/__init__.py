"""The CPU backend: the kernels once more in C, built where a compiler is found, for CPU tensors.

A C function has the name of a Triton kernel and its arguments, in its order, behind the range of programs to
run; how Python calls it is read off its declaration. Built once, in two seconds, with the compiler's own idea of
this machine (-march=native), and kept under ``~/.cache/fusedonebit`` (``build``). Bits equal those of the twins:
nothing is contracted, nothing reassociated.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout import BLOCK_SIZES
from . import build
from .build import SOURCES, UnavailableError
from .generate import Parameter, Spec, header

compiler = build.compiler

_DECLARATION = re.compile(r"^void (\w+)\(int64_t begin, int64_t end, ([^)]*)\)", re.MULTILINE)
_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "uint8_t": torch.uint8,
    "int32_t": torch.int32,
    "uint32_t": torch.uint32,
    "int64_t": torch.int64,
}
_OF_ELEMENTS = ["compensated", "exp_avg", "exp_avg_sq", "grad", "fresh", "values", "out"]
_OF_BLOCKS = [
    "worker_scale",
    "exp_avg_scale",
    "last_scale",
    "server_scale",
    "scale",
    "limit",
    "largest",
    "slot",
    "block_tensor",
    "block_start",
    "live_row",
    "tail_row",
    "exp_avg_sq_sums",
    "squares",
]
"""Tensors that have at least as many elements as there are elements, or blocks, to work on."""
_STAND_INS = {
    "compensated": ("arrived_scales",),
    "server_scale": ("arrived_scales",),
    "exp_avg": ("compensated",),
    "exp_avg_sq": ("compensated", "exp_avg", "exp_avg_scale"),
    "exp_avg_sq_sums": ("exp_avg", "norms"),
    "norms": ("largest",),
    "rounding": ("coef", "values"),
    "unscale": ("out",),
}
"""Of each tensor that not every call uses, the arguments of which one is then passed in its place."""
_STRIDED = ("flags",)
"""Tensors that are a column of another one; kernels are told the stride."""
_LEAST_PROGRAMS = 64
"""Programs that a thread must have to be worth waking: 65,536 elements, as in torch's own operations."""


_DEFINITION = re.compile(r"^KERNEL\((\w+)\)", re.MULTILINE)
KERNELS = frozenset(name for source in SOURCES for name in _DEFINITION.findall((build.HERE / source).read_text()))
"""Ops with a kernel in C."""
_parameters: dict[str, Sequence[Parameter]] = {}


def declare(name: str, parameters: Sequence[Parameter]) -> None:
    """Tells what an op's kernel takes."""
    if name in KERNELS:
        _parameters[name] = parameters


class Argument(NamedTuple):
    """One argument of a C function, from its declaration; ``dtype`` is that of a tensor, None where it may vary."""

    name: str
    kind: type[Any]
    dtype: torch.dtype | None = None


class Function(NamedTuple):
    """A C function; ``arguments`` without the range of programs."""

    call: Any
    arguments: tuple[Argument, ...]


@cache
def declarations() -> dict[str, tuple[Argument, ...]]:
    """The arguments of every C kernel, by name."""
    found = {}
    for source in SOURCES:
        for name, arguments in _DECLARATION.findall((build.HERE / source).read_text()):
            found[name] = tuple(_argument(text) for text in arguments.split(","))
    return found


def _argument(text: str) -> Argument:
    *kind, name = text.replace("*", " * ").split()
    if "*" in kind:
        return Argument(name, ctypes.c_void_p, _DTYPES.get(kind[kind.index("*") - 1]))
    return Argument(name, {"int64_t": ctypes.c_int64, "float": ctypes.c_float}[kind[-1]])


def library() -> Mapping[str, Any] | None:
    """The C kernels, built if need be; None where there are none: ``reason`` says why."""
    found = _library()
    return None if isinstance(found, str) else found


def reason() -> str:
    """Why there are no C kernels."""
    found = _library()
    return found if isinstance(found, str) else ""


def shared_library() -> Path:
    """Where the C kernels are, built if need be; raises as ``build.shared_library``."""
    return build.shared_library([*declarations(), *_parameters], header(_parameters))


@cache
def _library() -> Mapping[str, Any] | str:
    try:
        loaded = ctypes.CDLL(str(shared_library()))
        old = {name: Function(_callable(loaded, name), arguments) for name, arguments in declarations().items()}
        return old | {name: Kernel(loaded, name, parameters) for name, parameters in _parameters.items()}
    except (OSError, UnavailableError) as error:
        return str(error)
    except Exception as error:  # nobody's step may fail for want of a faster kernel, whatever is wrong here
        return repr(error)


def _callable(loaded: ctypes.CDLL, name: str) -> Any:
    call = getattr(loaded, name)
    call.restype = None
    call.argtypes = [ctypes.c_int64, ctypes.c_int64, *(argument.kind for argument in declarations()[name])]
    return call


# ---------------------------------------------------------------- calls


class Kernel:
    """A C function, behind the range of programs with the arguments of its Triton kernel."""

    def __init__(self, loaded: ctypes.CDLL, name: str, parameters: Sequence[Parameter]) -> None:
        self._call, self._parameters = getattr(loaded, name), parameters
        kinds: list[Any] = [ctypes.c_int64, ctypes.c_int64]
        for parameter in parameters:
            kinds.append(_kind(parameter.kind))
            kinds += [ctypes.c_int64] * parameter.several
        self._call.argtypes, self._call.restype = kinds, None

    def run(self, programs: int, given: Sequence[Any], blocks: int, block_size: int) -> None:
        """Runs programs 0 to ``programs`` on torch's number of threads; none depends on another.

        Args:
            programs: Their number.
            given: In the order of the parameters; None where a tensor is left out.
            blocks, block_size: How many blocks the tensors must be long enough for, of how many elements: C would
                not notice that it goes beyond their end.

        Raises:
            TypeError, ValueError: for a tensor of another dtype, whose rows have gaps, or that is too short.
        """
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
        least = {"element": blocks * block_size, "block": blocks, "": 0}
        values: list[Any] = []
        for parameter, value in zip(self._parameters, given, strict=True):
            if isinstance(value, Tensor) and parameter.spec is not None:
                _check_tensor(parameter, parameter.spec, value, least[parameter.spec.per])
            values.append(value.data_ptr() if isinstance(value, Tensor) else value)
            if parameter.several:
                values.append(int(value is not None and value.dtype is torch.bfloat16))
        threads = min(torch.get_num_threads(), programs // _LEAST_PROGRAMS)
        if threads < 2:
            self._call(0, programs, *values)
            return
        bounds = [programs * i // threads for i in range(threads + 1)]
        # ctypes lets go of the interpreter's lock, so that threads run at once.
        parts = [_pool(threads - 1).submit(self._call, *pair, *values) for pair in pairwise(bounds[1:])]
        self._call(0, bounds[1], *values)
        for part in parts:
            part.result()


def _kind(kind: str) -> Any:
    return ctypes.c_void_p if kind.startswith("*") else ctypes.c_float if kind == "fp32" else ctypes.c_int64


def _check_tensor(parameter: Parameter, spec: Spec, tensor: Tensor, least: int) -> None:
    name = parameter.name
    if tensor.dtype not in ((spec.dtype,) if spec.dtype else (torch.float32, torch.bfloat16)):
        raise TypeError(f"{name} must be {spec.dtype or 'torch.float32 or torch.bfloat16'}, got {tensor.dtype}")
    if spec.dense and tensor.dim() and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(f"{name} must be dense along its last dimension, got strides {tensor.stride()}")
    if tensor.numel() < least:
        raise ValueError(f"{name} must have at least {least} elements, got {tensor.numel()}")


def run(function: Function, programs: int, arguments: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Runs programs 0 to ``programs`` on torch's number of threads; none depends on another.

    Args:
        function: Of ``library``.
        programs: Their number.
        arguments: In the order of the declaration; rows of tensors are dense. Where one is not used, another
            argument may stand in its place.
        constants: The arguments behind those, by name.

    Raises:
        TypeError, ValueError: for a tensor of another dtype, whose rows have gaps, or that is too short.
    """
    given = {argument.name: value for argument, value in zip(function.arguments, arguments, strict=False)}
    least = _least(given, programs, constants)
    for argument, value in zip(function.arguments, arguments, strict=False):
        if isinstance(value, Tensor):
            _check(argument, value, least.get(argument.name, 0), given)
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
    values += [int(constants[argument.name]) for argument in function.arguments[len(values) :]]
    threads = min(torch.get_num_threads(), programs // _LEAST_PROGRAMS)
    if threads < 2:
        function.call(0, programs, *values)
        return
    bounds = [programs * i // threads for i in range(threads + 1)]
    # ctypes lets go of the interpreter's lock, so that threads run at once.
    parts = [_pool(threads - 1).submit(function.call, *pair, *values) for pair in pairwise(bounds[1:])]
    function.call(0, bounds[1], *values)
    for part in parts:
        part.result()


def _least(given: Mapping[str, Any], programs: int, constants: Mapping[str, Any]) -> dict[str, int]:
    """How many elements tensors must have, by name: C would not notice that it goes beyond their end."""
    if "live_row" not in given and "tail_row" not in given:
        return {}  # packed words, whose lengths the kernel is told
    block, blocks = constants["BLOCK"], programs + given.get("first_block", 0)
    if block not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block}")
    if given.get("blocks_per_chunk", 1) < 1:
        raise ValueError(f"live_row must have a block for each chunk at least, got {blocks} blocks")
    return dict.fromkeys(_OF_ELEMENTS, blocks * block) | dict.fromkeys(_OF_BLOCKS, blocks)


def _check(argument: Argument, tensor: Tensor, least: int, given: Mapping[str, Any]) -> None:
    name, right = argument.name, argument.dtype in (None, tensor.dtype)
    dense = name in _STRIDED or not tensor.dim() or tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    if right and dense and tensor.numel() >= least:
        return
    if any(given.get(other) is tensor for other in _STAND_INS.get(name, ())):
        return  # it is not used; the other one has a check of its own
    if not right:
        raise TypeError(f"{name} must be {argument.dtype}, got {tensor.dtype}")
    if not dense:
        raise ValueError(f"{name} must be dense along its last dimension, got strides {tensor.stride()}")
    raise ValueError(f"{name} must have at least {least} elements, got {tensor.numel()}")


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "fusedonebit")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
