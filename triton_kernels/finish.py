"""Scales from partial sums, and the headers of the messages that carry them.

Sums have one order, whatever computes them. Of n numbers, lane l of LANES adds numbers l, l + LANES, ... in their
order; then neighbouring lanes are added, again and again, until one is left (``ordered``). A segment of at most SHORT
blocks is one lane's; a longer one is cut into pieces of PIECE blocks, each summed in this order, and their sums are
again.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from . import block_io as io
from . import headers, rules
from .advance import WIDTH, programs_of, renew_kernel, renew_plainly
from .eager import ABS, NONZERO, SQUARE
from .jit import jit, tl
from .nouns import (
    Coefficients,
    Counters,
    Derived,
    Doubles,
    Flag,
    Floats,
    Header,
    Headers,
    Indices,
    Partials,
    Table,
    stride,
)
from .op import op

SCALE_NORMS = {"l1": 0, "l2": 1, "contractive": 2, "relaxed": 3}
"""What ``finish`` takes as ``norm``, by the name that users give."""

LANES = io.SUM_LANES
SHORT = 32  # blocks, the most that 4096 elements are
PIECE = 1024  # blocks
STEP, TAG, FLAGS, DIGEST, SIGNAL = headers.STEP, headers.TAG, headers.FLAGS, headers.DIGEST, headers.SIGNAL
ERROR = 3  # row of what programs have summed, behind those of ``eager``
UPDATE = ERROR + 1  # only of a worker alone
SUMS = UPDATE + 1
OF_A_PIECE = 5  # numbers


Pieces = Annotated[Table, f"pieces {OF_A_PIECE}"]
PieceSums = Annotated[Doubles, f"{SUMS} programs"]


class Segments(NamedTuple):
    """Cuts segments of blocks, each of which has one scale, into the work of programs."""

    start: Annotated[Table, "segments+1"]
    """Their first blocks, and behind the last the number of blocks."""
    single: Annotated[Table, "_"]
    """Those of at most SHORT blocks, a lane's work each."""
    pieces: Pieces
    """Of the others, a program's work each: the segment, its first block and behind its last, and of
    the segment the first piece and their number."""
    live: Annotated[Doubles, "segments"]
    """Live elements of each."""
    measured: Annotated[Floats, "segments+"]
    """Their scales, written."""
    sums: PieceSums
    """What programs leave for the last: zeros, scratch."""
    tickets: Annotated[Table, "1+pieces"]
    """Of all programs, and of the pieces of each segment: zeros, scratch."""

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides."""
        return {
            "singles": ("i32", lambda single: len(single)),
            "longs": ("i32", lambda pieces: len(pieces)),
            "sums_stride": ("i32", lambda sums: stride(sums)),
        }

    @classmethod
    def of(cls, segment: Tensor, measured: Tensor) -> Segments:
        """Return those of ``segment`` int [B], rising without gaps, none of an empty one; nothing counts as yet."""
        device = measured.device
        lengths = torch.unique_consecutive(segment.cpu(), return_counts=True)[1]
        start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        pieces: list[tuple[int, ...]] = []
        for j in (lengths > SHORT).nonzero().view(-1).tolist():
            begin, end = int(start[j]), int(start[j + 1])
            first, number = len(pieces), -(-(end - begin) // PIECE)
            pieces += [(j, at, min(at + PIECE, end), first, number) for at in range(begin, end, PIECE)]
        single = (lengths <= SHORT).nonzero().view(-1)
        table = torch.tensor(pieces, dtype=torch.int32).view(-1, OF_A_PIECE)
        programs = max(1, -(-len(single) // LANES) + len(pieces))
        return cls(
            start.to(device, torch.int32),
            single.to(device, torch.int32),
            table.to(device),
            torch.zeros(len(lengths), dtype=torch.float64, device=device),
            measured,
            torch.zeros(SUMS, programs, dtype=torch.float64, device=device),
            torch.zeros(1 + len(pieces), dtype=torch.int32, device=device),
        )


@jit()
def short_scales(p, segments, partials, partials_stride, NORM: tl.constexpr, TERNARY: tl.constexpr):
    """Make and store scales of short segments, a lane to each, and leave for the last program what it needs.

    Returns their numbers, their first blocks and those behind their last, the length of the longest, and the scales.
    """
    index = p * LANES + tl.arange(0, LANES)
    some = index < segments.singles
    j = tl.load(segments.single + index, mask=some, other=0)
    begin = tl.load(segments.start + j, mask=some, other=0).to(tl.int64)
    end = tl.load(segments.start + j + 1, mask=some, other=0).to(tl.int64)
    absolute = tl.zeros([LANES], tl.float64)
    squares = tl.zeros([LANES], tl.float64)
    # Loaded ahead: behind the loops the compiler would keep too few registers, and spill.
    n = tl.zeros([LANES], tl.float64) if TERNARY else tl.load(segments.live + j, mask=some, other=0.0)
    longest = tl.max((end - begin).to(tl.int32), axis=0)
    for k in range(longest):
        at = partials + begin + k
        inside = begin + k < end
        absolute += tl.load(at, mask=inside, other=0.0)
        squares += tl.load(at + partials_stride, mask=inside, other=0.0)
        if TERNARY:
            n += tl.load(at + 2 * partials_stride, mask=inside, other=0.0)
    s = rules.scale_of(absolute, squares, n, NORM)
    tl.store(segments.measured + j, s, mask=some)
    error = tl.where(some, rules.residual_square(absolute, squares, s, n), 0.0)
    tl.store(segments.sums + ERROR * segments.sums_stride + p, io.tree_sum(error))
    return j, begin, end, longest, s


@jit()
def sum_piece(p, groups, segments, partials, partials_stride, TERNARY: tl.constexpr):
    """Sum a piece of a segment.

    Returns whether all its pieces are there now; the segment, the program of its first piece, and how many there are.
    """
    piece = segments.pieces + (p - groups) * OF_A_PIECE
    j = tl.load(piece)
    begin = tl.load(piece + 1)
    end = tl.load(piece + 2)
    first = tl.load(piece + 3)
    number = tl.load(piece + 4)
    for row in tl.static_range(2 + TERNARY):
        of_row = io.ordered_sum(partials + row * partials_stride, begin, end)
        tl.store(segments.sums + row * segments.sums_stride + p, of_row)
    return io.is_last(segments.tickets + 1 + first, number), j, groups + first, number


@jit()
def long_scale(j, first, number, segments, NORM: tl.constexpr, TERNARY: tl.constexpr):
    """Make and store the scale of a segment from the sums of its pieces, by all lanes together."""
    sums, stride, last = segments.sums, segments.sums_stride, first + number
    n = tl.load(segments.live + j)
    if TERNARY:
        n = io.ordered_sum(sums + NONZERO * stride, first, last)
    absolute = io.ordered_sum(sums + ABS * stride, first, last)
    squares = io.ordered_sum(sums + SQUARE * stride, first, last)
    s = rules.scale_of(absolute, squares, n, NORM)
    tl.store(segments.measured + j, s)
    tl.store(sums + ERROR * stride + first, rules.residual_square(absolute, squares, s, n))
    return s


@jit()
def _tell_shorts(j, begin, end, longest, s, to):
    """Write short segments' scales into messages."""
    segment, message_scales, message_scales_stride, blocks_per_message = to
    for k in range(longest):
        # A message tells of a segment where that begins, or where the message itself does.
        block = begin + k
        chunk = block // blocks_per_message
        first = chunk * blocks_per_message
        told = (block < end) & ((k == 0) | (block == first))
        slot = j - tl.load(segment + first, mask=told, other=0)
        tl.store(message_scales + chunk * message_scales_stride + slot, s, mask=told)


@jit()
def _tell_long(j, begin, end, s, to):
    """Write a long segment's scale into messages."""
    segment, message_scales, message_scales_stride, blocks_per_message = to
    last = (end - 1) // blocks_per_message + 1
    # A lane to a message: one after the other, thousands of ranks would each wait for a load.
    for at in range(begin // blocks_per_message, last, LANES):
        chunk = (at + tl.arange(0, LANES)).to(tl.int64)
        slot = j - tl.load(segment + chunk * blocks_per_message, mask=chunk < last, other=0)
        each = tl.zeros([LANES], tl.float32) + s
        tl.store(message_scales + chunk * message_scales_stride + slot, each, mask=chunk < last)


@jit()
def step_of(header):
    """Return the step's number, counted up where it lies on the device."""
    step = header.number
    if header.counter is not None:
        step = tl.load(header.counter)
        if header.COUNTS:
            step += 1
            tl.store(header.counter, step)
    return step


@jit()
def signal_of(segments, parts):
    """Return the norm of what the scales leave, float32."""
    error = io.ordered_sum(segments.sums + ERROR * segments.sums_stride, 0, parts)
    return tl.sqrt(tl.maximum(error, 0.0)).to(tl.float32)


@jit()
def _write_headers(words, words_stride, messages, step, tag, flags, digest):
    """Write what changes from step to step into the header of every message, but for the signal."""
    lane = tl.arange(0, LANES)
    nothing = tl.zeros([LANES], tl.int32)
    for first in range(0, messages, LANES):
        w = first + lane
        header = words + w.to(tl.int64) * words_stride
        tl.store(header + STEP, nothing + step, mask=w < messages)
        tl.store(header + DIGEST, nothing + digest, mask=w < messages)
        tl.store(header + TAG, nothing + tag, mask=w < messages)
        tl.store(header + FLAGS, nothing + flags, mask=w < messages)


@jit()
def _write_signal(words, words_stride, messages, norm):
    """Write the signal into the header of every message."""
    lane = tl.arange(0, LANES)
    signal = tl.zeros([LANES], tl.int32) + norm.to(tl.int32, bitcast=True)
    for first in range(0, messages, LANES):
        w = first + lane
        tl.store(words + w.to(tl.int64) * words_stride + SIGNAL, signal, mask=w < messages)


@jit(do_not_specialize=("header_number", "header_tag", "header_flags", "coefficients_length"))
def finish_kernel(
    partials, partials_stride, segments, segment, message_scales, message_scales_stride, words, words_stride, messages,
    blocks_per_message, header, digest, hold, coefficients, parts,
    NORM: tl.constexpr, TERNARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Make scales from partial sums, in a fixed order, and headers.

    Grid: ceil(short segments / LANES), a lane to each, and a program to each piece of the others. The last to arrive
    writes the headers. Behind them, where there are coefficients, ceil(tensors / WIDTH).
    """
    p = tl.program_id(0).to(tl.int64)
    if p < parts:
        held = tl.load(hold)
        if held == 0:
            to = segment, message_scales, message_scales_stride, blocks_per_message
            groups = tl.cdiv(segments.singles, LANES)
            if p < groups:
                j, begin, end, longest, s = short_scales(p, segments, partials, partials_stride, NORM, TERNARY)
                _tell_shorts(j, begin, end, longest, s, to)
            elif p < groups + segments.longs:
                all_there, j, first, number = sum_piece(p, groups, segments, partials, partials_stride, TERNARY)
                if all_there:
                    begin = tl.load(segments.start + j)
                    end = tl.load(segments.start + j + 1)
                    _tell_long(j, begin, end, long_scale(j, first, number, segments, NORM, TERNARY), to)
        if io.is_last(segments.tickets, parts):
            step = step_of(header)
            flags = header.flags | tl.load(header.pending)
            if held == 0:
                _write_signal(words, words_stride, messages, signal_of(segments, parts))
            tl.store(header.pending, 0)
            _write_headers(words, words_stride, messages, step, header.tag, flags, headers.fold(tl.load(digest)))
    elif coefficients.groups is not None:
        renew_kernel(p - parts, coefficients, WIDTH)


@op(
    finish_kernel,
    writes=(
        *("segments.measured", "segments.sums", "segments.tickets", "message_scales", "words"),
        *("header.counter", "header.pending", "coefficients.table", "coefficients.moved"),
    ),
    derive={
        "messages": ("i32", lambda words: len(words)),
        "blocks_per_message": ("i32", lambda segment, messages: len(segment) // messages),
        "TERNARY": ("constexpr", lambda partials: len(partials) > NONZERO),
        "WIDTH": ("constexpr", lambda: WIDTH),
        "parts": ("i32", lambda segments_sums: segments_sums.shape[1]),
        "programs": ("i32", lambda parts, coefficients_group_of: parts + programs_of(coefficients_group_of)),
        "num_warps": ("i32", lambda: 1),  # whose lanes are added without a barrier
    },
)
def finish(
    partials: Partials, segments: Segments, norm: int, segment: Indices, message_scales: Annotated[Floats, "M 1+"],
    words: Annotated[Headers, "M WORDS"], header: Header, digest: Annotated[Counters, "1"], hold: Flag,
    coefficients: Coefficients | None = None,
) -> None:  # fmt: skip
    """Turn partial sums into scales, in a fixed order, and write them where they travel from; and headers.

        l1: mean |c|      l2: sqrt(mean c^2)      contractive: min(l2, 1.9 * l1)      relaxed: the same of 1.3 * l2

    Means over the live elements; where ternary, over those that are not zero. Without segments there are headers only.

    Args:
        partials: float64 [2, B], or [3, B] where ternary.
        segments: What is measured, and where scales are written.
        norm: One of ``SCALE_NORMS``' values.
        segment: The scale that each block shares; rising.
        message_scales: Written: message k carries the scales of its
            B / messages blocks, in order; slots that it does not need stay as they are.
        words: Headers of which STEP, DIGEST, TAG, FLAGS and SIGNAL are written: the last is the
            norm of what the scales leave.
        header: What is written there.
        digest: Of which DIGEST is made: its halves combined.
        hold: Where set headers are written, but for SIGNAL, and nothing else.
        coefficients: Renewed on the way; None: nothing is.
    """
    renew_plainly(coefficients)
    step, flags = count_up(header)
    if not hold:
        finish_segments(partials, segments, norm)
        if len(segments.live):
            by_message = segment.view(len(words), -1)
            slot = by_message - by_message[:, :1]
            message = torch.arange(len(words), device=segment.device)[:, None]
            message_scales[message, slot] = segments.measured[segment].view_as(slot)
        words[:, SIGNAL] = norm_left(segments.sums).view(torch.int32)
    for word, value in ((STEP, step), (DIGEST, headers.folded(digest)), (TAG, header.tag), (FLAGS, flags)):
        words[:, word] = value


def count_up(header: Header) -> tuple[Tensor, Tensor]:
    """Return the step's number, counted up where it lies on the device, and all flags; none are pending then."""
    step = torch.tensor(header.number, dtype=torch.int32) if header.counter is None else header.counter
    if header.counter is not None and header.counts:
        header.counter.add_(1)
    flags = header.pending | header.flags
    header.pending.zero_()
    return step, flags


def finish_segments(partials: Tensor, work: Segments, norm: int) -> None:
    """Make the scales, and leave what programs leave in ``sums``."""
    scale, sums, ternary = work.measured, work.sums, len(partials) > NONZERO
    j = work.single.long()
    begin, length = work.start[j].long(), work.start[j + 1] - work.start[j]
    totals = torch.zeros(len(partials), len(j), dtype=torch.float64, device=partials.device)
    for k in range(int(length.max()) if len(j) else 0):
        inside = k < length
        totals += torch.where(inside, partials[:, torch.where(inside, begin + k, begin)], 0.0)
    n = totals[NONZERO] if ternary else work.live[j]
    scale[j] = rules.scale_of(totals[ABS], totals[SQUARE], n, norm)
    groups = -(-len(j) // LANES)
    left = rules.residual_square(totals[ABS], totals[SQUARE], scale[j], n)
    padded = torch.nn.functional.pad(left, (0, groups * LANES - len(j))).view(groups, LANES)
    sums[ERROR, :groups] = ordered_sum(padded)
    for q, (_, start, end, *_) in enumerate(work.pieces.tolist(), groups):
        sums[: len(partials), q] = ordered_sum(partials[:, start:end])
    for q, (segment, _, _, first, number) in enumerate(work.pieces.tolist()):
        if q == first:
            absolute, squares, *nonzero = ordered_sum(sums[: len(partials), groups + first :][:, :number])
            n = nonzero[0] if ternary else work.live[segment]
            scale[segment] = rules.scale_of(absolute, squares, n, norm)
            sums[ERROR, groups + first] = rules.residual_square(absolute, squares, scale[segment], n)


def norm_left(sums: Tensor) -> Tensor:
    """Return the norm of what the scales leave, float32 []."""
    return ordered_sum(sums[ERROR]).clamp(min=0).sqrt().float()


def ordered_sum(values: Tensor, lanes: int = LANES) -> Tensor:
    """Sum float64 [..., n] in the order that is the same on all backends: float64 [...]."""
    rows = torch.nn.functional.pad(values, (0, -values.shape[-1] % lanes)).unflatten(-1, (-1, lanes))
    total = torch.zeros_like(values[..., :1]).expand(*values.shape[:-1], lanes)
    for row in rows.unbind(-2):
        total = total + row
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    return total[..., 0]
