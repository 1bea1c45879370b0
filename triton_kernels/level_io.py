"""Reads and writes blocks of messages in 8, 4 or 1 bits, in kernels, and tiles of them, in eager functions.

See ``quantise``.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from . import bit_rules, headers
from . import block_io as io
from .eager import Tile, drawn_bits, live_mask, load, only_live, pack, signs, store_drawn, tiles
from .jit import jit, tl
from .native.generate import Spec
from .nouns import Bits, Derived, Header, Headers, Places, Stored, stride

STEP, DIGEST, TAG, FLAGS, SIGNAL = headers.STEP, headers.DIGEST, headers.TAG, headers.FLAGS, headers.SIGNAL
BYTE, NIBBLE = 8, 4  # bits of a level


class Levels(NamedTuple):
    """Messages of quantised numbers, in rows: of each chunk one, or of each sender.

    Codes of a block are side by side, the first in the lowest bits; a block's scale is the bits of a bfloat16. Tensors
    have a bit each, LSB first, that says that the sender has no gradient of it: it is absent.
    """

    codes: Annotated[Bits, "rows _"]
    scales: Annotated[Tensor, Spec(torch.int16), "rows blocks"]
    words: Annotated[Headers, "rows WORDS"]
    absent: Annotated[Bits, "rows _"]

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides."""
        return {
            "codes_stride": ("i32", lambda codes: stride(codes)),
            "scales_stride": ("i32", lambda scales: stride(scales)),
            "words_stride": ("i32", lambda words: stride(words)),
            "absent_stride": ("i32", lambda absent: stride(absent)),
            "rows": ("i32", lambda scales: len(scales)),
            "blocks": ("i32", lambda scales: scales.shape[1]),
        }


# ---------------------------------------------------------------- one block of a message


@jit()
def scale_of_block(x, count, BITS: tl.constexpr):
    """Return a block's scale: its 16 bits, uint32, and what they are, float32; ``count``: how many elements count."""
    if BITS == 1:
        s = (io.total_of(tl.abs(x)) / tl.maximum(count, 1.0)).to(tl.float32)
    else:
        s = tl.div_rn(tl.max(tl.max(tl.abs(x), axis=1), axis=0), ((1 << (BITS - 1)) - 1) * 1.0)
    bits = bit_rules.scale_bits(s.to(tl.uint32, bitcast=True))
    return bits, (bits << 16).to(tl.float32, bitcast=True)


@jit()
def levels_of_block(x, s, drawn, BITS: tl.constexpr):
    """Return the levels of a block, float32, and their codes, int32 [n, 8]; nearest where none are ``drawn``."""
    if BITS == 1:
        return tl.where(x >= 0, 1.0, -1.0), (x >= 0).to(tl.int32)
    else:
        if drawn is None:
            u = bit_rules.level(x, s, 0.0)
        else:
            u = bit_rules.level(x, s, bit_rules.shift_of(drawn.to(tl.float32)))
        code = bit_rules.linear_code(u.to(tl.uint32, bitcast=True), (1 << BITS) - 1)
        return u - bit_rules.ROUNDER, code.to(tl.int32)


@jit()
def store_codes(at, code, BITS: tl.constexpr):
    """Write the codes of a block, int32 [n, 8], to its bytes."""
    row = tl.arange(0, code.shape[0])
    if BITS == BYTE:
        tl.store(at + row[:, None] * 8 + tl.arange(0, 8)[None, :], code.to(tl.uint8))
    else:
        words = tl.sum(code << (BITS * tl.arange(0, 8)[None, :]), axis=1)
        if BITS == NIBBLE:
            tl.store(at.to(tl.pointer_type(tl.int32)) + row, words)
        else:
            tl.store(at + row, words.to(tl.uint8))


@jit()
def load_codes(at, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Read what ``store_codes`` has written: levels, float32 [n, 8], and the sum of the 8-byte words, int64."""
    row, column = tl.arange(0, BLOCK_SIZE // 8), tl.arange(0, 8)[None, :]
    if BITS == BYTE:
        code = tl.load(at + row[:, None] * 8 + column).to(tl.int32)
        total = tl.sum(tl.sum(code.to(tl.int64) << (8 * column), axis=1), axis=0)
    elif BITS == NIBBLE:
        words = tl.load(at.to(tl.pointer_type(tl.int32)) + row)
        code = (words[:, None] >> (NIBBLE * column)) & 15
        total = tl.sum(words.to(tl.uint32, bitcast=True).to(tl.int64) << (32 * (row % 2)), axis=0)
    else:
        signs = tl.load(at + row)
        code = io.bits_of(signs)
        total = io.sum_of_bytes(signs)
    if BITS == 1:
        return (code * 2 - 1).to(tl.float32), total
    else:
        half = 1 << (BITS - 1)
        return ((code ^ half) - half).to(tl.float32), total


@jit()
def codes_at(of_rows, row, block, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return where the codes of a row's block lie."""
    return of_rows.codes + row * of_rows.codes_stride + block * (BLOCK_SIZE * BITS // 8)


@jit()
def load_scale(of_rows, row, block):
    """Read the scale of a row's block: its bits, int32, and what they are, float32."""
    bits = tl.load(of_rows.scales + row * of_rows.scales_stride + block).to(tl.int32) & 0xFFFF
    return bits, (bits << 16).to(tl.float32, bitcast=True)


@jit()
def is_absent(of_rows, row, t):
    """Tell whether a row's sender has no gradient of tensor ``t``, int32."""
    skip = (tl.load(of_rows.absent + row * of_rows.absent_stride + t // 8).to(tl.int32) >> (t % 8)) & 1
    return skip  # noqa: RET504 - the audit of bytes knows it by this name


@jit()
def drawn_of_block(seed, b, i, BLOCK_SIZE: tl.constexpr):
    """16 random bits for each element of block ``b``, uint32."""
    first = b * BLOCK_SIZE
    words = bit_rules.block_seed((first >> 32).to(tl.uint32), seed.to(tl.uint32))
    return bit_rules.random_bits(first.to(tl.uint32) + i.to(tl.uint32), words)


@jit()
def store_levels(
    message, row, block, x, live, residual, unit, drawn, b, i, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Quantise a block of x, of which what is ``live`` counts, into a message, and store what that leaves."""
    bits, s = scale_of_block(x, io.count(live), BITS)
    tl.store(message.scales + row * message.scales_stride + block, bits.to(tl.uint16).to(tl.int16, bitcast=True))
    if residual.numbers is None:
        _, code = levels_of_block(x, s, drawn, BITS)
    else:
        q, code = levels_of_block(x, s, None, BITS)
        e = bit_rules.left(x, q, s)
        if unit is not None:
            e = tl.div_rn(e, tl.load(unit))
        io.store(residual, drawn, b, i, tl.where(live, e, 0.0), True, BLOCK_SIZE)
    store_codes(codes_at(message, row, block, BITS, BLOCK_SIZE), code, BITS)


@jit()
def store_nothing(message, row, block, i, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Write zeros for a block."""
    tl.store(message.scales + row * message.scales_stride + block, tl.full([], 0, tl.int16))
    store_codes(codes_at(message, row, block, BITS, BLOCK_SIZE), i * 0, BITS)


@jit()
def carried_block(residual, unit, b, i, BLOCK_SIZE: tl.constexpr):
    """Return what was left last time, in the gradient's unit; 0 without feedback."""
    e = tl.zeros(i.shape, tl.float32)
    if residual.numbers is not None:
        e = io.load(residual, b, i, True, BLOCK_SIZE)
        if unit is not None:
            e = e * tl.load(unit)
    return e


@jit()
def sum_of_rows(arrived, block, factor, i, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Add what all rows say of a block, each times a factor, in their order."""
    total = tl.zeros(i.shape, tl.float32)
    row = tl.full([], 0, tl.int64)
    for _ in range(arrived.rows):
        q, _ = load_codes(codes_at(arrived, row, block, BITS, BLOCK_SIZE), BITS, BLOCK_SIZE)
        _, s = load_scale(arrived, row, block)
        total += bit_rules.value(q, s) * factor
        row += 1
    return total


# ---------------------------------------------------------------- tiles, for eager functions


def tiles_of(places: Places, message: Levels) -> tuple[Tile, ...]:
    """Return the tiles of a message's rows, in order."""
    return tiles(
        places.sizes or (len(places.live_row) * places.block_size,),
        len(message.scales),
        places.block_size,
        message.scales.device,
        len(places.live_row),
    )


def absent_blocks(absent: Tensor, places: Places, tile: Tile) -> Tensor:
    """Tell of which blocks of a tile no row has a gradient, bool [blocks]."""
    t = places.block_tensor[tile.blocks].long()
    return ((absent[:, t // 8] >> (t % 8).to(torch.uint8)) & 1).bool().all(0)


def part_of_row(message: Levels, tile: Tile, block_size: int, bits: int) -> tuple[slice, slice]:
    """Return where in a row the blocks of a tile are, and their codes."""
    blocks = message.scales.shape[1]
    first = tile.blocks.start % blocks
    last, size = first + tile.blocks.stop - tile.blocks.start, block_size * bits // 8
    return slice(first, last), slice(first * size, last * size)


def scale_of_tile(of: Levels, row: int, tile: Tile, block_size: int, bits: int) -> Tensor:
    """Return the scales of a row's tile, float32 [blocks, 1]."""
    blocks, _ = part_of_row(of, tile, block_size, bits)
    return (of.scales[row, blocks].int() << 16).view(torch.float32)[:, None]


def load_tile(of: Levels, row: int, tile: Tile, block_size: int, bits: int) -> Tensor:
    """Return what a row says of a tile, float32 [blocks, block_size]."""
    _, of_codes = part_of_row(of, tile, block_size, bits)
    codes, scale = of.codes[row, of_codes], scale_of_tile(of, row, tile, block_size, bits)
    if bits == BYTE:
        q = codes.view(torch.int8).float()
    elif bits == NIBBLE:
        each = torch.stack([codes & 15, codes >> 4], 1).view(-1).to(torch.int8)
        q = ((each ^ 8) - 8).float()
    else:
        q = signs(codes, len(scale))
    return bit_rules.value(q.view(len(scale), -1), scale)


def sum_tile(arrived: Levels, tile: Tile, block_size: int, factor: float, bits: int) -> Tensor:
    """Do as ``sum_of_rows`` of a tile, float32 [blocks, block_size]."""
    total = torch.zeros(tile.numel // block_size, block_size, device=arrived.scales.device)
    for row in range(len(arrived.scales)):
        total += load_tile(arrived, row, tile, block_size, bits) * factor
    return total


def carried_tile(residual: Stored, unit: Tensor | None, tile: Tile) -> Tensor:
    """Do as ``carried_block`` of a tile's residuals, float32 [blocks, block_size]."""
    e = load(residual, tile)
    return e if unit is None else e * unit


def keep_tile(
    residual: Stored, e: Tensor, taken: Tensor, places: Places, unit: Tensor | None, seed: int, tile: Tile
) -> None:  # fmt: skip
    """Store a tile's residuals where blocks were taken."""
    e = only_live(e if unit is None else e / unit, places, tile)
    exponents = None if residual.exponents is None else residual.exponents[tile.blocks].clone()
    numbers = residual.numbers[tile.start : tile.start + tile.numel].view(e.shape)
    kept = numbers.clone()
    store_drawn(residual, e, drawn_bits(seed, tile, places.block_size), tile)
    numbers.copy_(torch.where(taken[:, None], numbers, kept))
    if exponents is not None and residual.exponents is not None:
        residual.exponents[tile.blocks] = torch.where(taken, residual.exponents[tile.blocks], exponents)


def store_tile(
    message: Levels, tile: Tile, x: Tensor, taken: Tensor, places: Places, residual: Stored | None,
    unit: Tensor | None, seed: int, bits: int,
) -> None:  # fmt: skip
    """Quantise a tile of x into a message, zeros where blocks are not taken, and store what that leaves."""
    x = tl.where(taken[:, None], x, 0.0)
    live = live_mask(places, tile)
    if bits == 1:
        count = x.new_full((len(x),), places.block_size, dtype=torch.float64) if live is None else live.sum(1).double()
        s = (x.abs().double().sum(1) / count.clamp(min=1)).float()
    else:
        s = x.abs().amax(1) / (2.0 ** (bits - 1) - 1)
    scale_bits = bit_rules.scale_bits(s.view(torch.int32))
    s = (scale_bits << 16).view(torch.float32)[:, None]
    blocks, of_codes = part_of_row(message, tile, places.block_size, bits)
    message.scales[tile.chunk, blocks] = scale_bits.to(torch.int16)
    to = message.codes[tile.chunk, of_codes]
    if bits == 1:
        q = tl.where(x >= 0, torch.ones_like(x), -1.0)
        pack(x.view(-1), to)
        to.view(len(x), -1)[~taken] = 0
    else:
        shift: Tensor | float = 0.0
        if residual is None:
            shift = bit_rules.shift_of(drawn_bits(seed, tile, places.block_size))
        u = bit_rules.level(x, s, shift)
        code = bit_rules.linear_code(u.view(torch.int32), (1 << bits) - 1).to(torch.uint8).view(-1)
        to.copy_(code if bits == BYTE else code[::2] | code[1::2] << NIBBLE)
        q = u - bit_rules.ROUNDER
    if residual is not None:
        keep_tile(residual, bit_rules.left(x, q, s), taken, places, unit, seed, tile)


def write_words(message: Levels, header: Header, digest: Tensor, flags: Tensor) -> None:
    """Do as ``headers.write_words`` of all rows."""
    for word, value in ((STEP, header.number), (DIGEST, digest), (TAG, header.tag), (FLAGS, flags), (SIGNAL, 0)):
        message.words[:, word] = value
