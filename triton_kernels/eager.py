"""Cuts tiles, packs bits, masks, rounds and sums for the eager ops, as ``block_io`` does for kernels.

Eager ops are memory-bound on a CPU: they walk the flat index space in tiles, whose operands stay in cache from the
first line of the arithmetic to the last. Blocks are rows: a tile is float32 [blocks, block_size], what a table holds
per block is [blocks, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import bit_rules, rules
from .codes import decode, encode, keep_nearest
from .headers import PARTLY
from .jit import numpy, tl
from .layout import FlatLayout, Span
from .nouns import Divisor, Moments, Places, Preconditioner, Stored
from .tables import FULL_ROW, SPREAD

ABS, SQUARE, NONZERO = 0, 1, 2  # rows of the partial sums; the last only where ternary
TILE_NUMEL = {"cpu": 1 << 16}
"""Elements per tile by device type; elsewhere 2^22, where launches cost more than temporaries."""


class Tile(NamedTuple):
    """Some consecutive blocks of one chunk."""

    chunk: int
    blocks: slice  # of the block tables
    bytes: slice  # of the chunk's packed bits
    numel: int  # padding included
    start: int  # flat index
    spans: tuple[Span, ...]  # of tensors
    first: int = 0  # what is added to flat indices of which random bits are made


def tiles(
    sizes: Sequence[int], chunks: int, block_size: int, device: torch.device, blocks: int = 0, first: int = 0
) -> tuple[Tile, ...]:
    """Return the tiles of a layout, in order; none crosses a chunk boundary.

    ``blocks`` is how many it has where it may be longer than its tensors need: boundaries follow from that. ``first``
    is which of a longer layout its first block is.
    """
    found = _tiles(tuple(sizes), chunks, block_size, blocks, TILE_NUMEL.get(device.type, 1 << 22))
    return tuple(tile._replace(first=first * block_size) for tile in found) if first else found


@lru_cache(maxsize=16)
def _tiles(sizes: tuple[int, ...], chunks: int, block: int, blocks: int, tile_numel: int) -> tuple[Tile, ...]:
    layout = FlatLayout(sizes, chunks, block, blocks)
    per_chunk, step = layout.blocks_per_chunk, max(1, tile_numel // block)
    result = []
    for chunk in range(chunks):
        for lo in range(0, per_chunk, step):
            hi = min(lo + step, per_chunk)
            start, stop = (chunk * per_chunk + lo) * block, (chunk * per_chunk + hi) * block
            spans = tuple(layout.spans(start, stop))
            rows, packed = slice(start // block, stop // block), slice(lo * block // 8, hi * block // 8)
            result.append(Tile(chunk, rows, packed, stop - start, start, spans))
    return tuple(result)


def memory_order(tensor: Tensor) -> Tensor:
    """View a dense tensor's elements as 1-D, in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def gather(tensors: Sequence[Tensor], tile: Tile, block_size: int) -> Tensor:
    """Copy a tile of the tensors' elements to float32 [blocks, block_size]; the rest is zero.

    An empty tensor where the layout has elements stands for zeros.
    """
    only = tile.spans[0] if len(tile.spans) == 1 else None
    if only and only.stop - only.start == tile.numel and tensors[only.tensor].numel():
        values = memory_order(tensors[only.tensor])[only.start : only.stop]
        return values.to(torch.float32, copy=True).view(-1, block_size)
    out = torch.zeros(tile.numel, dtype=torch.float32, device=tensors[0].device if tensors else "cpu")
    for span in tile.spans:
        tensor = tensors[span.tensor]
        if tensor.numel():
            at = span.flat - tile.start
            out[at : at + span.stop - span.start] = memory_order(tensor)[span.start : span.stop]
    return out.view(-1, block_size)


def scatter(values: Tensor, tensors: Sequence[Tensor], tile: Tile) -> None:
    """Copy a tile's values back into the tensors, rounding to their dtype."""
    flat = values.view(-1)
    for span in tile.spans:
        at = span.flat - tile.start
        memory_order(tensors[span.tensor])[span.start : span.stop] = flat[at : at + span.stop - span.start]


def signs(bits: Tensor, rows: int) -> Tensor:
    """+1.0 and -1.0, float32 [rows, 8 * bytes / rows], from packed bits."""
    table = _sign_table(bits.device)
    if numpy is not None and bits.device.type == "cpu":  # in half the time, as bytes are its indices
        return torch.from_numpy(table.numpy().take(bits.reshape(-1).numpy(), 0)).view(rows, -1)
    return table.index_select(0, bits.reshape(-1).int()).view(rows, -1)


@cache
def _sign_table(device: torch.device) -> Tensor:
    # Row b holds the eight signs of byte b, LSB first.
    byte = torch.arange(256, device=device)[:, None]
    return ((byte >> torch.arange(8, device=device)) & 1).float().mul_(2).sub_(1)


def scaled(bits: Tensor, scale: Tensor) -> Tensor:
    """Decode what ``compress`` made, float32 [blocks, block_size]: scale [blocks, 1] and -scale; zeros if ternary."""
    ternary = bits.dim() == 2
    values = signs(bits[0] if ternary else bits, len(scale)).mul_(scale)
    return tl.where(signs(bits[1], len(scale)) > 0, values, 0.0) if ternary else values


def live_mask(places: Places, tile: Tile) -> Tensor | None:
    """Tell which elements of a tile count, bool [blocks, block_size]; None where all do."""
    rows = places.live_row[tile.blocks]
    if bool((rows == FULL_ROW).all()):
        return None
    return signs(places.live[rows.long()], len(rows)) > 0


def only_live(values: Tensor, places: Places, tile: Tile) -> Tensor:
    """Return the values, zero where an element does not count."""
    mask = live_mask(places, tile)
    return values if mask is None else tl.where(mask, values, 0.0)


def move(
    params: Sequence[Tensor],
    tile: Tile,
    places: Places,
    update: Tensor,
    k: Tensor,
    rounding: Tensor | None,
    still: Tensor | None = None,
    correction: Tensor | None = None,
) -> Tensor:
    """``rules.moved`` for the elements of a tile that count; returns it for all of them, unrounded.

    Those that are ``still``, bool [blocks, block_size], stay where they are.
    """
    x = gather(params, tile, places.block_size)
    low = None if correction is None else correction[tile.start : tile.start + tile.numel].view(x.shape)
    if low is not None:
        x = join(x, low)
    new = rules.moved(x, update, k)
    new = new if still is None else tl.where(still, x, new)
    in_place = rounding is None and correction is None
    write(params, tile, new if in_place else new.clone(), x, places, rounding, low)
    return new


def write(
    params: Sequence[Tensor],
    tile: Tile,
    new: Tensor,
    x: Tensor,
    places: Places,
    rounding: Tensor | None,
    correction: Tensor | None = None,
) -> None:
    """Write ``new`` values, which may change, to the elements of a tile that count; others stay ``x``."""
    mask = live_mask(places, tile)
    new = new if mask is None else tl.where(mask, new, x)
    if correction is not None:
        low = part_bfloat16(new, params, tile, rounding, correction)
        correction.copy_(low if mask is None else torch.where(mask, low, correction))
    elif rounding is not None:
        round_bfloat16(new, params, tile, rounding)
    scatter(new, params, tile)


def follow(
    g: Tensor,
    moments: Moments,
    exp_avg_sq_sums: Tensor | None,
    found: Tensor | None,
    tile: Tile,
    k: Tensor,
    as_kept: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Update m and v of a tile in place, and the sums of v if asked; return both in float32, and what stays.

    Where there is ``found``, elements whose gradient does not count keep both; else, or where there are none: None.
    They are returned before they are rounded, or ``as_kept``.
    """
    exp_avg, exp_avg_sq = moments.stored
    m, v, still = load(exp_avg, tile), load(exp_avg_sq, tile, signed=False), None
    new_m, new_v = rules.momentum(m, g, k), rules.variance(v, g, k)
    if found is not None and not bool((fine := rules.counts(g, k)).all()):
        found |= int(PARTLY)
        new_m, new_v, still = tl.where(fine, new_m, m), tl.where(fine, new_v, v), ~fine
    stored = (store(exp_avg, new_m, moments.drawn, tile), store(exp_avg_sq, new_v, moments.drawn, tile, signed=False))
    if exp_avg_sq_sums is not None:
        exp_avg_sq_sums[tile.blocks] = new_v.sum(1, dtype=torch.float64)
    return *(stored if as_kept else (new_m, new_v)), still


def _rows(stored: Stored | Divisor | Preconditioner, tile: Tile) -> tuple[Tensor, Tensor | None]:
    """View what a tile has of what is stored: values [blocks, block_size], and exponents uint8 [blocks]."""
    b = tile.blocks
    values = stored.numbers.view(-1, tile.numel // (b.stop - b.start))[b]
    return values, None if stored.exponents is None else stored.exponents[b]


def load(stored: Stored | Divisor | Preconditioner, tile: Tile, signed: bool = True) -> Tensor:
    """Do as ``block_io.load`` of a tile, float32 [blocks, block_size]: where it is in float32, the same memory."""
    values, exponents = _rows(stored, tile)
    return values.float() if exponents is None else decode(values, exponents, signed=signed)


def load_variance(of: Preconditioner, places: Places, tile: Tile) -> Tensor:
    """Do as ``block_io.load_variance`` of a tile."""
    v = load(of, tile, signed=False)
    return v if of.factors is None else rules.renewed(v, *of.factors[:, places.block_tensor[tile.blocks], None])


def store(stored: Stored, new: Tensor, drawn: Tensor | None, tile: Tile, signed: bool = True) -> Tensor:
    """Do as ``block_io.store`` of a tile's values, float32 [blocks, block_size]; return what is stored of them."""
    values, _ = _rows(stored, tile)
    if drawn is None or values.dtype is torch.float32:
        values.copy_(new)
        return new
    store_drawn(stored, new, moment_bits(drawn, tile, new.shape[1]), tile, signed)
    return load(stored, tile, signed)


def store_drawn(stored: Stored, new: Tensor, bits: Tensor, tile: Tile, signed: bool = True) -> None:
    """Store a tile's values, rounded by 16 random bits each unless in float32."""
    values, exponents = _rows(stored, tile)
    if exponents is not None:
        encode(new, values, exponents, signed=signed, nonzero=not signed, bits=bits)
    else:
        values.copy_(new if values.dtype is torch.float32 else stochastic(new, bits))


def keep(stored: Preconditioner, codes: Sequence[Tensor], tile: Tile) -> None:
    """Store a tile's codes and their exponents as they are."""
    for kept, given in zip(_rows(stored, tile), codes, strict=True):
        if kept is not None:
            kept.copy_(given)


def store_nearest(stored: Stored | Preconditioner, x: Tensor, tile: Tile, signed: bool = True) -> None:
    """Store a tile's values, float32 [blocks, block_size], rounded to nearest."""
    values, exponents = _rows(stored, tile)
    keep_nearest(x, values, exponents, signed=signed)


def nearest(x: Tensor, dtype: torch.dtype, signed: bool) -> Tensor:
    """Round a tile's values, float32 [blocks, block_size], to the nearest that can be stored in a dtype; float32."""
    exponents = x.new_empty(len(x), dtype=torch.uint8) if dtype is torch.uint8 else None
    values = torch.empty_like(x, dtype=dtype)
    keep_nearest(x, values, exponents, signed=signed)
    return values.float() if exponents is None else decode(values, exponents, signed=signed)


def random_bits(rounding: Tensor, tile: Tile, block_size: int) -> Tensor:
    """16 bits for each element of a tile, int32 [blocks, block_size].

    A function of the number of updates and of the element's place in the flat index space, nothing
    else: all ranks draw the same, and so does a run that goes on from a checkpoint.
    """
    return bit_rules.random_bits(*_index_and_seed(rounding, tile, block_size)).int()


def drawn_bits(seed: int, tile: Tile, block_size: int) -> Tensor:
    """Do as ``random_bits``, of a number of the host's."""
    return random_bits(torch.full((), seed), tile, block_size)


def moment_bits(drawn: Tensor, tile: Tile, block_size: int) -> Tensor:
    """16 bits for each element's moments, int32 [blocks, block_size], of the same."""
    index, seed = _index_and_seed(drawn, tile, block_size)
    half = block_size // 2
    second = torch.arange(block_size, device=drawn.device) // half
    return bit_rules.half_of(bit_rules.moments_word(index[:, :half], seed).repeat(1, 2), second).int()


def _index_and_seed(done: Tensor, tile: Tile, block_size: int) -> tuple[Tensor, Tensor]:
    start = tile.start + tile.first
    index = torch.arange(start, start + tile.numel, device=done.device).view(-1, block_size)
    return index & bit_rules.WORD, bit_rules.block_seed(index[:, :1] >> 32, done & bit_rules.WORD)


def stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 ``x`` to one of its two neighbours in bfloat16, up in magnitude with the odds of its remainder.

    ``bits``, int32 of x's shape, are uniform in [0, 2^16): added below the bits that are kept, they carry.
    See ``bit_rules.bfloat16``; NaN stays as it is.
    """
    kept = bit_rules.bfloat16(x.view(torch.int32), bits) << 16
    return tl.where(x.isnan(), x, kept.view(torch.float32))


def round_bfloat16(values: Tensor, params: Sequence[Tensor], tile: Tile, rounding: Tensor) -> None:
    """Round in place what bfloat16 tensors get of a tile's values, float32 [blocks, block_size]."""
    own = _of_bfloat16(params, tile)
    if not own:
        return
    flat, bits = values.view(-1), random_bits(rounding, tile, values.shape[1]).view(-1)
    for each in own:
        flat[each] = stochastic(flat[each], bits[each])


def _of_bfloat16(params: Sequence[Tensor], tile: Tile) -> list[slice]:
    """Return where in a tile bfloat16 tensors lie."""
    spans = (span for span in tile.spans if params[span.tensor].dtype is torch.bfloat16)
    return [slice(span.flat - tile.start, span.flat - tile.start + span.stop - span.start) for span in spans]


def join(x: Tensor, correction: Tensor) -> Tensor:
    """Return the masters of which ``part`` has made float32 ``x``, and a correction of its shape."""
    low = correction.int() << (8 if correction.dtype is torch.int8 else 0)
    return bit_rules.restored(x.view(torch.int32), low).view(torch.float32)


def part(x: Tensor, dtype: torch.dtype, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round float32 ``x`` to the nearest bfloat16, in float32; return it and what that loses, in ``dtype``.

    In int16 that is all of it. Of int8 x is rounded to 24 bits first, by ``bits``: int32 of its shape, 16 random ones.
    """
    u, number = x.view(torch.int32), ~x.isnan()
    if dtype is torch.int8:
        assert bits is not None
        u = bit_rules.with_24_bits(u, bits)
    upper = bit_rules.nearest(u)
    low = torch.where(number, bit_rules.lost(u, upper), 0) >> (8 if dtype is torch.int8 else 0)
    return tl.where(number, (upper << 16).view(torch.float32), torch.nan), low.to(dtype)


def part_bfloat16(
    values: Tensor, params: Sequence[Tensor], tile: Tile, rounding: Tensor | None, correction: Tensor
) -> Tensor:
    """Round in place what bfloat16 tensors get of a tile's values; return what that loses, of others 0."""
    bits = None if rounding is None else random_bits(rounding, tile, values.shape[1]).view(-1)
    flat, low = values.view(-1), torch.zeros_like(correction)
    for own in _of_bfloat16(params, tile):
        flat[own], low.view(-1)[own] = part(flat[own], correction.dtype, None if bits is None else bits[own])
    return low


def square_sum(x: Tensor) -> Tensor:
    """Sum the squares of each row of x float32 [rows, n]: float64 [rows]."""
    wide = x.double()
    return wide.mul_(wide).sum(1)


def write_partials(c: Tensor, partials: Tensor) -> bool:
    """Write a tile's sums of |c| and c^2; return whether they are finite, as c then is.

    Where ``partials`` has a third row, it is the number of elements that are not zero.
    """
    wide = c.double().abs_()
    partials[ABS] = wide.sum(1)
    partials[SQUARE] = wide.mul_(wide).sum(1)
    if len(partials) > NONZERO:
        partials[NONZERO] = (c != 0).sum(1).double()
    return bool(torch.isfinite(partials[SQUARE]).all())


def pack(x: Tensor, bits: Tensor, compare: Callable[..., Tensor] = torch.ge) -> None:
    """Set the bits of elements that compare so with 0."""
    if numpy is not None and x.device.type == "cpu" and x.dtype is torch.float32:
        ones = {torch.ge: numpy.greater_equal, torch.ne: numpy.not_equal}[compare](x.numpy(), 0)
        bits.copy_(torch.from_numpy(numpy.packbits(ones, bitorder="little")))
        return
    # Into a tensor of x's dtype: comparisons to bool don't vectorise.
    ones = compare(x, 0, out=torch.empty_like(x, memory_format=torch.contiguous_format)).to(torch.int8)
    bits.copy_(ones.view(torch.int64).mul_(SPREAD).bitwise_right_shift_(56))


def compress(c: Tensor, bits: Tensor) -> None:
    """Pack c [blocks, block_size] into the planes that ``bits`` has, uint8 [bytes] or [2, bytes]."""
    for compare, plane in zip((torch.ge, torch.ne), bits.view(-1, bits.shape[-1]), strict=False):
        pack(c.view(-1), plane, compare)
