"""The plain-torch twin of every kernel: its specification, its oracle, and the CPU backend.

Names: ``c`` the compensated momentum (momentum + residual), ``s`` its scale, ``e = c - s*sign(c)``
the residual, ``m`` the momentum. Blocks are rows: a tile is float32 [blocks, block_size], what a
table holds per block is [blocks, 1]. Each line is one float32 rounding; kernels follow the same
order of operations, without contraction, so that their bits are the same.

Partial sums are taken in float64 of float32 terms: squares are exact there, sums round far below
the float32 result, and so the order of summation does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from .coefficients import Coef
from .live import FULL_ROW
from .tiles import Tile, gather, scatter, tiles

_SPREAD = 0x0102040810204080  # multiplied by eight 0/1 bytes, its top byte is their bits, LSB first

L1, L2, CONTRACTIVE = 0, 1, 2
SCALE_NORMS = {"l1": L1, "l2": L2, "contractive": CONTRACTIVE}
CONTRACTIVE_LIMIT = 1.9  # any factor below 2 makes x -> x - s*sign(x) a contraction

ABS, SQUARE, DROPPED = 0, 1, 2  # rows of the partial sums
TAIL = 8  # words behind the flattened gradients, summed with them by the warm-up's all-reduce


def pack(x: Tensor, bits: Tensor) -> None:
    """Packs signs: bit i % 8 of byte i // 8 is ``x[i] >= 0`` (so +1 for -0.0; a NaN counts as -1).

    Args:
        x: A float dtype [n], n a multiple of 8, contiguous.
        bits: uint8 [n / 8], written.
    """
    ones = torch.ge(x, 0, out=torch.empty_like(x, memory_format=torch.contiguous_format)).to(torch.int8)
    bits.copy_(ones.view(torch.int64).mul_(_SPREAD).bitwise_right_shift_(56))


def unpack(bits: Tensor, x: Tensor) -> None:
    """Writes +1 where a bit is set and -1 where not: ``bits`` uint8 [n / 8], ``x`` any dtype [n]."""
    x.copy_(_signs(bits, 1).view(-1))


def flatten(tensors: Sequence[Tensor], sizes: Sequence[int], block_size: int, factor: float, out: Tensor) -> None:
    """Copies tensors, times ``factor``, into the flat index space; padding becomes zero.

    Args:
        tensors: Dense tensors of ``sizes`` elements, read in memory order; empty ones are zeros.
        sizes: Elements of each tensor.
        block_size: Elements per block.
        factor: 1 / world_size; dividing before the sum cannot overflow.
        out: float32 [P + TAIL], written: the values; and 1 at P if any is not finite.
    """
    for tile in tiles(sizes, 1, block_size, out.device):
        values = gather(tensors, tile, block_size).mul_(factor).view(-1)
        if not torch.isfinite(values).all():
            out[-TAIL] = 1.0
        out[tile.start : tile.start + tile.numel] = values
    # Padding that only other ranks' chunks need, behind the last tensor's last block.
    out[tile.start + tile.numel : -TAIL] = 0.0


def momentum_compress(
    grads: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    compensated: Tensor,
    worker_scale: Tensor,
    exp_avg_bits: Tensor,
    exp_avg_scale: Tensor,
    coef: Tensor,
    block_tensor: Tensor,
    exp_avg_sq: Tensor | None,
    eps_inside_sqrt: bool,
    live: Tensor,
    live_row: Tensor,
    bits: Tensor,
    partials: Tensor,
) -> None:
    """Momentum, error feedback and sign compression in one pass (1-bit Adam, Algorithm 1, worker).

        e = c - s*sign(c);  c = beta1*m + (1 - beta1)*g*unit + e;  bits = c >= 0

    The residual is deferred: it is formed when ``c`` is read again, since its scale is known only
    after all of ``c`` was seen. ``m`` comes from the last synchronised bits and scales. An element
    whose new ``c`` is not finite drops its gradient and is counted.

    Args:
        grads: Gradients of any float dtype, dense, in the parameters' memory order; empty is zeros.
        sizes: Elements of each gradient.
        block_size: Elements per block.
        compensated: c, float32 [P], read and written.
        worker_scale: s of the last step, float32 [B].
        exp_avg_bits: Signs of m, uint8 [W, P / 8W].
        exp_avg_scale: |m|, float32 [B].
        coef: float32 [tensors, columns of ``Coef``].
        block_tensor: int32 [B].
        exp_avg_sq: None, or float32 [P]: then unit = 1/denom per coordinate, else the layer's.
        eps_inside_sqrt: Which denom; see ``adam_apply``.
        live, live_row: Elements that count; others get c = 0.
        bits: uint8 [W, P / 8W], written.
        partials: float64 [3, B], written: sums of |c| and of c^2, number of dropped elements.
    """
    flat = compensated.view(-1, block_size)
    for tile in tiles(sizes, len(bits), block_size, compensated.device):
        b = tile.blocks
        k = coef[block_tensor[b]]
        c = flat[b]
        residual = _residual(c, worker_scale[b])
        m = _signs(exp_avg_bits[tile.chunk, tile.bytes], len(c)).mul_(exp_avg_scale[b, None])
        kept = m.mul_(_column(k, Coef.BETA1)).add_(residual)
        g = gather(grads, tile, block_size).mul_(_column(k, Coef.ONE_MINUS_BETA1))
        if exp_avg_sq is None:
            g.mul_(_column(k, Coef.UNIT))
        else:
            g.div_(_denom(exp_avg_sq.view(-1, block_size)[b], k, eps_inside_sqrt))
        new = _only_live(g.add_(kept), live, live_row, tile)
        if not _write_partials(new, partials[:, b]):
            finite = torch.isfinite(new)
            new = torch.where(finite, new, kept)
            _write_partials(new, partials[:, b])
            partials[DROPPED, b] = (~finite).sum(1).double()
        c.copy_(new)
        pack(new.view(-1), bits[tile.chunk, tile.bytes])


def finish(
    partials: Tensor,
    segment: Tensor,
    segment_start: Tensor,
    count: Tensor,
    norm: int,
    scale: Tensor,
    message_scales: Tensor,
    message_flags: Tensor,
) -> None:
    """Turns partial sums into scales, in a fixed order, and writes them where they travel from.

        l1: mean |c|      l2: sqrt(mean c^2)      contractive: min(l2, 1.9 * l1)

    Args:
        partials: float64 [3, B].
        segment: int32 [B], the scale that each block shares; rising.
        segment_start: int64 [segments + 1], first block of each.
        count: float64 [segments], live elements of each.
        norm: One of ``SCALE_NORMS``' values.
        scale: float32 [B], written: each block's scale.
        message_scales: float32 [messages, slots], written: message k carries the scales of its
            B / messages blocks, in order; slots that it does not need stay as they are.
        message_flags: int32 [messages], written: 1 where any element was dropped, else 0.
    """
    n = count.clamp(min=1.0)
    sums = [torch.segment_reduce(partials[row], "sum", offsets=segment_start) for row in (ABS, SQUARE)]
    l1, l2 = sums[ABS] / n, (sums[SQUARE] / n).sqrt()
    by_segment = (l1, l2, torch.minimum(l2, CONTRACTIVE_LIMIT * l1))[norm].to(torch.float32)
    torch.index_select(by_segment, 0, segment, out=scale)
    by_message = segment.view(len(message_flags), -1)
    slot = by_message - by_message[:, :1]
    message = torch.arange(len(message_flags), device=segment.device)[:, None]
    message_scales[message, slot] = scale.view_as(slot)
    message_flags.fill_((partials[DROPPED] > 0).any())


def server_reduce(
    arrived_bits: Tensor,
    arrived_scales: Tensor,
    slot: Tensor,
    skip: Tensor,
    block_size: int,
    compensated: Tensor,
    server_scale: Tensor,
    live: Tensor,
    live_row: Tensor,
    bits: Tensor,
    partials: Tensor,
) -> None:
    """Averages the workers' chunks and compresses the average (1-bit Adam, Algorithm 1, server).

        E = c - s*sign(c);  c = sum_w (s_w/W)*sign_w + E;  bits = c >= 0

    The sum runs in rank order. Where ``skip`` is set nothing is averaged and E stays as it is.

    Args:
        arrived_bits: uint8 [W, P / 8W].
        arrived_scales: float32 [W, slots].
        slot: int32 [B / W], each block's slot.
        skip: int32 [1].
        block_size: Elements per block.
        compensated: The server's c, float32 [P / W], read and written.
        server_scale: Its s of the last step, float32 [B / W].
        live, live_row: Elements of this chunk that count.
        bits: uint8 [1, P / 8W], written.
        partials: float64 [3, B / W], written as by ``momentum_compress``.
    """
    world_size, flat = len(arrived_bits), compensated.view(-1, block_size)
    for tile in tiles((compensated.numel(),), 1, block_size, compensated.device):
        b = tile.blocks
        c = flat[b]
        new = _residual(c, server_scale[b])
        if not skip:
            scales = arrived_scales[:, slot[b], None] * (1.0 / world_size)
            total = torch.zeros_like(c)
            for w in range(world_size):
                total += _signs(arrived_bits[w, tile.bytes], len(c)).mul_(scales[w])
            new += total
        new = _only_live(new, live, live_row, tile)
        c.copy_(new)
        pack(new.view(-1), bits[0, tile.bytes])
        _write_partials(new, partials[:, b])


def adam_apply(
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
) -> None:
    """Applies the synchronised momentum with the frozen variance (1-bit Adam, Algorithm 1).

        x = (1 - lr*wd)*x - step_size * m/denom,  m = scale*sign(bits)/unit
        denom = sqrt(v)/sqrt(1 - beta2^F) + eps, or eps inside the root

    Args:
        params: Parameters of any float dtype, dense, written; computed in float32, rounded once.
        sizes: Elements of each.
        block_size: Elements per block.
        exp_avg_bits: uint8 [W, P / 8W].
        exp_avg_scale: float32 [B].
        exp_avg_sq: Frozen variance, float32 [P], or None where the unit already is 1/denom.
        eps_inside_sqrt: Which denom (Fixing 1-bit Adam, eq. 2, puts eps inside).
        coef: float32 [tensors, columns of ``Coef``].
        block_tensor: int32 [B].
        live, live_row: Elements that move.
        skip: int32 [1]; where set nothing moves.
    """
    if skip:
        return
    for tile in tiles(sizes, len(exp_avg_bits), block_size, exp_avg_scale.device):
        b = tile.blocks
        k = coef[block_tensor[b]]
        m = _signs(exp_avg_bits[tile.chunk, tile.bytes], len(k))
        update = m.mul_((exp_avg_scale[b] / k[:, Coef.UNIT])[:, None])
        if exp_avg_sq is not None:
            update.div_(_denom(exp_avg_sq.view(-1, block_size)[b], k, eps_inside_sqrt))
        _move(params, tile, block_size, update, k, live, live_row)


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
        live, live_row: Elements that move.
        skip: int32 [1]; where set nothing changes.
        exp_avg_sq_sums: float64 [B], written: sum of v per block (for the freeze rule); or None.
    """
    if skip:
        return
    for tile in tiles(sizes, 1, block_size, exp_avg.device):
        b = tile.blocks
        k = coef[block_tensor[b]]
        g = _only_live(grad[tile.start : tile.start + tile.numel].view(-1, block_size), live, live_row, tile)
        m, v = exp_avg.view(-1, block_size)[b], exp_avg_sq.view(-1, block_size)[b]
        m.mul_(_column(k, Coef.BETA1)).add_(g * _column(k, Coef.ONE_MINUS_BETA1))
        v.mul_(_column(k, Coef.BETA2)).add_((g * _column(k, Coef.ONE_MINUS_BETA2)).mul_(g))
        if exp_avg_sq_sums is not None:
            exp_avg_sq_sums[b] = v.sum(1, dtype=torch.float64)
        _move(params, tile, block_size, m / _denom(v, k, False), k, live, live_row)


def freeze(
    sizes: Sequence[int],
    block_size: int,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    coef: Tensor,
    block_tensor: Tensor,
    dead_value: Tensor | None,
) -> None:
    """Turns the warm-up's state into the compression stage's, in place; runs once.

    ``c = beta1 * unit * m``: with both scales zero, the next ``momentum_compress`` then finds in
    its "residual" just what the full-precision momentum contributes. Coordinates with v == 0 take
    ``dead_value`` float32 [tensors], the mean of their tensor's live v; None leaves them.
    """
    for tile in tiles(sizes, 1, block_size, exp_avg.device):
        owner = block_tensor[tile.blocks]
        k = coef[owner]
        exp_avg.view(-1, block_size)[tile.blocks].mul_(_column(k, Coef.BETA1)).mul_(_column(k, Coef.UNIT))
        if dead_value is not None:
            v = exp_avg_sq.view(-1, block_size)[tile.blocks]
            v.copy_(torch.where(v == 0, dead_value[owner][:, None], v))


def live_variance(sizes: Sequence[int], block_size: int, exp_avg_sq: Tensor, partials: Tensor) -> None:
    """Per block, the sum of v and the number of v > 0: ``partials`` float64 [2, B], written."""
    for tile in tiles(sizes, 1, block_size, exp_avg_sq.device):
        v = exp_avg_sq.view(-1, block_size)[tile.blocks]
        partials[0, tile.blocks] = v.sum(1, dtype=torch.float64)
        partials[1, tile.blocks] = (v > 0).sum(1).double()


def settle(compensated: Tensor, scale: Tensor, live: Tensor, live_row: Tensor) -> None:
    """Forms the deferred residual in place: ``c = c - s*sign(c)``, ``s = 0``. Changes no later step.

    Args:
        compensated: float32 [n].
        scale: float32 [blocks of n].
        live, live_row: Elements that count; others have no residual.
    """
    block_size = compensated.numel() // scale.numel()
    for tile in tiles((compensated.numel(),), 1, block_size, compensated.device):
        c = compensated.view(-1, block_size)[tile.blocks]
        c.copy_(_only_live(_residual(c, scale[tile.blocks]), live, live_row, tile))
    scale.zero_()


def _signs(bits: Tensor, rows: int) -> Tensor:
    """+1.0 and -1.0, float32 [rows, 8 * bytes / rows], from packed bits."""
    return _sign_table(bits.device).index_select(0, bits.reshape(-1).int()).view(rows, -1)


@cache
def _sign_table(device: torch.device) -> Tensor:
    # Row b holds the eight signs of byte b, LSB first.
    byte = torch.arange(256, device=device)[:, None]
    return ((byte >> torch.arange(8, device=device)) & 1).float().mul_(2).sub_(1)


def _residual(c: Tensor, scale: Tensor) -> Tensor:
    """c - s*sign(c) for c float32 [blocks, block_size]; adding 0.0 makes the sign of -0.0 a plus."""
    return c - torch.copysign(scale[:, None], c + 0.0)


def _column(k: Tensor, column: int) -> Tensor:
    return k[:, column, None]


def _denom(v: Tensor, k: Tensor, eps_inside_sqrt: bool) -> Tensor:
    root, eps = _column(k, Coef.RSQRT_BIAS2), _column(k, Coef.EPS)
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
    return _signs(live[rows.long()], len(rows)) > 0


def _only_live(values: Tensor, live: Tensor, live_row: Tensor, tile: Tile) -> Tensor:
    mask = _mask(live, live_row, tile)
    return values if mask is None else torch.where(mask, values, 0.0)


def _move(
    params: Sequence[Tensor],
    tile: Tile,
    block_size: int,
    update: Tensor,
    k: Tensor,
    live: Tensor,
    live_row: Tensor,
) -> None:
    x = gather(params, tile, block_size)
    moved = x * _column(k, Coef.DECAY)
    moved.sub_(update.mul_(_column(k, Coef.STEP_SIZE)))
    mask = _mask(live, live_row, tile)
    scatter(moved if mask is None else torch.where(mask, moved, x), params, tile)


def _write_partials(c: Tensor, partials: Tensor) -> bool:
    """Writes a tile's sums of |c| and c^2; returns whether they are finite, as c then is."""
    wide = c.double()
    partials[SQUARE] = (wide * wide).sum(1)
    partials[ABS] = wide.abs_().sum(1)
    partials[DROPPED] = 0.0
    return bool(torch.isfinite(partials[SQUARE]).all())
