"""Averages and compresses on a server what workers sent. The kernel is never autotuned: it updates in place."""

from __future__ import annotations

import torch
from torch import Tensor

from . import block_io as io
from . import headers, rules
from .eager import compress, keep, kept_values, only_live, scaled, tiles, write_partials
from .jit import jit, tl
from .nouns import Bits, Counters, Doubles, Flag, Floats, Headers, Indices, Moment, PerBlock, Places
from .op import op

SIGN = 0x80000000  # of a float32's bits
STEP, DIGEST, TAG, FLAGS, SIGNAL = headers.STEP, headers.DIGEST, headers.TAG, headers.FLAGS, headers.SIGNAL


@jit()
def moved(pointer, stride, times: tl.constexpr):
    """``pointer`` so many strides on; their product would need 64 bits."""
    for _ in tl.static_range(times):
        pointer += stride
    return pointer


@jit()
def load_four(arrived, stride, plane, TERNARY: tl.constexpr):
    """Four ranks' bytes one behind the other, int32 [n]: of signs and, where TERNARY, of what is not zero.

    Four loads are under way together, and cross from the threads that load to those that add in one exchange.
    """
    signs, nonzero = io.load_bits(arrived, plane, TERNARY)
    four, four_nonzero = signs.to(tl.int32), nonzero.to(tl.int32)
    for place in tl.static_range(8, 32, 8):
        arrived += stride
        signs, nonzero = io.load_bits(arrived, plane, TERNARY)
        four |= signs.to(tl.int32) << place
        four_nonzero |= nonzero.to(tl.int32) << place
    return four, four_nonzero


@jit()
def load_four_scales(scales, stride, per_worker):
    """s_w/W of four ranks."""
    first = tl.load(scales) * per_worker
    scales += stride
    second = tl.load(scales) * per_worker
    scales += stride
    third = tl.load(scales) * per_worker
    scales += stride
    return first, second, third, tl.load(scales) * per_worker


@jit()
def zeros_like(x):
    """Zeros that the same threads have as x, float32, so that sums that begin with them need not change hands.

    Made of x, of a bit that is never set: it is only after threads are chosen that the compiler knows them for zeros.
    """
    return ((x.to(tl.uint32, bitcast=True) >> 31) & 2).to(tl.float32, bitcast=True)


@jit()
def add_one(total, signs, nonzero, place: tl.constexpr, scale, LOW: tl.constexpr, TERNARY: tl.constexpr):
    """Adds what the bytes at bit ``place`` stand for, as ``add_four`` has shifted them.

    A bit becomes the sign of what is subtracted, in two integer operations; of one rank in four it is compared, on
    another unit. Comparing all would fill AMD's scalar registers with results, and none costs registers elsewhere.
    """
    left = 24 + LOW - place - (tl.arange(0, 8)[None, :] & LOW)
    if place == 16:
        x = tl.where((signs << left) >= SIGN, rules.negative(scale), scale)
    else:
        x = (((signs << left) & SIGN) ^ scale.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)
    if TERNARY:
        x = tl.where((nonzero << left) >= SIGN, x, 0.0)
    return total - x


@jit()
def add_four(total, fours, scales, LOW: tl.constexpr, TERNARY: tl.constexpr):
    """Adds four ranks, in their order.

    A thread has LOW + 1 neighbouring elements of a byte. First it shifts the byte by where these begin: all shifts
    that follow are constants.
    """
    left = 7 - LOW - (tl.arange(0, 8)[None, :] & (7 - LOW))
    signs = fours[0].to(tl.uint32, bitcast=True)[:, None] << left
    nonzero = fours[1].to(tl.uint32, bitcast=True)[:, None] << left
    first, second, third, fourth = scales
    total = add_one(total, signs, nonzero, 0, first, LOW, TERNARY)
    total = add_one(total, signs, nonzero, 8, second, LOW, TERNARY)
    total = add_one(total, signs, nonzero, 16, third, LOW, TERNARY)
    return add_one(total, signs, nonzero, 24, fourth, LOW, TERNARY)


@jit()
def _write_header(header, number, counter, digest, tag, flags):
    """Writes what changes from step to step into the header of a message of which nothing is left."""
    step = number
    if counter is not None:
        step = tl.load(counter)
    tl.store(header + STEP, step)
    tl.store(header + DIGEST, digest)
    tl.store(header + TAG, tag)
    tl.store(header + FLAGS, flags)
    tl.store(header + SIGNAL, 0)


@jit(do_not_specialize=("number", "tag"))
def server_reduce_kernel(
    arrived_bits, arrived_bits_stride, plane, arrived_scales, arrived_scales_stride, arrived_words,
    arrived_words_stride, own_words, slot, compensated, server_scale, live, live_row, bits, partials, partials_stride,
    hold, flags, kept_words, header, number, counter, tag, drawn, octaves, world_size, per_worker,
    TERNARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of the chunk; each compares the headers, the first stores what they say, all of them keep some.

    Bytes per element: W/8 in, 4, 2 or 1 for c if any, twice, 1/8 out; bits twice where TERNARY. Sums in rank order.
    """
    b = tl.program_id(0).to(tl.int64)
    held = tl.load(hold)
    bad = headers.count_flags(arrived_words, arrived_words_stride, own_words, world_size)
    if b == 0:
        found = headers.flags_of(bad) | held
        tl.store(flags, found)
        if header is not None:
            _write_header(header, number, counter, tl.load(own_words + DIGEST), tag, found)
    headers.keep_words(b, arrived_words, arrived_words_stride, kept_words, world_size)
    if held != 0:
        return
    i = io.elements(BLOCK_SIZE)
    byte = tl.arange(0, BLOCK_SIZE // 8)
    row = tl.load(live_row + b)
    at = tl.load(slot + b)
    c = tl.zeros(i.shape, tl.float32)
    if compensated is not None:
        c = io.load_kept(compensated, octaves, b, i, True, BLOCK_SIZE)
        c = rules.residual(c, tl.load(server_scale + b), TERNARY)
    # Each backend has its own sum over ranks: rules are elementwise.
    total = zeros_like(c)
    if bad == 0:
        LOW: tl.constexpr = 0 if compensated is None else 3
        # Pointers that move on: w * stride would need 64 bits.
        arrived = arrived_bits + b * (BLOCK_SIZE // 8) + byte
        scales = arrived_scales + at
        for _ in range(world_size // 8):
            first = load_four(arrived, arrived_bits_stride, plane, TERNARY)
            first_scales = load_four_scales(scales, arrived_scales_stride, per_worker)
            arrived = moved(arrived, arrived_bits_stride, 4)
            scales = moved(scales, arrived_scales_stride, 4)
            second = load_four(arrived, arrived_bits_stride, plane, TERNARY)
            second_scales = load_four_scales(scales, arrived_scales_stride, per_worker)
            arrived = moved(arrived, arrived_bits_stride, 4)
            scales = moved(scales, arrived_scales_stride, 4)
            total = add_four(total, first, first_scales, LOW, TERNARY)
            total = add_four(total, second, second_scales, LOW, TERNARY)
        for _ in range(world_size // 8 * 8, world_size):
            scale = tl.load(scales) * per_worker
            signs, nonzero = io.load_bits(arrived, plane, TERNARY)
            total += io.scaled(signs, nonzero, scale, TERNARY)
            arrived += arrived_bits_stride
            scales += arrived_scales_stride
        c = c + total
    c = io.only_active(c, io.counting(live, row, i, BLOCK_SIZE), row)
    if compensated is not None:
        c = io.store_kept(compensated, octaves, io.moment_bits(drawn, b, i, BLOCK_SIZE), b, i, c, True, BLOCK_SIZE)
    io.store_partials(partials, partials_stride, b, c, TERNARY)
    io.store_bits(bits + b * (BLOCK_SIZE // 8) + byte, plane, c, TERNARY, HALVES=True)


def _warps(block_size: int, TERNARY: bool, compensated: Tensor | None) -> int:
    # One warp exchanges nothing with another; where ternary it would have no registers to spare, and where residuals
    # are rounded besides, four on AMD have none either.
    if TERNARY:
        return 4 if compensated is None or compensated.dtype is torch.float32 else 8
    return max(1, block_size // 1024)


@op(
    server_reduce_kernel,
    writes=("compensated", "bits", "partials", "flags", "kept_words", "header", "octaves"),
    derive={
        "num_warps": ("i32", _warps),
        "world_size": ("i32", lambda arrived_bits: len(arrived_bits)),
        "per_worker": ("fp32", lambda world_size: 1.0 / world_size),
        "compensated": ("", lambda compensated: compensated if compensated.numel() else None),
        "server_scale": ("", lambda compensated, server_scale: None if compensated is None else server_scale),
    },
)
def server_reduce(
    arrived_bits: Bits, arrived_scales: Floats, arrived_words: Headers, own_words: Flag, slot: Indices, places: Places,
    compensated: Moment, server_scale: PerBlock, bits: Bits, partials: Doubles, hold: Flag, flags: Flag,
    kept_words: Headers, header: Headers | None = None, number: int = 0, counter: Flag | None = None, tag: int = 0,
    drawn: Counters | None = None, octaves: Bits | None = None,
) -> None:  # fmt: skip
    """Averages the workers' chunks and compresses the average (1-bit LAMB, line 10: 1-bit Adam's).

        E = c - s*sign(c);  c = sum_w (s_w/W)*sign_w + E;  bits = c >= 0

    Without ``compensated`` there is no E: c is the average. The sum runs in rank order. Where any rank's header has a
    flag, or differs from this rank's in a checked word, nothing is averaged and E stays as it is.

    Args:
        arrived_bits: uint8 [W, P / 8W], or [W, 2, P / 8W] where ternary.
        arrived_scales: float32 [W, slots].
        arrived_words: int32 [W, 8], the headers.
        own_words: int32 [8], this rank's.
        slot: int32 [B / W], each block's slot.
        compensated: The server's c, float32, bfloat16 or codes [P / W], read and written; or empty.
        server_scale: Its s of the last step, float32 [B / W].
        places: Of this chunk.
        bits: uint8 [1, P / 8W], or [1, 2, P / 8W], written.
        partials: float64 [2, B / W], or [3, B / W], written as by ``momentum_compress``.
        hold: int32 [1]; where set nothing is written but what follows.
        flags: int32 [1], written: ``agreed_flags`` of the headers and of ``hold``.
        kept_words: int32 [W, 8], written: the headers.
        header: int32 [1, 8], that of the server's message where scales are no measured ones, written: STEP, TAG,
            DIGEST as in ``own_words`` and, with ``flags``, FLAGS; SIGNAL is 0. None: ``finish`` writes it.
        number, counter, tag: Its words, as for ``finish``.
        drawn: As for ``momentum_compress``.
        octaves: uint8 [B / W], written, of codes; None: there are none.
    """
    flags.copy_(headers.agreed_flags(arrived_words, own_words, hold))
    kept_words.copy_(arrived_words)
    if header is not None:
        step = number if counter is None else counter
        for word, value in ((STEP, step), (DIGEST, own_words[DIGEST]), (TAG, tag), (FLAGS, flags), (SIGNAL, 0)):
            header[:, word] = value
    if hold:
        return
    world_size, keeps, flat = len(arrived_bits), compensated.numel() > 0, places.rows(compensated)
    for tile in tiles((len(places.live_row) * places.block_size,), 1, places.block_size, compensated.device):
        b = tile.blocks
        total = torch.zeros(tile.numel // places.block_size, places.block_size, device=compensated.device)
        new = torch.zeros_like(total)
        if keeps:
            of_c = None if octaves is None else octaves[b]
            new = rules.residual(kept_values(flat[b], of_c), server_scale[b, None], arrived_bits.dim() == 3)
        if not flags:
            scales = arrived_scales[:, slot[b]] * (1.0 / world_size)
            for w in range(world_size):
                total += scaled(arrived_bits[w, ..., tile.bytes], scales[w, :, None])
            new += total
        new = only_live(new, places, tile)
        if keeps:
            new = keep(flat[b], of_c, new, drawn, tile)
        compress(new, bits[0, ..., tile.bytes])
        write_partials(new, partials[:, b])
