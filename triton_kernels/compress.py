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
from .codes import keep_nearest, rows_of
from .eager import compress, gather, keep, kept_values, only_live, scaled, tiles, write_partials
from .jit import jit, tl
from .nouns import Bits, Counters, Doubles, Flag, Floats, Moment, PerBlock, Places, Signs, Tensors
from .op import op

V, OWN = 1, 2  # rows of octaves; those of c come first


@jit()
def momentum_compress_kernel(
    grads_table, tensors, compensated, worker_scale, exp_avg_bits, exp_avg_bits_stride, exp_avg_scale, coef,
    block_tensor, block_start, exp_avg_sq, live, live_row, bits, bits_stride, plane, partials, partials_stride, found,
    hold, worker_sq, drawn, octaves, octaves_stride, blocks_per_chunk,
    GRADS: tl.constexpr, EPS_INSIDE_SQRT: tl.constexpr, TERNARY: tl.constexpr, IN_PLACE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks.

    Bytes per element: g, 4, 2 or 1 for c, twice, 1/8 + 1/8 for bits (twice where TERNARY); 4, 2 or 1 for the variance,
    if any; as many, twice, for the worker's own, if any.
    """
    if tl.load(hold) != 0:
        return
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    t, k = io.tensor_of(b, block_tensor, coef)
    row = tl.load(live_row + b)
    scale = tl.load(exp_avg_scale + b)
    c = io.load_kept(compensated, octaves, b, i, True, BLOCK_SIZE)
    packed = io.bytes_at(exp_avg_bits, exp_avg_bits_stride, b, blocks_per_chunk, BLOCK_SIZE)
    signs, nonzero = io.load_bits(packed, plane, TERNARY)
    m = io.scaled(signs, nonzero, scale, TERNARY)
    kept = rules.carried(m, c, tl.load(worker_scale + b), k, TERNARY)
    place = users.place_of(grads_table, tensors, t, block_start, b, BLOCK_SIZE)
    g = users.load(place, i, io.counting(live, row, i, BLOCK_SIZE), row, GRADS)
    if exp_avg_sq is not None:
        v = io.load_kept(exp_avg_sq, io.row_of(octaves, octaves_stride, V), b, i, False, BLOCK_SIZE)
    if worker_sq is not None:
        of_squares = io.row_of(octaves, octaves_stride, OWN)
        own = rules.followed(io.load_kept(worker_sq, of_squares, b, i, False, BLOCK_SIZE), g, k)
        io.store_kept(worker_sq, of_squares, io.moment_bits(drawn, b, i, BLOCK_SIZE), b, i, own, False, BLOCK_SIZE)
        if exp_avg_sq is not None:
            v = rules.shared_or_own(v, own)
    if exp_avg_sq is not None:
        c = rules.with_preconditioned(kept, g, v, k, EPS_INSIDE_SQRT)
    else:
        c = rules.with_gradient(kept, g, k)
    # The mask is read again, so that no register holds it meanwhile.
    c = io.only_active(c, io.counting(live, row, i, BLOCK_SIZE), row)
    finite = rules.finite(c)
    c = tl.where(finite, c, kept)
    bad = io.any_of(~finite)  # here: no register holds it further
    if bad != 0:
        tl.atomic_or(found, io.NONFINITE)
    c = io.store_kept(compensated, octaves, io.moment_bits(drawn, b, i, BLOCK_SIZE), b, i, c, True, BLOCK_SIZE)
    if IN_PLACE:
        tl.debug_barrier()  # all warps have read the last step's
    io.store_bits(io.bytes_at(bits, bits_stride, b, blocks_per_chunk, BLOCK_SIZE), plane, c, TERNARY)
    io.store_partials(partials, partials_stride, b, c, TERNARY)


@op(
    momentum_compress_kernel,
    writes=("compensated", "bits", "partials", "found", "worker_sq", "octaves"),
    derive={"IN_PLACE": ("constexpr", lambda exp_avg_bits, bits: exp_avg_bits.data_ptr() == bits.data_ptr())},
)
def momentum_compress(
    grads: Tensors, places: Places, compensated: Moment, worker_scale: PerBlock, exp_avg: Signs, coef: Floats,
    exp_avg_sq: Moment | None, eps_inside_sqrt: bool, bits: Bits, partials: Doubles, found: Flag, hold: Flag,
    worker_sq: Moment | None = None, drawn: Counters | None = None, octaves: Bits | None = None,
) -> None:  # fmt: skip
    """Momentum, error feedback and sign compression in one pass (1-bit LAMB, lines 6 and 7: 1-bit Adam's).

        e = c - s*sign(c);  c = beta1*m + (1 - beta1)*g*unit + e;  bits = c >= 0

    The residual is deferred: it is formed when ``c`` is read again, since its scale is known only
    after all of ``c`` was seen. ``m`` comes from the last synchronised bits and scales. An element
    whose gradient exceeds GRAD_LIMIT, or whose new ``c`` is not finite, drops its gradient.

    Other arguments as for ``apply_momentum``.

    Args:
        grads: Gradients of any float dtype, dense, in the parameters' memory order; empty is zeros.
        compensated: c, float32, bfloat16, or codes in uint8 [P], read and written; its signs and sums are those of
            what is kept.
        worker_scale: s of the last step, float32 [B].
        exp_avg: m of the last step; its bits may be ``bits``, which a worker alone sends nobody.
        exp_avg_sq: None, or float32, bfloat16 or codes [P]: then unit = 1/denom per coordinate, else the layer's.
        places: Elements that do not count get c = 0.
        bits: As those of ``exp_avg``, written.
        partials: float64 [2, B], written: sums of |c| and of c^2; or [3, B] where ternary: number of elements that
            are not zero.
        found: int32 [1], ``NONFINITE`` is set where any gradient was dropped.
        hold: int32 [1]; where set nothing is written.
        worker_sq: float32, bfloat16 or codes [P], written: the EMA of the squares of this worker's own gradients, by
            which gradients are divided where v is 0; None: nobody wants it.
        drawn: int64 [], the updates done, with which c and these squares are rounded stochastically: to nearest, small
            gradients would be lost, and squares stand still. None: both are float32.
        octaves: uint8 [3, B], written: of each block, where codes of c, of ``exp_avg_sq`` and of ``worker_sq`` lie.
            None: there are no codes.
    """
    if hold:
        return
    ternary = bits.dim() == 3
    flat = places.rows(compensated)
    for tile in tiles(places.sizes, len(bits), places.block_size, compensated.device, len(places.block_tensor)):
        b = tile.blocks
        k = coef[places.block_tensor[b]]
        m = scaled(exp_avg.bits[tile.chunk, ..., tile.bytes], exp_avg.scale[b, None])
        of_c, of_v, of_own = (None if row is None else row[b] for row in rows_of(octaves, 3))
        kept = rules.carried(m, kept_values(flat[b], of_c), worker_scale[b, None], k, ternary)
        g = gather(grads, tile, places.block_size)
        if worker_sq is not None:
            kept_sq = places.rows(worker_sq)[b]
            own = rules.followed(kept_values(kept_sq, of_own, signed=False), g, k)
            own = only_live(own, places, tile)
            keep(kept_sq, of_own, own, drawn, tile, signed=False)
        v = None if exp_avg_sq is None else kept_values(places.rows(exp_avg_sq)[b], of_v, signed=False)
        if v is not None and worker_sq is not None:
            v = rules.shared_or_own(v, own)
        if v is None:
            new = rules.with_gradient(kept, g, k)
        else:
            new = rules.with_preconditioned(kept, g, v, k, eps_inside_sqrt)
        new = only_live(new, places, tile)
        if not write_partials(new, partials[:, b]):
            finite = rules.finite(new)
            new = tl.where(finite, new, kept)
            write_partials(new, partials[:, b])
            found |= int(io.NONFINITE)
        rounded = keep(flat[b], of_c, new, drawn, tile)
        if rounded is not new:
            write_partials(rounded, partials[:, b])
        compress(rounded, bits[tile.chunk, ..., tile.bytes])


def settle(compensated: Moment, scale: Floats, ternary: bool, places: Places, octaves: Bits | None = None) -> None:
    """Forms the deferred residual in place: ``c = c - s*sign(c)``, ``s = 0``. Changes no later step, but by rounding.

    Args:
        compensated: float32 [n]; or bfloat16 or codes, which are rounded to nearest.
        scale: float32 [blocks of n].
        ternary: Whether sign(0) is 0.
        places: Of the n elements; those that do not count have no residual.
        octaves: uint8 [blocks of n], written, of codes; or None.
    """
    for tile in tiles((compensated.numel(),), 1, places.block_size, compensated.device):
        c = places.rows(compensated)[tile.blocks]
        of_c = None if octaves is None else octaves[tile.blocks]
        residual = rules.residual(kept_values(c, of_c), scale[tile.blocks, None], ternary)
        residual = only_live(residual, places, tile)
        keep_nearest(residual, c, of_c)
    scale.zero_()
