"""The Triton kernel that makes scales of partial sums; see ``kernels``."""

from __future__ import annotations

import triton
import triton.language as tl

from .access import sum_of


@triton.jit
def scale_of(absolute, squares, n, NORM: tl.constexpr):
    """The scale of n elements with these sums: float32."""
    l1 = absolute / n
    l2 = tl.sqrt(squares / n)
    if NORM == 0:
        return l1.to(tl.float32)
    elif NORM == 1:
        return l2.to(tl.float32)
    else:
        return tl.minimum(l2, 1.9 * l1).to(tl.float32)


@triton.jit
def finish_segment(
    j,
    partials,
    partials_stride,
    segment,
    segment_start,
    count,
    scale,
    message_scales,
    scales_stride,
    blocks_per_chunk,
    NORM: tl.constexpr,
    TERNARY: tl.constexpr,
    LANES: tl.constexpr,
):
    """One scale, by all lanes together; see ``finish``."""
    lane = tl.arange(0, LANES)
    begin = tl.load(segment_start + j)
    end = tl.load(segment_start + j + 1)
    if TERNARY:
        n = tl.maximum(sum_of(partials + 3 * partials_stride, begin, end, LANES), 1.0)
    else:
        n = tl.maximum(tl.load(count + j), 1.0)
    s = scale_of(sum_of(partials, begin, end, LANES), sum_of(partials + partials_stride, begin, end, LANES), n, NORM)
    for at in range(begin, end, LANES):
        tl.store(scale + at + lane, tl.zeros([LANES], tl.float32) + s, mask=at + lane < end)
    last = (end - 1) // blocks_per_chunk + 1
    # A lane to a message: one after the other, thousands of ranks would each wait for a load.
    for first in range(begin // blocks_per_chunk, last, LANES):
        chunk = first + lane
        slot = j - tl.load(segment + chunk * blocks_per_chunk, mask=chunk < last, other=0)
        s_each = tl.zeros([LANES], tl.float32) + s
        tl.store(message_scales + chunk * scales_stride + slot, s_each, mask=chunk < last)


@triton.jit
def store_flags(message_flags, flags_stride, messages, flag, LANES: tl.constexpr):
    """Writes the flag of every message."""
    lane = tl.arange(0, LANES)
    for first in range(0, messages, LANES):
        w = first + lane.to(tl.int64)
        tl.store(message_flags + w * flags_stride, tl.zeros([LANES], tl.int32) + flag, mask=w < messages)


@triton.jit
def finish_short(
    j,
    begin,
    end,
    partials,
    partials_stride,
    segment,
    count,
    scale,
    message_scales,
    scales_stride,
    blocks_per_chunk,
    NORM: tl.constexpr,
    TERNARY: tl.constexpr,
    LANES: tl.constexpr,
):
    """Segments ``j``, a lane to each; returns how many elements were dropped there. See ``finish``."""
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
    s = scale_of(absolute, squares, tl.maximum(nonzero, 1.0), NORM)
    for k in range(longest):
        block = begin + k
        inside = block < end
        tl.store(scale + block, s, mask=inside)
        # A message tells of a segment where it begins, or where the message itself does.
        chunk = block // blocks_per_chunk
        first = chunk * blocks_per_chunk
        told = inside & ((k == 0) | (block == first))
        slot = j - tl.load(segment + first, mask=told, other=0)
        tl.store(message_scales + chunk * scales_stride + slot, s, mask=told)
    return tl.max(dropped, axis=0)


@triton.jit
def finish(
    partials,  # float64 [3, B], or [4, B] where TERNARY, rows ``partials_stride`` apart
    partials_stride,
    blocks,  # B
    segment,  # int32 [B], the scale that each block shares
    segment_start,  # int64 [segments + 1], first block of each
    segments,  # their number
    count,  # float64 [segments], live elements of each
    scale,  # float32 [B], written
    message_scales,  # float32 [messages, slots], written
    scales_stride,  # elements between its rows
    message_flags,  # int32 [messages], written; zeros before where SHORT
    flags_stride,  # elements between them
    messages,  # their number
    blocks_per_chunk,  # B / messages
    NORM: tl.constexpr,
    TERNARY: tl.constexpr,
    LANES: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Scales from partial sums, in a fixed order.

    Grid: segments + 1, of which the last writes the flags. Where SHORT is not 0: ceil(segments / LANES), a lane to
    each segment of at most SHORT blocks, and all lanes together to each of the others, one after the other.
    """
    p = tl.program_id(0).to(tl.int64)
    if SHORT:
        j = p * LANES + tl.arange(0, LANES)
        begin = tl.load(segment_start + j, mask=j < segments, other=0)
        end = tl.load(segment_start + j + 1, mask=j < segments, other=0)
        long = end - begin > SHORT
        dropped = finish_short(
            j,
            begin,
            tl.where(long, begin, end),
            partials,
            partials_stride,
            segment,
            count,
            scale,
            message_scales,
            scales_stride,
            blocks_per_chunk,
            NORM,
            TERNARY,
            LANES,
        )
        if tl.max(long.to(tl.int32), axis=0) != 0:
            for each in range(LANES):
                one = tl.minimum(p * LANES + each, segments - 1)
                first = tl.load(segment_start + one)
                last = tl.load(segment_start + one + 1)
                if last - first > SHORT:
                    dropped += sum_of(partials + 2 * partials_stride, first, last, LANES)
                    finish_segment(
                        one,
                        partials,
                        partials_stride,
                        segment,
                        segment_start,
                        count,
                        scale,
                        message_scales,
                        scales_stride,
                        blocks_per_chunk,
                        NORM,
                        TERNARY,
                        LANES,
                    )
        if dropped > 0:
            store_flags(message_flags, flags_stride, messages, 1, LANES)  # whoever stores, stores the same
    elif p == segments:
        dropped = sum_of(partials + 2 * partials_stride, 0, blocks, LANES)
        store_flags(message_flags, flags_stride, messages, (dropped > 0).to(tl.int32), LANES)
    else:
        finish_segment(
            p,
            partials,
            partials_stride,
            segment,
            segment_start,
            count,
            scale,
            message_scales,
            scales_stride,
            blocks_per_chunk,
            NORM,
            TERNARY,
            LANES,
        )
