"""Scales from partial sums, and the headers of the messages that carry them.

Sums have one order, whatever computes them. Of n numbers, lane l of LANES adds numbers l, l + LANES, ... in their
order; then neighbouring lanes are added, again and again, until one is left (``ordered``). A segment of at most SHORT
blocks is one lane's; a longer one is cut into pieces of PIECE blocks, each summed in this order, and their sums are
again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import block_io as io
from . import headers, rules
from .advance import WIDTH, programs_of, renew_kernel, renew_plainly
from .eager import ABS, NONZERO, SQUARE
from .jit import jit, tl
from .op import Counters, Doubles, Flag, Floats, Headers, Indices, Table, op

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


class Segments(NamedTuple):
    """Cuts segments of blocks, each of which has one scale, into the work of programs."""

    start: Tensor
    """Their first blocks, and behind the last the number of blocks: int32 [segments + 1]."""
    single: Tensor
    """Those of at most SHORT blocks, a lane's work each: int32 [n]."""
    pieces: Tensor
    """Of the others, a program's work each: int32 [m, 5], the segment, its first block and behind its last, and of
    the segment the first piece and their number."""
    sums: Tensor
    """What programs leave for the last: zeros float64 [SUMS, programs]."""
    tickets: Tensor
    """Of all programs, and of the pieces of each segment: zeros int32 [1 + m]."""

    @classmethod
    def of(cls, segment: Tensor, device: torch.device) -> Segments:
        """Return those of ``segment`` int [B], rising without gaps; none of an empty one."""
        lengths = torch.unique_consecutive(segment.cpu(), return_counts=True)[1]
        start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        pieces: list[tuple[int, ...]] = []
        for j in (lengths > SHORT).nonzero().view(-1).tolist():
            begin, end = int(start[j]), int(start[j + 1])
            first, number = len(pieces), -(-(end - begin) // PIECE)
            pieces += [(j, at, min(at + PIECE, end), first, number) for at in range(begin, end, PIECE)]
        single = (lengths <= SHORT).nonzero().view(-1)
        sums = torch.zeros(SUMS, max(1, -(-len(single) // LANES) + len(pieces)), dtype=torch.float64, device=device)
        tickets = torch.zeros(1 + len(pieces), dtype=torch.int32, device=device)
        table = torch.tensor(pieces, dtype=torch.int32).view(-1, OF_A_PIECE)
        return cls(start.to(device, torch.int32), single.to(device, torch.int32), table.to(device), sums, tickets)


@jit()
def short_scales(
    p, single, singles, segment_start, partials, partials_stride, count, scale, sums, sums_stride, NORM: tl.constexpr,
    TERNARY: tl.constexpr,
):  # fmt: skip
    """Makes and stores scales of short segments, a lane to each, and leaves for the last program what it needs.

    Returns their numbers, their first blocks and those behind their last, the length of the longest, and the scales.
    """
    index = p * LANES + tl.arange(0, LANES)
    some = index < singles
    j = tl.load(single + index, mask=some, other=0)
    begin = tl.load(segment_start + j, mask=some, other=0).to(tl.int64)
    end = tl.load(segment_start + j + 1, mask=some, other=0).to(tl.int64)
    absolute = tl.zeros([LANES], tl.float64)
    squares = tl.zeros([LANES], tl.float64)
    # Loaded ahead: behind the loops the compiler would keep too few registers, and spill.
    n = tl.zeros([LANES], tl.float64) if TERNARY else tl.load(count + j, mask=some, other=0.0)
    longest = tl.max((end - begin).to(tl.int32), axis=0)
    for k in range(longest):
        at = partials + begin + k
        inside = begin + k < end
        absolute += tl.load(at, mask=inside, other=0.0)
        squares += tl.load(at + partials_stride, mask=inside, other=0.0)
        if TERNARY:
            n += tl.load(at + 2 * partials_stride, mask=inside, other=0.0)
    s = rules.scale_of(absolute, squares, n, NORM)
    tl.store(scale + j, s, mask=some)
    error = tl.where(some, rules.residual_square(absolute, squares, s, n), 0.0)
    tl.store(sums + ERROR * sums_stride + p, io.tree_sum(error))
    return j, begin, end, longest, s


@jit()
def sum_piece(p, groups, pieces, partials, partials_stride, sums, sums_stride, tickets, TERNARY: tl.constexpr):
    """Sums a piece of a segment.

    Returns whether all its pieces are there now; the segment, the program of its first piece, and how many there are.
    """
    piece = pieces + (p - groups) * OF_A_PIECE
    j = tl.load(piece)
    begin = tl.load(piece + 1)
    end = tl.load(piece + 2)
    first = tl.load(piece + 3)
    number = tl.load(piece + 4)
    for row in tl.static_range(2 + TERNARY):
        tl.store(sums + row * sums_stride + p, io.ordered_sum(partials + row * partials_stride, begin, end))
    return io.is_last(tickets + 1 + first, number), j, groups + first, number


@jit()
def long_scale(j, first, number, count, scale, sums, sums_stride, NORM: tl.constexpr, TERNARY: tl.constexpr):
    """Makes and stores the scale of a segment from the sums of its pieces, by all lanes together."""
    n = tl.load(count + j)
    if TERNARY:
        n = io.ordered_sum(sums + NONZERO * sums_stride, first, first + number)
    absolute = io.ordered_sum(sums + ABS * sums_stride, first, first + number)
    squares = io.ordered_sum(sums + SQUARE * sums_stride, first, first + number)
    s = rules.scale_of(absolute, squares, n, NORM)
    tl.store(scale + j, s)
    tl.store(sums + ERROR * sums_stride + first, rules.residual_square(absolute, squares, s, n))
    return s


@jit()
def _tell_shorts(j, begin, end, longest, s, to):
    """Writes short segments' scales into messages."""
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
    """Writes a long segment's scale into messages."""
    segment, message_scales, message_scales_stride, blocks_per_message = to
    last = (end - 1) // blocks_per_message + 1
    # A lane to a message: one after the other, thousands of ranks would each wait for a load.
    for at in range(begin // blocks_per_message, last, LANES):
        chunk = (at + tl.arange(0, LANES)).to(tl.int64)
        slot = j - tl.load(segment + chunk * blocks_per_message, mask=chunk < last, other=0)
        each = tl.zeros([LANES], tl.float32) + s
        tl.store(message_scales + chunk * message_scales_stride + slot, each, mask=chunk < last)


@jit()
def step_of(number, counter, COUNTS: tl.constexpr):
    """Returns the step's number, counted up where it lies on the device."""
    step = number
    if counter is not None:
        step = tl.load(counter)
        if COUNTS:
            step += 1
            tl.store(counter, step)
    return step


@jit()
def signal_of(sums, sums_stride, parts):
    """Returns the norm of what the scales leave, float32."""
    error = io.ordered_sum(sums + ERROR * sums_stride, 0, parts)
    return tl.sqrt(tl.maximum(error, 0.0)).to(tl.float32)


@jit()
def _write_headers(words, words_stride, messages, step, tag, flags, digest):
    """Writes what changes from step to step into the header of every message, but for the signal."""
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
    """Writes the signal into the header of every message."""
    lane = tl.arange(0, LANES)
    signal = tl.zeros([LANES], tl.int32) + norm.to(tl.int32, bitcast=True)
    for first in range(0, messages, LANES):
        w = first + lane
        tl.store(words + w.to(tl.int64) * words_stride + SIGNAL, signal, mask=w < messages)


@jit(do_not_specialize=("number", "tag", "told", "length"))
def finish_kernel(
    partials, partials_stride, segment, segment_start, single, singles, pieces, longs, count, sums, sums_stride,
    tickets, scale, message_scales, message_scales_stride, words, words_stride, messages, blocks_per_message, number,
    counter, tag, told, pending, digest, hold, group_rows, lr, group_of, tensors, steps, mean_sq, coef, moved,
    moved_stride, length, parts,
    COUNTS: tl.constexpr, NORM: tl.constexpr, TERNARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Scales from partial sums, in a fixed order, and headers.

    Grid: ceil(short segments / LANES), a lane to each, and a program to each piece of the others. The last to arrive
    writes the headers. Behind them, where there are coefficients, ceil(tensors / WIDTH).
    """
    p = tl.program_id(0).to(tl.int64)
    if p < parts:
        held = tl.load(hold)
        if held == 0:
            to = segment, message_scales, message_scales_stride, blocks_per_message
            groups = tl.cdiv(singles, LANES)
            if p < groups:
                j, begin, end, longest, s = short_scales(
                    p, single, singles, segment_start, partials, partials_stride, count, scale, sums, sums_stride,
                    NORM, TERNARY,
                )  # fmt: skip
                _tell_shorts(j, begin, end, longest, s, to)
            elif p < groups + longs:
                all_there, j, first, pieces_of_it = sum_piece(
                    p, groups, pieces, partials, partials_stride, sums, sums_stride, tickets, TERNARY
                )
                if all_there:
                    begin = tl.load(segment_start + j)
                    end = tl.load(segment_start + j + 1)
                    s = long_scale(j, first, pieces_of_it, count, scale, sums, sums_stride, NORM, TERNARY)
                    _tell_long(j, begin, end, s, to)
        if io.is_last(tickets, parts):
            step = step_of(number, counter, COUNTS)
            flags = told | tl.load(pending)
            if held == 0:
                _write_signal(words, words_stride, messages, signal_of(sums, sums_stride, parts))
            tl.store(pending, 0)
            _write_headers(words, words_stride, messages, step, tag, flags, headers.fold(tl.load(digest)))
    elif group_rows is not None:
        table = steps, mean_sq, coef, moved, moved_stride, length
        renew_kernel(p - parts, group_rows, lr, group_of, tensors, *table, WIDTH)


@op(
    finish_kernel,
    writes=("sums", "tickets", "scale", "message_scales", "words", "counter", "pending", "coef", "moved"),
    derive={
        "singles": ("i32", lambda single: len(single)),
        "longs": ("i32", lambda pieces: len(pieces)),
        "messages": ("i32", lambda words: len(words)),
        "blocks_per_message": ("i32", lambda segment, messages: len(segment) // messages),
        "TERNARY": ("constexpr", lambda partials: len(partials) > NONZERO),
        "tensors": ("i32", lambda group_of: 0 if group_of is None else len(group_of)),
        "WIDTH": ("constexpr", lambda: WIDTH),
        "parts": ("i32", lambda sums: sums.shape[1]),
        "programs": ("i32", lambda parts, group_of: parts + programs_of(group_of)),
        "num_warps": ("i32", lambda: 1),  # whose lanes are added without a barrier
    },
)
def finish(
    partials: Doubles, segment: Indices, segment_start: Table, single: Table, pieces: Table, count: Doubles, norm: int,
    sums: Doubles, tickets: Table, scale: Floats, message_scales: Floats, words: Headers, number: int,
    counter: Flag | None, counts: bool, tag: int, told: int, pending: Flag, digest: Counters, hold: Flag,
    group_rows: Doubles | None = None, lr: Floats | None = None, group_of: Table | None = None,
    steps: Doubles | None = None, mean_sq: Doubles | None = None, coef: Floats | None = None,
    moved: Floats | None = None, length: int = 1,
) -> None:  # fmt: skip
    """Turns partial sums into scales, in a fixed order, and writes them where they travel from; and headers.

        l1: mean |c|      l2: sqrt(mean c^2)      contractive: min(l2, 1.9 * l1)      relaxed: the same of 1.3 * l2

    Means over the live elements; where ternary, over those that are not zero. Without segments there are headers only.

    Args:
        partials: float64 [2, B], or [3, B] where ternary.
        segment: int32 [B], the scale that each block shares; rising.
        segment_start, single, pieces, sums, tickets: See ``Segments``; the last two are scratch.
        count: float64 [segments], live elements of each.
        norm: One of ``SCALE_NORMS``' values.
        scale: float32 [segments], written.
        message_scales: float32 [messages, slots], written: message k carries the scales of its
            B / messages blocks, in order; slots that it does not need stay as they are.
        words: int32 [messages, 8], headers of which STEP, DIGEST, TAG, FLAGS and SIGNAL are written: the last is the
            norm of what the scales leave.
        number: STEP, an int32.
        counter: Where STEP lies instead, int32 []; or None.
        counts: Whether ``counter`` is one less, and to be counted up.
        tag: TAG.
        told: FLAGS of the host.
        pending: int32 [1], more of them; 0 afterwards.
        digest: int64 [1], of which DIGEST is made: its halves combined.
        hold: int32 [1]; where set headers are written, but for SIGNAL, and nothing else.
        group_rows, lr, group_of, steps, mean_sq: As for ``advance``, whose ``groups`` are the first.
        coef: float32 [tensors, columns of ``Coef``], of which LR, STEP_SIZE, DECAY and UNBIAS1 are written, for the
            step that is being taken; None: nothing is.
        moved: As for ``advance``: this step is added. ``coef`` is then of the round: the mean STEP_SIZE of its
            ``length`` steps, and the product of their DECAY.
    """
    if group_rows is not None and group_of is not None and steps is not None and coef is not None:
        renew_plainly(group_rows, lr, group_of, steps, mean_sq, coef, moved, length)
    step = torch.tensor(number, dtype=torch.int32) if counter is None else counter
    if counter is not None and counts:
        counter += 1
    flags = pending | told
    pending.zero_()
    if not hold:
        finish_segments(partials, Segments(segment_start, single, pieces, sums, tickets), count, norm, scale)
        if len(count):
            by_message = segment.view(len(words), -1)
            slot = by_message - by_message[:, :1]
            message = torch.arange(len(words), device=segment.device)[:, None]
            message_scales[message, slot] = scale[segment].view_as(slot)
        words[:, SIGNAL] = norm_left(sums).view(torch.int32)
    for word, value in ((STEP, step), (DIGEST, headers.folded(digest)), (TAG, tag), (FLAGS, flags)):
        words[:, word] = value


def finish_segments(partials: Tensor, work: Segments, count: Tensor, norm: int, scale: Tensor) -> None:
    """Make the scales, and leave what programs leave in ``sums``."""
    sums, ternary = work.sums, len(partials) > NONZERO
    j = work.single.long()
    begin, length = work.start[j].long(), work.start[j + 1] - work.start[j]
    totals = torch.zeros(len(partials), len(j), dtype=torch.float64, device=partials.device)
    for k in range(int(length.max()) if len(j) else 0):
        inside = k < length
        totals += torch.where(inside, partials[:, torch.where(inside, begin + k, begin)], 0.0)
    n = totals[NONZERO] if ternary else count[j]
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
            n = nonzero[0] if ternary else count[segment]
            scale[segment] = rules.scale_of(absolute, squares, n, norm)
            sums[ERROR, groups + first] = rules.residual_square(absolute, squares, scale[segment], n)


def norm_left(sums: Tensor) -> Tensor:
    """Return the norm of what the scales leave, float32 []."""
    return ordered_sum(sums[ERROR]).clamp(min=0).sqrt().float()


def ordered_sum(values: Tensor) -> Tensor:
    """Sums float64 [..., n] in the order that is the same on all backends: float64 [...]."""
    lanes = torch.nn.functional.pad(values, (0, -values.shape[-1] % LANES)).unflatten(-1, (-1, LANES))
    total = torch.zeros_like(values[..., :1]).expand(*values.shape[:-1], LANES)
    for row in lanes.unbind(-2):
        total = total + row
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    return total[..., 0]
