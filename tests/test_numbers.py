"""Numbers that kernels are given are as precise as those that plain torch computes with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from backends import bits_of
from compressing import CompressedSGD
from launch_keys import Noting
from torch import Tensor
from whole_steps import ADAM, LIVING, MUON, OWN_VARIANCES, SGD, Run, take

from fusedonebit.triton_kernels import using
from fusedonebit.triton_kernels.op import OPS, Op

FLOATS = {"fp32", "fp64"}
TAKE_FLOATS = {name for name, op in OPS.items() if any(p.kind in FLOATS for p in op.parameters)}
SMALL: dict[str, Any] = {"sizes": (300, 17), "world_size": 3}
RUNS = (
    replace(ADAM, options=LIVING | {"max_grad_norm": 0.3, "variance_floor": 1 / 3}, steps=8, **SMALL),
    replace(OWN_VARIANCES, **SMALL),
    replace(MUON, options={"momentum": 1 / 3}, **SMALL),
    replace(SGD, options={"compensation_limit": 0.3}, **SMALL),
    *(Run(CompressedSGD, {"bits": 4, "feedback": "bf16", "scatters": each}, **SMALL) for each in (False, True)),
)
"""None of whose numbers float32 has."""
MOST = 3  # launches of each op that are compared


@pytest.mark.parametrize("name", sorted(TAKE_FLOATS))
def test_tritons_launcher_passes_a_float_as_it_was_declared(name):
    op, keys = OPS[name], set()
    given = [1 / 3 if p.kind in FLOATS else 3 for p in op.parameters]
    Noting(op, keys)[(1,)](*given, num_warps=4, enable_fp_fusion=False)
    ((_, _, arguments),) = keys
    found = {argument: kind for argument, kind, _ in arguments}
    declared = {p.name: p.kind for p in op.parameters if p.kind in FLOATS}
    assert {argument: found[argument] for argument in declared} == declared


def compared(op: Op, arguments: Sequence[Any]) -> None:
    """Run an op as the interpreter does and in plain torch, which must leave the same bits."""
    named = dict(zip(op.arguments, arguments, strict=False))
    written = [each for name in op.writes for each in _tensors(named.get(name))]
    before = [tensor.untyped_storage().clone() for tensor in written]
    Op.launch.__wrapped__(op, arguments, "triton")  # type: ignore[attr-defined]
    found = [tensor.clone() for tensor in written]
    for tensor, was in zip(written, before, strict=True):
        tensor.untyped_storage().copy_(was)
    op.eager(*arguments)
    for tensor, other in zip(written, found, strict=True):
        if tensor.dtype is torch.float64:  # sums of blocks may be in another order
            torch.testing.assert_close(other, tensor, rtol=1e-14, atol=0.0, equal_nan=True)
        else:
            differing = int((bits_of(tensor) != bits_of(other)).sum())
            assert not differing, f"{op.name}: {differing} of {tensor.numel()} elements"


def _tensors(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


@pytest.mark.kernels
def test_kernels_compute_with_the_digits_of_plain_torch(monkeypatch):
    launch, seen = Op.launch, Counter()

    def launched(self: Op, arguments: Sequence[Any], on: str) -> None:
        seen[self.name] += self.name in TAKE_FLOATS
        if 0 < seen[self.name] <= MOST:
            compared(self, arguments)
        else:
            self.eager(*arguments)

    launched.__wrapped__ = launch  # type: ignore[attr-defined]
    monkeypatch.setattr(Op, "launch", launched)
    with using("triton"):
        for run in RUNS:
            take(run)
    assert {name for name, launched in seen.items() if launched} == TAKE_FLOATS
    print(f"{len(TAKE_FLOATS)} kernels take floats, and leave the bits of plain torch")
