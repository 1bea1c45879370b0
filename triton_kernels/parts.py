"""Closes a step that one rank alone has made in parts: flags of all, and the guard's verdict over all."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from . import block_io as io
from . import headers
from .finish import ordered_sum
from .jit import jit, tl
from .limit import VETO, judged, squares_by_block, squares_of, verdict
from .nouns import Doubles, Flag, Floats, Limit, PerBlock, Table
from .op import op
from .receive import zero

KNOWN = headers.KNOWN
LANES = io.SUM_LANES  # blocks, or parts, at a time
SPAN = 2048  # blocks of a program


@jit()
def _union(found, parts):
    """Unite the flags of all parts."""
    union = 0
    for first in range(0, parts, LANES):
        part = first + tl.arange(0, LANES)
        each = tl.load(found + part, mask=part < parts, other=0)
        for bit in tl.static_range(KNOWN):
            union |= tl.max((each >> bit) & 1, axis=0) << bit
    return union


@jit()
def _skip(found, parts, flags, scale, blocks, kept, kept_blocks):
    """Skip the parts that have not been."""
    for part in range(parts):
        own = tl.load(found + part)
        tl.store(found + part, own | flags)
        if own == 0:
            zero(scale + part * blocks, blocks)
            zero(kept + part * kept_blocks, kept_blocks)


@jit()
def close_parts_kernel(
    found, parts, scale, kept, flags, ticket, limit, squares, blocks, kept_blocks, programs,
):  # fmt: skip
    """Grid: spans of SPAN blocks where there is a limit, else 1. Bytes per block: where there is a limit 16 in."""
    p = tl.program_id(0).to(tl.int64)
    all_flags = _union(found, parts)
    if limit.largest is not None:
        square = tl.zeros([LANES], tl.float64)
        end = tl.minimum((p + 1) * SPAN, blocks)
        for begin in range(p * SPAN, end, LANES):
            b = begin + tl.arange(0, LANES)
            s = tl.load(scale + b, mask=b < end, other=0.0)
            square += squares_of(s, b, b < end, limit)
        tl.store(squares + p, io.tree_sum(square))
    if io.is_last(ticket, programs):
        if limit.largest is not None:
            size = tl.sqrt(io.ordered_sum(squares, 0, programs))
            size = tl.where(all_flags == 0, size, 0.0)  # else there is no update
            if verdict(size, limit) != 0:  # a select would take two registers more (sm_100)
                all_flags |= VETO
        if all_flags != 0:
            _skip(found, parts, all_flags, scale, blocks // parts, kept, kept_blocks // parts)
        tl.store(flags, all_flags)


def programs_of(scale: Tensor) -> int:
    """Return how many programs measure an update with these blocks."""
    return -(-len(scale) // SPAN)


@op(
    close_parts_kernel,
    writes=("found", "scale", "kept", "flags", "ticket", "limit.norm", "squares"),
    derive={
        "parts": ("i32", lambda found: len(found)),
        "blocks": ("i32", lambda scale: len(scale)),
        "kept_blocks": ("i32", lambda kept: kept.numel()),
        "programs": ("i32", lambda scale, limit_largest: 1 if limit_largest is None else programs_of(scale)),
        "num_warps": ("i32", lambda: 1),
    },
)
def close_parts(
    found: Annotated[Table, "parts"], scale: PerBlock, kept: Annotated[Floats, "_ | _ _"], flags: Flag, ticket: Flag,
    limit: Limit | None = None, squares: Annotated[Doubles, "programs"] | None = None,
) -> None:  # fmt: skip
    """Skip all parts of a step where any was, or where together they are an update beyond the limit, or no number.

    The result of a part that is skipped becomes zero, and nothing is lost; one that was skipped already stays.

    Args:
        found: Flags of each; all have those of all afterwards.
        scale: The result's, of equal parts one after the other; zero where a part is skipped now.
        kept: Scales of what the side that made the result has kept, in parts likewise; zero with it.
        flags: Written: those of all, and VETO where the update is refused.
        ticket: 0; scratch.
        limit: See ``receive``; its norm is 0 where there is no update.
        squares: ``programs_of``; scratch.
    """
    flags.copy_(headers.union(found))
    if limit is not None and squares is not None:
        square = squares_by_block(scale, limit)
        padded = torch.nn.functional.pad(square, (0, len(squares) * SPAN - len(square)))
        squares.copy_(ordered_sum(padded.view(len(squares), SPAN)))
        flags |= judged(torch.where(flags[0] == 0, ordered_sum(squares).sqrt(), 0.0), limit)
    stays = (found != 0) | (flags == 0)
    for each in (scale, kept):
        by_part = each.view(len(found), -1)
        by_part.copy_(torch.where(stays[:, None], by_part, 0.0))
    found |= flags
