"""Marsit's local update (Wu et al., DAC 2022). The kernel is never autotuned: it updates in place."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from . import block_io as io
from . import headers, rules
from . import user_tensors as users
from .eager import Tile, gather, only_live, pack, scaled, scatter, tiles
from .jit import jit, of, tl
from .nouns import (
    CoefTable,
    Counters,
    Derived,
    Flag,
    Floats,
    Headers,
    Packed,
    PerBlock,
    PerElement,
    Places,
    Tensors,
    stride,
)
from .op import op
from .rules import ONE_MINUS_BETA1

STEP, DIGEST, TAG, FLAGS, SIGNAL = headers.STEP, headers.DIGEST, headers.TAG, headers.FLAGS, headers.SIGNAL


class Chunks(NamedTuple):
    """The chunks worked on, ``first:last``."""

    first: int
    last: int


class Compensation(NamedTuple):
    """What a worker keeps from round to round, and what of it the last one has taken, until it is formed."""

    numbers: PerElement
    """c."""
    scale: PerBlock
    """s, how far the last global update went."""
    limit: PerBlock
    """Largest compensation of a coordinate; infinity: the paper's."""


class LocalUpdate(NamedTuple):
    """What a worker's own update is made of, and where it goes (``local_update``)."""

    factor: Annotated[Floats, "1"]
    """What gradients are multiplied with."""
    decays: bool
    """Whether any tensor has weight decay."""
    moves: bool = False
    """Whether it is a local step between two rounds: x = x - u, and no bits."""
    anchor: PerElement | None = None
    """Written where a round's first step ``moves``, else None: the parameters as they were, those that
    do not count included."""
    share: float = 1.0
    """What c is multiplied with where it is written: 1, or 1/W of what is summed over the ranks next."""


class ChunkHeaders(NamedTuple):
    """The headers of chunks, and what a round writes into them."""

    words: Annotated[Headers, "W WORDS"]
    """One that all chunks share has stride 0."""
    number: int
    """STEP."""
    tag: int
    """TAG."""
    flags: int
    """More FLAGS."""
    digest: Annotated[Counters, "1"]
    """``folded`` to DIGEST."""

    @staticmethod
    def derived() -> Derived:
        """Return what kernels find here besides."""
        return {"words_stride": ("i32", lambda words: stride(words))}


@jit()
def _write_header(words, header):
    """Write what changes from round to round; other programs set flags in it meanwhile."""
    tl.store(words + STEP, header.number)
    tl.store(words + DIGEST, headers.fold(tl.load(header.digest)))
    tl.store(words + TAG, header.tag)
    tl.store(words + SIGNAL, 0)
    tl.atomic_or(words + FLAGS, header.flags)


@jit()
def _clear(compensated, b):
    """Note that a block's compensation is formed."""
    tl.store(compensated.scale + b, 0.0)
    tl.store(compensated.limit + b, rules.INFINITY)


@jit(do_not_specialize=("header_number", "header_tag", "header_flags"))
def local_update_kernel(
    params_table, grads_table, tensors, places, exp_avg, exp_avg_sq, compensated, bits, bits_stride, coef, step, hold,
    inside, inside_row, header, first_block, blocks_per_chunk,
    PARAMS: tl.constexpr, GRADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of the chunks worked on.

    Bytes per element: the gradient, 8 for c, 8 each for m and v, 1/8 each way for bits; the parameter where DECAYS,
    twice where MOVES; 4 for the anchor. The first block of each chunk writes its header.
    """
    b = tl.program_id(0).to(tl.int64) + first_block
    i = io.elements(BLOCK_SIZE)
    row = tl.load(places.live_row + b)
    mask = io.counting(places.live, row, i, BLOCK_SIZE)
    t, k = io.tensor_of(b, places.block_tensor, coef)
    byte = io.bytes_at(bits, bits_stride, b, blocks_per_chunk, BLOCK_SIZE)
    at = b * BLOCK_SIZE + i
    source = users.place_of(grads_table, tensors, t, places.block_start, b, BLOCK_SIZE)
    if GRADS % users.ALIGNED > users.FP16:  # of several dtypes: a load with branches, over which nothing else is kept
        g = users.load(source, i, mask, row, GRADS)
    signs = tl.load(byte)
    sent = io.scaled(signs, signs, tl.load(compensated.scale + b), False)
    kept = rules.compensation(tl.load(compensated.numbers + at), sent, tl.load(compensated.limit + b))
    kept = tl.where(mask, kept, 0.0)
    if GRADS % users.ALIGNED <= users.FP16:
        g = users.load(source, i, mask, row, GRADS)
    g = rules.counted(g, k) * tl.load(step.factor)
    d = g * of(k, ONE_MINUS_BETA1)
    x = g
    if step.DECAYS or (step.MOVES and step.anchor is None):
        own = users.place_of(params_table, tensors, t, places.block_start, b, BLOCK_SIZE)
        x = users.load(own, i, mask, row, PARAMS)
    if step.DECAYS and exp_avg_sq is None:
        d = rules.decaying(d, x, k)
    m = d
    old_m = d
    if exp_avg is not None:
        old_m = tl.load(exp_avg + at)
        m = rules.accumulated(old_m, d, k)
    v = d
    old_v = d
    if exp_avg_sq is not None:
        old_v = tl.load(exp_avg_sq + at)
        v = rules.variance(old_v, g, k)
        u = rules.step_of(rules.preconditioned(m, v, k, False), k)
        if step.DECAYS:
            u = rules.decoupled(u, x, k)
    else:
        u = rules.step_of(m, k)
    u = tl.where(mask, u, 0.0)
    finite = rules.finite(kept + u)
    if exp_avg_sq is not None:
        finite = finite & rules.finite(v)
    held = tl.load(hold) != 0
    bad = io.any_of(~finite)
    tl.debug_barrier()  # all warps have read what the last round has taken
    if (bad != 0) & (not held):
        tl.atomic_or(header.words + b // blocks_per_chunk * header.words_stride + FLAGS, io.NONFINITE)
    counts = finite & (not held)
    u = tl.where(counts, u, 0.0)
    c = kept + u
    tl.store(compensated.numbers + at, c * step.share)
    if exp_avg is not None:
        tl.store(exp_avg + at, tl.where(counts, m, old_m))
    if exp_avg_sq is not None:
        tl.store(exp_avg_sq + at, tl.where(counts, v, old_v))
    if step.MOVES:
        # Looked up again, so that no register holds it meanwhile; so are the parameters where they are kept.
        place = users.place_of(params_table, tensors, t, places.block_start, b, BLOCK_SIZE)
        if step.anchor is not None:
            x = users.keep(place, b, i, step.anchor, inside, inside_row, PARAMS, BLOCK_SIZE)
        users.store(place, i, x - u, None, mask, row, PARAMS)
        _clear(compensated, b)
    else:
        _clear(compensated, b)  # in either branch, where no register spills for it
        tl.store(byte, io.bytes_of(c >= 0))
        if b % blocks_per_chunk == 0:
            _write_header(header.words + b // blocks_per_chunk * header.words_stride, header)


@op(
    local_update_kernel,
    writes=(
        *("params", "exp_avg", "exp_avg_sq", "compensated.numbers", "compensated.scale", "compensated.limit", "bits"),
        *("step.anchor", "header.words"),
    ),
    derive={
        "first_block": ("i32", lambda chunks_first, blocks_per_chunk: chunks_first * blocks_per_chunk),
        "last_block": ("i32", lambda chunks_last, blocks_per_chunk: chunks_last * blocks_per_chunk),
        "programs": ("i32", lambda first_block, last_block: last_block - first_block),
    },
)
def local_update(
    params: Tensors, grads: Tensors, places: Places, chunks: Chunks, exp_avg: PerElement | None,
    exp_avg_sq: PerElement | None, compensated: Compensation, bits: Packed, coef: CoefTable, step: LocalUpdate,
    hold: Flag, header: ChunkHeaders,
) -> None:  # fmt: skip
    """Add a worker's own update to what compression has left (Marsit, Algorithm 1, lines 1, 5 and 10).

        c = clip(c - s*sign(bits), limit) + u;  bits = c >= 0

    with u of SGD, m = momentum*m + g + wd*x, u = lr*m; or, with a variance, of AdamW. The compensation
    of the last round (line 10) is deferred: it is formed when ``c`` is read again, here. An element whose
    gradient exceeds GRAD_LIMIT, or whose update is not finite, has none, keeps its moments, and sets its chunk's flag.
    Unless it ``moves``, each chunk's header is written as well: all but FLAGS anew.

    Other arguments as for ``apply_momentum``.

    Args:
        params: Read where ``step.decays``, written where it ``moves``.
        grads: As for ``momentum_compress``.
        places: Elements that do not count get c = 0.
        chunks: Others stay.
        exp_avg: m, float32 [P], read and written; None: u = lr*g.
        exp_avg_sq: v, float32 [P], read and written; None: SGD.
        compensated: Read and written; then the scale is 0, and the limit infinity.
        bits: Signs of the last global update, overwritten by those of c, unless it ``moves``.
        coef: STEP_SIZE is lr (SGD), lr / (1 - beta1^t) (AdamW).
        step: What is added, and where it goes.
        hold: Where set u = 0 and moments stay.
        header: Written unless it ``moves``; ``NONFINITE`` is set where it happened.
    """
    numbers, scale, limit = compensated
    words, number, tag, more, digest = header
    if not step.moves:
        own = words[chunks.first : chunks.last] if words.stride(0) else words[:1]
        for word, value in ((STEP, number), (DIGEST, headers.folded(digest)), (TAG, tag), (SIGNAL, 0)):
            own[:, word] = value
        own[:, FLAGS] |= more
    flat = places.rows(numbers[: len(scale) * places.block_size])
    every = tiles(places.sizes, len(bits), places.block_size, numbers.device, len(places.block_tensor))
    of_a_chunk = len(every) // len(bits)
    for tile in every[chunks.first * of_a_chunk : chunks.last * of_a_chunk]:
        b = tile.blocks
        own_bits = bits[tile.chunk, tile.bytes]
        sent = scaled(own_bits, scale[b, None])
        kept = only_live(rules.compensation(flat[b], sent, limit[b, None]), places, tile)
        k = coef[places.block_tensor[b]]
        g = rules.counted(only_live(gather(grads, tile, places.block_size), places, tile), k) * step.factor
        x = gather(params, tile, places.block_size) if step.decays or step.moves else None
        if step.anchor is not None and x is not None:
            places.rows(step.anchor[: len(scale) * places.block_size])[b] = x
        decaying = only_live(x, places, tile) if step.decays and x is not None else None
        m, v, u = _update(g, decaying, exp_avg, exp_avg_sq, tile, k)
        u = only_live(u, places, tile)
        finite = rules.finite(kept + u) if v is None else rules.finite(kept + u) & rules.finite(v)
        counts = torch.zeros_like(finite) if hold else finite
        if not (hold or finite.all()):
            words[tile.chunk, FLAGS] |= io.NONFINITE
        u = tl.where(counts, u, 0.0)
        c = kept + u
        flat[b], scale[b], limit[b] = c * step.share, 0.0, rules.INFINITY
        for buffer, new in ((exp_avg, m), (exp_avg_sq, v)):
            if buffer is not None and new is not None:
                old = places.rows(buffer)[b]
                old.copy_(tl.where(counts, new, old))
        if step.moves:
            assert x is not None
            scatter(x - u, params, tile)
        else:
            pack(c.reshape(-1), own_bits)


def _update(
    g: Tensor, x: Tensor | None, exp_avg: Tensor | None, exp_avg_sq: Tensor | None, tile: Tile, k: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return new moments and the update of a tile; write nothing."""
    b, width = tile.blocks, g.shape[1]
    d = g * of(k, ONE_MINUS_BETA1)
    if x is not None and exp_avg_sq is None:
        d = rules.decaying(d, x, k)
    m = d if exp_avg is None else rules.accumulated(exp_avg.view(-1, width)[b], d, k)
    if exp_avg_sq is None:
        return m, None, rules.step_of(m, k)
    v = rules.variance(exp_avg_sq.view(-1, width)[b], g, k)
    u = rules.step_of(rules.preconditioned(m, v, k, False), k)
    return m, v, u if x is None else rules.decoupled(u, x, k)
