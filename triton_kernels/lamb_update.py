"""LAMB, and the warm-up of 1-bit LAMB (Li et al., 2021, equation (2)).

Never autotuned: all update in place.

Names: ``c`` a layer's coefficient, ``c_avg`` its moving average, one per tensor, in the table ``layers``. What moves
the parameters in the end are the columns ``STEP_SIZE`` and ``DECAY`` of ``coef``, which the op that computes
coefficients writes. One kernel works on blocks and leaves partial results, one on layers, one program for each, and
reads those in a fixed order.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from . import block_io as io
from . import rules
from . import user_tensors as users
from .eager import follow, gather, load, move, only_live, square_sum, tiles
from .jit import jit, tl
from .nouns import (
    CoefTable,
    Counter,
    Derived,
    DoublePerBlock,
    Doubles,
    Flag,
    Layers,
    Moments,
    Places,
    Starts,
    Stored,
    Tensors,
)
from .op import op
from .rules import AVERAGE, COEFFICIENT, COLUMNS, DECAY, STEP_SIZE
from .update import forget_kernel, moments_kernel, moved_kernel, tell_kernel

PER_LAYER: Derived = {
    "programs": ("i32", lambda coef: len(coef)),
    "tensors": ("i32", lambda coef: len(coef)),
    "AT_ONCE": ("constexpr", lambda: 1024),  # blocks that a layer's program reads at once
}


@jit()
def lamb_update_kernel(
    params_table, tensors, grads_table, moments, coef, places, skip, exp_avg_sq_sums, norms, norms_stride, found,
    found_before,
    PARAMS: tl.constexpr, GRADS: tl.constexpr, EPS_INSIDE_SQRT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks. Bytes per element: x, g, 8, 4 or 2 for m and for v."""
    b = tl.program_id(0).to(tl.int64)
    forget_kernel(b, found_before)
    row = tl.load(places.live_row + b)
    if (tl.load(skip) == 0) & (row != 1):
        i = io.elements(BLOCK_SIZE)
        t, k = io.tensor_of(b, places.block_tensor, coef)
        mask = io.counting(places.live, row, i, BLOCK_SIZE)
        place = users.place_of(grads_table, tensors, t, places.block_start, b, BLOCK_SIZE)
        given = place, moments, exp_avg_sq_sums, found, None
        m, v, fine = moments_kernel(*given, b, i, k, mask, row, True, GRADS, BLOCK_SIZE)
        tell_kernel(found, fine)
        place = users.place_of(params_table, tensors, t, places.block_start, b, BLOCK_SIZE)
        x = users.load(place, i, mask, row, PARAMS)
        io.store_norm(norms, b, x)
        u = rules.lamb(x, m, v, k, EPS_INSIDE_SQRT)
        io.store_norm(norms + norms_stride, b, io.only_active(u, mask, row))


@op(
    lamb_update_kernel,
    writes=(
        *("moments.exp_avg", "moments.exp_avg_sq", "moments.exponents"),
        *("exp_avg_sq_sums", "norms", "found", "found_before"),
    ),
)
def lamb_update(
    params: Tensors, grads: Tensors, places: Places, moments: Moments, eps_inside_sqrt: bool, coef: CoefTable,
    skip: Flag, exp_avg_sq_sums: DoublePerBlock | None, norms: Annotated[Doubles, "2 B"], found: Flag | None = None,
    found_before: Flag | None = None,
) -> None:  # fmt: skip
    """Make LAMB's moments, and what the norms of x and u need (1-bit LAMB, eq. 2, lines 1 to 3).

        m = beta1*m + (1 - beta1)*g;  v = beta2*v + (1 - beta2)*g^2;  u = m/denom + wd*x

    Moves no parameter: first every layer's coefficient must be known. u is that of what is kept.
    Other arguments as for ``adam_update`` and as for ``apply_momentum``.

    Args:
        eps_inside_sqrt: Which denom, as in ``Divisor``: eq. (2) prints sqrt(v + eps).
        norms: Written: sums of x^2 and of u^2; those of padding stay as they are.
    """
    if found_before is not None:
        found_before.zero_()
    if skip:
        return
    for tile in tiles(places.sizes, 1, places.block_size, skip.device):
        k = coef[places.block_tensor[tile.blocks]]
        g = only_live(gather(grads, tile, places.block_size), places, tile)
        m, v, _ = follow(g, moments, exp_avg_sq_sums, found, tile, k, as_kept=True)
        x = only_live(gather(params, tile, places.block_size), places, tile)
        u = only_live(rules.lamb(x, m, v, k, eps_inside_sqrt), places, tile)
        for row, values in enumerate((x, u)):
            norms[row, tile.blocks] = square_sum(values)


@jit()
def lamb_coefficient_kernel(
    norms, norms_stride, layer_start, skip, coef, layers, tensors, SKIPS_ONES: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Grid: tensors."""
    t = tl.program_id(0).to(tl.int64)
    if tl.load(skip) == 0:
        begin = tl.load(layer_start + t)
        end = tl.load(layer_start + t + 1)
        k = coef + t * COLUMNS
        x = tl.sqrt(io.sum_of(norms, begin, end, AT_ONCE))
        u = tl.sqrt(io.sum_of(norms + norms_stride, begin, end, AT_ONCE))
        c = rules.coefficient(x, u, k)
        c_avg = tl.load(layers + AVERAGE * tensors + t).to(tl.float64)
        tl.store(layers + AVERAGE * tensors + t, rules.average(c_avg, c, k, SKIPS_ONES).to(tl.float32))
        tl.store(layers + COEFFICIENT * tensors + t, c.to(tl.float32))
        store_step(c, k)


@jit()
def store_step(c, k):
    """Write a layer's step from its coefficient."""
    step_size, decay = rules.layer_step(c, k)
    tl.store(k + STEP_SIZE, step_size)
    tl.store(k + DECAY, decay)


@op(lamb_coefficient_kernel, writes=("coef", "layers"), derive=PER_LAYER)
def lamb_coefficient(
    norms: Annotated[Doubles, "2 B"], layer_start: Starts, skip: Flag, skips_ones: bool, coef: CoefTable,
    layers: Layers,
) -> None:  # fmt: skip
    """Compute each layer's coefficient and its moving average (eq. 2, line 4; Algorithm 1, line 2).

        c = clip(|x|/|u|, c_min, c_max), 1 where a norm is zero;  c_avg = beta3*c_avg + (1 - beta3)*c

    Args:
        norms: Sums of x^2 and of u^2.
        layer_start: First block of each tensor, and B.
        skip: Where set nothing changes.
        skips_ones: A c of 1, as where a norm is zero, leaves the average as it is.
        coef: STEP_SIZE and DECAY are written.
        layers: Read and written.
    """
    if skip:
        return
    x, u = norms_of(norms, layer_start)
    c = rules.coefficient(x, u, coef)
    layers[AVERAGE] = rules.average(layers[AVERAGE, :, None].double(), c, coef, skips_ones)[:, 0]
    layers[COEFFICIENT] = c[:, 0]
    write_step(c, coef)


def norms_of(norms: Tensor, layer_start: Tensor) -> list[Tensor]:
    """Return each layer's norms, float64 [tensors, 1], from sums of squares of its blocks."""
    return [torch.segment_reduce(row, "sum", offsets=layer_start).sqrt()[:, None] for row in norms]


def write_step(c: Tensor, coef: Tensor) -> None:
    """Write each layer's step from its coefficient, float64 [tensors, 1]."""
    step_size, decay = rules.layer_step(c, coef)
    coef[:, STEP_SIZE], coef[:, DECAY] = step_size[:, 0], decay[:, 0]


@jit()
def lamb_move_kernel(
    params_table, tensors, moments, coef, places, skip, rounding,
    PARAMS: tl.constexpr, EPS_INSIDE_SQRT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks. Bytes per element: x twice, 4, 2 or 1 for m and for v."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(places.live_row + b)
    if (tl.load(skip) == 0) & (row != 1):
        i = io.elements(BLOCK_SIZE)
        t, k = io.tensor_of(b, places.block_tensor, coef)
        exponents = None if moments.exponents is None else moments.exponents + moments.exponents_stride
        m = io.load(Stored(moments.exp_avg, moments.exponents), b, i, True, BLOCK_SIZE)
        v = io.load(Stored(moments.exp_avg_sq, exponents), b, i, False, BLOCK_SIZE)
        update = rules.preconditioned(m, v, k, EPS_INSIDE_SQRT)
        mask = io.counting(places.live, row, i, BLOCK_SIZE)
        place = users.place_of(params_table, tensors, t, places.block_start, b, BLOCK_SIZE)
        words = io.random_words(rounding, b, i, BLOCK_SIZE)
        moved_kernel(place, words, b, i, update, k, mask, row, None, None, PARAMS, BLOCK_SIZE)


@op(lamb_move_kernel, writes=("params",))
def lamb_move(
    params: Tensors, places: Places, moments: Moments, eps_inside_sqrt: bool, coef: CoefTable, skip: Flag,
    rounding: Counter | None,
) -> None:  # fmt: skip
    """x = x - lr*c*u, with the coefficients that ``lamb_coefficient`` left in ``coef`` (eq. 2, line 5).

    Other arguments as for ``lamb_update`` and as for ``apply_momentum``; ``moments`` are read, ``params`` written.
    """
    if skip:
        return
    for tile in tiles(places.sizes, 1, places.block_size, skip.device):
        k = coef[places.block_tensor[tile.blocks]]
        exp_avg, exp_avg_sq = moments.stored
        m, v = load(exp_avg, tile), load(exp_avg_sq, tile, signed=False)
        move(params, tile, places, rules.preconditioned(m, v, k, eps_inside_sqrt), k, rounding)
