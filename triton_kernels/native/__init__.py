"""Runs kernels in C, built where a compiler is found, on CPU tensors.

A C kernel has the name of its op and the arguments of its Triton kernel, behind the range of programs to run; both are
printed from the op's declaration, and so are the formulas (``generate``). Built once, in two seconds, with the
compiler's own idea of this machine (-march=native), and kept under ``~/.cache/fusedonebit`` (``build``). Bits equal
those of the eager ops: nothing is contracted, nothing reassociated.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..layout import BLOCK_SIZES
from . import build
from .build import SOURCES, UnavailableError
from .generate import Parameter, header, on_threads

compiler = build.compiler

_LEAST_PROGRAMS = 64
"""Programs that a thread must have to be worth waking: 65,536 elements, as in torch's own operations."""
_DEFINITION = re.compile(r"^KERNEL\((\w+)\)", re.MULTILINE)
KERNELS = {name for source in SOURCES for name in _DEFINITION.findall((build.HERE / source).read_text())}
"""Ops with a kernel in C."""
_parameters: dict[str, Sequence[Parameter]] = {}
_printed: dict[str, str] = {}


def declare(name: str, parameters: Sequence[Parameter], printed: str = "") -> None:
    """Tell what an op's kernel takes, and its C file where it is ``printed``; the next call builds with it."""
    if printed:
        KERNELS.add(name)
        _printed[f"{name}.c"] = printed
    if name in KERNELS:
        _parameters[name] = parameters
        _library.cache_clear()


def library() -> Mapping[str, Kernel] | None:
    """Return the C kernels, built if need be; None where there are none: ``reason`` says why."""
    return _library()[0]


def reason() -> str:
    """Why there are no C kernels."""
    return _library()[1]


def has_threads() -> bool:
    """Tell whether kernels can run on the threads of torch's operations, else on one."""
    return bool(_openmp())


def shared_library() -> bytes:
    """Return the C kernels as a shared library, built if need be; raise as ``build.shared_library``."""
    printed = {"generated.h": header(_parameters), "on_threads.c": on_threads(_parameters)}
    return build.shared_library([f"{name}_on_threads" for name in _parameters], printed | _printed)


@cache
def _library() -> tuple[Mapping[str, Kernel] | None, str]:
    try:
        loaded = build.load(shared_library())
        if _openmp():
            loaded.use_threads(*_openmp())
        return {name: Kernel(loaded, name, parameters) for name, parameters in _parameters.items()}, ""
    except (OSError, UnavailableError) as error:
        return None, str(error)
    except Exception as error:  # nobody's step may fail for want of a faster kernel, whatever is wrong here
        return None, repr(error)


@cache
def _openmp() -> tuple[ctypes.c_void_p, ...]:
    """Return how to start a function on the threads that torch's operations have, and which of them runs it; or ()."""
    process = ctypes.CDLL(None)
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    if "OpenMP" not in torch.__config__.parallel_info() or not all(hasattr(process, name) for name in names):
        return ()
    return tuple(ctypes.cast(getattr(process, name), ctypes.c_void_p) for name in names)


# ---------------------------------------------------------------- calls


class Kernel:
    """A C function, behind the range of programs with the arguments of its Triton kernel."""

    def __init__(self, loaded: ctypes.CDLL, name: str, parameters: Sequence[Parameter]) -> None:
        self._call, self._parameters = getattr(loaded, f"{name}_on_threads"), parameters
        kinds: list[Any] = [ctypes.c_int64, ctypes.c_int64]
        self.places: list[int] = []  # of each argument of the Triton kernel, among those behind the first two
        for parameter in parameters:
            self.places.append(len(kinds) - 2)
            kinds.append(_kind(parameter.kind))
            kinds += [ctypes.c_int64] * parameter.several
        self._call.argtypes, self._call.restype = kinds, None

    def start(self, programs: int, *values: Any) -> None:
        """Run programs 0 to ``programs`` on torch's threads, as many as it has been set to; none depends on another.

        ``values`` are what ``addresses`` has returned.
        """
        threads = min(torch.get_num_threads(), programs // _LEAST_PROGRAMS) if _openmp() else 1
        self._call(threads, programs, *values)

    def addresses(self, given: Sequence[Any], block_size: int) -> list[Any]:
        """Return what C takes for the arguments of the Triton kernel: addresses, numbers, and dtypes behind some.

        Tensors are as the op declares them, which C would not notice: it has been checked.
        """
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
        values: list[Any] = []
        for parameter, value in zip(self._parameters, given, strict=True):
            values.append(value.data_ptr() if isinstance(value, Tensor) else value)
            if parameter.several:
                assert parameter.spec is not None
                values.append(0 if value is None else parameter.spec.dtypes.index(value.dtype))
        return values


def _kind(kind: str) -> Any:
    numbers = {"fp32": ctypes.c_float, "fp64": ctypes.c_double}
    return ctypes.c_void_p if kind.startswith("*") else numbers.get(kind, ctypes.c_int64)
