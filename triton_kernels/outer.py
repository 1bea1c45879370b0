"""Compresses matrices to signs with a scale of each row and of each column, and averages them on a server.

The scale of element (i, j) is the product of its row's and its column's: an outer product, of which a message has the
factors. A matrix lies whole in the flat index space, row by row, and all of it in one chunk. The kernels are never
autotuned: they update in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from . import block_io as io
from . import headers, matrix_rules, rules
from . import user_tensors as users
from .eager import Tile, gather, live_mask, load, only_live, pack, signs, store, tiles
from .jit import jit, tl
from .layout import FlatLayout
from .nouns import (
    Bits,
    CoefTable,
    Counter,
    Derived,
    DoublePerBlock,
    Flag,
    Floats,
    Header,
    Headers,
    Indices,
    PerElement,
    Places,
    Residual,
    Stored,
    Table,
    Tensors,
    stride,
)
from .op import op
from .reduce import answer

DIGEST = headers.DIGEST
ROWS, COLUMNS = 0, 1  # whose scales a tile makes
LINES = 32  # rows or columns of a tile


class Outer(NamedTuple):
    """Scales of matrices' rows and columns, as they lie in messages, and where in a row of them each matrix has its.

    The scale of element (i, j) of tensor t is ``scales[k, rows_at[t] + i] * scales[k, columns_at[t] + j]``, k its chunk
    or, on a server, the worker whose it is.
    """

    scales: Annotated[Floats, "rows 1+"]
    table: Annotated[Table, "3 T"]
    """``rows_at``, ``columns_at``, and how many columns each tensor has, 1 at least. Scales of rows lie right before
    those of columns: ``columns_at - rows_at`` is how many rows it has."""
    start: Indices
    """The element of its tensor with which each block begins."""

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides."""
        return {
            "scales_stride": ("i32", lambda scales: stride(scales)),
            "table_stride": ("i32", lambda table: stride(table)),
        }

    @staticmethod
    def starts(layout: FlatLayout) -> Tensor:
        """Return ``start`` of all blocks of a layout, int32 [n_blocks]; of padding behind the last tensor 0."""
        within = torch.arange(layout.n_blocks) - torch.tensor([*layout.first_block[:-1], 0])[layout.block_tensor()]
        within[layout.first_block[-1] :] = 0
        return (within * layout.block_size).int()

    @staticmethod
    def tiles(sizes: Sequence[int], columns: Sequence[int]) -> Tensor:
        """Return the work of each program of ``outer_scales``, int32 [programs, 3], none of tensors without elements.

        That is: the tensor, ``ROWS`` or ``COLUMNS``, and the first of ``LINES`` of them.

        Args:
            sizes: Elements of each tensor.
            columns: How many columns each has.
        """
        found: list[tuple[int, int, int]] = []
        for t, (size, n) in enumerate(zip(sizes, columns, strict=True)):
            if size:  # the longest first; those that read the same one after the other
                found += [(t, COLUMNS, first) for first in range(0, n, LINES)]
                found += [(t, ROWS, first) for first in range(0, size // n, LINES)]
        return torch.tensor(found, dtype=torch.int32).view(-1, 3)


class SentSigns(NamedTuple):
    """Signs that workers have sent to a server of its chunk of P elements, and what this rank's own header says."""

    bits: Annotated[Bits, "W P/8"]
    """A row of each worker's, LSB first."""
    words: Annotated[Headers, "W WORDS"]
    """The headers."""
    own_words: Annotated[Flag, "WORDS"]
    """This rank's."""

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides."""
        return {
            "bits_stride": ("i32", lambda bits: stride(bits)),
            "words_stride": ("i32", lambda words: stride(words)),
            "world_size": ("i32", lambda bits: len(bits)),
        }


# ---------------------------------------------------------------- scales of elements


@jit()
def slots_of(outer, t, b, i):
    """Return where in a row of scales a block's elements have their row's and their column's, int32 like i each.

    Behind the end of a tensor they are no slots.
    """
    columns = tl.load(outer.table + 2 * outer.table_stride + t)
    start = tl.load(outer.start + b)
    first = start // columns
    # From the first row on: what is added to ``start`` might not fit an int32 behind the end.
    column = start - first * columns + i
    row = column // columns
    column = column - row * columns
    return tl.load(outer.table + t) + first + row, tl.load(outer.table + outer.table_stride + t) + column


@jit()
def load_scales(scales, slots, mask):
    """Load the scales of a block's elements, float32 like the mask; 0 where that is not set."""
    of_rows = tl.load(scales + slots[0], mask=mask, other=0.0)
    return matrix_rules.product(of_rows, tl.load(scales + slots[1], mask=mask, other=0.0))


def slots_of_tile(outer: Outer, places: Places, tile: Tile) -> tuple[Tensor, Tensor]:
    """Do as ``slots_of``, int64 [blocks, block_size]; 0 where an element does not count."""
    b = tile.blocks
    rows_at, columns_at, columns = outer.table[:, places.block_tensor[b], None].long()
    at = outer.start[b, None] + torch.arange(places.block_size, device=outer.start.device)
    slots, mask = (rows_at + at // columns, columns_at + at % columns), live_mask(places, tile)
    return slots if mask is None else (slots[0] * mask, slots[1] * mask)


def scales_of(scales: Tensor, slots: tuple[Tensor, Tensor]) -> Tensor:
    """Return the scales of a tile's elements, float32 [blocks, block_size], of a row of them."""
    return matrix_rules.product(scales[slots[0]], scales[slots[1]])


# ---------------------------------------------------------------- a worker's


@jit()
def outer_compress_kernel(
    grads_table, tensors, compensated, outer, coef, skipped, bits, bits_stride, partials, found, hold, drawn,
    block_tensor, block_start, live, live_row, blocks_per_chunk,
    GRADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks.

    Bytes per element: g, 4 or 2 for c, twice, 1/8 for bits; scales, of which many elements read each.
    """
    if tl.load(hold) != 0:
        return
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    t, k = io.tensor_of(b, block_tensor, coef)
    row = tl.load(live_row + b)
    of_c = Stored(compensated, None)
    kept = io.load(of_c, b, i, True, BLOCK_SIZE)
    if tl.load(skipped) == 0:
        slots = slots_of(outer, t, b, i)
        mask = io.counting(live, row, i, BLOCK_SIZE)
        s = load_scales(outer.scales + b // blocks_per_chunk * outer.scales_stride, slots, mask)
        kept = rules.residual(kept, s, False)
    place = users.place_of(grads_table, tensors, t, block_start, b, BLOCK_SIZE)
    g = users.load(place, i, io.counting(live, row, i, BLOCK_SIZE), row, GRADS)
    c = rules.with_gradient(kept, g, k)
    # The mask is read again, so that no register holds it meanwhile.
    c = io.only_active(c, io.counting(live, row, i, BLOCK_SIZE), row)
    finite = rules.finite(c)
    c = tl.where(finite, c, kept)
    bad = io.any_of(~finite)
    if bad != 0:
        tl.atomic_or(found, io.NONFINITE)
    c = io.store(of_c, io.moment_bits(drawn, b, i, BLOCK_SIZE), b, i, c, True, BLOCK_SIZE)
    tl.store(io.bytes_at(bits, bits_stride, b, blocks_per_chunk, BLOCK_SIZE), io.bytes_of(c >= 0))
    tl.store(partials + b, io.total_of(tl.abs(c)))


@op(outer_compress_kernel, writes=("compensated", "bits", "partials", "found"))
def outer_compress(
    grads: Tensors, places: Places, compensated: Residual, outer: Annotated[Outer, "rows=W"], coef: CoefTable,
    skipped: Flag, bits: Annotated[Bits, "W P/8/W+"], partials: DoublePerBlock, found: Flag, hold: Flag,
    drawn: Counter | None = None,
) -> None:  # fmt: skip
    """Compress gradients of matrices with error feedback, to signs: ``outer_scales`` makes their scales of c then.

        e = c - s*sign(c);  c = e + (1 - beta1)*g*unit;  bits = c >= 0

    The residual is deferred as in ``momentum_compress``; sign(0) is 1. An element whose gradient exceeds GRAD_LIMIT, or
    whose new c is not finite, drops its gradient, and has c = e.

    Args:
        grads: Gradients of any float dtype, dense, in the parameters' memory order; empty is zeros.
        places: Elements that do not count get c = 0.
        compensated: c, read and written; signs and sums are those of what is stored.
        outer: The scales s that the last message had, a row of each chunk.
        coef: Coefficients of each tensor, of which ONE_MINUS_BETA1, UNIT and GRAD_LIMIT are read.
        skipped: Not 0 where the last step was: its message counts for nothing, and e = c.
        bits: A row of each chunk, LSB first, written.
        partials: Written: the sum of |c| of each block.
        found: ``NONFINITE`` is set where any gradient was dropped.
        hold: Where set nothing is written.
        drawn: The updates done, with which c is rounded stochastically; None: it is in float32.
    """
    if hold:
        return
    of_c = Stored(compensated)
    for tile in tiles(places.sizes, len(bits), places.block_size, compensated.device, len(places.block_tensor)):
        kept = c = load(of_c, tile)
        if not skipped:
            s = scales_of(outer.scales[tile.chunk], slots_of_tile(outer, places, tile))
            kept = rules.residual(c, s, False)
        g = gather(grads, tile, places.block_size)
        new = only_live(rules.with_gradient(kept, g, coef[places.block_tensor[tile.blocks]]), places, tile)
        finite = rules.finite(new)
        if not finite.all():
            new = tl.where(finite, new, kept)
            found |= int(io.NONFINITE)
        c = store(of_c, new, drawn, tile)
        pack(c.view(-1), bits[tile.chunk, tile.bytes])
        partials[tile.blocks] = c.double().abs().sum(1)


# ---------------------------------------------------------------- a server's


@jit(do_not_specialize=("header_number", "header_tag", "header_flags"))
def outer_mean_kernel(
    arrived, outer, momentum, direction, beta, one_minus_beta, lead, one_minus_lead, hold, flags, kept_words, words,
    header, block_tensor, live, live_row, per_worker,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of the chunk; each compares the headers, the first stores what they say, all of them keep some.

    Bytes per element: W/8 in, 8 for the momentum, 4 out; scales as ``outer_compress``, of each worker. Sums in rank
    order.
    """
    b = tl.program_id(0).to(tl.int64)
    held = tl.load(hold)
    bad = headers.count_flags(arrived.words, arrived.words_stride, arrived.own_words, arrived.world_size)
    if b == 0:
        found = headers.flags_of(bad) | held
        tl.store(flags, found)
        if words is not None:
            headers.write_words(words, header, tl.load(arrived.own_words + DIGEST), found)
    headers.keep_words(b, arrived.words, arrived.words_stride, kept_words, arrived.world_size)
    if (held | bad) != 0:
        return
    i = io.elements(BLOCK_SIZE)
    row = tl.load(live_row + b)
    mask = io.counting(live, row, i, BLOCK_SIZE)
    slots = slots_of(outer, tl.load(block_tensor + b), b, i)
    # Pointers that move on: w * stride would need 64 bits.
    packed = arrived.bits + b * (BLOCK_SIZE // 8) + tl.arange(0, BLOCK_SIZE // 8)
    scales = outer.scales
    d = tl.zeros(i.shape, tl.float32)
    for _ in range(arrived.world_size):
        s = load_scales(scales, slots, mask) * per_worker
        d += tl.where(io.bits_of(tl.load(packed)) != 0, s, rules.negative(s))
        packed += arrived.bits_stride
        scales += outer.scales_stride
    m = matrix_rules.weighted(tl.load(momentum + b * BLOCK_SIZE + i), d, beta, one_minus_beta)
    tl.store(momentum + b * BLOCK_SIZE + i, io.only_active(m, mask, row))
    x = matrix_rules.weighted(d, m, lead, one_minus_lead)
    tl.store(direction + b * BLOCK_SIZE + i, io.only_active(x, mask, row))


@op(
    outer_mean_kernel,
    writes=("momentum", "direction", "flags", "kept_words", "words"),
    derive={
        "one_minus_beta": ("fp32", lambda beta: 1.0 - beta),
        "one_minus_lead": ("fp32", lambda lead: 1.0 - lead),
        "per_worker": ("fp32", lambda arrived_world_size: 1.0 / arrived_world_size),
    },
)
def outer_mean(
    arrived: SentSigns, places: Places, outer: Annotated[Outer, "rows=W"], momentum: PerElement,
    direction: PerElement, beta: float, lead: float, hold: Flag, flags: Flag,
    kept_words: Annotated[Headers, "W WORDS"], words: Annotated[Headers, "1 WORDS"] | None = None,
    header: Header | None = None,
) -> None:  # fmt: skip
    """Average the workers' matrices on their server, and follow the average with a momentum.

        d = sum_w (s_w/W)*sign_w;  m = beta*m + (1 - beta)*d;  direction = lead*d + (1 - lead)*m

    The sum runs in rank order. Where any rank's header has a flag, or differs from this rank's in a checked word, or
    ``hold`` is set, m and the direction stay as they are.

    Args:
        arrived: What workers have sent, but for scales.
        places: Of this chunk; of elements that do not count m and the direction become 0.
        outer: The scales that have arrived, a row of each worker's.
        momentum: m, of this chunk, read and written.
        direction: Where the matrices are to go, of this chunk, written.
        beta: How much of m stays.
        lead: 0, or 1 - beta for Nesterov's momentum.
        hold: Where set nothing is written but what follows.
        flags, kept_words, words, header: As for ``server_reduce``.
    """
    answer(arrived.words, arrived.own_words, hold, flags, kept_words, words, header)
    if flags:
        return
    world_size = len(arrived.bits)
    for tile in tiles((len(places.live_row) * places.block_size,), 1, places.block_size, momentum.device):
        here, slots = slice(tile.start, tile.start + tile.numel), slots_of_tile(outer, places, tile)
        m = places.rows(momentum[here])
        d = torch.zeros_like(m)
        for w in range(world_size):
            s = scales_of(outer.scales[w], slots) * (1.0 / world_size)
            d += signs(arrived.bits[w, tile.bytes], len(m)).mul_(s)
        new = matrix_rules.weighted(m, d, beta, 1.0 - beta)
        m.copy_(only_live(new, places, tile))
        x = only_live(matrix_rules.weighted(d, new, lead, 1.0 - lead), places, tile)
        places.rows(direction[here]).copy_(x)
