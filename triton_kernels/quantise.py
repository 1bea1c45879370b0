"""Sends gradients in 8, 4 or 1 bits: quantises with feedback, averages, and quantises again. For any optimizer.

A block has one scale, a bfloat16. Of 8 and 4 bits a number is its level, a whole number in two's complement, times
the scale, which is the largest of the block over 127 or 7; of one bit it is the scale or its negative, the mean of the
block's absolute values. With feedback a level is the nearest, and what that leaves is added next time (1-bit Adam,
Algorithm 1, of gradients); without, it is drawn so that its mean is right.

A block that is not sent, since its gradient is not finite or since nobody had one, is zeros, and its residual stays.
Residuals are of unscaled gradients: where a loss was scaled, ``unit`` is by how much.
"""

from __future__ import annotations

from typing import Annotated

import torch

from . import bit_rules, headers
from . import block_io as io
from . import level_io as levels
from . import user_tensors as users
from .columns import LARGEST_GRADIENT
from .eager import gather, only_live, tiles, write
from .jit import jit, tl
from .level_io import Levels
from .nouns import Counters, Derived, Flag, Floats, Header, Headers, Places, Stored, Tensors
from .op import op

NONFINITE, DIGEST = headers.NONFINITE, headers.DIGEST


@jit(do_not_specialize=("header_number", "header_tag", "header_flags", "seed"))
def quantise_kernel(
    tensors_table, number, places, residual, unit, message, header, ticket, digest, seed, most, blocks,
    TENSORS: tl.constexpr, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks; the last to arrive writes the headers.

    Bytes per element: the tensor's, BITS / 8 and a scale; twice what a residual is stored in, if there is one.
    """
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    t = tl.load(places.block_tensor + b)
    row = tl.load(places.live_row + b)
    chunk = b // message.blocks
    block = b - chunk * message.blocks
    live = io.counting(places.live, row, i, BLOCK_SIZE)
    place = users.place_of(tensors_table, number, t, places.block_start, b, BLOCK_SIZE)
    g = users.load(place, i, live, row, TENSORS)
    bad = io.any_of(~(tl.abs(g) <= most))
    if bad != 0:
        tl.atomic_or(header.pending, NONFINITE)
    skip = bad | levels.is_absent(message, 0, t)
    if skip != 0:
        levels.store_nothing(message, chunk, block, i, BITS, BLOCK_SIZE)
    else:
        x = g + levels.carried_block(residual, unit, b, i, BLOCK_SIZE)
        drawn = levels.drawn_of_block(seed, b, i, BLOCK_SIZE)
        levels.store_levels(message, chunk, block, x, live, residual, unit, drawn, b, i, BITS, BLOCK_SIZE)
    if io.is_last(ticket, blocks):
        flags = tl.load(header.pending) | header.flags
        tl.store(header.pending, 0)
        folded = headers.fold(tl.load(digest))
        tl.store(digest, tl.full([], 0, tl.int64))
        words = message.words
        for _ in range(message.rows):
            headers.write_words(words, header, folded, flags)
            words += message.words_stride


_SIZES: Derived = {
    "number": ("i32", lambda tensors: len(tensors)),
    "blocks": ("i32", lambda live_row: len(live_row)),
    "most": ("fp32", lambda: LARGEST_GRADIENT),
    "num_warps": ("i32", lambda block_size: max(1, block_size // 256)),
}


@op(
    quantise_kernel,
    writes=(
        *("residual.numbers", "residual.exponents", "message.codes", "message.scales", "message.words"),
        *("header.pending", "ticket", "digest"),
    ),
    derive=_SIZES,
)
def quantise(
    tensors: Tensors, places: Places, residual: Stored | None, unit: Annotated[Floats, ""] | None, message: Levels,
    header: Header, ticket: Flag, digest: Annotated[Counters, "1"], seed: int, bits: int,
) -> None:  # fmt: skip
    """Quantise gradients into messages to the ranks that serve them, a row of ``message`` each.

        x = g + e*unit;  q = nearest or drawn level of x/s;  e = (x - q*s)/unit

    A block whose gradient is not finite, or beyond ``LARGEST_GRADIENT``, sets NONFINITE; it is not sent, nor is one of
    an absent tensor: zeros are, and e stays.

    Args:
        tensors: g, of any float dtype, dense, in memory order; empty is zeros.
        places: Where they lie in the index space.
        residual: e, read and written, rounded stochastically unless in float32; None: no feedback.
        unit: What the loss was multiplied with; None: nothing.
        message: A row of each chunk; all but ``absent``, the same in each row, is written.
        header: What headers say: STEP, counted by nobody, TAG, FLAGS, and NONFINITE in ``pending``, which is 0 then.
        ticket: 0; scratch.
        digest: Of what arrived last, DIGEST of the headers; 0 afterwards.
        seed: Of random bits.
        bits: Of a level: 8, 4 or 1.
    """
    for tile in levels.tiles_of(places, message):
        g = only_live(gather(tensors, tile, places.block_size), places, tile)
        fine = (g.abs() <= LARGEST_GRADIENT).all(1)
        if not fine.all():
            header.pending.bitwise_or_(int(NONFINITE))
        taken = fine & ~levels.absent_blocks(message.absent[:1], places, tile)
        x = g if residual is None else g + levels.carried_tile(residual, unit, tile)
        levels.store_tile(message, tile, x, taken, places, residual, unit, seed, bits)
    levels.write_words(message, header, headers.folded(digest), header.pending | header.flags)
    header.pending.zero_()
    digest.zero_()


@jit(do_not_specialize=("header_number", "header_tag", "header_flags", "seed"))
def requantise_kernel(
    arrived, own_words, block_tensor, live, live_row, residual, unit, message, header, flags, kept_words, per_worker,
    seed,
    BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of the chunk. Bytes per element: W * BITS / 8 in, BITS / 8 out, and as of ``quantise``."""
    b = tl.program_id(0).to(tl.int64)
    bad = headers.count_flags(arrived.words, arrived.words_stride, own_words, arrived.rows)
    if b == 0:
        found = headers.flags_of(bad)
        tl.store(flags, found)
        headers.write_words(message.words, header, tl.load(own_words + DIGEST), found)
    headers.keep_words(b, arrived.words, arrived.words_stride, kept_words, arrived.rows)
    i = io.elements(BLOCK_SIZE)
    t = tl.load(block_tensor + b)
    row = tl.load(live_row + b)
    chunk = tl.full([], 0, tl.int64)
    absent = 1
    for _ in range(arrived.rows):
        absent &= levels.is_absent(arrived, chunk, t)
        chunk += 1
    skip = bad | absent
    if skip != 0:
        levels.store_nothing(message, 0, b, i, BITS, BLOCK_SIZE)
    else:
        x = levels.sum_of_rows(arrived, b, per_worker, i, BITS, BLOCK_SIZE)
        x = x + levels.carried_block(residual, unit, b, i, BLOCK_SIZE)
        counts = io.counting(live, row, i, BLOCK_SIZE)
        x = io.only_active(x, counts, row)
        drawn = levels.drawn_of_block(seed, b, i, BLOCK_SIZE)
        levels.store_levels(message, 0, b, x, counts, residual, unit, drawn, b, i, BITS, BLOCK_SIZE)


@op(
    requantise_kernel,
    writes=(
        *("residual.numbers", "residual.exponents", "message.codes", "message.scales", "message.words"),
        *("flags", "kept_words"),
    ),
    derive={
        "per_worker": ("fp32", lambda arrived_rows: 1.0 / arrived_rows),
        "num_warps": _SIZES["num_warps"],
    },
)
def requantise(
    arrived: Annotated[Levels, "rows=W blocks=B"], own_words: Annotated[Flag, "WORDS"], places: Places,
    residual: Stored | None, unit: Annotated[Floats, ""] | None,
    message: Annotated[Levels, "rows=1 blocks=B"], header: Header, flags: Flag,
    kept_words: Annotated[Headers, "W WORDS"], seed: int, bits: int,
) -> None:  # fmt: skip
    """Average on a server what workers have sent of its chunk, and quantise the mean.

        x = sum_w q_w*s_w/W + E*unit;  q = nearest or drawn level of x/s;  E = (x - q*s)/unit

    The sum runs in rank order. Where a header has a flag, or differs from this rank's in a checked word, and of tensors
    that are absent in all messages, zeros are sent, and E stays.

    Args:
        arrived: A row of each worker.
        own_words: This rank's header.
        places: Of the chunk.
        residual, unit, seed, bits: As for ``quantise``; E.
        message: Written, but for ``absent``.
        header: STEP and TAG of its header; FLAGS are those found, DIGEST this rank's own.
        flags: Written: ``agreed_flags``.
        kept_words: Written: the headers.
    """
    flags.copy_(headers.agreed_flags(arrived.words, own_words))
    kept_words.copy_(arrived.words)
    levels.write_words(message, header, own_words[DIGEST], flags)
    for tile in levels.tiles_of(places, message):
        taken = ~levels.absent_blocks(arrived.absent, places, tile) & (flags == 0)
        x = levels.sum_tile(arrived, tile, places.block_size, 1.0 / len(arrived.scales), bits)
        x = x if residual is None else x + levels.carried_tile(residual, unit, tile)
        levels.store_tile(message, tile, only_live(x, places, tile), taken, places, residual, unit, seed, bits)


@jit()
def take_back_kernel(
    arrived, own_words, tensors_table, number, places, residual, unit, sent, seed, most, rounded,
    TENSORS: tl.constexpr, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks. Bytes per element: nothing, as a rule."""
    bad = headers.count_flags(arrived.words, arrived.words_stride, own_words, arrived.rows)
    if bad == 0:
        return
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    t = tl.load(places.block_tensor + b)
    row = tl.load(places.live_row + b)
    chunk = b // sent.blocks
    block = b - chunk * sent.blocks
    live = io.counting(places.live, row, i, BLOCK_SIZE)
    place = users.place_of(tensors_table, number, t, places.block_start, b, BLOCK_SIZE)
    g = users.load(place, i, live, row, TENSORS)
    skip = io.any_of(~(tl.abs(g) <= most)) | levels.is_absent(sent, 0, t)
    if skip == 0:
        q, _ = levels.load_codes(levels.codes_at(sent, chunk, block, BITS, BLOCK_SIZE), BITS, BLOCK_SIZE)
        _, s = levels.load_scale(sent, chunk, block)
        kept = levels.carried_block(residual, unit, b, i, BLOCK_SIZE)
        e = bit_rules.told_apart(kept + bit_rules.value(q, s) - g, kept, s, g, rounded)
        if unit is not None:
            e = tl.div_rn(e, tl.load(unit))
        drawn = levels.drawn_of_block(seed, b, i, BLOCK_SIZE)
        io.store(residual, drawn, b, i, tl.where(live, e, 0.0), True, BLOCK_SIZE)


_ROUNDED = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.uint8: 2.0**-2}
"""Of what a residual is stored in: more than a share that storing changes."""


@op(
    take_back_kernel,
    writes=("residual.numbers", "residual.exponents"),
    derive={**_SIZES, "rounded": ("fp32", lambda residual_numbers: _ROUNDED[residual_numbers.dtype])},
)
def take_back(
    arrived: Annotated[Levels, "rows=W"], own_words: Annotated[Flag, "WORDS"], tensors: Tensors, places: Places,
    residual: Stored, unit: Annotated[Floats, ""] | None, sent: Levels, seed: int, bits: int,
) -> None:  # fmt: skip
    """Make residuals what they were before ``quantise``, but for rounding, where messages have arrived with a flag.

        e = (e*unit + q*s - g)/unit

    What rounding would leave of that is 0 instead: beside a gradient that is far larger an e of 16 or 8 bits is lost.

    Args:
        arrived: What servers, or of a reduce-scatter workers, have sent.
        own_words: This rank's header.
        tensors: g, as ``quantise`` has read them.
        places, residual, unit, seed, bits: As for ``quantise``.
        sent: What that has written.
    """
    if not headers.agreed_flags(arrived.words, own_words):
        return
    for tile in levels.tiles_of(places, sent):
        g = only_live(gather(tensors, tile, places.block_size), places, tile)
        taken = (g.abs() <= LARGEST_GRADIENT).all(1) & ~levels.absent_blocks(sent.absent[:1], places, tile)
        kept = levels.carried_tile(residual, unit, tile)
        s = levels.scale_of_tile(sent, tile.chunk, tile, places.block_size, bits)
        e = kept + levels.load_tile(sent, tile.chunk, tile, places.block_size, bits) - g
        e = bit_rules.told_apart(e, kept, s, g, _ROUNDED[residual.numbers.dtype])
        levels.keep_tile(residual, e, taken, places, unit, seed, tile)


@jit()
def dequantise_kernel(
    arrived, own_words, tensors_table, number, places, factor, flags, kept_words, digest,
    TENSORS: tl.constexpr, SUMS: tl.constexpr, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks. Bytes per element: BITS / 8, of each chunk where SUMS, and the tensor's."""
    b = tl.program_id(0).to(tl.int64)
    i = io.elements(BLOCK_SIZE)
    t = tl.load(places.block_tensor + b)
    row = tl.load(places.live_row + b)
    bad = headers.count_flags(arrived.words, arrived.words_stride, own_words, arrived.rows)
    if b == 0:
        tl.store(flags, headers.flags_of(bad))
    headers.keep_words(b, arrived.words, arrived.words_stride, kept_words, arrived.rows)
    if SUMS:
        x = levels.sum_of_rows(arrived, b, factor, i, BITS, BLOCK_SIZE)
    else:
        chunk = b // arrived.blocks
        block = b - chunk * arrived.blocks
        q, total = levels.load_codes(levels.codes_at(arrived, chunk, block, BITS, BLOCK_SIZE), BITS, BLOCK_SIZE)
        scale_bits, s = levels.load_scale(arrived, chunk, block)
        x = bit_rules.value(q, s) * factor
        tl.atomic_add(digest, total + scale_bits, sem="relaxed")
    x = tl.where(bad == 0, x, float("nan"))
    live = io.counting(places.live, row, i, BLOCK_SIZE)
    place = users.place_of(tensors_table, number, t, places.block_start, b, BLOCK_SIZE)
    users.store(place, i, x, None, live, row, TENSORS)


@op(dequantise_kernel, writes=("tensors", "flags", "kept_words", "digest"), derive=_SIZES)
def dequantise(
    arrived: Annotated[Levels, "rows=W"], own_words: Annotated[Flag, "WORDS"], tensors: Tensors, places: Places,
    factor: float, flags: Flag, kept_words: Annotated[Headers, "W WORDS"], digest: Annotated[Counters, "1"],
    sums: bool, bits: int,
) -> None:  # fmt: skip
    """Write what has arrived to tensors: NaN, all of them, where a header has a flag, or is not as this rank's.

    Args:
        arrived: A row of each chunk; or, where ``sums``, of each worker: then they are added, in rank order.
        own_words: This rank's header.
        tensors: Written, rounded to nearest.
        places: Where they lie.
        factor: What numbers are multiplied with before they are added.
        flags: Written: ``agreed_flags``.
        kept_words: Written: the headers.
        digest: Unless these are ``sums``, the wrapping sum of codes, in words of 8 bytes, and of scales is added.
        sums: See ``arrived``.
        bits: Of a level: 8, 4 or 1.
    """
    flags.copy_(headers.agreed_flags(arrived.words, own_words))
    kept_words.copy_(arrived.words)
    if not sums:
        width = arrived.scales.shape[1] * places.block_size * bits // 8
        digest += arrived.codes[:, :width].contiguous().view(torch.int64).sum()
        digest += (arrived.scales.long() & 0xFFFF).sum()
    rows = 1 if sums else len(arrived.scales)
    for tile in tiles(places.sizes, rows, places.block_size, flags.device, len(places.live_row)):
        if sums:
            x = levels.sum_tile(arrived, tile, places.block_size, factor, bits)
        else:
            x = levels.load_tile(arrived, tile.chunk, tile, places.block_size, bits) * factor
        x = tl.where(flags == 0, x, torch.nan)
        write(tensors, tile, x, gather(tensors, tile, places.block_size), places, None)
