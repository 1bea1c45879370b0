"""Launches Marsit's kernels; see ``launch``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from .launch import block_starts, block_tables, launch, pointer_table
from .marsit_twins import threshold_of, trailing_zeros

WORDS = 512  # of a program


def local_update(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    first: int,
    last: int,
    exp_avg: Tensor | None,
    exp_avg_sq: Tensor | None,
    compensated: Tensor,
    scale: Tensor,
    limit: Tensor,
    bits: Tensor,
    coef: Tensor,
    block_tensor: Tensor,
    live: Tensor,
    live_row: Tensor,
    factor: Tensor,
    hold: Tensor,
    decays: bool,
    moves: bool,
    flags: Tensor,
) -> None:
    """See ``marsit_kernels.local_update``."""
    device, blocks = compensated.device, len(live_row)
    per_chunk = blocks // len(bits)
    targets, sources = pointer_table(params, device), pointer_table(grads, device, sizes)
    launch(
        "local_update",
        (last - first) * per_chunk,
        targets.table,
        sources.table,
        len(params),
        compensated if exp_avg is None else exp_avg,
        compensated if exp_avg_sq is None else exp_avg_sq,
        compensated,
        scale,
        limit,
        bits,
        bits.stride(0),
        coef,
        block_tensor,
        block_starts(sizes, blocks, block_size, device),
        live,
        live_row,
        factor,
        hold,
        flags,
        flags.stride(0),
        first * per_chunk,
        per_chunk,
        DTYPE=targets.dtype,
        ALIGNED=targets.aligned,
        GRAD_DTYPE=sources.dtype,
        GRAD_ALIGNED=sources.aligned,
        MOMENTUM=exp_avg is not None,
        ADAM=exp_avg_sq is not None,
        DECAYS=decays,
        MOVES=moves,
        BLOCK=block_size,
    )


def merge_signs(
    bits: Tensor,
    arrived_bits: Tensor,
    threshold: int,
    seed: int,
    words: Tensor,
    arrived_words: Tensor,
    checked: int,
    flags: int,
    mismatch: int,
) -> None:
    """See ``marsit_kernels.merge_signs``."""
    own, arrived = _words(bits), _words(arrived_bits)
    programs = -(-own.shape[1] // WORDS)
    launch(
        "merge_signs",
        len(bits) * programs,
        own,
        _quads(own.stride(0)),
        arrived,
        _quads(arrived.stride(0)),
        _quads(own.shape[1]),
        programs,
        threshold,
        trailing_zeros(threshold),
        seed,
        words,
        words.stride(0),
        arrived_words,
        arrived_words.stride(0),
        checked,
        flags,
        mismatch,
        BLOCK=WORDS,
    )


def pick_owned(bits: Tensor, rank: int, seed: int, owners: Tensor, picked: Tensor) -> None:
    """See ``marsit_kernels.pick_owned``."""
    own = _words(bits)
    world_size = len(bits)
    launch(
        "pick_owned",
        -(-own.shape[1] // WORDS),
        own,
        _quads(own.stride(0)),
        _quads(own.shape[1]),
        rank,
        world_size,
        seed,
        _thresholds(world_size, bits.device),
        _words(owners),
        _words(picked),
        BLOCK=WORDS,
    )


def place_owned(gathered: Tensor, owners: Tensor, bits: Tensor) -> None:
    """See ``marsit_kernels.place_owned``."""
    theirs, own = _words(gathered), _words(bits)
    programs = -(-own.shape[1] // WORDS)
    launch(
        "place_owned",
        len(bits) * programs,
        theirs,
        _quads(theirs.stride(0)),
        _words(owners),
        _quads(own.shape[1]),
        len(bits),
        own,
        _quads(own.stride(0)),
        BLOCK=WORDS,
    )


def add_values(
    params: Sequence[Tensor],
    sizes: Sequence[int],
    block_size: int,
    values: Tensor,
    replaces: bool,
    live: Tensor,
    live_row: Tensor,
    skip: Tensor,
    rounding: Tensor | None,
) -> None:
    """See ``marsit_kernels.add_values``."""
    pointers, blocks = pointer_table(params, values.device), len(live_row)
    table = block_tables(sizes, blocks, block_size, values.device)
    launch(
        "add_values",
        blocks,
        pointers.table,
        len(params),
        values,
        table.tensor,
        table.start,
        live,
        live_row,
        skip,
        values if rounding is None else rounding,
        DTYPE=pointers.dtype,
        ALIGNED=pointers.aligned,
        REPLACES=replaces,
        ROUNDING=rounding is not None,
        BLOCK=block_size,
    )


def _words(bits: Tensor) -> Tensor:
    """uint8 [n, 4 m] as uint32 [n, m], the same memory."""
    return bits.view(torch.uint32)


def _quads(words: int) -> int:
    quads, rest = divmod(words, 4)
    if rest:
        raise ValueError(f"packed bits must have rows of a multiple of 16 bytes, got {4 * words}")
    return quads


@cache  # CUDA graphs read it as long as they are replayed
def _thresholds(world_size: int, device: torch.device) -> Tensor:
    values = [threshold_of(world_size - shift) if world_size - shift > 1 else 0 for shift in range(world_size)]
    return torch.tensor(values, dtype=torch.int64, device=device)
