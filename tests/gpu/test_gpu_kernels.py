"""Each Triton kernel on CUDA tensors against eager torch on the same tensors, drawn as ``test_every_op`` draws them.

Everything must be equal in every bit, with one exception. Additions, products, quotients and roots
are rounded correctly on both sides (``div.rn``, ``sqrt.rn``, no contraction, no flushing of
denormals), in the same order. Only float64 sums are added in another order: they may
differ by 1e-14, and the float32 scales made of them are equal again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import ANY_ORDER, assert_equal_backends, bits_of, each
from op_draws import OURS, Draw, draws

from fusedonebit import triton_kernels
from fusedonebit.triton_kernels import using

LARGE = [(100_000,), (3_000_001, 40, 1_000_000)]
CASES, SMALL = 6, 4
"""Of each op and size; draws of a case where tensors are small."""


def some(name: str, sizes: tuple[int, ...] | None, case: int, count: int) -> list[Draw]:
    fixed: dict[str, tuple[Any, ...]] = {"edges": ("", "grads")} | ({} if sizes is None else {"sizes": (sizes,)})
    return list(draws(name, case * count, (case + 1) * count, fixed))


@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("sizes", [None, *LARGE])
@pytest.mark.parametrize("name", OURS)
def test_a_kernel_equals_eager(device, small_only, name, sizes, case):
    if small_only and sizes:
        pytest.skip("dry run: too large for the interpreter")
    for draw in some(name, sizes, case, 1 if sizes else SMALL):
        assert_equal_backends(name, lambda draw=draw: draw.make(device), ANY_ORDER)


@pytest.mark.parametrize(
    "name", ["momentum_compress", "server_reduce", "lamb_update", "lamb_ratio", "lamb_coefficient"]
)
def test_the_same_inputs_give_the_same_bits_every_time(device, small_only, name):
    (draw,) = some(name, None if small_only else LARGE[-1], 1, 1)
    outcomes = []
    for _ in range(3):
        arguments = draw.make(device)
        with using("triton"):
            getattr(triton_kernels, name)(*arguments)
        outcomes.append([bits_of(x) for _, x in each(name, arguments)])
    for again in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], again, strict=True))
