"""The plain-torch twin of distributed Lion's worker (Liu et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .arithmetic import column, counted, live_mask, only_live, random_bits
from .coefficients import Coef
from .tiles import gather, tiles
from .twins import pack

NONFINITE = 1  # what ``lion_compress`` sets


def lion_compress(
    grads: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    exp_avg: Tensor,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    step: Tensor,
    hold: Tensor,
    bits: Tensor,
    flags: Tensor,
) -> None:
    """A worker's update of Lion, one bit each, and its momentum (distributed Lion, Algorithm 1).

        bits = beta1*m + (1 - beta1)*g >= 0;  m = beta2*m + (1 - beta2)*g

    A bit has no zero: where the update is 0 a coin is tossed, alike on all ranks, so that coordinates without
    a gradient do not drift. An element whose gradient exceeds
    GRAD_LIMIT, or whose new momentum is not finite, drops its gradient and sets the flag.

    Args:
        grads: Gradients of any float dtype, dense; empty is zeros.
        sizes: Elements of each.
        block_size: Elements per block.
        exp_avg: m, float32 [P], read and written.
        coef: float32 [tensors, columns of ``Coef``].
        block_tensor: int32 [B].
        live, live_row: Elements that count; others have bit 1, and keep their moments.
        step: Updates done, int64 []; of it and of the flat index coins are made (``arithmetic.random_bits``).
        hold: int32 [1]; where set m stays.
        bits: uint8 [W, P / 8W], written.
        flags: int32 [1], ``NONFINITE`` is set where it happened.
    """
    moments = exp_avg.view(-1, block_size)
    for tile in tiles(sizes, len(bits), block_size, exp_avg.device, len(block_tensor)):
        k, m = coef[block_tensor[tile.blocks]], moments[tile.blocks]
        g = counted(only_live(gather(grads, tile, block_size), live, live_row, tile), k)
        new = m * column(k, Coef.BETA2) + g * column(k, Coef.ONE_MINUS_BETA2)
        c = m * column(k, Coef.BETA1) + g * column(k, Coef.ONE_MINUS_BETA1)
        mask, finite = live_mask(live, live_row, tile), torch.isfinite(new) & torch.isfinite(c)
        if not (hold or (finite if mask is None else finite | ~mask).all()):
            flags |= NONFINITE
        c = torch.where(finite, c, m)
        coin = (random_bits(step, tile, block_size) & 1) * 2.0 - 1
        c = only_live(torch.where(c == 0, coin, c), live, live_row, tile)
        pack(c.reshape(-1), bits[tile.chunk, tile.bytes])
        moved = finite & (hold == 0) if mask is None else finite & (hold == 0) & mask
        moments[tile.blocks] = torch.where(moved, new, m)
