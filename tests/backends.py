"""Runs an op on all backends from equal arguments and compares every bit that it wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from op_arguments import flat
from reference_ops import Problem
from torch import Tensor

from fusedonebit.triton_kernels import using
from fusedonebit.triton_kernels.native import KERNELS, library
from fusedonebit.triton_kernels.op import launches

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = (torch.nan, torch.inf, -torch.inf, -0.0, 1e-45, -1e-45, 3e38, 9e18, -1.95e19)


def problem(
    sizes: Sequence[int],
    world_size: int = 1,
    block: int = 1024,
    dtype: torch.dtype = torch.float32,
    special: bool = False,
    **options: object,
) -> Problem:
    """Random arguments; with ``special``, gradients have NaN, Inf, -0.0 and denormals among them."""
    p = Problem(sizes, world_size, block, dtype=dtype, **options)
    if special:
        for g in p.grads:
            for i, value in enumerate(SPECIAL[: g.numel()]):
                g[i * 37 % g.numel()] = value
    return p


def tensors(arguments: Sequence[Any]) -> list[Tensor]:
    """All tensors among an op's arguments, in lists and nouns too, each with what lies around it in its memory."""
    found = []
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            found += tensors(argument)
        elif isinstance(argument, Tensor):
            found.append(argument if argument._base is None else argument._base)
    return found


def bits_of(tensor: Tensor) -> Tensor:
    """The bits, so that NaN equals NaN (whatever its payload) and -0.0 differs from 0.0."""
    if tensor.is_floating_point():
        tensor = torch.where(torch.isnan(tensor), torch.nan, tensor)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(integer)


def compared(found: Sequence[Tensor]) -> list[str]:
    """What is compared with plain torch for such tensors: C, if there is a compiler, for those of the CPU only."""
    on_cpu = all(t.device.type == "cpu" for t in found)
    return ["triton", "native"] if on_cpu and library() is not None else ["triton"]


def assert_equal_backends(name: str, make: Callable[[], tuple], float64_rtol: float = 1e-14) -> None:
    """Runs an op on all backends from equal arguments; every argument must end with equal bits.

    Float64 partial sums may differ in the order of summation.
    """
    plain = make()
    before = launches.total()
    with using("plain"):
        getattr(torch.ops.fusedonebit, name)(*flat(name, plain))
    assert launches.total() == before
    for backend in compared(tensors(plain)):
        arguments, before = make(), launches.total()
        with using(backend):
            getattr(torch.ops.fusedonebit, name)(*flat(name, arguments))
        assert launches.total() == before + (backend == "triton" or name in KERNELS)
        for expected, found in zip(tensors(plain), tensors(arguments), strict=True):
            if expected.dtype is torch.float64:
                torch.testing.assert_close(found, expected, rtol=float64_rtol, atol=0.0, equal_nan=True)
            else:
                assert torch.equal(bits_of(expected), bits_of(found)), backend


def assert_equal_functions(function: Callable[[], Tensor]) -> None:
    """What a function returns must have equal bits on all backends."""
    with using("plain"):
        expected = function()
    for backend in compared([expected]):
        with using(backend):
            found = function()
        assert torch.equal(bits_of(expected), bits_of(found)), backend
