"""Matrices with scales of rows and columns: what ops refuse, where blocks begin, and that sending loses nothing."""

from __future__ import annotations

import pytest
import torch
from op_arguments import Problem
from torch import Tensor

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import Coef, FlatLayout, unpack, using
from fusedonebit.triton_kernels.outer import COLUMNS, LINES, ROWS, Outer

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
        ("outer_scales", "table", lambda x: x[:2], r"outer.table must be int32 \[3, T\] = \[3, 4\] on cpu, got"),
        ("outer_scales", "scales", Tensor.double, r"outer.scales must be float32 .*, got float64"),
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


def test_each_row_and_column_is_one_programs_work():
    sizes, columns = (0, 70 * 33, 5, 64 * 96), (4, 33, 1, 96)
    tiles = Outer.tiles(sizes, columns)
    assert tiles.dtype == torch.int32
    lines = [(t, kind, line) for t, kind, first in tiles.tolist() for line in range(first, first + LINES)]
    counts = {(t, kind): (n, size // n)[kind == ROWS] for t, (size, n) in enumerate(zip(sizes, columns, strict=True))
              for kind in (ROWS, COLUMNS) if size}  # fmt: skip
    assert {(t, kind) for t, kind, _ in lines} == set(counts)
    expected = [(t, kind, line) for (t, kind), n in counts.items() for line in range(n)]
    assert sorted(each for each in lines if each[2] < counts[each[:2]]) == sorted(expected)
    assert Outer.tiles((0,), (3,)).shape == (0, 3)


@pytest.mark.parametrize("backend", ["plain", "triton"])
def test_what_is_sent_and_what_is_left_are_what_was_added(backend):
    p = Problem(SIZES)
    coef = torch.ones_like(p.coef)
    coef[:, Coef.ONE_MINUS_BETA1], coef[:, Coef.UNIT], coef[:, Coef.GRAD_LIMIT] = 0.5, 2.0, 1e19
    a, b = p.arguments("outer_compress"), p.arguments("outer_scales")
    a = a._replace(
        compensated=torch.zeros(p.layout.numel), coef=coef, found=a.hold.clone(), skipped=torch.ones_like(a.skipped)
    )
    tiles = Outer.tiles(SIZES, a.outer.table[2].tolist())
    b = b._replace(compensated=a.compensated, outer=a.outer, partials=a.partials, tiles=tiles)
    sent = total = torch.zeros(p.layout.numel, dtype=torch.float64)
    for _ in range(5):
        a = a._replace(grads=[p.normal(size) for size in SIZES])
        with using(backend):
            ops.outer_compress(*a)
            total = total + torch.from_numpy(p.flat(a.grads))
            torch.testing.assert_close(sent + a.compensated.double(), total, rtol=0.0, atol=1e-5)
            ops.outer_scales(*b)
        # The message counts: the next step forms the residual with its scales, whose sum is that of what they scale.
        scales = elements(a.outer, p)
        sums = [[x.sum() for x in p.layout.cut(each)] for each in (scales, a.compensated.double().abs())]
        torch.testing.assert_close(*map(torch.tensor, sums), rtol=1e-6, atol=0.0)
        sent = sent + scales * unpack(a.bits.view(-1)).double()
        a = a._replace(skipped=torch.zeros_like(a.skipped))
    assert not int(a.found)


@pytest.mark.parametrize("backend", ["plain", "triton"])
def test_a_matrix_of_one_rank_is_what_its_scales_say(backend):
    p = Problem((45 * 170,))
    matrix = torch.outer(p.normal(45), p.normal(170))
    c = torch.full((p.layout.numel,), torch.nan)
    c[: matrix.numel()] = matrix.view(-1)
    partials = c.nan_to_num(0.0).abs().double().view(-1, 128).sum(1)
    outer = Outer(torch.zeros(1, 215), torch.tensor([[0], [45], [170]], dtype=torch.int32), Outer.starts(p.layout))
    hold = torch.zeros(1, dtype=torch.int32)
    with using(backend):
        ops.outer_scales(c, p.places, outer, partials, Outer.tiles((45 * 170,), (170,)), hold)
    found = elements(outer, p)[: matrix.numel()].view(45, 170)
    torch.testing.assert_close(found, matrix.abs().double(), rtol=1e-6, atol=0.0)


def elements(outer: Outer, p: Problem) -> Tensor:
    """Return the scales of all elements, each matrix's by itself."""
    line, (scales,) = torch.zeros(p.layout.numel, dtype=torch.float64), outer.scales.double()
    for t, size in enumerate(p.layout.sizes):
        rows_at, columns_at, columns = outer.table[:, t].tolist()
        rows = scales[rows_at : rows_at + size // columns]
        matrix = torch.outer(rows, scales[columns_at : columns_at + columns])
        line[p.layout.offset(t) : p.layout.offset(t) + size] = matrix.view(-1)
    return line
