"""Runs kernels in C, built where a compiler is found, on CPU tensors.

A C kernel has the name of its op and the arguments of its Triton kernel, behind the range of programs to run; both are
printed from the op's declaration, and so are the formulas (``generate``). Built once, in two seconds, with the
compiler's own idea of this machine (-march=native), and kept under ``~/.cache/fusedonebit`` (``build``). Bits equal
those of the eager ops: nothing is contracted, nothing reassociated.
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
from typing import Any

import torch
from torch import Tensor

from ..layout import BLOCK_SIZES
from . import build
from .build import SOURCES, UnavailableError
from .generate import Parameter, Spec, header

compiler = build.compiler

_LEAST_PROGRAMS = 64
"""Programs that a thread must have to be worth waking: 65,536 elements, as in torch's own operations."""
_DEFINITION = re.compile(r"^KERNEL\((\w+)\)", re.MULTILINE)
KERNELS = {name for source in SOURCES for name in _DEFINITION.findall((build.HERE / source).read_text())}
"""Ops with a kernel in C."""
_parameters: dict[str, Sequence[Parameter]] = {}
_printed: dict[str, str] = {}


def declare(name: str, parameters: Sequence[Parameter], printed: str = "") -> None:
    """Tells what an op's kernel takes, and its C file where it is ``printed``; the next call builds with it."""
    if printed:
        KERNELS.add(name)
        _printed[f"{name}.c"] = printed
    if name in KERNELS:
        _parameters[name] = parameters
        _library.cache_clear()


def library() -> Mapping[str, Kernel] | None:
    """Returns the C kernels, built if need be; None where there are none: ``reason`` says why."""
    return _library()[0]


def reason() -> str:
    """Why there are no C kernels."""
    return _library()[1]


def shared_library() -> Path:
    """Returns the path of the C kernels, built if need be; raises as ``build.shared_library``."""
    return build.shared_library(list(_parameters), {"generated.h": header(_parameters), **_printed})


@cache
def _library() -> tuple[Mapping[str, Kernel] | None, str]:
    try:
        loaded = ctypes.CDLL(str(shared_library()))
        return {name: Kernel(loaded, name, parameters) for name, parameters in _parameters.items()}, ""
    except (OSError, UnavailableError) as error:
        return None, str(error)
    except Exception as error:  # nobody's step may fail for want of a faster kernel, whatever is wrong here
        return None, repr(error)


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

        Raises TypeError or ValueError for a tensor of another dtype, whose rows have gaps, or that is too short for
        so many blocks: C would not notice that it goes beyond its end.
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


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "fusedonebit")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
