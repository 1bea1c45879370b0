"""Chooses which implementation of an op runs: Triton kernels, the C kernels of ``native``, or eager torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

from . import native
from .jit import interpreting

Backend = Literal["triton", "native", "plain"]

forced: Backend | None = None
"""What runs whatever the device (``using``)."""


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Make all ops run on one ``backend``, whatever the device.

    ``"triton"`` on CPU tensors needs Triton's interpreter: set TRITON_INTERPRET=1 before anything
    imports triton. ``"native"``, the default for CPU tensors where there is a C compiler, is for CPU tensors
    only. ``"plain"``, eager torch, runs on CUDA tensors too.

    Raises:
        ValueError: for another name.
        RuntimeError: if Triton is asked for on a machine without CUDA, outside the interpreter; or C kernels
            where they can't be built.
    """
    global forced
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be 'triton', 'native' or 'plain', got {backend!r}")
    if backend == "triton" and not torch.cuda.is_available() and not interpreting():
        raise RuntimeError("Triton kernels on CPU tensors need its interpreter: set TRITON_INTERPRET=1 at the start")
    if backend == "native" and native.library() is None:
        raise RuntimeError(f"there are no C kernels here: {native.reason()}; use 'plain'")
    before, forced = forced, backend
    try:
        yield
    finally:
        forced = before


def chosen(device_type: str) -> Backend:
    """Return what runs for tensors of a device.

    Raises:
        RuntimeError: if C kernels are asked for, and the tensors are not the CPU's.
    """
    if forced == "native" and device_type != "cpu":
        raise RuntimeError(f"C kernels work on CPU tensors, got {device_type}; use 'triton' or 'plain'")
    if forced is not None:
        return forced
    if device_type == "cuda":
        return "triton"
    return "plain" if native.library() is None else "native"


def backend(device: torch.device) -> str:
    """Name what runs on a ``device``, for ``repr`` and ``stats()``."""
    which = chosen(device.type)
    if which == "native":
        alone = "" if native.has_threads() else ", on one thread: torch has no OpenMP whose threads they could share"
        return f"C, {native.compiler()} ({device.type}){alone}"
    if which == "plain":
        why = f": {native.reason()}" if device.type == "cpu" and native.library() is None else ""
        return f"plain torch, eager ({device.type}){why}"
    import triton

    return f"Triton {triton.__version__}{', interpreted' if interpreting() else ''} ({device.type})"
