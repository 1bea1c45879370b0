"""Closes a round of Marsit's: what all headers agree on, a checksum, how far it goes, what may be left."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch

from . import block_io as io
from . import headers, rules
from .headers import Word
from .jit import jit, tl
from .nouns import Bits, CoefTable, Derived, Digest, Flag, Headers, Indices, PerBlock, stride
from .op import op
from .receive import sum_span

FLAGS = headers.FLAGS
LANES = 128  # blocks, or headers, at a time
SPAN = 2048  # of a row, in 8 bytes, that a program sums


class Received(NamedTuple):
    """What ends a round of Marsit's: all headers, what this rank's own says, and what was agreed on."""

    words: Annotated[Headers, "W WORDS"]
    """The headers; their FLAGS are 0 afterwards."""
    own_words: Annotated[Flag, "WORDS"]
    """This rank's, one of them or not; the same."""
    summed: Annotated[Bits, "rows _"]
    """What of the update, signs in messages or float32, the digest is to have now; of what is left
    out, ``apply_momentum`` adds the bits."""
    heads: Annotated[Bits, "rows _"] | None = None
    """Headers that have travelled apart from what is summed; None: none have."""

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides; ``length`` and ``head``: of a row, in 8 bytes."""
        return {
            "words_stride": ("i32", lambda words: stride(words)),
            "summed_stride": ("i32", lambda summed: stride(summed)),
            "heads_stride": ("i32", lambda heads: stride(heads)),
            "world_size": ("i32", lambda words: len(words)),
            "length": ("i32", lambda summed: summed.shape[1] // 8),
            "head": ("i32", lambda heads: 0 if heads is None else heads.shape[1] // 8),
        }


class Left(NamedTuple):
    """How far a round's global update v goes, and what of it each worker's compensation takes."""

    scale: PerBlock
    """eta_s; 0 where the round is skipped."""
    taken: PerBlock
    """s of ``local_update``."""
    limit: PerBlock
    """Its limit."""


@jit()
def _clear_flags(received):
    """Let the next round's updates set flags in these headers anew."""
    nothing = tl.zeros([LANES], tl.int32)
    for first in range(0, received.world_size, LANES):
        w = first + tl.arange(0, LANES)
        tl.store(received.words + w.to(tl.int64) * received.words_stride + FLAGS, nothing, mask=w < received.world_size)
    tl.store(received.own_words + FLAGS, 0)


@jit()
def close_round_kernel(
    received, coef, block_tensor, steps, most, hold, left, digest, flags, ticket, spans, blocks, blocks_per_program,
    programs, SIGNS: tl.constexpr,
):  # fmt: skip
    """Grid: rows of spans, each of SPAN times 8 bytes of what is summed and a share of the blocks.

    Bytes: what is summed in; per block 12 out.
    """
    p = tl.program_id(0).to(tl.int64)
    w = p // spans
    j = p % spans
    held = tl.load(hold)
    bad = headers.count_flags(received.words, received.words_stride, received.own_words, received.world_size)
    kept = (bad == 0) & (held == 0)
    row = (received.summed + w * received.summed_stride).to(tl.pointer_type(tl.int64), bitcast=True)
    summed_here = sum_span(row, j * SPAN, tl.minimum(j * SPAN + SPAN, received.length))
    if received.heads is not None:  # noqa: SIM102 - what there is none of must not be compiled
        if j == 0:
            heads = (received.heads + w * received.heads_stride).to(tl.pointer_type(tl.int64), bitcast=True)
            summed_here += sum_span(heads, 0, received.head)
    tl.atomic_add(digest.running, summed_here, sem="relaxed")
    end = tl.minimum((p + 1) * blocks_per_program, blocks)
    for begin in range(p * blocks_per_program, end, LANES):
        b = begin + tl.arange(0, LANES)
        mask = b < end
        k = coef + tl.load(block_tensor + b, mask=mask, other=0).to(tl.int64) * rules.COLUMNS
        s, bound = rules.global_step(k, steps, most)
        s = tl.where(kept, s, 0.0)
        tl.store(left.scale + b, s, mask=mask)
        if SIGNS:
            tl.store(left.taken + b, s, mask=mask)
        else:
            bound = tl.zeros([LANES], tl.float32) + most
            tl.store(left.taken + b, tl.zeros([LANES], tl.float32), mask=mask)
        tl.store(left.limit + b, tl.where(kept, bound, rules.INFINITY), mask=mask)
    if io.is_last(ticket, programs):
        of_all = tl.atomic_xchg(digest.running, 0)
        if digest.updates is not None:
            of_all += tl.load(digest.updates)
        tl.store(digest.sums, of_all)
        tl.store(flags, headers.flags_of(bad) | held)
        _clear_flags(received)


@op(
    close_round_kernel,
    writes=(
        *("received.words", "received.own_words", "left.scale", "left.taken", "left.limit"),
        *("digest.sums", "digest.running", "flags", "ticket"),
    ),
    derive={
        "spans": (
            "i32",
            lambda received_length, received_summed, blocks: max(
                -(-received_length // SPAN), -(-blocks // (len(received_summed) * LANES))
            ),
        ),
        "programs": ("i32", lambda received_summed, spans: len(received_summed) * spans),
        "blocks": ("i32", lambda left_scale: len(left_scale)),
        "blocks_per_program": ("i32", lambda blocks, programs: -(-blocks // programs)),
        "num_warps": ("i32", lambda: 1),
    },
)
def close_round(
    received: Received, coef: CoefTable, block_tensor: Indices, steps: float, most: float, signs: bool, hold: Flag,
    left: Left, digest: Digest, flags: Flag, ticket: Flag,
) -> None:  # fmt: skip
    """End a round (Marsit, Algorithm 1): whether all ranks take it, and what they will keep of v (lines 10 and 12).

    Where any header has a flag, or differs from this rank's in a checked word, the round is skipped: s := 0, and all of
    v stays. The compensation itself is formed by ``local_update``.

    Args:
        received: Headers, and what was agreed on.
        coef: LR * GLOBAL_RATIO * ``steps`` is how far each coordinate goes in a round of signs, eta_s.
        block_tensor: int32 [B].
        steps: Of the round.
        most: Largest compensation of a coordinate: of signs in units of eta_s, where that is above 0.
        signs: Whether they are what was agreed on; else nothing is taken of v, but by ``most``.
        hold: Flags that skip as well.
        left: Written.
        digest: Of one part; its sum, of ``summed`` and ``heads``, is written.
        flags: Written: ``agreed_flags``.
        ticket: 0; scratch.
    """
    words, own_words, summed, heads = received
    flags.copy_(headers.agreed_flags(words, own_words, hold))
    digest.sums.copy_(summed.view(torch.int64).sum())
    for more in (digest.updates, None if heads is None else heads.view(torch.int64).sum()):
        if more is not None:
            digest.sums.add_(more)
    words[:, Word.FLAGS] = 0
    own_words[Word.FLAGS] = 0
    s, bound = (values[:, 0] for values in rules.global_step(coef[block_tensor], steps, most))
    kept = flags == 0
    left.scale.copy_(torch.where(kept, s, 0.0))
    left.taken.copy_(left.scale if signs else torch.zeros_like(left.taken))
    left.limit.copy_(torch.where(kept, bound if signs else most, rules.INFINITY))
