"""The plain-torch twins of what changes parameters: Adam's update, and the apply of synchronised bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .coefficients import Coef
from .cpu_tiles import Tile, tiles
from .eager import column, denom, move, only_live, scaled, square_sum


def apply_momentum(
    params: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    exp_avg_bits: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor | None,
    eps_inside_sqrt: bool,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    skip: Tensor,
    rounding: Tensor | None,
) -> None:
    """Applies the synchronised momentum with the frozen variance (1-bit Adam, Algorithm 1).

        x = (1 - lr*wd)*x - step_size * m/denom,  m = scale*sign(bits)/unit
        denom = sqrt(v)/sqrt(1 - beta2^F) + eps, or eps inside the root

    Args:
        params: Parameters of any float dtype, dense, written; computed in float32, rounded once.
        sizes: Elements of each.
        block_size: Elements per block.
        exp_avg_bits: uint8 [W, P / 8W], or [W, 2, P / 8W] where ternary.
        exp_avg_scale: float32 [B].
        exp_avg_sq: Frozen variance, float32 or bfloat16 [P], or None where the unit already is 1/denom.
        eps_inside_sqrt: Which denom (Fixing 1-bit Adam, eq. 2, puts eps inside).
        coef: float32 [tensors, columns of ``Coef``].
        block_tensor: int32 [B].
        live, live_row: Elements that move.
        skip: int32 [1]; where set nothing moves.
        rounding: Updates done, int64 []: then bfloat16 parameters are rounded stochastically, with bits
            drawn from it and from the flat index (``arithmetic.random_bits``); or None: to nearest.
    """
    if skip:
        return
    for tile in tiles(sizes, len(exp_avg_bits), block_size, exp_avg_scale.device, len(block_tensor)):
        b = tile.blocks
        k = coef[block_tensor[b]]
        update = scaled(exp_avg_bits[tile.chunk, ..., tile.bytes], exp_avg_scale[b] / k[:, Coef.UNIT])
        if exp_avg_sq is not None:
            update.div_(denom(exp_avg_sq.view(-1, block_size)[b], k, eps_inside_sqrt))
        move(params, tile, block_size, update, k, live, live_row, rounding)


def adam_update(
    params: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    skip: Tensor,
    exp_avg_sq_sums: Tensor | None,
    rounding: Tensor | None,
) -> None:
    """One step of AdamW on averaged gradients, the warm-up of 1-bit Adam (1-bit LAMB, eq. 1).

    Args:
        params: Parameters of any float dtype, dense, written.
        sizes: Elements of each.
        block_size: Elements per block.
        grad: Averaged gradients, float32 [>= P].
        exp_avg: m, float32 [P], read and written.
        exp_avg_sq: v, float32 [P], read and written.
        coef: float32 [tensors, columns of ``Coef``].
        block_tensor: int32 [B].
        live, live_row: Elements that move; moments of blocks without any may stay as they are.
        skip: int32 [1]; where set nothing changes.
        exp_avg_sq_sums: float64 [B], written: sum of v per block (for the freeze rule); or None.
        rounding: See ``apply_momentum``.
    """
    if skip:
        return
    for tile in tiles(sizes, 1, block_size, exp_avg.device):
        k = coef[block_tensor[tile.blocks]]
        g = only_live(grad[tile.start : tile.start + tile.numel].view(-1, block_size), live, live_row, tile)
        m, v = moments(g, exp_avg, exp_avg_sq, exp_avg_sq_sums, tile, k)
        move(params, tile, block_size, m / denom(v, k, False), k, live, live_row, rounding)


def moments(
    g: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, exp_avg_sq_sums: Tensor | None, tile: Tile, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Updates m and v of a tile in place, and the sums of v if asked; returns views of both."""
    b = tile.blocks
    m, v = exp_avg.view(-1, g.shape[1])[b], exp_avg_sq.view(-1, g.shape[1])[b]
    m.mul_(column(k, Coef.BETA1)).add_(g * column(k, Coef.ONE_MINUS_BETA1))
    v.mul_(column(k, Coef.BETA2)).add_((g * column(k, Coef.ONE_MINUS_BETA2)).mul_(g))
    if exp_avg_sq_sums is not None:
        exp_avg_sq_sums[b] = v.sum(1, dtype=torch.float64)
    return m, v


def freeze(
    sizes: Sequence[int],
    block_size: int,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    eps_inside_sqrt: bool,
    precondition: bool,
    coef: Tensor,
    block_tensor: Tensor,
    dead_value: Tensor | None,
    least: Tensor | None,
    bfloat16: bool = False,
) -> None:
    """Turns the warm-up's state into the compression stage's, in place; runs once per freeze.

    ``c = beta1 * unit * m``: with both scales zero, the next ``momentum_compress`` then finds in
    its "residual" just what the full-precision momentum contributes.

    Args:
        sizes: Elements of each tensor.
        block_size: Elements per block.
        exp_avg: m, float32 [P]; c is written.
        exp_avg_sq: v, float32 [P], read and written.
        eps_inside_sqrt: Which denom; see ``apply_momentum``.
        precondition: unit = 1/denom per coordinate, with the v that is written, instead of the layer's.
        coef: float32 [tensors, columns of ``Coef``].
        block_tensor: int32 [B].
        dead_value: What coordinates with v == 0 take, the mean of their tensor's other v, float32
            [tensors]; None leaves them.
        least: What v must at least be, float32 [tensors], or None.
        bfloat16: Rounds v to what bfloat16 can represent, before it is used.
    """
    for tile in tiles(sizes, 1, block_size, exp_avg.device):
        owner = block_tensor[tile.blocks]
        k = coef[owner]
        c, v = exp_avg.view(-1, block_size)[tile.blocks], exp_avg_sq.view(-1, block_size)[tile.blocks]
        if dead_value is not None:
            v.copy_(torch.where(v == 0, dead_value[owner][:, None], v))
        if least is not None:
            v.copy_(torch.maximum(v, least[owner][:, None]))
        if bfloat16:
            v.copy_(v.bfloat16())
        c.mul_(column(k, Coef.BETA1))
        if precondition:
            c.div_(denom(v, k, eps_inside_sqrt))
        else:
            c.mul_(column(k, Coef.UNIT))


def thaw(
    sizes: Sequence[int],
    block_size: int,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    eps_inside_sqrt: bool,
    precondition: bool,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    clip: bool,
) -> None:
    """Turns the compression stage's momentum and variance back into the warm-up's, in place; see ``freeze``.

    v is corrected for its start at 0. With ``clip`` |m| is at most the root of v: a gradient that v
    has never seen then moves a coordinate by about a step, as Adam would have.

    Args:
        sizes: Elements of each tensor.
        block_size: Elements per block.
        exp_avg: float32 [P]: unit*m is read, m written.
        exp_avg_sq: float32 [P]: v is read, v / (1 - beta2^F) written.
        eps_inside_sqrt: Which denom; see ``apply_momentum``.
        precondition: unit = 1/denom per coordinate, instead of the layer's.
        coef: float32 [tensors, columns of ``Coef``].
        block_tensor: int32 [B].
        live, live_row: Elements that count; others get v = 0.
        clip: Bounds m by +-(1 - beta1^t) * sqrt(v).
    """
    for tile in tiles(sizes, 1, block_size, exp_avg.device):
        k = coef[block_tensor[tile.blocks]]
        m, v = exp_avg.view(-1, block_size)[tile.blocks], exp_avg_sq.view(-1, block_size)[tile.blocks]
        if precondition:
            m.mul_(denom(v, k, eps_inside_sqrt))
        else:
            m.div_(column(k, Coef.UNIT))
        v.mul_(column(k, Coef.RSQRT_BIAS2)).mul_(column(k, Coef.RSQRT_BIAS2))
        v.copy_(only_live(v, live, live_row, tile))
        if clip:
            most = v.sqrt().div_(column(k, Coef.UNBIAS1))
            torch.clamp(m, -most, most, out=m)


def live_variance(sizes: Sequence[int], block_size: int, exp_avg_sq: Tensor, partials: Tensor) -> None:
    """Per block, the sum of v and the number of v > 0: ``partials`` float64 [2, B], written; else as for ``freeze``."""
    for tile in tiles(sizes, 1, block_size, exp_avg_sq.device):
        v = exp_avg_sq.view(-1, block_size)[tile.blocks]
        partials[0, tile.blocks] = v.sum(1, dtype=torch.float64)
        partials[1, tile.blocks] = (v > 0).sum(1).double()


def square_sums(
    sizes: Sequence[int], block_size: int, x: Tensor, live: Tensor, live_row: Tensor, partials: Tensor
) -> None:
    """Per block, the sum of squares of the live elements of ``x`` float32 [P]: ``partials`` float64 [B], written.

    Other arguments as for ``thaw``.
    """
    for tile in tiles(sizes, 1, block_size, x.device):
        partials[tile.blocks] = square_sum(only_live(x.view(-1, block_size)[tile.blocks], live, live_row, tile))


def update_sums(
    sizes: Sequence[int],
    block_size: int,
    x: Tensor | None,
    exp_avg_sq: Tensor,
    eps_inside_sqrt: bool,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    partials: Tensor,
) -> None:
    """Per block, the sum of (x/denom)^2 over live elements: ``partials`` float64 [B], written; ``x`` None is 1.

    Other arguments as for ``thaw``.
    """
    for tile in tiles(sizes, 1, block_size, exp_avg_sq.device):
        b = tile.blocks
        d = denom(exp_avg_sq.view(-1, block_size)[b], coef[block_tensor[b]], eps_inside_sqrt)
        wide = only_live(torch.ones_like(d) if x is None else x.view(-1, block_size)[b], live, live_row, tile).double()
        partials[b] = (wide / d.clamp(min=torch.finfo(torch.float32).tiny)).square().sum(1)


def exponents(sizes: Sequence[int], block_size: int, x: Tensor, live: Tensor, live_row: Tensor, counts: Tensor) -> None:
    """Counts the live elements of ``x`` by the upper half of their bits: a histogram with 128 bins per octave.

    Args:
        sizes: Elements of each tensor.
        block_size: Elements per block.
        x: float32 [P], none negative; zeros are not counted.
        live, live_row: Elements that count.
        counts: int64 [32768], added to. Bin i begins at the float32 whose bits are ``i << 16``.
    """
    for tile in tiles(sizes, 1, block_size, x.device):
        values = only_live(x.view(-1, block_size)[tile.blocks], live, live_row, tile).reshape(-1)
        bins = values[values > 0].view(torch.int32) >> 16
        counts += torch.bincount(bins, minlength=len(counts))
