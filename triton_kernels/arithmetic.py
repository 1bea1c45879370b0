"""What the twins are made of, as ``access`` is for the kernels: signs, residuals, denominators, masks.

Blocks are rows: a tile is float32 [blocks, block_size], what a table holds per block is [blocks, 1].
Each line is one float32 rounding, in the order in which the kernels round, without contraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from .coefficients import Coef
from .live import FULL_ROW
from .tiles import Tile, gather, scatter

ABS, SQUARE, DROPPED, NONZERO = 0, 1, 2, 3  # rows of the partial sums; the last only where ternary


def signs(bits: Tensor, rows: int) -> Tensor:
    """+1.0 and -1.0, float32 [rows, 8 * bytes / rows], from packed bits."""
    return _sign_table(bits.device).index_select(0, bits.reshape(-1).int()).view(rows, -1)


@cache
def _sign_table(device: torch.device) -> Tensor:
    # Row b holds the eight signs of byte b, LSB first.
    byte = torch.arange(256, device=device)[:, None]
    return ((byte >> torch.arange(8, device=device)) & 1).float().mul_(2).sub_(1)


def scaled(bits: Tensor, scale: Tensor) -> Tensor:
    """What bits stand for, float32 [blocks, block_size]: scale and -scale, and 0 for zeros where ternary.

    Args:
        bits: uint8 [bytes], or [2, bytes] where ternary; see ``twins``.
        scale: float32 [blocks].
    """
    ternary = bits.dim() == 2
    values = signs(bits[0] if ternary else bits, len(scale)).mul_(scale[:, None])
    return torch.where(signs(bits[1], len(scale)) > 0, values, 0.0) if ternary else values


def residual(c: Tensor, scale: Tensor, ternary: bool) -> Tensor:
    """c - s*sign(c) for c float32 [blocks, block_size]; sign(0) is 0 where ternary, else 1."""
    # Adding 0.0 makes the sign of -0.0 a plus.
    signed = torch.copysign(scale[:, None], c + 0.0)
    return c - (torch.where(c == 0, 0.0, signed) if ternary else signed)


def column(k: Tensor, which: Coef) -> Tensor:
    """A coefficient of each block, [blocks, 1], from rows ``k`` of the table."""
    return k[:, which, None]


def denom(v: Tensor, k: Tensor, eps_inside_sqrt: bool) -> Tensor:
    """sqrt(v)/sqrt(1 - beta2^t) + eps, or eps inside the root; ``v`` is left as it is."""
    root, eps = column(k, Coef.RSQRT_BIAS2), column(k, Coef.EPS)
    if eps_inside_sqrt:
        return _sqrt(v.mul(root).mul_(root).add_(eps))
    return _sqrt(v).mul_(root).add_(eps)


def _sqrt(v: Tensor) -> Tensor:
    # On CPUs torch.sqrt is up to one unit off; a Newton step in float64 rounds it as hardware does.
    guess = v.sqrt().double().clamp_(1e-300, 1e300)
    return v.double().div_(guess).add_(guess).mul_(0.5).float()


def _mask(live: Tensor, live_row: Tensor, tile: Tile) -> Tensor | None:
    rows = live_row[tile.blocks]
    if bool((rows == FULL_ROW).all()):
        return None
    return signs(live[rows.long()], len(rows)) > 0


def only_live(values: Tensor, live: Tensor, live_row: Tensor, tile: Tile) -> Tensor:
    """The values, zero where an element does not count."""
    mask = _mask(live, live_row, tile)
    return values if mask is None else torch.where(mask, values, 0.0)


def move(
    params: Sequence[Tensor],
    tile: Tile,
    block_size: int,
    update: Tensor,
    k: Tensor,
    live: Tensor,
    live_row: Tensor,
) -> None:
    """x = decay*x - step_size*update for the live elements of a tile; overwrites ``update``."""
    x = gather(params, tile, block_size)
    moved = x * column(k, Coef.DECAY)
    moved.sub_(update.mul_(column(k, Coef.STEP_SIZE)))
    mask = _mask(live, live_row, tile)
    scatter(moved if mask is None else torch.where(mask, moved, x), params, tile)


def write_partials(c: Tensor, partials: Tensor) -> bool:
    """Writes a tile's sums of |c| and c^2; returns whether they are finite, as c then is.

    Where ``partials`` has a fourth row, it is the number of elements that are not zero.
    """
    wide = c.double()
    partials[SQUARE] = (wide * wide).sum(1)
    partials[ABS] = wide.abs_().sum(1)
    partials[DROPPED] = 0.0
    if len(partials) > NONZERO:
        partials[NONZERO] = (c != 0).sum(1).double()
    return bool(torch.isfinite(partials[SQUARE]).all())
