"""1-bit LAMB's compression stage (Li et al., 2021, Algorithm 1), and the same with a variance that lives.

Never autotuned: all update in place.

Names as in ``lamb``; ``r`` is a layer's ratio. In the paper's algorithm one kernel works on blocks and leaves partial
results, and one on layers, one program for each, which reads those in a fixed order and computes coefficients. Where
the variance lives there are no ratios, and one kernel on layers makes coefficients from the bits' norms.
"""

from __future__ import annotations

from typing import Annotated

import torch

from . import block_io as io
from . import rules
from . import user_tensors as users
from .eager import gather, load, only_live, scaled, square_sum, tiles
from .jit import jit, tl
from .lamb_update import PER_LAYER, norms_of, store_step, write_step
from .nouns import (
    CoefTable,
    Divisor,
    Doubles,
    Flag,
    Indices,
    Layers,
    PerBlock,
    PerElement,
    PerTensor,
    Places,
    Ratios,
    Signs,
    Starts,
    Tensors,
)
from .op import op
from .rules import AVERAGE, COEFFICIENT, COLUMNS, DECAY, RATIO, STEP_SIZE, UNIT


@jit()
def lamb_ratio_kernel(
    params_table, tensors, exp_avg, last_bits, last_scale, exp_avg_sq, fresh, started, coef, places, skip, ratios,
    blocks_per_chunk,
    PARAMS: tl.constexpr, PRECONDITIONED: tl.constexpr, OF_DENOMINATORS: tl.constexpr, TERNARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks.

    Bytes per element: 4 or 2 for the frozen variance, 4 + 4 for the fresh one, 3/8 for bits (twice where TERNARY); x
    with norms.
    """
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(places.live_row + b)
    if tl.load(skip) == 0:
        i = io.elements(BLOCK_SIZE)
        t, k = io.tensor_of(b, places.block_tensor, coef)
        scale = tl.load(exp_avg.scale + b)
        packed = io.bytes_at(exp_avg.bits, exp_avg.bits_stride, b, blocks_per_chunk, BLOCK_SIZE)
        signs, nonzero = io.load_bits(packed, exp_avg.plane, TERNARY)
        held = tl.load(fresh + b * BLOCK_SIZE + i)
        frozen = io.load(exp_avg_sq, b, i, False, BLOCK_SIZE)
        last_at = last_bits + b * (BLOCK_SIZE // 8) + tl.arange(0, BLOCK_SIZE // 8)
        if TERNARY:
            last_at += b // blocks_per_chunk * exp_avg.plane  # the chunks before have a second plane each
        last_signs, last_nonzero = io.load_bits(last_at, exp_avg.plane, TERNARY)
        m = io.scaled(signs, nonzero, rules.plain_scale(scale, k), TERNARY)
        last = io.scaled(last_signs, last_nonzero, rules.plain_scale(tl.load(last_scale + b), k), TERNARY)
        if PRECONDITIONED:
            m = m * rules.denominator(frozen, k, exp_avg_sq.EPS_INSIDE_SQRT)
            last = last * rules.denominator(frozen, k, exp_avg_sq.EPS_INSIDE_SQRT)
        running = tl.load(started) != 0
        g = rules.rebuilt_gradient(m, tl.where(running, last, held), k)
        mask = io.counting(places.live, row, i, BLOCK_SIZE)
        v = io.only_active(rules.variance(tl.where(running, held, frozen), g, k), mask, row)
        ratio = rules.variance_ratio(frozen, v, k, exp_avg_sq.EPS_INSIDE_SQRT, OF_DENOMINATORS)
        ratio = io.only_active(ratio, mask, row)
        tl.store(ratios.largest + b, tl.max(tl.max(ratio, axis=1), axis=0))
        tl.store(fresh + b * BLOCK_SIZE + i, v)
        tl.store(last_at, signs)
        if TERNARY:
            tl.store(last_at + exp_avg.plane, nonzero)
        tl.store(last_scale + b, scale)
        if ratios.norms is not None:
            place = users.place_of(params_table, tensors, t, places.block_start, b, BLOCK_SIZE)
            x = users.load(place, i, mask, row, PARAMS)
            adam = rules.preconditioned(rules.unbiased(m, k), frozen, k, exp_avg_sq.EPS_INSIDE_SQRT)
            adam = io.only_active(adam, mask, row)
            io.store_norm(ratios.norms, b, adam)
            io.store_norm(ratios.norms + ratios.norms_stride, b, rules.decaying(adam, x, k))


@op(lamb_ratio_kernel, writes=("last_bits", "last_scale", "fresh", "ratios.largest", "ratios.norms"))
def lamb_ratio(
    params: Tensors, places: Places, exp_avg: Signs, last: Signs, exp_avg_sq: Divisor, fresh: PerElement,
    started: Flag, preconditioned: bool, of_denominators: bool, coef: CoefTable, skip: Flag, ratios: Ratios,
) -> None:  # fmt: skip
    """Rebuild the gradient, update the fresh variance, find the largest ratio of each block (lines 15 to 17).

        g = (m_t - beta1*m_{t-1})/(1 - beta1);  v_t = beta2*v_{t-1} + (1 - beta2)*g^2
        largest = max over a block of v_{T_w}/v_t, 0 where v_{T_w} is 0 or both are infinite

    Both momenta are bits and scales. Only before the first step is m_{t-1} the warm-up's, in full
    precision: ``fresh`` then holds it, and v_{t-1} is v_{T_w}. Leaves m_t as the next m_{t-1}.
    Other arguments as for ``apply_momentum``.

    Args:
        params: Read only for norms.
        exp_avg: m_t, times unit.
        last: m_{t-1}, its bits contiguous, read and written.
        exp_avg_sq: v_{T_w}, the frozen variance; which denom is not read without ``preconditioned``,
            ``of_denominators`` or norms.
        fresh: v_{t-1} or, before the first step, m_{T_w}, float32 [P]; v_t is written.
        started: 0 before the first step.
        preconditioned: The momenta were compressed in the unit 1/denom of each coordinate.
        of_denominators: The ratio is that of the denominators: of roots, plus eps.
        ratios: Written.
    """
    if skip:
        return
    for tile in tiles(places.sizes, len(exp_avg.bits), places.block_size, fresh.device, len(places.block_tensor)):
        b = tile.blocks
        k = coef[places.block_tensor[b]]
        frozen, held, inside = load(exp_avg_sq, tile, signed=False), places.rows(fresh)[b], exp_avg_sq.eps_inside_sqrt
        packed, last_packed = (bits[tile.chunk, ..., tile.bytes] for bits in (exp_avg.bits, last.bits))
        m = scaled(packed, rules.plain_scale(exp_avg.scale[b, None], k))
        last_m = scaled(last_packed, rules.plain_scale(last.scale[b, None], k))
        if preconditioned:
            m, last_m = (x.mul_(rules.denominator(frozen, k, inside)) for x in (m, last_m))
        g = rules.rebuilt_gradient(m, last_m if started else held, k)
        v = only_live(rules.variance(held if started else frozen, g, k), places, tile)
        ratio = rules.variance_ratio(frozen, v, k, inside, of_denominators)
        ratios.largest[b] = only_live(ratio, places, tile).amax(1)
        held.copy_(v)
        last_packed.copy_(packed)
        last.scale[b] = exp_avg.scale[b]
        if ratios.norms is not None:
            adam = rules.preconditioned(rules.unbiased(m, k), frozen, k, inside)
            u = rules.decaying(adam, gather(params, tile, places.block_size), k)
            for row, values in enumerate((adam, u)):
                ratios.norms[row, b] = square_sum(only_live(values, places, tile))


@jit()
def _max_of(row, begin, end, AT_ONCE: tl.constexpr):
    """Return the largest of row[begin:end], float32; 0 of nothing."""
    lane = tl.arange(0, AT_ONCE)
    most = tl.zeros([AT_ONCE], tl.float32)
    for at in range(begin, end, AT_ONCE):
        most = tl.maximum(most, tl.load(row + at + lane, mask=at + lane < end, other=0.0))
    return tl.max(most, axis=0)


@jit()
def lamb_rescale_kernel(
    largest, norms, norms_stride, layer_start, skip, started, coef, layers, tensors,
    RANGE_FIRST: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid: tensors."""
    t = tl.program_id(0).to(tl.int64)
    if tl.load(skip) == 0:
        begin = tl.load(layer_start + t)
        end = tl.load(layer_start + t + 1)
        k = coef + t * COLUMNS
        last = tl.load(layers + RATIO * tensors + t).to(tl.float64)
        found = _max_of(largest, begin, end, AT_ONCE).to(tl.float64)
        r = found
        if norms is not None:
            adam = tl.sqrt(io.sum_of(norms, begin, end, AT_ONCE))
            r = rules.blended(r, adam, tl.sqrt(io.sum_of(norms + norms_stride, begin, end, AT_ONCE)))
        c_avg = tl.load(layers + AVERAGE * tensors + t).to(tl.float64)
        r, c = rules.rescaled(rules.limited(r, last, k, RANGE_FIRST), found, last, c_avg)
        tl.store(layers + RATIO * tensors + t, r)
        tl.store(layers + COEFFICIENT * tensors + t, c.to(tl.float32))
        if t == 0:
            tl.store(started, 1)
        store_step(c, k)


@op(lamb_rescale_kernel, writes=("started", "coef", "layers"), derive=PER_LAYER)
def lamb_rescale(
    largest: PerBlock, norms: Annotated[Doubles, "2 B"] | None, layer_start: Starts, skip: Flag, range_first: bool,
    started: Flag, coef: CoefTable, layers: Layers,
) -> None:  # fmt: skip
    """Clip each layer's ratio both ways, and make its coefficient c = r*c_avg (lines 17 to 20).

    First its change is limited (line 18), then its range (line 19), or the other way round. With norms r is first
    blended with the share of the weight decay: R*r + 1 - R, R = min(1, |m/denom|/|u|). A layer that found no ratio
    keeps its own. Other arguments as for ``lamb_coefficient``.

    Args:
        largest: From ``lamb_ratio``.
        norms: From ``lamb_ratio``: then r is blended; or None.
        range_first: Limit the range, then the change.
        started: Set to 1.
    """
    if skip:
        return
    found = torch.segment_reduce(largest, "max", offsets=layer_start, initial=0.0).double()[:, None]
    last = layers[RATIO, :, None].double()
    r = found if norms is None else rules.blended(found, *norms_of(norms, layer_start))
    c_avg = layers[AVERAGE, :, None].double()
    r, c = rules.rescaled(rules.limited(r, last, coef, range_first), found, last, c_avg)
    layers[RATIO], layers[COEFFICIENT] = r[:, 0], c[:, 0]
    started.fill_(1)
    write_step(c, coef)


@jit()
def _norms_of_layer(x_squares, scale, numel, begin, end, AT_ONCE: tl.constexpr):
    """Return the squares of the norms of a layer's parameters, and of what its bits stand for, float64."""
    lane = tl.arange(0, AT_ONCE)
    of_x = tl.zeros([AT_ONCE], tl.float64)
    of_bits = tl.zeros([AT_ONCE], tl.float64)
    for at in range(begin, end, AT_ONCE):
        inside = at + lane < end
        of_x += tl.load(x_squares + at + lane, mask=inside, other=0.0).to(tl.float64)
        s = tl.load(scale + at + lane, mask=inside, other=0.0).to(tl.float64)
        of_bits += s * s * tl.load(numel + at + lane, mask=inside, other=0).to(tl.float64)
    return tl.sum(of_x, axis=0), tl.sum(of_bits, axis=0)


@jit()
def lamb_follow_kernel(
    x_squares, scale, numel, layer_start, skip, coef, layers, tensors, update_squares, AT_ONCE: tl.constexpr
):
    """Grid: tensors. Bytes per block: 12."""
    t = tl.program_id(0).to(tl.int64)
    if tl.load(skip) == 0:
        begin = tl.load(layer_start + t)
        end = tl.load(layer_start + t + 1)
        k = coef + t * COLUMNS
        of_x, of_bits = _norms_of_layer(x_squares, scale, numel, begin, end, AT_ONCE)
        x = tl.sqrt(of_x)
        now = rules.norm_without_noise(of_bits, k)
        mean = rules.followed_norm(tl.load(update_squares + t).to(tl.float64), now, k).to(tl.float32)
        c = rules.decaying_coefficient(x, mean.to(tl.float64), k).to(tl.float32)
        step_size, decay = rules.following_step(rules.decaying_coefficient(x, now, k), c.to(tl.float64), k)
        tl.store(update_squares + t, mean)
        tl.store(layers + COEFFICIENT * tensors + t, c)
        tl.store(k + STEP_SIZE, step_size)
        tl.store(k + DECAY, decay)
        tl.store(k + UNIT, c)


@op(lamb_follow_kernel, writes=("coef", "layers", "update_squares"), derive=PER_LAYER)
def lamb_follow(
    x_squares: PerBlock, scale: PerBlock, numel: Indices, layer_start: Starts, skip: Flag, coef: CoefTable,
    layers: Layers, update_squares: PerTensor,
) -> None:  # fmt: skip
    """Make each layer's step from what synchronised bits tell of its update, and the coefficient of the next.

        |u_t| = share * |bits| / ((1 - beta1^t) * c_t);  mean |u|^2 = beta3 * mean |u|^2 + (1 - beta3) * |u_t|^2
        step = lr * min(c_t, c(|x|, |u_t|));  c_{t+1} = c(|x|, mean |u|),  with c as ``lamb_coefficient`` has it

    Gradients were multiplied by c_t before they were compressed, so that residuals are in units of the step. Other
    arguments as for ``lamb_coefficient``.

    Args:
        x_squares: Sums of squares of the parameters.
        scale: Of the bits.
        numel: How many of their elements count.
        coef: UNIT, c_t, is read; STEP_SIZE, for bits in that unit, and DECAY are written, and UNIT of the next step.
        layers: COEFFICIENT of the next step is written.
        update_squares: Mean |u|^2, 0 where it is not known; read and written.
    """
    if skip:
        return
    bits = scale.double().square() * numel
    squares = x_squares.double(), bits
    of_x, of_bits = (torch.segment_reduce(row, "sum", offsets=layer_start)[:, None] for row in squares)
    now = rules.norm_without_noise(of_bits, coef)
    mean = rules.followed_norm(update_squares[:, None].double(), now, coef).float()
    c = rules.decaying_coefficient(of_x.sqrt(), mean.double(), coef).float()
    step_size, decay = rules.following_step(rules.decaying_coefficient(of_x.sqrt(), now, coef), c.double(), coef)
    update_squares.copy_(mean[:, 0])
    layers[COEFFICIENT] = c[:, 0]
    for column, each in ((STEP_SIZE, step_size), (DECAY, decay), (UNIT, c)):
        coef[:, column] = each[:, 0]
