"""Shares squares of gradients between workers: what a renewal of a living variance needs, in torch alone.

Of the mean gradient nobody but an average of floats knows the squares. What workers tell each other instead
(docs/numerics.md, "A variance that lives"):

    logarithms      of each worker's own squares, 8 bits an element; their mean has the variance's shape
    projections     of its gradient on random signs, alike on all workers, a float for ``SHARE`` elements; the square
                    of their mean is that of the mean gradient, on average
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import rules
from .eager import gather, only_live, scaled, tiles
from .layout import FlatLayout
from .op import Bits, Floats, Indices, PerBlock, PerElement, Tensors, Variance

SHARE = 16
"""Elements of which a projection is the sum, in tensors with as many projections as are wanted."""

LEAST, MOST = 64, 2048
"""Projections of a tensor: fewer are sums of fewer elements, since their squares' sum is too noisy; more, of more."""

_MANTISSA = 20  # bits of a float32 that a logarithm has none of: three are left of 23
_STEPS = 255  # logarithms above zero; 8 of them are an octave
_LARGEST = (0x7F800000 >> _MANTISSA) - 1  # of finite numbers


def encode(values: PerElement, tops: Bits, out: Bits) -> None:
    """Writes numbers that are not negative as logarithms of 8 bits, next to the largest of their block.

    To nearest, to within 1/16, over 32 octaves below the block's largest; what is smaller becomes 0.

    Args:
        values: float32 [blocks * n], finite.
        tops: uint8 [blocks], written: the octave above each block's largest number.
        out: uint8 [blocks * n], written.
    """
    block_size = values.numel() // len(tops)
    rows, logs = values.view(-1, block_size), out.view(-1, block_size)
    for tile in tiles((values.numel(),), 1, block_size, values.device):
        b = tile.blocks
        steps = ((rows[b].view(torch.int32) + (1 << (_MANTISSA - 1))) >> _MANTISSA).clamp_(max=_LARGEST)
        octave = (steps.amax(1) + 7) >> 3
        tops[b] = octave.to(torch.uint8)
        logs[b] = (steps - (octave * 8 - _STEPS)[:, None]).clamp_(min=0).to(torch.uint8)


def decode(logs: Bits, tops: Bits) -> Tensor:
    """Returns what ``encode`` has written, float32 [blocks, n], of uint8 [blocks, n] and [blocks]."""
    base = tops.int() * 8 - _STEPS
    steps = torch.where(logs == 0, 0, logs.int() + base[:, None]).clamp_(min=0)
    return (steps << _MANTISSA).view(torch.float32)


def average_logs(arrived_logs: Bits, arrived_tops: Bits, tops: Bits, out: Bits) -> None:
    """Writes the mean of several workers' numbers as ``encode`` does; they are added in the order of workers.

    Args:
        arrived_logs, arrived_tops: uint8 [W, blocks * n] and [W, blocks].
        tops, out: As for ``encode``.
    """
    blocks, share = len(tops), 1.0 / len(arrived_logs)
    logs = arrived_logs.view(len(arrived_logs), blocks, -1)
    for tile in tiles((out.numel(),), 1, logs.shape[2], out.device):
        b = tile.blocks
        total = decode(logs[0, b], arrived_tops[0, b]) * share
        for own, top in zip(logs[1:, b], arrived_tops[1:, b], strict=True):
            total += decode(own, top) * share
        encode(total.view(-1), tops[b], out.view(blocks, -1)[b].view(-1))


def random_signs(updates: Tensor, start: int, shape: tuple[int, int]) -> Tensor:
    """Returns signs, float32 ``shape``, of elements from flat index ``start`` on, a multiple of 32.

    A function of the number of ``updates``, int64 [], and of the element's place, nothing else: the same on all ranks.
    """
    word = torch.arange(start // 32, start // 32 + shape[0] * shape[1] // 32, device=updates.device)
    seed = rules.block_seed(word >> 32, updates & rules.WORD)
    word = rules.mixed((word & rules.WORD) ^ seed)
    bits = (word[:, None] >> torch.arange(32, device=word.device)) & 1
    return (1.0 - 2.0 * bits.float()).view(shape)


class Projections(NamedTuple):
    """Says where the projections of a layout's tensors lie: a tensor's behind another's, of whole blocks."""

    shares: tuple[int, ...]
    """Elements of which one is the sum, by tensor: a power of two, at most a block."""
    starts: tuple[int, ...]
    """Where each tensor's begin, and behind the last how many there are."""

    @classmethod
    def of(cls, layout: FlatLayout) -> Projections:
        """Places them."""
        few, many = (
            [1 << max(0, (size // wanted).bit_length() - 1) for size in layout.sizes] for wanted in (LEAST, MOST)
        )
        shares = tuple(min(layout.block_size, max(min(SHARE, f), m)) for f, m in zip(few, many, strict=True))
        starts, first = [0], layout.first_block
        for i, share in enumerate(shares):
            starts.append(starts[-1] + (first[i + 1] - first[i]) * layout.block_size // share)
        return cls(shares, tuple(starts))


def project(
    grads: Tensors, layout: FlatLayout, start: int, factor: Floats | None, updates: Tensor, live: Bits,
    live_row: Indices, out: Floats,
) -> None:  # fmt: skip
    """Sums elements of a gradient with random signs, a few at a time (``Projections``).

    Args:
        grads: Tensors of the layout's sizes, of any float dtype, dense; an empty one is zeros.
        layout: Where they lie.
        start: Flat index of the first block.
        factor: What gradients are multiplied with, float32 [1]; None: nothing.
        updates: int64 [], see ``random_signs``.
        live, live_row: The active mask, as for ``momentum_compress``.
        out: float32 [projections], written.
    """
    places, block_size, first = Projections.of(layout), layout.block_size, layout.first_block
    for tile in tiles(layout.sizes, 1, block_size, out.device, layout.n_blocks):
        g = only_live(gather(grads, tile, block_size), live, live_row, tile)
        g = g if factor is None else g * factor
        signed = g * random_signs(updates, start + tile.start, (len(g), block_size))
        for tensor, begin, end, flat in tile.spans:
            row, share = (flat - tile.start) // block_size, places.shares[tensor]
            rows = signed[row : row - (begin - end) // block_size]
            at = places.starts[tensor] + (tile.blocks.start + row - first[tensor]) * block_size // share
            out[at : at + rows.numel() // share] = rows.reshape(-1, share).sum(1, dtype=torch.float64).float()


def projected_squares(projections: Floats, layout: FlatLayout) -> Tensor:
    """Sums squares of projections by block: float64 [B]."""
    sums = torch.zeros(layout.n_blocks, dtype=torch.float64, device=projections.device)
    places, first = Projections.of(layout), layout.first_block
    for i in range(len(layout.sizes)):
        own = projections[places.starts[i] : places.starts[i + 1]]
        if own.numel():
            sums[first[i] : first[i + 1]] = own.view(first[i + 1] - first[i], -1).double().square_().sum(1)
    return sums


def renewed(mean_sq: Tensor, owner: Indices, tables: Floats, dtype: torch.dtype) -> Tensor:
    """Returns v, float32 [blocks, n], as ``dtype`` represents it: the mean of workers' squares, brought to its level.

    Args:
        mean_sq: float32 [blocks, n].
        owner: int32 [blocks], each block's tensor.
        tables: float32 [3, tensors]: what squares are multiplied with, what v is where there are none, the least v.
        dtype: float32 or bfloat16.
    """
    level, mean, least = tables[:, owner, None]
    return rules.renewed(mean_sq, level, mean, least).to(dtype).float()


def renew(
    block_size: int, exp_avg_sq: Variance, logs: Bits, tops: Bits, tables: Floats, block_tensor: Indices, live: Bits,
    live_row: Indices,
) -> None:  # fmt: skip
    """Writes ``renewed`` v, float32 or bfloat16 [n], from ``encode``'s logarithms; others as for ``change_unit``."""
    v = exp_avg_sq.view(-1, block_size)
    for tile in tiles((exp_avg_sq.numel(),), 1, block_size, exp_avg_sq.device):
        b = tile.blocks
        mean_sq = decode(logs.view(-1, block_size)[b], tops[b])
        v[b] = only_live(renewed(mean_sq, block_tensor[b], tables, v.dtype), live, live_row, tile).to(v.dtype)


def change_unit(
    block_size: int, compensated: PerElement, scale: PerBlock, ternary: bool, bits: Bits | None,
    exp_avg_scale: PerBlock, eps_inside_sqrt: bool, coef: Floats, block_tensor: Indices, exp_avg_sq: Variance,
    logs: Bits, tops: Bits, tables: Floats, live: Bits, live_row: Indices,
) -> None:  # fmt: skip
    """Brings what is divided by one variance's root to the unit of the next: times old over new denominator.

    That is a residual e, and with it the momentum, as ``freeze`` puts it into ``compensated``: with both scales zero
    the next ``momentum_compress`` finds there what both contribute, so that nothing of what was compressed is lost.

    Args:
        compensated: float32 [n], read and written: c, of a worker or of a server.
        scale: float32 [blocks], s of c; written: 0.
        bits, exp_avg_scale: m of the last step, uint8 [chunks, ...] and float32 [blocks]; of a server None, and any.
        exp_avg_sq: v, in which c still is, float32 or bfloat16 [n].
        logs, tops, tables: What ``renewed`` makes the next v of.
        block_size, eps_inside_sqrt, coef, block_tensor, live, live_row: As for ``momentum_compress``.
    """
    chunks = 1 if bits is None else len(bits)
    flat, v, logs = (x.view(-1, block_size) for x in (compensated, exp_avg_sq, logs))
    for tile in tiles((compensated.numel(),), chunks, block_size, compensated.device):
        b, owner = tile.blocks, block_tensor[tile.blocks]
        k, s = coef[owner], scale[b, None]
        if bits is None:
            kept = rules.residual(flat[b], s, ternary)
        else:
            m = scaled(bits[tile.chunk, ..., tile.bytes], exp_avg_scale[b, None])
            kept = rules.carried(m, flat[b], s, k, ternary)
        mean_sq = decode(logs[b], tops[b])
        old = rules.denominator(v[b].float(), k, eps_inside_sqrt)
        new = rules.denominator(renewed(mean_sq, owner, tables, v.dtype), k, eps_inside_sqrt)
        flat[b] = only_live(rules.in_unit(kept, v[b].float(), old, new), live, live_row, tile)
    scale.zero_()
