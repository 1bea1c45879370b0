"""The plain-torch twins of 0/1 Adam (Lu et al., 2022): a step between two synchronisations, and what follows one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .coefficients import Coef
from .cpu_tiles import gather, scatter, tiles
from .eager import column, counted, denom, live_mask, only_live, residual, scaled

NONFINITE = 1  # what ``local_step`` sets


def local_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    eps_inside_sqrt: bool,
    precondition: bool,
    compensated: Tensor,
    worker_scale: Tensor,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    hold: Tensor,
    moves: bool,
    last: bool,
    leaks: bool,
    flags: Tensor,
) -> None:
    """A worker's own step between two synchronisations (0/1 Adam, Algorithm 1, lines 4 to 6).

        m = beta1*m + (1 - beta1)*g;  x = (1 - lr*wd)*x - step_size * m/denom;  c = c + m/denom, or c + m

    ``c`` is the buffer u of the paper on top of the residual that the last synchronisation has left, which is
    deferred: it is formed when ``c`` is read again. Before the step that synchronises, ``last``, beta1*m is
    added as well: ``momentum_compress`` then only adds that step's gradient. An element whose gradient exceeds
    GRAD_LIMIT, or whose update is not finite, has none, keeps its moment, and sets the flag; nor is beta1*m added
    where ``c`` would not be finite.

    Args:
        params: Parameters of any float dtype, dense, written where ``moves``.
        grads: Gradients of any float dtype, dense, read where ``moves``; empty is zeros.
        sizes: Elements of each.
        block_size: Elements per block.
        exp_avg: m, float32 [P], read; written where ``moves``, unless ``last``.
        exp_avg_sq: v, float32 [P].
        eps_inside_sqrt: Which denom; see ``apply_momentum``.
        precondition: Whether ``c`` sums m/denom, else m.
        compensated: c, float32 [P], read and written.
        worker_scale: s of the last synchronisation, float32 [B]; the caller sets it to 0 afterwards.
        coef: float32 [tensors, columns of ``Coef``].
        block_tensor: int32 [B].
        live, live_row: Elements that count; others get c = 0.
        hold: int32 [1]; where set x and m stay, and c gets no update.
        moves: Whether this is a step; else only beta1*m is added where ``last``.
        last: Whether the next step synchronises.
        leaks: c also gets wd*x*denom, as DeepSpeed's does; only without ``precondition``.
        flags: int32 [1], ``NONFINITE`` is set where it happened.
    """
    flat, moments = compensated.view(-1, block_size), exp_avg.view(-1, block_size)
    for tile in tiles(sizes, 1, block_size, compensated.device, len(block_tensor)):
        b = tile.blocks
        k = coef[block_tensor[b]]
        m, d = moments[b], denom(exp_avg_sq.view(-1, block_size)[b], k, eps_inside_sqrt)
        c = residual(flat[b], worker_scale[b], False)
        mask, finite = live_mask(live, live_row, tile), torch.ones_like(c, dtype=torch.bool)
        if moves:
            g = counted(only_live(gather(grads, tile, block_size), live, live_row, tile), k)
            x = gather(params, tile, block_size)
            new = m * column(k, Coef.BETA1) + g * column(k, Coef.ONE_MINUS_BETA1)
            u = new / d
            added = u if precondition else new
            if leaks:
                added = added + x * column(k, Coef.WEIGHT_DECAY) * d
            finite = torch.isfinite(c + added) & torch.isfinite(u)
            counts = (finite if mask is None else finite & mask) & (hold == 0)
            scatter(torch.where(counts, x * column(k, Coef.DECAY) - u * column(k, Coef.STEP_SIZE), x), params, tile)
            m = torch.where(counts, new, m)
            c = torch.where(counts, c + added, c)
        if last:
            total = c + (m / d if precondition else m) * column(k, Coef.BETA1)
            fits = torch.isfinite(total)
            finite, c = finite & fits, torch.where(fits, total, c)
        elif moves:
            moments[b] = m
        flat[b] = only_live(c, live, live_row, tile)
        bad = ~finite if mask is None else ~finite & mask
        if bad.any() and not hold:
            flags |= NONFINITE


def rebuild_momentum(
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
    exp_avg: Tensor,
) -> None:
    """Momentum from the synchronised buffer (0/1 Adam, Algorithm 1, line 9): m = scale*sign(bits) * denom.

    Args:
        sizes: Elements of each tensor.
        block_size: Elements per block.
        exp_avg_bits: uint8 [W, P / 8W].
        exp_avg_scale: float32 [B]: the buffer's scale over what its round has summed.
        exp_avg_sq: v, float32 [P], or None: then without denom.
        eps_inside_sqrt: Which denom; see ``apply_momentum``.
        coef: float32 [tensors, columns of ``Coef``].
        block_tensor: int32 [B].
        live, live_row: Elements that count; others get 0.
        exp_avg: m, float32 [>= P], written.
    """
    flat = exp_avg[: len(exp_avg_scale) * block_size].view(-1, block_size)
    for tile in tiles(sizes, len(exp_avg_bits), block_size, exp_avg.device, len(block_tensor)):
        b = tile.blocks
        m = scaled(exp_avg_bits[tile.chunk, ..., tile.bytes], exp_avg_scale[b])
        if exp_avg_sq is not None:
            m.mul_(denom(exp_avg_sq.view(-1, block_size)[b], coef[block_tensor[b]], eps_inside_sqrt))
        flat[b] = only_live(m, live, live_row, tile)
