"""Scales from partial sums."""

from __future__ import annotations

import torch

from . import block_io as io
from . import rules
from .eager import ABS, DROPPED, NONZERO, SQUARE
from .jit import jit, tl
from .op import Counters, Doubles, Flag, Floats, Indices, PerBlock, op

SCALE_NORMS = {"l1": 0, "l2": 1, "contractive": 2}
"""What ``finish`` takes as ``norm``, by the name that users give."""

WIDTH, SHORT_WIDTH, ONE_SCALE_WIDTH = (2048, 8), (128, 4), (8192, 32)
"""Lanes and warps. One scale: a single program scans all, on a whole multiprocessor."""
SHORT_SEGMENT = 32  # blocks, the most that 4096 elements are


@jit()
def _finish_segment(j, begin, end, sums, to, NORM: tl.constexpr, TERNARY: tl.constexpr, LANES: tl.constexpr):
    """Makes one scale, by all lanes together; see ``finish_kernel``."""
    partials, partials_stride, count = sums
    segment, scale, message_scales, message_scales_stride, blocks_per_message = to
    lane = tl.arange(0, LANES)
    if TERNARY:
        n = tl.maximum(io.sum_of(partials + 3 * partials_stride, begin, end, LANES), 1.0)
    else:
        n = tl.maximum(tl.load(count + j), 1.0)
    absolute = io.sum_of(partials, begin, end, LANES)
    s = rules.scale_of(absolute, io.sum_of(partials + partials_stride, begin, end, LANES), n, NORM)
    for at in range(begin, end, LANES):
        tl.store(scale + at + lane, tl.zeros([LANES], tl.float32) + s, mask=at + lane < end)
    last = (end - 1) // blocks_per_message + 1
    # A lane to a message: one after the other, thousands of ranks would each wait for a load.
    for first in range(begin // blocks_per_message, last, LANES):
        chunk = first + lane
        slot = j - tl.load(segment + chunk * blocks_per_message, mask=chunk < last, other=0)
        s_each = tl.zeros([LANES], tl.float32) + s
        tl.store(message_scales + chunk * message_scales_stride + slot, s_each, mask=chunk < last)


@jit()
def _store_flags(message_flags, message_flags_stride, messages, flag, LANES: tl.constexpr):
    """Writes the flag of every message."""
    lane = tl.arange(0, LANES)
    for first in range(0, messages, LANES):
        w = first + lane.to(tl.int64)
        tl.store(message_flags + w * message_flags_stride, tl.zeros([LANES], tl.int32) + flag, mask=w < messages)


@jit()
def _finish_short(j, begin, end, sums, to, NORM: tl.constexpr, TERNARY: tl.constexpr, LANES: tl.constexpr):
    """Segments ``j``, a lane to each; returns how many elements were dropped there. See ``finish_kernel``."""
    partials, partials_stride, count = sums
    segment, scale, message_scales, message_scales_stride, blocks_per_message = to
    absolute = tl.zeros([LANES], tl.float64)
    squares = tl.zeros([LANES], tl.float64)
    dropped = tl.zeros([LANES], tl.float64)
    nonzero = tl.zeros([LANES], tl.float64)
    longest = tl.max(end - begin, axis=0)
    for k in range(longest):
        at = partials + begin + k
        inside = begin + k < end
        absolute += tl.load(at, mask=inside, other=0.0)
        squares += tl.load(at + partials_stride, mask=inside, other=0.0)
        dropped += tl.load(at + 2 * partials_stride, mask=inside, other=0.0)
        if TERNARY:
            nonzero += tl.load(at + 3 * partials_stride, mask=inside, other=0.0)
    if not TERNARY:
        nonzero = tl.load(count + j, mask=begin < end, other=1.0)
    s = rules.scale_of(absolute, squares, tl.maximum(nonzero, 1.0), NORM)
    for k in range(longest):
        block = begin + k
        inside = block < end
        tl.store(scale + block, s, mask=inside)
        # A message tells of a segment where it begins, or where the message itself does.
        chunk = block // blocks_per_message
        first = chunk * blocks_per_message
        told = inside & ((k == 0) | (block == first))
        slot = j - tl.load(segment + first, mask=told, other=0)
        tl.store(message_scales + chunk * message_scales_stride + slot, s, mask=told)
    return tl.max(dropped, axis=0)


@jit()
def finish_kernel(
    partials, partials_stride, blocks, segment, segment_start, segments, count, scale, message_scales,
    message_scales_stride, message_flags, message_flags_stride, messages, blocks_per_message,
    NORM: tl.constexpr, TERNARY: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Scales from partial sums, in a fixed order.

    Grid: segments + 1, of which the last writes the flags. Where SHORT is not 0: ceil(segments / LANES), a lane to
    each segment of at most SHORT blocks, and all lanes together to each of the others, one after the other; flags
    are zeros before.
    """
    p = tl.program_id(0).to(tl.int64)
    sums = partials, partials_stride, count
    to = segment, scale, message_scales, message_scales_stride, blocks_per_message
    if SHORT:
        j = p * LANES + tl.arange(0, LANES)
        begin = tl.load(segment_start + j, mask=j < segments, other=0)
        end = tl.load(segment_start + j + 1, mask=j < segments, other=0)
        long = end - begin > SHORT
        dropped = _finish_short(j, begin, tl.where(long, begin, end), sums, to, NORM, TERNARY, LANES)
        if tl.max(long.to(tl.int32), axis=0) != 0:
            for each in range(LANES):
                one = tl.minimum(p * LANES + each, segments - 1)
                first = tl.load(segment_start + one)
                last = tl.load(segment_start + one + 1)
                if last - first > SHORT:
                    dropped += io.sum_of(partials + 2 * partials_stride, first, last, LANES)
                    _finish_segment(one, first, last, sums, to, NORM, TERNARY, LANES)
        if dropped > 0:
            # whoever stores, stores the same
            _store_flags(message_flags, message_flags_stride, messages, 1, LANES)
    elif p == segments:
        dropped = io.sum_of(partials + 2 * partials_stride, 0, blocks, LANES)
        _store_flags(message_flags, message_flags_stride, messages, (dropped > 0).to(tl.int32), LANES)
    else:
        begin = tl.load(segment_start + p)
        end = tl.load(segment_start + p + 1)
        _finish_segment(p, begin, end, sums, to, NORM, TERNARY, LANES)


def _width(segments: int, SHORT: int) -> tuple[int, int]:
    return SHORT_WIDTH if SHORT else ONE_SCALE_WIDTH if segments == 1 else WIDTH


@op(
    finish_kernel,
    writes=("scale", "message_scales", "message_flags"),
    derive={
        "blocks": ("i32", lambda segment: len(segment)),
        "segments": ("i32", lambda count: len(count)),
        "messages": ("i32", lambda message_flags: len(message_flags)),
        "blocks_per_message": ("i32", lambda blocks, messages: blocks // messages),
        "message_flags": ("", lambda message_flags, SHORT: message_flags.zero_() if SHORT else message_flags),
        "TERNARY": ("constexpr", lambda partials: len(partials) > NONZERO),
        "SHORT": ("constexpr", lambda blocks, segments: SHORT_SEGMENT * (1 < segments >= blocks / SHORT_SEGMENT)),
        "width": ("", _width),
        "LANES": ("constexpr", lambda width: width[0]),
        "programs": ("i32", lambda segments, LANES, SHORT: -(-segments // LANES) if SHORT else segments + 1),
        "num_warps": ("i32", lambda width: width[1]),
    },
)
def finish(
    partials: Doubles, segment: Indices, segment_start: Counters, count: Doubles, norm: int, scale: PerBlock,
    message_scales: Floats, message_flags: Flag,
) -> None:  # fmt: skip
    """Turns partial sums into scales, in a fixed order, and writes them where they travel from.

        l1: mean |c|      l2: sqrt(mean c^2)      contractive: min(l2, 1.9 * l1)

    Means over the live elements; where ternary, over those that are not zero.

    Args:
        partials: float64 [3, B], or [4, B] where ternary.
        segment: int32 [B], the scale that each block shares; rising.
        segment_start: int64 [segments + 1], first block of each.
        count: float64 [segments], live elements of each.
        norm: One of ``SCALE_NORMS``' values.
        scale: float32 [B], written: each block's scale.
        message_scales: float32 [messages, slots], written: message k carries the scales of its
            B / messages blocks, in order; slots that it does not need stay as they are.
        message_flags: int32 [messages], written: 1 where any element was dropped, else 0.
    """
    if len(partials) > NONZERO:
        count = torch.segment_reduce(partials[NONZERO], "sum", offsets=segment_start)
    absolute, squares = (torch.segment_reduce(partials[row], "sum", offsets=segment_start) for row in (ABS, SQUARE))
    by_segment = rules.scale_of(absolute, squares, count.clamp(min=1.0), norm)
    torch.index_select(by_segment, 0, segment, out=scale)
    by_message = segment.view(len(message_flags), -1)
    slot = by_message - by_message[:, :1]
    message = torch.arange(len(message_flags), device=segment.device)[:, None]
    message_scales[message, slot] = scale.view_as(slot)
    message_flags.fill_((partials[DROPPED] > 0).any())
