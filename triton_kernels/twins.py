"""The plain-torch twins of compression and exchange: specification, oracle, and what runs without a compiler.

Every kernel has a twin of the same name, here, in ``update_twins`` or in ``lamb_twins``. Names: ``c``
the compensated momentum (momentum + residual), ``s`` its scale, ``e = c - s*sign(c)`` the residual,
``m`` the momentum. Kernels follow the same order of operations, without contraction, so that their
bits are the same.

Bits are one plane of signs, uint8 [W, P / 8W]; or, where ternary, two planes, uint8 [W, 2, P / 8W]:
signs, and which elements are not zero (Tarasov & Ershov, section 4). Then sign(0) = 0, so that zeros
have no residual and no momentum, weigh in no scale, and are counted in a fourth row of partial sums.
Which of the two it is, ops see from the dimensions of their bits and from the rows of their sums.

Partial sums are taken in float64 of float32 terms: squares are exact there, sums round far below
the float32 result, and so the order of summation does not show.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .coefficients import LARGEST_GRADIENT, Coef
from .cpu_tiles import gather, tiles
from .eager import (
    ABS,
    DROPPED,
    NONZERO,
    SQUARE,
    column,
    compress,
    counted,
    denom,
    only_live,
    pack_where,
    residual,
    scaled,
    signs,
    square_sum,
    write_partials,
)

L1, L2, CONTRACTIVE = 0, 1, 2
SCALE_NORMS = {"l1": L1, "l2": L2, "contractive": CONTRACTIVE}
"""What ``finish`` takes as ``norm``, by the name that users give."""

CONTRACTIVE_LIMIT = 1.9  # any factor below 2 makes x -> x - s*sign(x) a contraction

TAIL = 8
"""Words behind the flattened gradients, summed with them by the warm-up's all-reduce."""


def pack(x: Tensor, bits: Tensor) -> None:
    """Packs signs: bit i % 8 of byte i // 8 is ``x[i] >= 0`` (so +1 for -0.0; a NaN counts as -1).

    Args:
        x: A float dtype [n], n a multiple of 8, contiguous.
        bits: uint8 [n / 8], written.
    """
    pack_where(torch.ge, x, bits)


def unpack(bits: Tensor, x: Tensor) -> None:
    """Writes +1 where a bit is set and -1 where not: ``bits`` uint8 [n / 8], ``x`` any dtype [n]."""
    x.copy_(signs(bits, 1).view(-1))


def flatten(
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    factor: float,
    unscale: Tensor | None,
    out: Tensor,
) -> None:
    """Copies tensors, times ``factor``, into the flat index space; padding becomes zero.

    Args:
        tensors: Dense tensors of ``sizes`` elements, read in memory order; empty ones are zeros.
        sizes: Elements of each tensor.
        block_size: Elements per block.
        factor: 1 / world_size; dividing before the sum cannot overflow.
        unscale: float32 [], a second factor, of gradients of a scaled loss; or None.
        out: float32 [P + TAIL], written: the values; and 1 at P if any is not finite, or larger than ``factor``
            times ``LARGEST_GRADIENT``.
    """
    for tile in tiles(sizes, 1, block_size, out.device):
        values = gather(tensors, tile, block_size).mul_(factor).view(-1)
        if unscale is not None:
            values.mul_(unscale)
        if not (values.abs() <= LARGEST_GRADIENT * factor).all():
            out[-TAIL] = 1.0
        out[tile.start : tile.start + tile.numel] = values
    # Padding that only other ranks' chunks need, behind the last tensor's last block.
    out[tile.start + tile.numel : -TAIL] = 0.0


def gradient_squares(
    tensors: Sequence[Tensor], sizes: Sequence[int], block_size: int, bound: Tensor, squares: Tensor
) -> None:
    """Sums the squares of a gradient, by block, in float64: no sum overflows, and bad elements do not count.

    Args:
        tensors: Gradients of any float dtype, dense; empty is zeros.
        sizes: Elements of each.
        block_size: Elements per block.
        bound: float32 [1]; larger elements, and NaN, are left out.
        squares: float64 [B], written.
    """
    squares.zero_()
    for tile in tiles(sizes, 1, block_size, squares.device):
        g = gather(tensors, tile, block_size)
        squares[tile.blocks] = square_sum(torch.where(g.abs() <= bound, g, 0.0))


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
    hold: Tensor,
) -> None:
    """Momentum, error feedback and sign compression in one pass (1-bit Adam, Algorithm 1, worker).

        e = c - s*sign(c);  c = beta1*m + (1 - beta1)*g*unit + e;  bits = c >= 0

    The residual is deferred: it is formed when ``c`` is read again, since its scale is known only
    after all of ``c`` was seen. ``m`` comes from the last synchronised bits and scales. An element
    whose gradient exceeds GRAD_LIMIT, or whose new ``c`` is not finite, drops its gradient and is counted.

    Args:
        grads: Gradients of any float dtype, dense, in the parameters' memory order; empty is zeros.
        sizes: Elements of each gradient.
        block_size: Elements per block.
        compensated: c, float32 [P], read and written.
        worker_scale: s of the last step, float32 [B].
        exp_avg_bits: Signs of m, uint8 [W, P / 8W], or [W, 2, P / 8W] where ternary.
        exp_avg_scale: |m|, float32 [B].
        coef: float32 [tensors, columns of ``Coef``].
        block_tensor: int32 [B].
        exp_avg_sq: None, or float32 or bfloat16 [P]: then unit = 1/denom per coordinate, else the layer's.
        eps_inside_sqrt: Which denom; see ``apply_momentum``.
        live, live_row: Elements that count; others get c = 0.
        bits: As ``exp_avg_bits``, written.
        partials: float64 [3, B], written: sums of |c| and of c^2, number of dropped elements; or
            [4, B] where ternary: number of elements that are not zero.
        hold: int32 [1]; where set nothing is written.
    """
    if hold:
        return
    ternary = bits.dim() == 3
    flat = compensated.view(-1, block_size)
    for tile in tiles(sizes, len(bits), block_size, compensated.device, len(block_tensor)):
        b = tile.blocks
        k = coef[block_tensor[b]]
        c = flat[b]
        error = residual(c, worker_scale[b], ternary)
        # beta1*m: of +-scale the product is that of scale, with its sign.
        kept = scaled(exp_avg_bits[tile.chunk, ..., tile.bytes], exp_avg_scale[b] * k[:, Coef.BETA1]).add_(error)
        g = counted(gather(grads, tile, block_size), k).mul_(column(k, Coef.ONE_MINUS_BETA1))
        if exp_avg_sq is None:
            g.mul_(column(k, Coef.UNIT))
        else:
            g.div_(denom(exp_avg_sq.view(-1, block_size)[b], k, eps_inside_sqrt))
        new = only_live(g.add_(kept), live, live_row, tile)
        if not write_partials(new, partials[:, b]):
            finite = torch.isfinite(new)
            new = torch.where(finite, new, kept)
            write_partials(new, partials[:, b])
            partials[DROPPED, b] = (~finite).sum(1).double()
        c.copy_(new)
        compress(new, bits[tile.chunk, ..., tile.bytes])


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

    Means over the live elements; where ternary, over those that are not zero.

    Args:
        partials: float64 [3, B], or [4, B] where ternary.
        segment: int32 [B], the scale that each block shares; rising.
        segment_start: int64 [segments + 1], first block of each.
        count: float64 [segments], live elements of each.
        norm: One of ``SCALE_NORMS``' values.
        scale: float32 [B], written: each block's scale.
        message_scales: float32 [messages, slots], written: message k carries the scales of its
            B / messages blocks, in order; slots that it does not need stay as they are.
        message_flags: int32 [messages], written: 1 where any element was dropped, else 0.
    """
    if len(partials) > NONZERO:
        count = torch.segment_reduce(partials[NONZERO], "sum", offsets=segment_start)
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
    agreement: Tensor,
    hold: Tensor,
) -> None:
    """Averages the workers' chunks and compresses the average (1-bit Adam, Algorithm 1, server).

        E = c - s*sign(c);  c = sum_w (s_w/W)*sign_w + E;  bits = c >= 0

    Without ``compensated`` there is no E: c is the average. The sum runs in rank order. Where ``skip`` is set
    nothing is averaged and E stays as it is.

    Args:
        arrived_bits: uint8 [W, P / 8W], or [W, 2, P / 8W] where ternary.
        arrived_scales: float32 [W, slots].
        slot: int32 [B / W], each block's slot.
        skip: int32 [1].
        block_size: Elements per block.
        compensated: The server's c, float32 [P / W], read and written; or empty.
        server_scale: Its s of the last step, float32 [B / W].
        live, live_row: Elements of this chunk that count.
        bits: uint8 [1, P / 8W], or [1, 2, P / 8W], written.
        partials: float64 [3, B / W], or [4, B / W], written as by ``momentum_compress``.
        agreement: float64 [2, B / W], written: the sum of the average's squares, before E is added, and
            the square that each would have if all workers' signs agreed.
        hold: int32 [1]; where set nothing is written.
    """
    if hold:
        return
    world_size, keeps, flat = len(arrived_bits), compensated.numel() > 0, compensated.view(-1, block_size)
    for tile in tiles((len(live_row) * block_size,), 1, block_size, compensated.device):
        b = tile.blocks
        total = torch.zeros(tile.numel // block_size, block_size, device=compensated.device)
        new = residual(flat[b], server_scale[b], arrived_bits.dim() == 3) if keeps else torch.zeros_like(total)
        most = torch.zeros_like(total[:, 0])
        if not skip:
            scales = arrived_scales[:, slot[b]] * (1.0 / world_size)
            for w in range(world_size):
                total += scaled(arrived_bits[w, ..., tile.bytes], scales[w])
                most += scales[w]
            new += total
        new = only_live(new, live, live_row, tile)
        if keeps:
            flat[b] = new
        compress(new, bits[0, ..., tile.bytes])
        write_partials(new, partials[:, b])
        agreement[0, b] = square_sum(only_live(total, live, live_row, tile))
        agreement[1, b] = most.double().square()


def settle(compensated: Tensor, scale: Tensor, ternary: bool, live: Tensor, live_row: Tensor) -> None:
    """Forms the deferred residual in place: ``c = c - s*sign(c)``, ``s = 0``. Changes no later step.

    Args:
        compensated: float32 [n].
        scale: float32 [blocks of n].
        ternary: Whether sign(0) is 0.
        live, live_row: Elements that count; others have no residual.
    """
    block_size = compensated.numel() // scale.numel()
    for tile in tiles((compensated.numel(),), 1, block_size, compensated.device):
        c = compensated.view(-1, block_size)[tile.blocks]
        c.copy_(only_live(residual(c, scale[tile.blocks], ternary), live, live_row, tile))
    scale.zero_()
