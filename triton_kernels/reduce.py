"""Averages and compresses on a server what workers sent. The kernel is never autotuned: it updates in place."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from . import block_io as io
from . import headers, rules
from .eager import compress, load, only_live, scaled, store, tiles, write_partials
from .jit import jit, tl
from .nouns import Bits, Compensated, Flag, Header, Headers, Partials, Places, Sent
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
    """Add what the bytes at bit ``place`` stand for, as ``add_four`` has shifted them.

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
    """Add four ranks, in their order.

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


@jit(do_not_specialize=("header_number", "header_tag", "header_flags"))
def server_reduce_kernel(
    arrived, compensated, live, live_row, bits, partials, partials_stride, hold, flags, kept_words, words, header,
    per_worker,
    TERNARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of the chunk; each compares the headers, the first stores what they say, all of them keep some.

    Bytes per element: W/8 in, 4, 2 or 1 for c if any, twice, 1/8 out; bits twice where TERNARY. Sums in rank order.
    """
    b = tl.program_id(0).to(tl.int64)
    held = tl.load(hold)
    bad = headers.count_flags(arrived.words, arrived.words_stride, arrived.own_words, arrived.world_size)
    if b == 0:
        found = headers.flags_of(bad) | held
        tl.store(flags, found)
        if words is not None:
            headers.write_words(words, header, tl.load(arrived.own_words + DIGEST), found)
    headers.keep_words(b, arrived.words, arrived.words_stride, kept_words, arrived.world_size)
    if held != 0:
        return
    i = io.elements(BLOCK_SIZE)
    byte = tl.arange(0, BLOCK_SIZE // 8)
    row = tl.load(live_row + b)
    at = tl.load(arrived.slot + b)
    c = tl.zeros(i.shape, tl.float32)
    if compensated.numbers is not None:
        c = io.load(compensated, b, i, True, BLOCK_SIZE)
        c = rules.residual(c, tl.load(compensated.scale + b), TERNARY)
    # Each backend has its own sum over ranks: rules are elementwise.
    total = zeros_like(c)
    if bad == 0:
        LOW: tl.constexpr = 0 if compensated.numbers is None else 3
        # Pointers that move on: w * stride would need 64 bits.
        packed = arrived.bits + b * (BLOCK_SIZE // 8) + byte
        scales = arrived.scales + at
        for _ in range(arrived.world_size // 8):
            first = load_four(packed, arrived.bits_stride, arrived.plane, TERNARY)
            first_scales = load_four_scales(scales, arrived.scales_stride, per_worker)
            packed = moved(packed, arrived.bits_stride, 4)
            scales = moved(scales, arrived.scales_stride, 4)
            second = load_four(packed, arrived.bits_stride, arrived.plane, TERNARY)
            second_scales = load_four_scales(scales, arrived.scales_stride, per_worker)
            packed = moved(packed, arrived.bits_stride, 4)
            scales = moved(scales, arrived.scales_stride, 4)
            total = add_four(total, first, first_scales, LOW, TERNARY)
            total = add_four(total, second, second_scales, LOW, TERNARY)
        for _ in range(arrived.world_size // 8 * 8, arrived.world_size):
            scale = tl.load(scales) * per_worker
            signs, nonzero = io.load_bits(packed, arrived.plane, TERNARY)
            total += io.scaled(signs, nonzero, scale, TERNARY)
            packed += arrived.bits_stride
            scales += arrived.scales_stride
        c = c + total
    c = io.only_active(c, io.counting(live, row, i, BLOCK_SIZE), row)
    if compensated.numbers is not None:
        c = io.store(compensated, io.moment_bits(compensated.drawn, b, i, BLOCK_SIZE), b, i, c, True, BLOCK_SIZE)
    io.store_partials(partials, partials_stride, b, c, TERNARY)
    io.store_bits(bits + b * (BLOCK_SIZE // 8) + byte, arrived.plane, c, TERNARY, HALVES=True)


def answer(
    arrived: Tensor,
    own: Tensor,
    hold: Tensor,
    flags: Tensor,
    kept_words: Tensor,
    words: Tensor | None,
    header: Header | None,
) -> None:
    """Compare the headers that arrived, int32 [W, 8], and write what they say; other arguments as ``server_reduce``."""
    flags.copy_(headers.agreed_flags(arrived, own, hold))
    kept_words.copy_(arrived)
    if words is not None and header is not None:
        step = header.number if header.counter is None else header.counter
        for word, value in ((STEP, step), (DIGEST, own[DIGEST]), (TAG, header.tag), (FLAGS, flags), (SIGNAL, 0)):
            words[:, word] = value


def _warps(block_size: int, TERNARY: bool, compensated_numbers: Tensor | None) -> int:
    # One warp exchanges nothing with another; where ternary it would have no registers to spare, and where residuals
    # are rounded besides, four on AMD have none either.
    if TERNARY:
        return 4 if compensated_numbers is None or compensated_numbers.dtype is torch.float32 else 8
    return max(1, block_size // 1024)


@op(
    server_reduce_kernel,
    writes=("compensated.numbers", "compensated.exponents", "bits", "partials", "flags", "kept_words", "words"),
    derive={
        "num_warps": ("i32", _warps),
        "per_worker": ("fp32", lambda arrived_world_size: 1.0 / arrived_world_size),
        "compensated_numbers": (
            "",
            lambda compensated_numbers: compensated_numbers if compensated_numbers.numel() else None,
        ),
    },
)
def server_reduce(
    arrived: Sent, places: Places, compensated: Annotated[Compensated, "empty"],
    bits: Annotated[Bits, "1 P/8 | 1 2 P/8"], partials: Partials, hold: Flag, flags: Flag,
    kept_words: Annotated[Headers, "W WORDS"], words: Annotated[Headers, "1 WORDS"] | None = None,
    header: Header | None = None,
) -> None:  # fmt: skip
    """Average the workers' chunks and compress the average (1-bit LAMB, line 10: 1-bit Adam's).

        E = c - s*sign(c);  c = sum_w (s_w/W)*sign_w + E;  bits = c >= 0

    Without c there is no E: c is the average. The sum runs in rank order. Where any rank's header has a
    flag, or differs from this rank's in a checked word, nothing is averaged and E stays as it is.

    Args:
        arrived: What workers have sent.
        compensated: The server's [P / W], read and written; or empty.
        places: Of this chunk.
        bits: Written.
        partials: Written as by ``momentum_compress``.
        hold: Where set nothing is written but what follows.
        flags: Written: ``agreed_flags`` of the headers and of ``hold``.
        kept_words: Written: the headers.
        words: Header of the server's message where scales are no measured ones, written: STEP, TAG,
            DIGEST as in ``own_words`` and, with ``flags``, FLAGS; SIGNAL is 0. None: ``finish`` writes it.
        header: STEP, counted by nobody, and TAG; None, as ``words``.
    """
    answer(arrived.words, arrived.own_words, hold, flags, kept_words, words, header)
    if hold:
        return
    of_c = compensated.stored
    world_size, keeps, device = len(arrived.bits), of_c.numbers.numel() > 0, arrived.scales.device
    for tile in tiles((len(places.live_row) * places.block_size,), 1, places.block_size, device):
        b = tile.blocks
        total = torch.zeros(tile.numel // places.block_size, places.block_size, device=device)
        new = torch.zeros_like(total)
        if keeps:
            new = rules.residual(load(of_c, tile), compensated.scale[b, None], arrived.bits.dim() == 3)
        if not flags:
            scales = arrived.scales[:, arrived.slot[b]] * (1.0 / world_size)
            for w in range(world_size):
                total += scaled(arrived.bits[w, ..., tile.bytes], scales[w, :, None])
            new += total
        new = only_live(new, places, tile)
        if keeps:
            new = store(of_c, new, compensated.drawn, tile)
        compress(new, bits[0, ..., tile.bytes])
        write_partials(new, partials[:, b])
