"""Compresses a worker's momentum: error feedback and signs. The kernel is never autotuned: it updates in place.

Bits are one plane of signs, uint8 [W, P / 8W]; or, where ternary, two planes, uint8 [W, 2, P / 8W]: signs, and which
elements are not zero (Tarasov & Ershov, section 4). Then sign(0) = 0, so that zeros have no residual and no momentum,
weigh in no scale, and are counted in a third row of partial sums. Which of the two it is, ops see from the dimensions
of their bits and from the rows of their sums.

Partial sums are taken in float64 of float32 terms: squares are exact there, sums round far below the float32 result,
and so the order of summation does not show.
"""

from __future__ import annotations

from . import block_io as io
from . import rules
from . import user_tensors as users
from .eager import compress, gather, load, load_variance, only_live, scaled, store, store_nearest, tiles, write_partials
from .jit import jit, tl
from .nouns import (
    CoefTable,
    Compensated,
    Flag,
    Moment,
    Packed,
    Partials,
    Places,
    Preconditioner,
    Signs,
    Stored,
    Tensors,
)
from .op import op

OWN = 2  # row of exponents: of a worker's own squares; those of c come first, then v's


@jit()
def momentum_compress_kernel(
    grads_table, tensors, compensated, exp_avg, coef, places, exp_avg_sq, bits, bits_stride, partials, partials_stride,
    found, hold, worker_sq, blocks_per_chunk,
    GRADS: tl.constexpr, TERNARY: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks.

    Bytes per element: g, 4, 2 or 1 for c, twice, 1/8 + 1/8 for bits (twice where TERNARY); 4, 2 or 1 for the variance,
    if any, or 1 where it is made of mean squares; as many as of c, twice, for the worker's own, if any.
    """
    if tl.load(hold) != 0:
        return
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    t, k = io.tensor_of(b, places.block_tensor, coef)
    row = tl.load(places.live_row + b)
    scale = tl.load(exp_avg.scale + b)
    c = io.load(compensated, b, i, True, BLOCK_SIZE)
    packed = io.bytes_at(exp_avg.bits, exp_avg.bits_stride, b, blocks_per_chunk, BLOCK_SIZE)
    signs, nonzero = io.load_bits(packed, exp_avg.plane, TERNARY)
    m = io.scaled(signs, nonzero, scale, TERNARY)
    kept = rules.carried(m, c, tl.load(compensated.scale + b), k, TERNARY)
    place = users.place_of(grads_table, tensors, t, places.block_start, b, BLOCK_SIZE)
    g = users.load(place, i, io.counting(places.live, row, i, BLOCK_SIZE), row, GRADS)
    if exp_avg_sq.numbers is not None:
        v = io.load_variance(exp_avg_sq, t, b, i, BLOCK_SIZE)
    if worker_sq is not None:
        exponents = compensated.exponents
        squares = Stored(worker_sq, None if exponents is None else exponents + OWN * compensated.exponents_stride)
        own = rules.followed(io.load(squares, b, i, False, BLOCK_SIZE), g, k)
        io.store(squares, io.moment_bits(compensated.drawn, b, i, BLOCK_SIZE), b, i, own, False, BLOCK_SIZE)
        if exp_avg_sq.numbers is not None:
            v = rules.shared_or_own(v, own)
    if exp_avg_sq.numbers is not None:
        c = rules.with_preconditioned(kept, g, v, k, exp_avg_sq.EPS_INSIDE_SQRT)
    else:
        c = rules.with_gradient(kept, g, k)
    # The mask is read again, so that no register holds it meanwhile.
    c = io.only_active(c, io.counting(places.live, row, i, BLOCK_SIZE), row)
    finite = rules.finite(c)
    c = tl.where(finite, c, kept)
    bad = io.any_of(~finite)  # here: no register holds it further
    if bad != 0:
        tl.atomic_or(found, io.NONFINITE)
    c = io.store(compensated, io.moment_bits(compensated.drawn, b, i, BLOCK_SIZE), b, i, c, True, BLOCK_SIZE)
    if IN_PLACE:
        tl.debug_barrier()  # all warps have read the last step's
    io.store_bits(io.bytes_at(bits, bits_stride, b, blocks_per_chunk, BLOCK_SIZE), exp_avg.plane, c, TERNARY)
    io.store_partials(partials, partials_stride, b, c, TERNARY)


@op(
    momentum_compress_kernel,
    writes=("compensated.numbers", "compensated.exponents", "bits", "partials", "found", "worker_sq"),
    derive={"IN_PLACE": ("constexpr", lambda exp_avg_bits, bits: exp_avg_bits.data_ptr() == bits.data_ptr())},
)
def momentum_compress(
    grads: Tensors, places: Places, compensated: Compensated, exp_avg: Signs, coef: CoefTable,
    exp_avg_sq: Preconditioner | None, bits: Packed, partials: Partials, found: Flag, hold: Flag,
    worker_sq: Moment | None = None,
) -> None:  # fmt: skip
    """Update the momentum and compress it with error feedback, in one pass (1-bit LAMB, lines 6 and 7: 1-bit Adam's).

        e = c - s*sign(c);  c = beta1*m + (1 - beta1)*g*unit + e;  bits = c >= 0

    The residual is deferred: it is formed when ``c`` is read again, since its scale is known only
    after all of ``c`` was seen. ``m`` comes from the last synchronised bits and scales. An element
    whose gradient exceeds GRAD_LIMIT, or whose new ``c`` is not finite, drops its gradient.

    Other arguments as for ``apply_momentum``.

    Args:
        grads: Gradients of any float dtype, dense, in the parameters' memory order; empty is zeros.
        compensated: c, read and written; its signs and sums are those of what is stored.
        exp_avg: m of the last step; its bits may be ``bits``, which a worker alone sends nobody.
        exp_avg_sq: v: then unit = 1/denom per coordinate; None: the layer's.
        places: Elements that do not count get c = 0.
        bits: As those of ``exp_avg``, written.
        partials: Written: sums of |c| and of c^2; or [3, B] where ternary: number of elements that
            are not zero.
        found: ``NONFINITE`` is set where any gradient was dropped.
        hold: Where set nothing is written.
        worker_sq: The EMA of the squares of this worker's own gradients, by which gradients are divided where v is 0,
            stored as c is, read and written; their exponents are row ``OWN`` of those of ``compensated``. None: nobody
            wants it.
    """
    if hold:
        return
    ternary, of_c = bits.dim() == 3, compensated.stored
    squares = None if worker_sq is None else Stored.row(worker_sq, compensated.exponents, OWN)
    device = compensated.scale.device
    for tile in tiles(places.sizes, len(bits), places.block_size, device, len(places.block_tensor)):
        b = tile.blocks
        k = coef[places.block_tensor[b]]
        m = scaled(exp_avg.bits[tile.chunk, ..., tile.bytes], exp_avg.scale[b, None])
        kept = rules.carried(m, load(of_c, tile), compensated.scale[b, None], k, ternary)
        g = gather(grads, tile, places.block_size)
        if squares is not None:
            own = rules.followed(load(squares, tile, signed=False), g, k)
            own = only_live(own, places, tile)
            store(squares, own, compensated.drawn, tile, signed=False)
        if exp_avg_sq is None:
            new = rules.with_gradient(kept, g, k)
        else:
            v = load_variance(exp_avg_sq, places, tile)
            v = v if squares is None else rules.shared_or_own(v, own)
            new = rules.with_preconditioned(kept, g, v, k, exp_avg_sq.eps_inside_sqrt)
        new = only_live(new, places, tile)
        if not write_partials(new, partials[:, b]):
            finite = rules.finite(new)
            new = tl.where(finite, new, kept)
            write_partials(new, partials[:, b])
            found |= int(io.NONFINITE)
        rounded = store(of_c, new, compensated.drawn, tile)
        if rounded is not new:
            write_partials(rounded, partials[:, b])
        compress(rounded, bits[tile.chunk, ..., tile.bytes])


def settle(compensated: Compensated, ternary: bool, places: Places) -> None:
    """Form the deferred residual in place: ``c = c - s*sign(c)``, ``s = 0``. Changes no later step, but by rounding.

    Args:
        compensated: c [n] and its scales; what is not in float32 is rounded to nearest.
        ternary: Whether sign(0) is 0.
        places: Of the n elements; those that do not count have no residual.
    """
    of_c, scale = compensated.stored, compensated.scale
    for tile in tiles((of_c.numbers.numel(),), 1, places.block_size, scale.device):
        residual = rules.residual(load(of_c, tile), scale[tile.blocks, None], ternary)
        store_nearest(of_c, only_live(residual, places, tile), tile)
    scale.zero_()
