"""Takes up the servers' messages, of all parts of a step: flags, checksums, scales of blocks, the guard's verdict."""

from __future__ import annotations

from typing import Annotated

import torch

from . import block_io as io
from . import headers
from .finish import ordered_sum
from .headers import Word
from .jit import jit, tl
from .limit import VETO, judged, squares_by_block, squares_of, verdict
from .nouns import Arrived, Digest, Doubles, Flag, Limit, PerBlock, Side
from .op import op

FLAGS = headers.FLAGS
TILE = 512  # of a message, in 8 bytes, at a time
LANES = io.SUM_LANES  # blocks at a time, and of a program


def spans_of(blocks_per_message: int) -> int:
    """Return how many programs take up a message."""
    return -(-blocks_per_message // LANES)


@jit()
def sum_span(payload, begin, end):
    """Sum 8 bytes each, int64: payload[begin:end]."""
    lane = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int64)
    for at in range(begin, end, TILE):
        total += tl.load(payload + at + lane, mask=at + lane < end, other=0)
    return tl.sum(total, axis=0)


@jit()
def _count_flags(own, arrived):
    """Do as ``count_flags``, of the headers of each part; of its counts only those of 0 are exact."""
    counts = 0
    first = tl.full([], 0, tl.int64)
    for _ in range(arrived.parts):
        words = arrived.words + first * arrived.words_stride
        counts |= headers.count_flags(words, arrived.words_stride, own, arrived.world_size)
        first += arrived.world_size
        own += arrived.own_words_stride
    return counts


@jit()
def _store_side(at, mask, segment, kept, side):
    """Hand a side's scales to blocks."""
    s = tl.load(side.measured + segment, mask=mask, other=0.0)
    tl.store(side.scale + at, tl.where(kept, s, 0.0), mask=mask)
    tl.store(side.settled + at, tl.zeros([LANES], tl.float32), mask=mask)


@jit()
def _measured(squares, programs, limit, held):
    """Measure the update; VETO where it is refused. What is held back is none."""
    refused = 0
    if held == 0:
        refused = verdict(tl.sqrt(io.ordered_sum(squares, 0, programs)), limit)
    return refused


@jit()
def zero(at, count):
    """Overwrite at[:count], float32, by one program."""
    lane = tl.arange(0, LANES)
    for first in range(0, count, LANES):
        tl.store(at + first + lane, tl.zeros([LANES], tl.float32), mask=first + lane < count)


@jit()
def receive_kernel(
    arrived, worker, server, rank, scale, hold, flags, digest, ticket, limit, squares, spans, span,
    blocks_per_message, programs,
):  # fmt: skip
    """Grid: W rows of each part, of spans, each of LANES blocks of a message and a share of what is summed.

    Bytes: what is summed in; per block 4 of a scale in, 12 out; where there is a limit 12 more in.
    """
    p = tl.program_id(0).to(tl.int64)
    w = p // spans
    j = p % spans
    part = w // arrived.world_size
    bad = _count_flags(arrived.own_words, arrived)
    kept = bad == 0
    row = (arrived.summed + w * arrived.summed_stride).to(tl.pointer_type(tl.int64), bitcast=True)
    end = tl.minimum(j * span + span, arrived.length)
    tl.atomic_add(digest.running + part, sum_span(row, j * span, end), sem="relaxed")
    held = tl.load(hold)
    if held == 0:
        averaged = tl.load(arrived.words + w * arrived.words_stride + FLAGS) == 0
        first = w * blocks_per_message
        first_segment = tl.load(worker.segment + first)
        b = j * LANES + tl.arange(0, LANES)
        mask = b < blocks_per_message
        of = tl.load(worker.segment + first + b, mask=mask, other=0)
        s = tl.load(arrived.scales + w * arrived.scales_stride + of - first_segment, mask=mask, other=0.0)
        s = tl.where(kept, s, 0.0)
        tl.store(scale + first + b, s, mask=mask)
        if limit.largest is not None:
            tl.store(squares + p, io.tree_sum(squares_of(s, first + b, mask, limit)))
        # A server that has seen nothing wrong has averaged what arrived, and keeps that.
        _store_side(first + b, mask, of, averaged, worker)
        if w - part * arrived.world_size == rank:
            served = part * blocks_per_message + b
            of = tl.load(server.segment + served, mask=mask, other=0)
            _store_side(served, mask, of, kept, server)
    if io.is_last(ticket, programs):
        for begin in range(0, arrived.parts, LANES):
            q = begin + tl.arange(0, LANES)
            mask = q < arrived.parts
            # What was there, and 0 from now on: AMD's compiler knows no exchange of several.
            before = tl.atomic_and(digest.running + q, tl.zeros([LANES], tl.int64), mask=mask)
            if digest.updates is not None:
                before += tl.load(digest.updates)
            tl.store(digest.sums + q, before, mask=mask)
        found = headers.flags_of(bad)
        if limit.largest is not None:
            found |= _measured(squares, programs, limit, held)
            if found & VETO != 0:
                zero(scale, arrived.parts * arrived.world_size * blocks_per_message)
                zero(server.scale, arrived.parts * blocks_per_message)
        tl.store(flags, found)


@op(
    receive_kernel,
    writes=(
        *("scale", "worker.scale", "worker.settled", "server.scale", "server.settled"),
        *("flags", "digest.sums", "digest.running", "ticket", "limit.norm", "squares"),
    ),
    derive={
        "spans": ("i32", spans_of),
        "span": ("i32", lambda arrived_length, spans: -(-arrived_length // spans)),
        "blocks_per_message": ("i32", lambda worker_segment, arrived_words: len(worker_segment) // len(arrived_words)),
        "programs": ("i32", lambda arrived_words, spans: len(arrived_words) * spans),
        "num_warps": ("i32", lambda: 1),
    },
)
def receive(
    arrived: Annotated[Arrived, "messages=M parts=N"], worker: Annotated[Side, "blocks=B"],
    server: Annotated[Side, "blocks=B*N/M"], rank: int, scale: PerBlock, hold: Flag, flags: Flag,
    digest: Annotated[Digest, "parts=N"], ticket: Flag, limit: Limit | None = None,
    squares: Annotated[Doubles, "programs"] | None = None,
) -> None:  # fmt: skip
    """Take up what servers have sent, and hand scales to blocks (1-bit LAMB, line 13: 1-bit Adam's).

    Of a step in parts these lie one behind the other in all tensors, W messages of each. Where any server's header has
    a flag, or differs from this rank's of that part in a checked word, the step is skipped, all parts of it: s := 0
    turns all of c into residual, which already contains the momentum. A server that has seen nothing wrong has
    averaged what arrived, and keeps that: workers don't keep it as well. An update whose norm is beyond the limit, or
    not a number, is refused in the same way.

    Args:
        arrived: What servers have sent.
        worker: Of whole tensors, whose scales servers cut at chunk boundaries: scales are written, and zeros.
        server: Of the chunk of each part that this rank's server serves, B / W blocks: the same is written.
        rank: Whose chunk of each part this server's is.
        scale: Written: the result's.
        hold: Where set scales stay.
        flags: Written: ``agreed_flags``, and VETO where the update is refused.
        digest: Its sums are written, whatever is skipped or held.
        ticket: 0; scratch.
        limit: Its norm is written; None, as ``squares``: any update is let through.
        squares: Of each program; scratch.
    """
    words, parts = arrived.words, len(arrived.own_words)
    of_parts = zip(words.chunk(parts), arrived.own_words, strict=True)
    flags.copy_(headers.union(torch.cat([headers.agreed_flags(*of_part) for of_part in of_parts])))
    digest.sums.copy_(arrived.summed.view(torch.int64).unflatten(0, (parts, -1)).sum((1, 2)))
    if digest.updates is not None:
        digest.sums.add_(digest.updates)
    if hold:
        return
    by_message = worker.segment.view(len(words), -1)
    slot = (by_message - by_message[:, :1]).long()
    kept, averaged = flags == 0, words[:, Word.FLAGS, None] == 0
    scale.copy_(torch.where(kept, torch.gather(arrived.scales, 1, slot).view(-1), 0.0))
    worker.scale.copy_(torch.where(averaged, worker.measured[worker.segment].view_as(by_message), 0.0).view(-1))
    server.scale.copy_(torch.where(kept, server.measured[server.segment], 0.0))
    worker.settled.zero_()
    server.settled.zero_()
    if limit is None or squares is None:
        return
    square = squares_by_block(scale, limit)
    padded = torch.nn.functional.pad(square.view(len(words), -1), (0, -by_message.shape[1] % LANES))
    squares.copy_(ordered_sum(padded.view(-1, LANES)))
    refused = judged(ordered_sum(squares).sqrt(), limit)
    flags |= refused
    if refused:
        scale.zero_()
        server.scale.zero_()
