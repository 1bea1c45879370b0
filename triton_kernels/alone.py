"""Ends the compression of a worker that is alone: there is no server, so that what it sends itself is the result."""

from __future__ import annotations

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
from .op import Doubles, Flag, Floats, Indices, PerBlock, Table, op
from .rules import COLUMNS, CORRECTION1, GROUP_COLUMNS, UNBIAS1

STEP, TAG, FLAGS, SIGNAL = headers.STEP, headers.TAG, headers.FLAGS, headers.SIGNAL
VETO = headers.VETO


@jit()
def _unbias(t, mask, groups, group_of, steps, coef):
    """UNBIAS1 of tensors in the step that is being taken: other programs of the launch are only writing it."""
    if groups is None:
        unbias = tl.load(coef + t.to(tl.int64) * COLUMNS + UNBIAS1, mask=mask, other=0.0)
    else:
        group = tl.load(group_of + t, mask=mask, other=0).to(tl.int64)
        beta = tl.load(groups + group * GROUP_COLUMNS + CORRECTION1, mask=mask, other=0.0)
        power1 = power(beta, tl.load(steps + t, mask=mask, other=0.0) + 1.0)
        _, _, _, exact = rules.coefficients(power1, power1, power1, power1 * 0.0)
        unbias = exact.to(tl.float32)
    return unbias.to(tl.float64)


@jit()
def _hand_out(b, mask, s, to, of_update):
    """Hands scales to blocks; returns what these add to the square of the update's norm, float64 [LANES]."""
    scale, worker_scale, worker_settled = to
    block_tensor, weight, groups, group_of, steps, coef = of_update
    tl.store(scale + b, s, mask=mask)
    tl.store(worker_scale + b, s, mask=mask)
    tl.store(worker_settled + b, tl.zeros([LANES], tl.float32), mask=mask)
    square = tl.zeros([LANES], tl.float64)
    if weight is not None:
        t = tl.load(block_tensor + b, mask=mask, other=0)
        root = tl.load(weight + b, mask=mask, other=0.0).to(tl.float64)
        added = rules.update_square(s.to(tl.float64), _unbias(t, mask, groups, group_of, steps, coef), root)
        square = tl.where(mask, added, 0.0)
    return square


@jit()
def _hand_out_shorts(begin, end, longest, s, to, of_update):
    """Hands short segments' scales to their blocks."""
    square = tl.zeros([LANES], tl.float64)
    for k in range(longest):
        square += _hand_out(begin + k, begin + k < end, s, to, of_update)
    return square


@jit()
def _hand_out_long(begin, end, s, to, of_update):
    """Hands a long segment's scale to its blocks."""
    square = tl.zeros([LANES], tl.float64)
    each = tl.zeros([LANES], tl.float32) + s
    for at in range(begin, end, LANES):
        b = (at + tl.arange(0, LANES)).to(tl.int64)
        square += _hand_out(b, b < end, each, to, of_update)
    return square


@jit()
def _forget(scale, worker_scale, blocks):
    """Zeroes all scales, by one program: all of c is residual then, which already contains the momentum."""
    nothing = tl.zeros([LANES], tl.float32)
    for first in range(0, blocks, LANES):
        b = first + tl.arange(0, LANES)
        tl.store(scale + b, nothing, mask=b < blocks)
        tl.store(worker_scale + b, nothing, mask=b < blocks)


@jit(do_not_specialize=("number", "tag", "told", "length"))
def finish_alone_kernel(
    partials, partials_stride, segment_start, single, singles, pieces, longs, count, sums, sums_stride, tickets,
    measured, scale, worker_scale, worker_settled, words, number, counter, tag, told, pending, hold, flags,
    block_tensor, weight, limit, update_norm, group_rows, lr, group_of, tensors, steps, mean_sq, coef, moved,
    moved_stride, length, parts, blocks,
    COUNTS: tl.constexpr, NORM: tl.constexpr, TERNARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: as that of ``finish``.

    Bytes per block: 16 of partial sums in, 12 of scales out; where there is a limit 8 in.
    """
    p = tl.program_id(0).to(tl.int64)
    if p < parts:
        held = tl.load(hold)
        if held == 0:
            to = scale, worker_scale, worker_settled
            of_update = block_tensor, weight, group_rows, group_of, steps, coef
            groups = tl.cdiv(singles, LANES)
            if p < groups:
                _, begin, end, longest, s = short_scales(
                    p, single, singles, segment_start, partials, partials_stride, count, measured, sums, sums_stride,
                    NORM, TERNARY,
                )  # fmt: skip
                update = _hand_out_shorts(begin, end, longest, s, to, of_update)
                tl.store(sums + UPDATE * sums_stride + p, io.tree_sum(update))
            elif p < groups + longs:
                all_there, j, first, pieces_of_it = sum_piece(
                    p, groups, pieces, partials, partials_stride, sums, sums_stride, tickets, TERNARY
                )
                if all_there:
                    s = long_scale(j, first, pieces_of_it, count, measured, sums, sums_stride, NORM, TERNARY)
                    begin = tl.load(segment_start + j)
                    update = _hand_out_long(begin, tl.load(segment_start + j + 1), s, to, of_update)
                    tl.store(sums + UPDATE * sums_stride + first, io.tree_sum(update))
        if io.is_last(tickets, parts):
            own = told | tl.load(pending)
            found = own | held
            if held == 0:
                found = own
                if limit is not None:
                    size = tl.sqrt(io.ordered_sum(sums + UPDATE * sums_stride, 0, parts))
                    size = tl.where(own == 0, size, 0.0)  # else there is no update
                    tl.store(update_norm, size)
                    if not size <= tl.load(limit):
                        found |= VETO
                if found != 0:
                    _forget(scale, worker_scale, blocks)
                signal = signal_of(sums, sums_stride, parts)
                tl.store(words + SIGNAL, signal.to(tl.int32, bitcast=True))
            tl.store(pending, 0)
            tl.store(words + STEP, step_of(number, counter, COUNTS))
            tl.store(words + TAG, tag)
            tl.store(words + FLAGS, own)
            tl.store(flags, found)
    elif group_rows is not None:
        table = steps, mean_sq, coef, moved, moved_stride, length
        renew_kernel(p - parts, group_rows, lr, group_of, tensors, *table, WIDTH)


@op(
    finish_alone_kernel,
    writes=(
        *("sums", "tickets", "measured", "scale", "worker_scale", "worker_settled", "words", "counter", "pending"),
        *("flags", "update_norm", "coef", "moved"),
    ),
    derive={
        "singles": ("i32", lambda single: len(single)),
        "longs": ("i32", lambda pieces: len(pieces)),
        "TERNARY": ("constexpr", lambda partials: len(partials) > NONZERO),
        "tensors": ("i32", lambda group_of: 0 if group_of is None else len(group_of)),
        "WIDTH": ("constexpr", lambda: WIDTH),
        "parts": ("i32", lambda sums: sums.shape[1]),
        "blocks": ("i32", lambda scale: len(scale)),
        "programs": ("i32", lambda parts, group_of: parts + programs_of(group_of)),
        "num_warps": ("i32", lambda: 1),  # whose lanes are added without a barrier
    },
)
def finish_alone(
    partials: Doubles, segment_start: Table, single: Table, pieces: Table, count: Doubles, norm: int,
    sums: Doubles, tickets: Table, measured: Floats, scale: PerBlock, worker_scale: PerBlock, worker_settled: PerBlock,
    words: Flag, number: int, counter: Flag | None, counts: bool, tag: int, told: int, pending: Flag, hold: Flag,
    flags: Flag, block_tensor: Indices, weight: PerBlock | None, limit: Doubles | None, update_norm: Doubles | None,
    group_rows: Doubles | None, lr: Floats | None, group_of: Table | None, steps: Doubles | None,
    mean_sq: Doubles | None, coef: Floats | None, moved: Floats | None = None, length: int = 1,
) -> None:  # fmt: skip
    """Turns partial sums into scales, hands them to blocks, and says whether the step is skipped.

    What ``finish``, a server and ``receive`` do together, of one worker that compresses once. A step with any flag is
    skipped, and an update whose norm is beyond the limit, or no number, is refused: s := 0 turns all of c into
    residual, which already contains the momentum.

    Args:
        partials, segment_start, single, pieces, count, sums, tickets: As of ``finish``.
        norm: One of ``SCALE_NORMS``' values.
        measured: float32 [segments], written: scales.
        scale, worker_scale, worker_settled: float32 [B], written: the result's, the residual's, and zeros.
        words: int32 [8], a header, of which STEP, TAG, FLAGS and SIGNAL are written.
        number, counter, counts, tag, told, pending: As of ``finish``.
        hold: int32 [1]; where set headers and flags are written, but for SIGNAL, and nothing else.
        flags: int32 [1], written: those of the header and of ``hold``, and VETO where the update is refused.
        block_tensor: int32 [B].
        weight: float32 [B], see ``receive``; None, as ``limit`` and ``update_norm``: any update is let through.
        limit: float64 [], the largest norm that is.
        update_norm: float64 [], written: the update's; 0 where there is none.
        group_rows, lr, group_of, steps, mean_sq: As of ``finish``; with them
        coef: float32 [tensors, columns of ``Coef``] is written as by that; else its UNBIAS1 is read where there is a
            limit.
        moved, length: As of ``finish``.
    """
    if group_rows is not None and group_of is not None and steps is not None and coef is not None:
        renew_plainly(group_rows, lr, group_of, steps, mean_sq, coef, moved, length)
    step = torch.tensor(number, dtype=torch.int32) if counter is None else counter
    if counter is not None and counts:
        counter += 1
    own = pending | told
    pending.zero_()
    if not hold:
        work = Segments(segment_start, single, pieces, sums, tickets)
        finish_segments(partials, work, count, norm, measured)
        scale.copy_(torch.repeat_interleave(measured, segment_start.diff()))
        worker_scale.copy_(scale)
        worker_settled.zero_()
        words[SIGNAL] = norm_left(sums).view(torch.int32)
    flags.copy_(own | hold)
    if not hold:
        if weight is not None and limit is not None and update_norm is not None and coef is not None:
            unbias = coef[:, UNBIAS1].double()[block_tensor]
            _sum_update(rules.update_square(scale.double(), unbias, weight.double()), work)
            update_norm.copy_(torch.where(own[0] == 0, ordered_sum(sums[UPDATE]).sqrt(), 0.0))
            flags |= (~(update_norm <= limit)).int() * int(VETO)
        for each in (scale, worker_scale):
            each.copy_(torch.where(flags == 0, each, 0.0))
    for word, value in ((STEP, step), (TAG, tag), (FLAGS, own)):
        words[word] = value


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
