"""Ends the compression of a worker that is alone: there is no server, so that what it sends itself is the result."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from . import block_io as io
from . import headers, rules
from .advance import WIDTH, power, programs_of, renew_kernel, renew_plainly
from .eager import NONZERO
from .finish import (
    LANES,
    UPDATE,
    Segments,
    count_up,
    finish_segments,
    long_scale,
    norm_left,
    ordered_sum,
    short_scales,
    signal_of,
    step_of,
    sum_piece,
)
from .jit import jit, tl
from .limit import judged, squares_by_block, verdict
from .nouns import Coefficients, Flag, Header, Limit, Partials, PerBlock
from .op import op
from .rules import COLUMNS, CORRECTION1, GROUP_COLUMNS, UNBIAS1

STEP, TAG, FLAGS, SIGNAL = headers.STEP, headers.TAG, headers.FLAGS, headers.SIGNAL


@jit()
def _unbias(t, mask, coefficients):
    """UNBIAS1 of tensors in the step that is being taken: other programs of the launch are only writing it."""
    if coefficients.groups is None:
        unbias = tl.load(coefficients.table + t.to(tl.int64) * COLUMNS + UNBIAS1, mask=mask, other=0.0)
    else:
        group = tl.load(coefficients.group_of + t, mask=mask, other=0).to(tl.int64)
        beta = tl.load(coefficients.groups + group * GROUP_COLUMNS + CORRECTION1, mask=mask, other=0.0)
        power1 = power(beta, tl.load(coefficients.steps + t, mask=mask, other=0.0) + 1.0)
        _, _, _, exact = rules.coefficients(power1, power1, power1, power1 * 0.0)
        unbias = exact.to(tl.float32)
    return unbias.to(tl.float64)


@jit()
def _hand_out(b, mask, s, to, limit, coefficients):
    """Hand scales to blocks; return what these add to the square of the update's norm, float64 [LANES]."""
    scale, worker_scale, worker_settled = to
    tl.store(scale + b, s, mask=mask)
    tl.store(worker_scale + b, s, mask=mask)
    tl.store(worker_settled + b, tl.zeros([LANES], tl.float32), mask=mask)
    square = tl.zeros([LANES], tl.float64)
    if limit.weight is not None:
        t = tl.load(limit.block_tensor + b, mask=mask, other=0)
        root = tl.load(limit.weight + b, mask=mask, other=0.0).to(tl.float64)
        added = rules.update_square(s.to(tl.float64), _unbias(t, mask, coefficients), root)
        square = tl.where(mask, added, 0.0)
    return square


@jit()
def _hand_out_shorts(begin, end, longest, s, to, limit, coefficients):
    """Hand short segments' scales to their blocks."""
    square = tl.zeros([LANES], tl.float64)
    for k in range(longest):
        square += _hand_out(begin + k, begin + k < end, s, to, limit, coefficients)
    return square


@jit()
def _hand_out_long(begin, end, s, to, limit, coefficients):
    """Hand a long segment's scale to its blocks."""
    square = tl.zeros([LANES], tl.float64)
    each = tl.zeros([LANES], tl.float32) + s
    for at in range(begin, end, LANES):
        b = (at + tl.arange(0, LANES)).to(tl.int64)
        square += _hand_out(b, b < end, each, to, limit, coefficients)
    return square


@jit()
def _forget(scale, worker_scale, blocks):
    """Zero all scales, by one program: all of c is residual then, which already contains the momentum."""
    nothing = tl.zeros([LANES], tl.float32)
    for first in range(0, blocks, LANES):
        b = first + tl.arange(0, LANES)
        tl.store(scale + b, nothing, mask=b < blocks)
        tl.store(worker_scale + b, nothing, mask=b < blocks)


@jit(do_not_specialize=("header_number", "header_tag", "header_flags", "coefficients_length"))
def finish_alone_kernel(
    partials, partials_stride, segments, scale, worker_scale, worker_settled, words, header, hold, flags, limit,
    coefficients, parts, blocks, NORM: tl.constexpr, TERNARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: as that of ``finish``.

    Bytes per block: 16 of partial sums in, 12 of scales out; where there is a limit 8 in.
    """
    p = tl.program_id(0).to(tl.int64)
    if p < parts:
        held = tl.load(hold)
        updates = segments.sums + UPDATE * segments.sums_stride
        if held == 0:
            to = scale, worker_scale, worker_settled
            groups = tl.cdiv(segments.singles, LANES)
            if p < groups:
                _, begin, end, longest, s = short_scales(p, segments, partials, partials_stride, NORM, TERNARY)
                update = _hand_out_shorts(begin, end, longest, s, to, limit, coefficients)
                tl.store(updates + p, io.tree_sum(update))
            elif p < groups + segments.longs:
                all_there, j, first, number = sum_piece(p, groups, segments, partials, partials_stride, TERNARY)
                if all_there:
                    s = long_scale(j, first, number, segments, NORM, TERNARY)
                    begin = tl.load(segments.start + j)
                    end = tl.load(segments.start + j + 1)
                    tl.store(updates + first, io.tree_sum(_hand_out_long(begin, end, s, to, limit, coefficients)))
        if io.is_last(segments.tickets, parts):
            own = header.flags | tl.load(header.pending)
            found = own | held
            if held == 0:
                found = own
                if limit.largest is not None:
                    size = tl.sqrt(io.ordered_sum(updates, 0, parts))
                    size = tl.where(own == 0, size, 0.0)  # else there is no update
                    found |= verdict(size, limit)
                if found != 0:
                    _forget(scale, worker_scale, blocks)
                tl.store(words + SIGNAL, signal_of(segments, parts).to(tl.int32, bitcast=True))
            tl.store(header.pending, 0)
            tl.store(words + STEP, step_of(header))
            tl.store(words + TAG, header.tag)
            tl.store(words + FLAGS, own)
            tl.store(flags, found)
    elif coefficients.groups is not None:
        renew_kernel(p - parts, coefficients, WIDTH)


@op(
    finish_alone_kernel,
    writes=(
        *("segments.measured", "segments.sums", "segments.tickets", "scale", "worker_scale", "worker_settled", "words"),
        *("header.counter", "header.pending", "flags", "limit.norm", "coefficients.table", "coefficients.moved"),
    ),
    derive={
        "TERNARY": ("constexpr", lambda partials: len(partials) > NONZERO),
        "WIDTH": ("constexpr", lambda: WIDTH),
        "parts": ("i32", lambda segments_sums: segments_sums.shape[1]),
        "blocks": ("i32", lambda scale: len(scale)),
        "programs": ("i32", lambda parts, coefficients_group_of: parts + programs_of(coefficients_group_of)),
        "num_warps": ("i32", lambda: 1),  # whose lanes are added without a barrier
    },
)
def finish_alone(
    partials: Partials, segments: Segments, norm: int, scale: PerBlock, worker_scale: PerBlock,
    worker_settled: PerBlock, words: Annotated[Flag, "1 WORDS"], header: Header, hold: Flag, flags: Flag,
    limit: Limit | None, coefficients: Coefficients | None = None,
) -> None:  # fmt: skip
    """Turn partial sums into scales, hand them to blocks, and say whether the step is skipped.

    What ``finish``, a server and ``receive`` do together, of one worker that compresses once. A step with any flag is
    skipped, and an update whose norm is beyond the limit, or no number, is refused: s := 0 turns all of c into
    residual, which already contains the momentum.

    Args:
        partials, segments: As of ``finish``.
        norm: One of ``SCALE_NORMS``' values.
        scale, worker_scale, worker_settled: Written: the result's, the residual's, and zeros.
        words: A header, of which STEP, TAG, FLAGS and SIGNAL are written.
        header: What is written there.
        hold: Where set headers and flags are written, but for SIGNAL, and nothing else.
        flags: Written: those of the header and of ``hold``, and VETO where the update is refused.
        limit: Its norm is written, 0 where there is no update; its ``coef`` is not read. None: any is let through.
        coefficients: Renewed on the way, or without ``groups`` a table of which UNBIAS1 is read where there is a limit.
    """
    renew_plainly(coefficients)
    step, own = count_up(header)
    if not hold:
        finish_segments(partials, segments, norm)
        scale.copy_(torch.repeat_interleave(segments.measured, segments.start.diff()))
        worker_scale.copy_(scale)
        worker_settled.zero_()
        words[:, SIGNAL] = norm_left(segments.sums).view(torch.int32)
    flags.copy_(own | hold)
    if not hold:
        if limit is not None and coefficients is not None:
            _sum_update(squares_by_block(scale, limit._replace(coef=coefficients.table)), segments)
            size = ordered_sum(segments.sums[UPDATE]).sqrt()
            flags |= judged(torch.where(own[0] == 0, size, 0.0), limit)
        for each in (scale, worker_scale):
            each.copy_(torch.where(flags == 0, each, 0.0))
    for word, value in ((STEP, step), (TAG, header.tag), (FLAGS, own)):
        words[:, word] = value


def _sum_update(square: Tensor, work: Segments) -> None:
    """Leave in ``sums`` what programs leave of the update's norm, of float64 [B]."""
    j = work.single.long()
    begin, length = work.start[j].long(), work.start[j + 1] - work.start[j]
    total = torch.zeros(len(j), dtype=torch.float64, device=square.device)
    for k in range(int(length.max()) if len(j) else 0):
        inside = k < length
        total += torch.where(inside, square[torch.where(inside, begin + k, begin)], 0.0)
    groups = -(-len(j) // LANES)
    padded = torch.nn.functional.pad(total, (0, groups * LANES - len(j))).view(groups, LANES)
    work.sums[UPDATE, :groups] = ordered_sum(padded)
    for q, (segment, _, _, first, _) in enumerate(work.pieces.tolist()):
        if q == first:
            work.sums[UPDATE, groups + first] = ordered_sum(square[work.start[segment] : work.start[segment + 1]])
