"""Matrices with scales of rows and columns: what ops refuse, where blocks begin, and that sending loses nothing."""

from __future__ import annotations

import pytest
import torch
from op_arguments import Problem
from torch import Tensor

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import FlatLayout, unpack, using
from fusedonebit.triton_kernels.outer import Outer

SIZES = (300, 128, 0, 129)


@pytest.mark.parametrize("backend", ["plain", "triton"])
@pytest.mark.parametrize(
    ("op", "field", "wrong", "told"),
    [
        ("outer_compress", "table", lambda x: x[:2], r"outer.table must be int32 \[3, T\] = \[3, 4\] on cpu, got"),
        ("outer_compress", "table", lambda x: x[:, :3], r"outer.table must be int32 \[3, T\] = \[3, 4\] on cpu, got"),
        ("outer_compress", "table", Tensor.long, r"outer.table must be int32 .*, got int64 \[3, 4\] on cpu"),
        (
            "outer_compress",
            "start",
            lambda x: x[1:],
            r"outer.start must be int32 \[B\] = \[6\] on cpu, got int32 \[5\]",
        ),
        ("outer_compress", "scales", lambda x: x[:1], r"bits must be uint8 .*; see .*outer.scales"),
        (
            "outer_compress",
            "scales",
            lambda x: x[:, :0],
            r"outer.scales must be float32 .*, got float32 \[2, 0\] on cpu",
        ),
        ("outer_mean", "scales", lambda x: x[:1], r"outer.scales must be float32 .*; see arrived.bits"),
        ("outer_mean", "scales", Tensor.double, r"outer.scales must be float32 .*, got float64"),
        ("outer_mean", "table", lambda x: x[0], r"outer.table must be int32 \[3, T\].* on cpu, got int32 \[4\]"),
    ],
)
def test_what_is_not_as_declared_is_named(op, field, wrong, told, backend):
    given = Problem(SIZES, 2).arguments(op)
    given = given._replace(outer=given.outer._replace(**{field: wrong(getattr(given.outer, field))}))
    with using(backend), pytest.raises(ValueError, match=rf"^{op}: {told}"):
        getattr(ops, op)(*given)


def test_blocks_begin_where_their_tensors_go_on():
    assert Outer.starts(FlatLayout(SIZES, 4, 128)).tolist() == [0, 128, 256, 0, 0, 128, 0, 0]
    assert not Outer.starts(FlatLayout((), 2, 128)).any()


@pytest.mark.parametrize("backend", ["plain", "triton"])
def test_what_is_sent_and_what_is_left_are_what_was_added(backend):
    p = Problem(SIZES)
    a = p.arguments("outer_compress")
    a = a._replace(
        compensated=torch.zeros(p.layout.numel), skipped=torch.ones(1, dtype=torch.int32), found=a.hold.clone()
    )
    sent = total = torch.zeros(p.layout.numel, dtype=torch.float64)
    for _ in range(5):
        a = a._replace(added=p.normal(p.layout.numel))
        with using(backend):
            ops.outer_compress(*a)
        total = total + torch.where(p.live_mask, a.added, 0.0)
        left = a.compensated.double()
        torch.testing.assert_close(sent + left, total, rtol=0.0, atol=1e-5)
        # Scales are made now, and the message counts: the next step forms the residual with them.
        a = a._replace(skipped=torch.zeros(1, dtype=torch.int32))
        a = a._replace(outer=a.outer._replace(scales=p.normal(*a.outer.scales.shape).abs()))
        sent = sent + elements(a.outer, p) * unpack(a.bits.view(-1)).double()
    assert not int(a.found)


def elements(outer: Outer, p: Problem) -> Tensor:
    """Return the scales of all elements, each matrix's by itself."""
    line, (scales,) = torch.zeros(p.layout.numel, dtype=torch.float64), outer.scales.double()
    for t, size in enumerate(p.layout.sizes):
        rows_at, columns_at, columns = outer.table[:, t].tolist()
        rows = scales[rows_at : rows_at + size // columns]
        matrix = torch.outer(rows, scales[columns_at : columns_at + columns])
        line[p.layout.offset(t) : p.layout.offset(t) + size] = matrix.view(-1)
    return line
