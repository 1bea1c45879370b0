"""Changes between the stages, and makes statistics: what runs once per freeze or when asked, in torch alone."""

from __future__ import annotations

import torch
from torch import Tensor

from . import rules
from .eager import gather, only_live, square_sum, tiles
from .jit import of
from .nouns import Floats, PerElement, Places, Tensors, Variance
from .rules import BETA1, RSQRT_BIAS2, UNBIAS1, UNIT


def freeze(
    places: Places, exp_avg: Variance, exp_avg_sq: Variance, eps_inside_sqrt: bool, precondition: bool, coef: Floats,
    dead_value: Floats | None, least: Floats | None, bfloat16: bool = False,
) -> None:  # fmt: skip
    """Turn the warm-up's state into the compression stage's, in place; runs once per freeze.

    ``c = beta1 * unit * m``: with both scales zero, the next ``momentum_compress`` then finds in
    its "residual" just what the full-precision momentum contributes. Other arguments as for ``apply_momentum``.

    Args:
        exp_avg: m, float32 or bfloat16 [P]; c is written.
        exp_avg_sq: v, float32 or bfloat16 [P], read and written.
        eps_inside_sqrt: Which denom, as in ``Divisor``.
        precondition: Whether the unit of each coordinate is that of its layer over denom, with the v that is written.
        dead_value: What coordinates with v == 0 take, the mean of their tensor's other v, float32
            [tensors]; None leaves them.
        least: What v must at least be, float32 [tensors], or None.
        bfloat16: Rounds v to what bfloat16 can represent, before it is used.
    """
    for tile in tiles(places.sizes, 1, places.block_size, exp_avg.device):
        owner = places.block_tensor[tile.blocks]
        k = coef[owner]
        c, v = places.rows(exp_avg)[tile.blocks], places.rows(exp_avg_sq)[tile.blocks]
        if dead_value is not None:
            v.copy_(torch.where(v == 0, dead_value[owner][:, None], v))
        if least is not None:
            v.copy_(torch.maximum(v, least[owner][:, None]))
        if bfloat16:
            v.copy_(v.bfloat16())
        carried = c.float() * (of(k, BETA1) * of(k, UNIT))
        c.copy_(carried / rules.denominator(v.float(), k, eps_inside_sqrt) if precondition else carried)


def rewarm(
    places: Places, exp_avg: Variance, exp_avg_sq: Variance, eps_inside_sqrt: bool, precondition: bool, coef: Floats,
) -> None:  # fmt: skip
    """Turn the compression stage's momentum and variance back into the warm-up's, in place; see ``freeze``.

    v is corrected for its start at 0. |m| becomes at most (1 - beta1^t) * sqrt(v): a gradient that v has never seen
    then moves a coordinate by about a step, as Adam would have.

    Other arguments as for ``apply_momentum``.

    Args:
        exp_avg: float32 or bfloat16 [P]: unit*m is read, m written.
        exp_avg_sq: float32 or bfloat16 [P]: v is read, v / (1 - beta2^F) written.
        eps_inside_sqrt: Which denom, as in ``Divisor``.
        precondition: Whether the unit of each coordinate is that of its layer over denom.
        places: Elements that do not count get v = 0.
    """
    for tile in tiles(places.sizes, 1, places.block_size, exp_avg.device):
        k = coef[places.block_tensor[tile.blocks]]
        kept_m, kept_v = (places.rows(x)[tile.blocks] for x in (exp_avg, exp_avg_sq))
        m, v = kept_m.float() / of(k, UNIT), kept_v.float()
        if precondition:
            m *= rules.denominator(v, k, eps_inside_sqrt)
        kept_v.copy_(only_live(v * of(k, RSQRT_BIAS2) * of(k, RSQRT_BIAS2), places, tile))
        most = kept_v.float().sqrt() / of(k, UNBIAS1)
        kept_m.copy_(torch.clamp(m, -most, most))


def live_variance(places: Places, exp_avg_sq: Variance) -> Tensor:
    """Sum v, and count v > 0, by block: float64 [2, B]; arguments as for ``apply_momentum``."""
    sums = exp_avg_sq.new_zeros(2, len(exp_avg_sq) // places.block_size, dtype=torch.float64)
    for tile in tiles(places.sizes, 1, places.block_size, exp_avg_sq.device):
        v = places.rows(exp_avg_sq)[tile.blocks]
        sums[0, tile.blocks] = v.sum(1, dtype=torch.float64)
        sums[1, tile.blocks] = (v > 0).sum(1).double()
    return sums


def square_sums(places: Places, x: PerElement) -> Tensor:
    """Sum by block the squares of the live elements of ``x`` float32 [P]: float64 [B].

    Other arguments as for ``apply_momentum``.
    """
    sums = x.new_zeros(len(x) // places.block_size, dtype=torch.float64)
    for tile in tiles(places.sizes, 1, places.block_size, x.device):
        sums[tile.blocks] = square_sum(only_live(places.rows(x)[tile.blocks], places, tile))
    return sums


def param_squares(params: Tensors, places: Places) -> Tensor:
    """Sum by block the squares of parameters' live elements: float64 [B]; arguments as for ``apply_momentum``."""
    sums = torch.zeros(len(places.live_row), dtype=torch.float64, device=places.live_row.device)
    for tile in tiles(places.sizes, 1, places.block_size, places.live_row.device, len(places.live_row)):
        x = only_live(gather(params, tile, places.block_size), places, tile)
        sums[tile.blocks] = square_sum(x)
    return sums


def update_sums(
    places: Places, x: Variance | None, exp_avg_sq: Variance, eps_inside_sqrt: bool, coef: Floats,
) -> Tensor:  # fmt: skip
    """Sum (x/denom)^2 by block over live elements: float64 [B]; ``x`` None is 1.

    Other arguments as for ``apply_momentum``.

    Args:
        eps_inside_sqrt: Which denom, as in ``Divisor``.
    """
    sums = exp_avg_sq.new_zeros(len(exp_avg_sq) // places.block_size, dtype=torch.float64)
    for tile in tiles(places.sizes, 1, places.block_size, exp_avg_sq.device):
        b = tile.blocks
        v = places.rows(exp_avg_sq)[b].float()
        d = rules.denominator(v, coef[places.block_tensor[b]], eps_inside_sqrt)
        wide = torch.ones_like(d) if x is None else places.rows(x)[b].float()
        wide = only_live(wide, places, tile).double()
        sums[b] = (wide / d.clamp(min=torch.finfo(torch.float32).tiny)).square().sum(1)
    return sums


def exponents(places: Places, x: Variance) -> Tensor:
    """Count the live elements of ``x`` by the upper half of their bits: a histogram with 128 bins per octave.

    Other arguments as for ``apply_momentum``.

    Args:
        x: float32 or bfloat16 [P], none negative; zeros are not counted.

    Returns:
        int64 [32768]; bin i begins at the float32 whose bits are ``i << 16``.
    """
    counts = torch.zeros(1 << 15, dtype=torch.int64, device=x.device)
    for tile in tiles(places.sizes, 1, places.block_size, x.device):
        values = only_live(places.rows(x)[tile.blocks].float(), places, tile).reshape(-1)
        bins = values[values > 0].view(torch.int32) >> 16
        counts += torch.bincount(bins, minlength=len(counts))
    return counts
