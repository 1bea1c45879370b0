"""Takes up the servers' messages: what they agree on, their checksum, and the scale of each block."""

from __future__ import annotations

import torch
from torch import Tensor

from . import block_io as io
from . import headers
from .headers import Word
from .jit import jit, tl
from .op import Bits, Counters, Flag, Floats, Headers, Indices, PerBlock, Table, op

DIGEST, FLAGS = headers.DIGEST, headers.FLAGS
SPAN = 2048  # of a message, in 8 bytes, that a program sums
TILE = 512  # of them at a time
LANES = 128  # blocks at a time


def checksum_of(values: Tensor) -> Tensor:
    """Return the wrapping 64-bit sum of the bits of ``values``, its halves combined, int32 []; stays on the device."""
    # Not summed as int32: on a CPU that first makes an int64 copy of all of it.
    total = values.view(torch.int64).sum()
    return (total ^ (total >> 32)).to(torch.int32)


@jit()
def _sum_span(payload, begin, end):
    """Sums 8 bytes each, int64: payload[begin:end]."""
    lane = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int64)
    for at in range(begin, end, TILE):
        total += tl.load(payload + at + lane, mask=at + lane < end, other=0)
    return tl.sum(total, axis=0)


@jit()
def _store_side(at, mask, measured, segment, kept, scale, settled):
    """Hands a side's scales to blocks."""
    s = tl.load(measured + segment, mask=mask, other=0.0)
    tl.store(scale + at, tl.where(kept, s, 0.0), mask=mask)
    tl.store(settled + at, tl.zeros([LANES], tl.float32), mask=mask)


@jit()
def receive_kernel(
    words, words_stride, own_words, payload, payload_stride, message_scales, message_scales_stride, segment,
    worker_measured, server_segment, server_measured, rank, scale, worker_scale, worker_settled, server_scale,
    server_settled, hold, flags, total, ticket, world_size, spans, length, blocks_per_message, blocks_per_span,
    programs,
):  # fmt: skip
    """Grid: W rows of spans, each of SPAN times 8 bytes of a message and a share of its blocks.

    Bytes per element: 1/8 in; per block 4 of a scale in, 12 out.
    """
    p = tl.program_id(0).to(tl.int64)
    w = p // spans
    j = p % spans
    bad = headers.count_flags(words, words_stride, own_words, world_size)
    kept = bad == 0
    row = (payload + w * payload_stride).to(tl.pointer_type(tl.int64), bitcast=True)
    tl.atomic_add(total, _sum_span(row, j * SPAN, tl.minimum(j * SPAN + SPAN, length)), sem="relaxed")
    if tl.load(hold) == 0:
        averaged = tl.load(words + w * words_stride + FLAGS) == 0
        first = w * blocks_per_message
        first_segment = tl.load(segment + first)
        end = tl.minimum((j + 1) * blocks_per_span, blocks_per_message)
        for begin in range(j * blocks_per_span, end, LANES):
            b = begin + tl.arange(0, LANES)
            mask = b < end
            of = tl.load(segment + first + b, mask=mask, other=0)
            s = tl.load(message_scales + w * message_scales_stride + of - first_segment, mask=mask, other=0.0)
            tl.store(scale + first + b, tl.where(kept, s, 0.0), mask=mask)
            # A server that has seen nothing wrong has averaged what arrived, and keeps that.
            _store_side(first + b, mask, worker_measured, of, averaged, worker_scale, worker_settled)
            if w == rank:
                of = tl.load(server_segment + b, mask=mask, other=0)
                _store_side(b, mask, server_measured, of, kept, server_scale, server_settled)
    if io.is_last(ticket, programs):
        sum_of_all = tl.atomic_xchg(total, 0)
        tl.store(flags, headers.flags_of(bad))
        tl.store(own_words + DIGEST, (sum_of_all ^ (sum_of_all >> 32)).to(tl.int32))


@op(
    receive_kernel,
    writes=(
        *("own_words", "scale", "worker_scale", "worker_settled", "server_scale", "server_settled"),
        *("flags", "total", "ticket"),
    ),
    derive={
        "world_size": ("i32", lambda words: len(words)),
        "length": ("i32", lambda payload: payload.shape[1] // 8),
        "spans": ("i32", lambda length: -(-length // SPAN)),
        "blocks_per_message": ("i32", lambda segment, world_size: len(segment) // world_size),
        "blocks_per_span": ("i32", lambda blocks_per_message, spans: -(-blocks_per_message // spans)),
        "programs": ("i32", lambda world_size, spans: world_size * spans),
        "num_warps": ("i32", lambda: 1),
    },
)
def receive(
    words: Headers, own_words: Flag, payload: Bits, message_scales: Floats, segment: Indices, worker_measured: Floats,
    server_segment: Table, server_measured: Floats, rank: int, scale: PerBlock, worker_scale: PerBlock,
    worker_settled: PerBlock, server_scale: Floats, server_settled: Floats, hold: Flag, flags: Flag, total: Counters,
    ticket: Flag,
) -> None:  # fmt: skip
    """Takes up what servers have sent, and hands scales to blocks (1-bit LAMB, line 13: 1-bit Adam's).

    Where any server's header has a flag, or differs from this rank's in a checked word, the step is skipped: s := 0
    turns all of c into residual, which already contains the momentum. A server that has seen nothing wrong has
    averaged what arrived, and keeps that: workers don't keep it as well.

    Args:
        words: int32 [W, 8], the headers.
        own_words: int32 [8], this rank's; DIGEST is written: ``checksum_of`` the payload.
        payload: uint8 [W, n], all behind the words.
        message_scales: float32 [W, slots].
        segment: int32 [B], the scale that each block shares on workers; rising. Servers cut these at chunk boundaries.
        worker_measured: float32 [segments], this worker's scales.
        server_segment: int32 [B / W], as this server shares its scales.
        server_measured: float32 [segments of its], its scales.
        rank: Whose chunk this server's is.
        scale: float32 [B], written: the result's.
        worker_scale, worker_settled: float32 [B], written: scales, and zeros.
        server_scale, server_settled: float32 [B / W], written: the same of the server.
        hold: int32 [1]; where set scales stay.
        flags: int32 [1], written: ``agreed_flags``.
        total: int64 [1], 0; scratch.
        ticket: int32 [1], 0; scratch.
    """
    flags.copy_(headers.agreed_flags(words, own_words))
    own_words[Word.DIGEST] = checksum_of(payload)
    if hold:
        return
    by_message = segment.view(len(words), -1)
    slot = (by_message - by_message[:, :1]).long()
    kept, averaged = flags == 0, words[:, Word.FLAGS, None] == 0
    scale.copy_(torch.where(kept, torch.gather(message_scales, 1, slot).view(-1), 0.0))
    worker_scale.copy_(torch.where(averaged, worker_measured[segment].view_as(by_message), 0.0).view(-1))
    server_scale.copy_(torch.where(kept, server_measured[server_segment], 0.0))
    worker_settled.zero_()
    server_settled.zero_()
