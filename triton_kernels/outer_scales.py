"""Makes scales of matrices' rows and columns of what ``outer_compress`` has left: sums of |c| along them.

Sums have one order, whatever computes them, that of ``finish``: lane l of so many adds elements l, l + lanes, ... in
their order, then neighbouring lanes are added. A tile is LINES rows, or LINES neighbouring columns, so that a warp
reads whole lines of memory of either; nobody waits for another.
"""

from __future__ import annotations

from typing import Annotated

from . import block_io as io
from . import matrix_rules
from .finish import ordered_sum
from .jit import jit, tl
from .layout import FlatLayout
from .nouns import DoublePerBlock, Flag, Places, Residual, Table
from .op import op
from .outer import LINES, ROWS, Outer

LANES = io.SUM_LANES  # of a line
LEVELS = io.SUM_LEVELS
LEVELS_OF_LINES = 5  # halvings of LINES
OF_A_TILE = 3  # numbers


@jit()
def add_lanes(x):
    """Add neighbouring lanes of x float64 [LINES, LANES], again and again, until one of each line is left: [LINES]."""
    for half in tl.static_range(1, LEVELS + 1):
        x = tl.sum(tl.reshape(x, [LINES, LANES >> half, 2]), axis=2)
    return tl.reshape(x, [LINES])


@jit()
def sums_of_lines(c, lines, line_stride, length, stride):
    """Sum |c| along lines, of which there are ``lines`` or LINES, float64 [LINES].

    Strides are those between lines, and between elements of a line.
    """
    line = tl.arange(0, LINES)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    # Fits an int32 where an element is: a tensor has no more. The pointer moves on, which needs 64 bits.
    at = line * line_stride + lane * stride
    total = tl.zeros([LINES, LANES], tl.float64)
    for first in range(0, length, LANES):
        x = tl.load(c + at, mask=(line < lines) & (first + lane < length), other=0.0)
        total += tl.abs(x.to(tl.float32)).to(tl.float64)
        c += LANES * stride
    return add_lanes(total)


@jit()
def sum_of_blocks(partials, begin, end):
    """Sum partials[begin:end] by LINES * LANES lanes, float64."""
    lane = tl.arange(0, LINES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    total = tl.zeros([LINES, LANES], tl.float64)
    for at in range(begin, end, LINES * LANES):
        total += tl.load(partials + at + lane, mask=at + lane < end, other=0.0)
    x = add_lanes(total)
    for half in tl.static_range(1, LEVELS_OF_LINES + 1):
        x = tl.sum(tl.reshape(x, [LINES >> half, 2]), axis=1)
    return tl.sum(x, axis=0)


@jit()
def outer_scales_kernel(
    compensated, outer, partials, tiles, hold, first_block, blocks_per_chunk,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: tiles. Bytes per element: 4 or 2 for c, twice, by rows and by columns; the second time often cached."""
    if tl.load(hold) != 0:
        return
    tile = tiles + tl.program_id(0).to(tl.int64) * OF_A_TILE
    t, first = tl.load(tile), tl.load(tile + 2)
    rows_at = tl.load(outer.table + t)
    columns_at = tl.load(outer.table + outer.table_stride + t)
    rows, columns = columns_at - rows_at, tl.load(outer.table + 2 * outer.table_stride + t)
    begin = tl.load(first_block + t)
    c = compensated + begin.to(tl.int64) * BLOCK_SIZE
    line = first + tl.arange(0, LINES)
    scales = outer.scales + (begin // blocks_per_chunk).to(tl.int64) * outer.scales_stride + line
    if tl.load(tile + 1) == ROWS:
        sums = sums_of_lines(c + first.to(tl.int64) * columns, rows - first, columns, columns, 1)
        tl.store(scales + rows_at, sums.to(tl.float32), mask=line < rows)
    else:
        total = sum_of_blocks(partials, begin, tl.load(first_block + t + 1))
        sums = sums_of_lines(c + first, columns - first, 1, rows, columns)
        tl.store(scales + columns_at, matrix_rules.share(sums, total), mask=line < columns)


@op(
    outer_scales_kernel,
    writes=("outer.scales",),
    derive={
        "first_block": ("*i32", lambda tables: tables.first_block),
        "blocks_per_chunk": ("i32", lambda blocks, outer_scales: blocks // len(outer_scales)),
        "programs": ("i32", lambda tiles: len(tiles)),
    },
)
def outer_scales(
    compensated: Residual, places: Places, outer: Outer, partials: DoublePerBlock,
    tiles: Annotated[Table, "programs 3"], hold: Flag,
) -> None:  # fmt: skip
    """Make the scales of matrices' rows and columns, in a fixed order, where they travel from.

        row i: sum_j |c_ij|;  column j: sum_i |c_ij| / sum_ij |c_ij|, 0 where all are 0

    So the scale of an element is the mean of its row times that of its column, over the mean of all.

    Args:
        compensated: c, as ``outer_compress`` leaves it: 0 where an element does not count. Padding is not read.
        places: Of all the index space.
        outer: Its scales are written, of each tensor in the row of the chunk in which it begins; others stay.
        partials: The sum of |c| of each block, of which those of matrices are made.
        tiles: ``Outer.tiles``: which rows and columns each program works on.
        hold: Where set nothing is written.
    """
    if hold:
        return
    layout = FlatLayout(tuple(places.sizes), len(outer.scales), places.block_size, len(places.block_tensor))
    for t in sorted(set(tiles[:, 0].tolist())):
        rows_at, columns_at, columns = outer.table[:, t].tolist()
        begin, end = layout.first_block[t : t + 2]
        scales, first, size = outer.scales[begin // layout.blocks_per_chunk], layout.offset(t), layout.sizes[t]
        c = compensated[first : first + size].view(columns_at - rows_at, columns).abs().double()
        total = ordered_sum(partials[begin:end], LINES * LANES)
        scales[rows_at:columns_at] = ordered_sum(c)
        scales[columns_at : columns_at + columns] = matrix_rules.share(ordered_sum(c.T), total)
