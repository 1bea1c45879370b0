"""The plain-torch twins of Marsit (Wu et al., DAC 2022): the local update, and the operator on packed bits.

Bits are uint8 [W, stride], a row for each chunk. Random bits are functions of a 31-bit seed and of
the place in the row, nothing else: every run and every backend draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .coefficients import Coef
from .cpu_tiles import Tile, gather, scatter, tiles
from .eager import column, counted, denom, only_live, round_bfloat16, signs
from .rules import GOLDEN, WORD, mixed
from .twins import pack

NONFINITE = 1  # what ``local_update`` sets in the flags of a chunk
DIGITS = 32  # of a threshold: probabilities are multiples of 2^-32

_WORDS = {"cpu": 1 << 11}
"""Words that a Bernoulli draw works on at a time, by device type: what fits a cache."""


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
    """A worker's own update, on top of what compression has left (Marsit, Algorithm 1, lines 1, 5 and 10).

        c = clip(c - s*sign(bits), limit) + u;  bits = c >= 0

    with u of SGD, m = momentum*m + g + wd*x, u = lr*m; or, with a variance, of AdamW. The compensation
    of the last round (line 10) is deferred: it is formed when ``c`` is read again. An element whose
    gradient exceeds GRAD_LIMIT, or whose update is not finite, has none, keeps its moments, and sets its chunk's flag.

    Args:
        params: Parameters of any float dtype, dense; read where ``decays``, written where ``moves``.
        grads: Gradients of any float dtype, dense; empty is zeros.
        sizes: Elements of each.
        block_size: Elements per block.
        first, last: Chunks ``first:last`` are worked on.
        exp_avg: m, float32 [P], read and written; None: u = lr*g.
        exp_avg_sq: v, float32 [P], read and written; None: SGD.
        compensated: c, float32 [>= P], read and written.
        scale: s, float32 [B]: how far the last global update went.
        limit: Largest compensation of a coordinate, float32 [B]; infinity: the paper's.
        bits: uint8 [W, stride]: signs of the last global update, overwritten by those of c, unless ``moves``.
        coef: float32 [tensors, columns of ``Coef``]; STEP_SIZE is lr (SGD), lr / (1 - beta1^t) (AdamW).
        block_tensor: int32 [B].
        live, live_row: Elements that count; others get c = 0.
        factor: float32 [1], what gradients are multiplied with.
        hold: int32 [1]; where set u = 0 and moments stay.
        decays: Whether any tensor has weight decay.
        moves: A local step between two rounds: x = x - u, and no bits.
        flags: int32 [W], ``NONFINITE`` is set where it happened.
    """
    flat = compensated[: len(scale) * block_size].view(-1, block_size)
    every = tiles(sizes, len(bits), block_size, compensated.device, len(block_tensor))
    of_a_chunk = len(every) // len(bits)
    for tile in every[first * of_a_chunk : last * of_a_chunk]:
        b = tile.blocks
        own_bits = bits[tile.chunk, tile.bytes]
        most = limit[b][:, None]
        kept = (flat[b] - signs(own_bits, len(most)) * scale[b][:, None]).clamp(-most, most)
        kept = only_live(kept + 0.0, live, live_row, tile)  # which zero a limit of zero leaves is hardware's affair
        k = coef[block_tensor[b]]
        g = counted(only_live(gather(grads, tile, block_size), live, live_row, tile), k) * factor
        x = gather(params, tile, block_size) if decays or moves else None
        decaying = only_live(x, live, live_row, tile) if decays and x is not None else None
        m, v, u = _update(g, decaying, exp_avg, exp_avg_sq, tile, k)
        u = only_live(u, live, live_row, tile)
        c = kept + u
        finite = torch.isfinite(c) if v is None else torch.isfinite(c) & torch.isfinite(v)
        counts = torch.zeros_like(finite) if hold else finite
        if not (hold or finite.all()):
            flags[tile.chunk] |= NONFINITE
        u = torch.where(counts, u, 0.0)
        flat[b] = kept + u
        for buffer, new in ((exp_avg, m), (exp_avg_sq, v)):
            if buffer is not None and new is not None:
                old = buffer.view(-1, block_size)[b]
                old.copy_(torch.where(counts, new, old))
        if moves:
            assert x is not None
            scatter(x - u, params, tile)
        else:
            pack(flat[b].reshape(-1), own_bits)


def _update(
    g: Tensor, x: Tensor | None, exp_avg: Tensor | None, exp_avg_sq: Tensor | None, tile: Tile, k: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """New moments and the update of a tile, nothing written."""
    b, width = tile.blocks, g.shape[1]
    d = g * column(k, Coef.ONE_MINUS_BETA1)
    if exp_avg_sq is None:
        if x is not None:
            d = d + x * column(k, Coef.WEIGHT_DECAY)
        m = d if exp_avg is None else exp_avg.view(-1, width)[b] * column(k, Coef.BETA1) + d
        return m, None, m * column(k, Coef.STEP_SIZE)
    assert exp_avg is not None
    m = exp_avg.view(-1, width)[b] * column(k, Coef.BETA1) + d
    v = exp_avg_sq.view(-1, width)[b] * column(k, Coef.BETA2) + g * column(k, Coef.ONE_MINUS_BETA2) * g
    u = m / denom(v, k, False) * column(k, Coef.STEP_SIZE)
    if x is not None:
        u = u + x * (column(k, Coef.LR) * column(k, Coef.WEIGHT_DECAY))
    return m, v, u


def bernoulli(threshold: int, seed: int, words: Tensor) -> Tensor:
    """32 draws in each word, int64: bits that are 1 with probability ``threshold`` / 2^32, exactly.

    By the binary digits of the probability, from the last: or-ing with a fair bit halves the
    distance to 1, and-ing halves the probability. Digits that are zero at the end cost nothing.

    Args:
        threshold: In [0, 2^32).
        seed: 31 bits.
        words: Places, int64 [n] in [0, 2^32).
    """
    first, drawn = trailing_zeros(threshold), torch.zeros_like(words)
    digits = torch.arange(first + 1, DIGITS + 1, device=words.device)
    fair = mixed(words ^ mixed((seed + digits * GOLDEN) & WORD)[:, None])
    for digit, bits in enumerate(fair, start=first):
        drawn = drawn | bits if threshold >> digit & 1 else drawn & bits
    return drawn


def trailing_zeros(threshold: int) -> int:
    """How many of a threshold's last digits cost nothing."""
    return (threshold & -threshold).bit_length() - 1 if threshold else DIGITS


def hashed(word: int) -> int:
    """``arithmetic.mixed`` of one number, on the host, without the top bit: a seed."""
    return mixed(word & WORD) & 0x7FFFFFFF


def _as_words(bits: Tensor) -> Tensor:
    """uint8 [..., 4 n] as int64 [..., n] in [0, 2^32), a copy."""
    return bits.contiguous().view(torch.int32).to(torch.int64) & WORD


def _as_bytes(words: Tensor) -> Tensor:
    return words.to(torch.int32).view(torch.uint8)


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
    """Marsit's operator on packed bits: v = (v AND v*) OR ((v XOR v*) AND b), b the transient vector (eq. 2).

    Where both agree it stays so; where not, b is the own bit with probability threshold / 2^32. The
    headers travel along: a checked word that differs is noted in the last word, and sets a flag;
    flags and notes are united.

    Args:
        bits: v*, own signs, uint8 [n, stride], rows of a multiple of 16 bytes; overwritten by the result.
        arrived_bits: v, uint8 [n, stride]: those of all workers before this one.
        threshold: round(2^32 / j), with this worker the j-th.
        seed: 31 bits, others for each merge of the same elements.
        words: int32 [n, 8], own headers, read and written.
        arrived_words: int32 [n, 8].
        checked: The first so many words must be equal.
        flags: Index of the word of flags; notes are in word 7.
        mismatch: The flag to set where they are not.
    """
    for row in range(len(bits)):
        for at in range(0, bits.shape[1], 4 * _words_at_a_time(bits)):
            part = slice(at, at + 4 * _words_at_a_time(bits))
            own, arrived = _as_words(bits[row, part]), _as_words(arrived_bits[row, part])
            place = torch.arange(len(own), device=bits.device) + (row * (bits.shape[1] // 4) + at // 4)
            keep = bernoulli(threshold, seed, place)
            transient = keep ^ own ^ WORD  # b of eq. 2: 1 with probability 1/j where v* = 1, (j - 1)/j where not
            bits[row, part] = _as_bytes((arrived & own) | ((arrived ^ own) & transient))
    differ = (words[:, :checked] != arrived_words[:, :checked]).int()
    note = (differ << torch.arange(checked, dtype=torch.int32, device=bits.device)).sum(1, dtype=torch.int32)
    words[:, flags] |= arrived_words[:, flags] | (note != 0).int() * mismatch
    words[:, 7] |= arrived_words[:, 7] | note


def _words_at_a_time(bits: Tensor) -> int:
    return _WORDS.get(bits.device.type, 1 << 20)


def pick_owned(bits: Tensor, rank: int, seed: int, owners: Tensor, picked: Tensor) -> None:
    """Draws whose sign each coordinate gets, and picks those of this rank: D/W bits of D.

    At place p of a chunk a shift r is drawn, uniform in 0 ... W - 1, the same on all ranks; worker
    (k + r) mod W gives the sign there of chunk k. So each worker gives as many, and one to each place.

    Args:
        bits: Own signs, uint8 [W, stride], rows of a multiple of 16 bytes.
        rank: This rank.
        seed: 31 bits, equal on all ranks.
        owners: uint8 [W, stride], written: plane r has the places where the shift is r.
        picked: uint8 [1, stride], written.
    """
    world_size = len(bits)
    for at in range(0, bits.shape[1], 4 * _words_at_a_time(bits)):
        part = slice(at, at + 4 * _words_at_a_time(bits))
        places = bits[0, part].numel() // 4
        words = torch.arange(places, device=bits.device) + at // 4
        left, chosen = torch.full_like(words, WORD), torch.zeros_like(words)
        for shift in range(world_size):
            others = world_size - shift
            taken = left & bernoulli(threshold_of(others), hashed(seed + shift), words) if others > 1 else left
            left = left ^ taken
            owners[shift, part] = _as_bytes(taken)
            chosen |= _as_words(bits[(rank - shift) % world_size, part]) & taken
        picked[0, part] = _as_bytes(chosen)


def threshold_of(count: int) -> int:
    """round(2^32 / count), for ``count`` >= 2."""
    return (2**32 + count // 2) // count


def place_owned(gathered: Tensor, owners: Tensor, bits: Tensor) -> None:
    """Puts what all ranks have picked where it belongs: the inverse of ``pick_owned``.

    Args:
        gathered: uint8 [W, stride], what each rank has picked.
        owners: uint8 [W, stride], from ``pick_owned``.
        bits: uint8 [W, stride], written.
    """
    torch.bitwise_and(gathered, owners[0], out=bits)
    for shift in range(1, len(bits)):
        # Chunk k has worker (k + shift) mod W there, for all k together: no loop over pairs of workers.
        bits[:-shift] |= gathered[shift:] & owners[shift]
        bits[-shift:] |= gathered[:shift] & owners[shift]


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
    """x = x - values, or x = values, for the elements that count (Marsit, Algorithm 2, line 6).

    Args:
        params: Parameters of any float dtype, dense, written.
        sizes: Elements of each.
        block_size: Elements per block.
        values: float32 [>= P].
        replaces: Which of the two.
        live, live_row: Elements that move.
        skip: int32 [1]; where set nothing moves.
        rounding: See ``apply_momentum``.
    """
    if skip:
        return
    for tile in tiles(sizes, 1, block_size, values.device):
        new = values[tile.start : tile.start + tile.numel].view(-1, block_size)
        x = gather(params, tile, block_size)
        moved = new if replaces else x - new
        counts = only_live(torch.ones_like(x), live, live_row, tile) > 0
        moved = torch.where(counts, moved, x)
        if rounding is not None:
            round_bfloat16(moved, params, tile, rounding)
        scatter(moved, params, tile)
