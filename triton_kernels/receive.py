"""Takes up the servers' messages, of all parts of a step: flags, checksums, scales of blocks, the guard's verdict."""

from __future__ import annotations

import torch

from . import block_io as io
from . import headers, rules
from .finish import ordered_sum
from .headers import Word
from .jit import jit, tl
from .op import Bits, Counters, Doubles, Flag, Floats, Headers, Indices, PerBlock, Table, op
from .rules import COLUMNS, UNBIAS1

FLAGS, VETO = headers.FLAGS, headers.VETO
TILE = 512  # of a message, in 8 bytes, at a time
LANES = io.SUM_LANES  # blocks at a time, and of a program


def spans_of(blocks_per_message: int) -> int:
    """Return how many programs take up a message."""
    return -(-blocks_per_message // LANES)


@jit()
def sum_span(payload, begin, end):
    """Sums 8 bytes each, int64: payload[begin:end]."""
    lane = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int64)
    for at in range(begin, end, TILE):
        total += tl.load(payload + at + lane, mask=at + lane < end, other=0)
    return tl.sum(total, axis=0)


@jit()
def _count_flags(words, stride, own, own_stride, world_size, parts):
    """Does as ``count_flags``, of the headers of each part; of its counts only those of 0 are exact."""
    counts = 0
    first = tl.full([], 0, tl.int64)
    for _ in range(parts):
        counts |= headers.count_flags(words + first * stride, stride, own, world_size)
        first += world_size
        own += own_stride
    return counts


@jit()
def _store_side(at, mask, measured, segment, kept, scale, settled):
    """Hands a side's scales to blocks."""
    s = tl.load(measured + segment, mask=mask, other=0.0)
    tl.store(scale + at, tl.where(kept, s, 0.0), mask=mask)
    tl.store(settled + at, tl.zeros([LANES], tl.float32), mask=mask)


@jit()
def squares_of(s, b, mask, coef, block_tensor, weight):
    """What blocks add to the square of the update's norm, float64 [LANES]."""
    t = tl.load(block_tensor + b, mask=mask, other=0).to(tl.int64)
    unbias = tl.load(coef + t * COLUMNS + UNBIAS1, mask=mask, other=0.0).to(tl.float64)
    root = tl.load(weight + b, mask=mask, other=0.0).to(tl.float64)
    return rules.update_square(s.to(tl.float64), unbias, root)


@jit()
def _verdict(held, limit, norm, squares, programs):
    """Measures the update; VETO where it is beyond the limit, or no number. What is held back is none."""
    refused = 0
    if held == 0:
        measured = tl.sqrt(io.ordered_sum(squares, 0, programs))
        tl.store(norm, measured)
        if not measured <= tl.load(limit):
            refused = VETO
    return refused


@jit()
def zero(at, count):
    """Overwrites at[:count], float32, by one program."""
    lane = tl.arange(0, LANES)
    for first in range(0, count, LANES):
        tl.store(at + first + lane, tl.zeros([LANES], tl.float32), mask=first + lane < count)


@jit()
def receive_kernel(
    words, words_stride, own_words, own_words_stride, summed, summed_stride, message_scales, message_scales_stride,
    segment, worker_measured, server_segment, server_measured, rank, scale, worker_scale, worker_settled, server_scale,
    server_settled, hold, flags, digest, total, ticket, updates, coef, block_tensor, weight, limit, norm, squares,
    world_size, parts, spans, length, span, blocks_per_message, programs,
):  # fmt: skip
    """Grid: W rows of each part, of spans, each of LANES blocks of a message and a share of what is summed.

    Bytes: what is summed in; per block 4 of a scale in, 12 out; where there is a limit 12 more in.
    """
    p = tl.program_id(0).to(tl.int64)
    w = p // spans
    j = p % spans
    part = w // world_size
    bad = _count_flags(words, words_stride, own_words, own_words_stride, world_size, parts)
    kept = bad == 0
    row = (summed + w * summed_stride).to(tl.pointer_type(tl.int64), bitcast=True)
    tl.atomic_add(total + part, sum_span(row, j * span, tl.minimum(j * span + span, length)), sem="relaxed")
    held = tl.load(hold)
    if held == 0:
        averaged = tl.load(words + w * words_stride + FLAGS) == 0
        first = w * blocks_per_message
        first_segment = tl.load(segment + first)
        b = j * LANES + tl.arange(0, LANES)
        mask = b < blocks_per_message
        of = tl.load(segment + first + b, mask=mask, other=0)
        s = tl.load(message_scales + w * message_scales_stride + of - first_segment, mask=mask, other=0.0)
        s = tl.where(kept, s, 0.0)
        tl.store(scale + first + b, s, mask=mask)
        if limit is not None:
            tl.store(squares + p, io.tree_sum(squares_of(s, first + b, mask, coef, block_tensor, weight)))
        # A server that has seen nothing wrong has averaged what arrived, and keeps that.
        _store_side(first + b, mask, worker_measured, of, averaged, worker_scale, worker_settled)
        if w - part * world_size == rank:
            served = part * blocks_per_message + b
            of = tl.load(server_segment + served, mask=mask, other=0)
            _store_side(served, mask, server_measured, of, kept, server_scale, server_settled)
    if io.is_last(ticket, programs):
        for begin in range(0, parts, LANES):
            q = begin + tl.arange(0, LANES)
            mask = q < parts
            # What was there, and 0 from now on: AMD's compiler knows no exchange of several.
            before = tl.atomic_and(total + q, tl.zeros([LANES], tl.int64), mask=mask)
            if updates is not None:
                before += tl.load(updates)
            tl.store(digest + q, before, mask=mask)
        found = headers.flags_of(bad)
        if limit is not None:
            found |= _verdict(held, limit, norm, squares, programs)
            if found & VETO != 0:
                zero(scale, parts * world_size * blocks_per_message)
                zero(server_scale, parts * blocks_per_message)
        tl.store(flags, found)


@op(
    receive_kernel,
    writes=(
        *("scale", "worker_scale", "worker_settled", "server_scale", "server_settled"),
        *("flags", "digest", "total", "ticket", "norm", "squares"),
    ),
    derive={
        "parts": ("i32", lambda own_words: len(own_words)),
        "world_size": ("i32", lambda words, parts: len(words) // parts),
        "length": ("i32", lambda summed: summed.shape[1] // 8),
        "spans": ("i32", spans_of),
        "span": ("i32", lambda length, spans: -(-length // spans)),
        "blocks_per_message": ("i32", lambda segment, words: len(segment) // len(words)),
        "programs": ("i32", lambda words, spans: len(words) * spans),
        "num_warps": ("i32", lambda: 1),
    },
)
def receive(
    words: Headers, own_words: Headers, summed: Bits, message_scales: Floats, segment: Indices, worker_measured: Floats,
    server_segment: Table, server_measured: Floats, rank: int, scale: PerBlock, worker_scale: PerBlock,
    worker_settled: PerBlock, server_scale: Floats, server_settled: Floats, hold: Flag, flags: Flag, digest: Counters,
    total: Counters, ticket: Flag, coef: Floats | None, block_tensor: Indices | None, weight: PerBlock | None,
    limit: Doubles | None, norm: Doubles | None, squares: Doubles | None, updates: Counters | None = None,
) -> None:  # fmt: skip
    """Takes up what servers have sent, and hands scales to blocks (1-bit LAMB, line 13: 1-bit Adam's).

    Of a step in parts these lie one behind the other in all tensors, W messages of each. Where any server's header has
    a flag, or differs from this rank's of that part in a checked word, the step is skipped, all parts of it: s := 0
    turns all of c into residual, which already contains the momentum. A server that has seen nothing wrong has
    averaged what arrived, and keeps that: workers don't keep it as well. An update whose norm is beyond the limit, or
    not a number, is refused in the same way.

    Args:
        words: int32 [parts * W, 8], the headers.
        own_words: int32 [parts, 8], this rank's.
        summed: uint8 [parts * W, n], what of the messages ``digest`` is to have now; of what is left out,
            ``apply_momentum`` adds the bits.
        message_scales: float32 [parts * W, slots].
        segment: int32 [B], the scale that each block shares on workers; rising. Servers cut these at chunk boundaries.
        worker_measured: float32 [segments], this worker's scales.
        server_segment: int32 [B / W], as this server shares its scales.
        server_measured: float32 [segments of its], its scales.
        rank: Whose chunk of each part this server's is.
        scale: float32 [B], written: the result's.
        worker_scale, worker_settled: float32 [B], written: scales, and zeros.
        server_scale, server_settled: float32 [B / W], written: the same of the server.
        hold: int32 [1]; where set scales stay.
        flags: int32 [1], written: ``agreed_flags``, and VETO where the update is refused.
        digest: int64 [parts], written: the wrapping sum of the 8-byte words of each part's ``summed``, whatever is
            skipped or held, and of ``updates``.
        total: int64 [parts], 0; scratch.
        ticket: int32 [1], 0; scratch.
        coef: float32 [tensors, columns of ``Coef``], of which UNBIAS1 is read.
        block_tensor: int32 [B].
        weight: float32 [B], the root of the square of the update's norm per square of a block's scale.
        limit: float64 [], the largest norm that is let through; None, as the others here: any.
        norm: float64 [], written: the update's.
        squares: float64 [parts * W * ``spans_of``]; scratch.
        updates: Done so far, int64 []; None: nobody counts.
    """
    of_parts = zip(words.chunk(len(own_words)), own_words, strict=True)
    flags.copy_(headers.union(torch.cat([headers.agreed_flags(*of_part) for of_part in of_parts])))
    digest.copy_(summed.view(torch.int64).unflatten(0, (len(own_words), -1)).sum((1, 2)))
    if updates is not None:
        digest += updates
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
    if limit is None or coef is None or block_tensor is None or weight is None or norm is None or squares is None:
        return
    square = rules.update_square(scale.double(), coef[:, UNBIAS1].double()[block_tensor], weight.double())
    padded = torch.nn.functional.pad(square.view(len(words), -1), (0, -by_message.shape[1] % LANES))
    squares.copy_(ordered_sum(padded.view(-1, LANES)))
    norm.copy_(ordered_sum(squares).sqrt())
    if not norm <= limit:
        flags |= int(VETO)
        scale.zero_()
        server_scale.zero_()
