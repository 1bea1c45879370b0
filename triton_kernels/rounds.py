"""Closes a round of Marsit's: what all headers agree on, a checksum, how far it goes, what may be left."""

from __future__ import annotations

import torch

from . import block_io as io
from . import headers, rules
from .headers import Word
from .jit import jit, tl
from .nouns import Bits, Counters, Flag, Floats, Headers, Indices, PerBlock
from .op import op
from .receive import sum_span

FLAGS = headers.FLAGS
LANES = 128  # blocks, or headers, at a time
SPAN = 2048  # of a row, in 8 bytes, that a program sums


@jit()
def _clear_flags(words, words_stride, own_words, world_size):
    """The next round's updates set flags in these headers anew."""
    nothing = tl.zeros([LANES], tl.int32)
    for first in range(0, world_size, LANES):
        w = first + tl.arange(0, LANES)
        tl.store(words + w.to(tl.int64) * words_stride + FLAGS, nothing, mask=w < world_size)
    tl.store(own_words + FLAGS, 0)


@jit()
def close_round_kernel(
    words, words_stride, own_words, summed, summed_stride, coef, block_tensor, steps, most, hold, scale, taken, limit,
    digest, flags, total, ticket, updates, heads, heads_stride, head, world_size, spans, length, blocks,
    blocks_per_program, programs, SIGNS: tl.constexpr,
):  # fmt: skip
    """Grid: rows of spans, each of SPAN times 8 bytes of what is summed and a share of the blocks.

    Bytes: what is summed in; per block 12 out.
    """
    p = tl.program_id(0).to(tl.int64)
    w = p // spans
    j = p % spans
    held = tl.load(hold)
    bad = headers.count_flags(words, words_stride, own_words, world_size)
    kept = (bad == 0) & (held == 0)
    row = (summed + w * summed_stride).to(tl.pointer_type(tl.int64), bitcast=True)
    summed_here = sum_span(row, j * SPAN, tl.minimum(j * SPAN + SPAN, length))
    if heads is not None:  # noqa: SIM102 - what there is none of must not be compiled
        if j == 0:
            summed_here += sum_span((heads + w * heads_stride).to(tl.pointer_type(tl.int64), bitcast=True), 0, head)
    tl.atomic_add(total, summed_here, sem="relaxed")
    end = tl.minimum((p + 1) * blocks_per_program, blocks)
    for begin in range(p * blocks_per_program, end, LANES):
        b = begin + tl.arange(0, LANES)
        mask = b < end
        k = coef + tl.load(block_tensor + b, mask=mask, other=0).to(tl.int64) * rules.COLUMNS
        s, bound = rules.global_step(k, steps, most)
        s = tl.where(kept, s, 0.0)
        tl.store(scale + b, s, mask=mask)
        if SIGNS:
            tl.store(taken + b, s, mask=mask)
        else:
            bound = tl.zeros([LANES], tl.float32) + most
            tl.store(taken + b, tl.zeros([LANES], tl.float32), mask=mask)
        tl.store(limit + b, tl.where(kept, bound, rules.INFINITY), mask=mask)
    if io.is_last(ticket, programs):
        of_all = tl.atomic_xchg(total, 0)
        if updates is not None:
            of_all += tl.load(updates)
        tl.store(digest, of_all)
        tl.store(flags, headers.flags_of(bad) | held)
        _clear_flags(words, words_stride, own_words, world_size)


@op(
    close_round_kernel,
    writes=("words", "own_words", "scale", "taken", "limit", "digest", "flags", "total", "ticket"),
    derive={
        "world_size": ("i32", lambda words: len(words)),
        "length": ("i32", lambda summed: summed.shape[1] // 8),
        "head": ("i32", lambda heads: 0 if heads is None else heads.shape[1] // 8),
        "spans": ("i32", lambda length, summed, blocks: max(-(-length // SPAN), -(-blocks // (len(summed) * LANES)))),
        "programs": ("i32", lambda summed, spans: len(summed) * spans),
        "blocks": ("i32", lambda scale: len(scale)),
        "blocks_per_program": ("i32", lambda blocks, programs: -(-blocks // programs)),
        "num_warps": ("i32", lambda: 1),
    },
)
def close_round(
    words: Headers, own_words: Flag, summed: Bits, coef: Floats, block_tensor: Indices, steps: float, most: float,
    signs: bool, hold: Flag, scale: PerBlock, taken: PerBlock, limit: PerBlock, digest: Counters,
    flags: Flag, total: Counters, ticket: Flag, updates: Counters | None = None, heads: Bits | None = None,
) -> None:  # fmt: skip
    """Ends a round (Marsit, Algorithm 1): whether all ranks take it, and what they will keep of v (lines 10 and 12).

    Where any header has a flag, or differs from this rank's in a checked word, the round is skipped: s := 0, and all of
    v stays. The compensation itself is formed by ``local_update``.

    Args:
        words: int32 [W, 8], the headers; their FLAGS are 0 afterwards.
        own_words: int32 [8], this rank's, one of them or not; the same.
        summed: uint8 [rows, n], what of the update, signs in messages or float32, ``digest`` is to have now; of what
            is left out, ``apply_momentum`` adds the bits.
        coef: LR * GLOBAL_RATIO * ``steps`` is how far each coordinate goes in a round of signs, eta_s.
        block_tensor: int32 [B].
        steps: Of the round.
        most: Largest compensation of a coordinate: of signs in units of eta_s, where that is above 0.
        signs: Whether they are what was agreed on; else nothing is taken of v, but by ``most``.
        hold: int32 [1], flags that skip as well.
        scale: float32 [B], written: eta_s.
        taken: float32 [B], written: s of ``local_update``.
        limit: float32 [B], written: its limit.
        digest: int64 [1], written: the wrapping sum of the 8-byte words of ``summed`` and ``heads``, and ``updates``.
        flags: int32 [1], written: ``agreed_flags``.
        total: int64 [1], 0; scratch.
        ticket: int32 [1], 0; scratch.
        updates: Done so far, int64 []; None: nobody counts.
        heads: uint8 [rows, m], headers that have travelled apart from what is summed; None: none have.
    """
    flags.copy_(headers.agreed_flags(words, own_words, hold))
    digest.copy_(summed.view(torch.int64).sum())
    for more in (updates, None if heads is None else heads.view(torch.int64).sum()):
        if more is not None:
            digest += more
    words[:, Word.FLAGS] = 0
    own_words[Word.FLAGS] = 0
    s, bound = (values[:, 0] for values in rules.global_step(coef[block_tensor], steps, most))
    kept = flags == 0
    scale.copy_(torch.where(kept, s, 0.0))
    taken.copy_(scale if signs else torch.zeros_like(taken))
    limit.copy_(torch.where(kept, bound if signs else most, rules.INFINITY))
