"""Marsit's operator on packed bits, and who owns which bit (Wu et al., DAC 2022). Never autotuned.

Bits are uint8 [W, stride], a row for each chunk, worked on as 32-bit words: one operation on a word is one on 32
elements. Kernels count lengths and strides in quads of 16 bytes, so that a compiler knows that a thread may take four
words at once. Random bits are functions of a 31-bit seed and of the place in the row, nothing else: every run and
every backend draws the same. There is no C: CPUs that merge signs are those of tests and simulations.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from . import bit_rules
from .bit_rules import GOLDEN, WORD
from .jit import jit, tl
from .nouns import Derived, Flag, Words
from .op import op

DIGITS = 32  # of a threshold: probabilities are multiples of 2^-32
HEADER = 8  # words
QUAD = 4
BLOCK_WORDS = 512  # of a program
_AT_A_TIME = {"cpu": 1 << 11}
"""Words that a Bernoulli draw works on at a time, by device type: what fits a cache."""


def _parts(quads: int) -> int:
    return -(-quads * QUAD // BLOCK_WORDS)


WORDS: Derived = {
    "quads": ("i32", lambda bits: bits.shape[1] // 16),  # of a row
    "parts": ("i32", _parts),  # of a row, a program each
    "programs": ("i32", lambda bits, parts: len(bits) * parts),
    "world_size": ("i32", lambda bits: len(bits)),
    "WORDS": ("constexpr", lambda: BLOCK_WORDS),
}


@jit()
def bernoulli_words(threshold, first_digit, seed, place):
    """32 draws in each word, uint32 as ``place``: from the binary digits of the probability."""
    drawn = tl.zeros(place.shape, tl.uint32)
    word = seed.to(tl.uint32) + (tl.zeros([], tl.uint32) + first_digit) * bit_rules.GOLDEN
    for digit in range(first_digit, 32):
        word += bit_rules.GOLDEN
        fair = bit_rules.mixed(place ^ bit_rules.mixed(word))
        # All ones where the digit is: then or, else and.
        on = 0 - (((threshold >> digit) & 1) != 0).to(tl.uint32)
        drawn = (drawn & (fair | on)) | (fair & on)
    return drawn


@jit()
def _threshold_of(count):
    """``threshold_of``, of an int64."""
    return (4294967296 + count // 2) // count


@jit()
def _shift_seed(seed, shift):
    return (bit_rules.mixed((seed + shift).to(tl.uint32)) & 0x7FFFFFFF).to(tl.int32)


@jit(do_not_specialize=["threshold", "first_digit", "seed"])
def merge_signs_kernel(
    bits, bits_stride, arrived_bits, arrived_bits_stride, quads, parts, threshold, first_digit, seed, words,
    words_stride, arrived_words, arrived_words_stride, checked, flags, mismatch, WORDS: tl.constexpr,
):  # fmt: skip
    """bits = v* where it is kept, else v. Grid: n * parts. Bytes per element: 3/8."""
    p = tl.program_id(0).to(tl.int64)
    row = p // parts
    part = p - row * parts
    i = part * WORDS + tl.arange(0, WORDS)
    inside = i < quads * QUAD
    at = row * bits_stride * QUAD
    arrived_at = row * arrived_bits_stride * QUAD
    own = tl.load(bits + at + i, mask=inside, other=0)
    arrived = tl.load(arrived_bits + arrived_at + i, mask=inside, other=0)
    keep = bernoulli_words(threshold, first_digit, seed, (row * quads * QUAD + i).to(tl.uint32))
    # The own bit where it is kept: the same as (v AND v*) OR ((v XOR v*) AND b) with the b of eq. 2.
    tl.store(bits + at + i, arrived ^ ((arrived ^ own) & keep), mask=inside)
    if part == 0:
        w = tl.arange(0, HEADER)
        header = words + row * words_stride + w
        mine = tl.load(header)
        theirs = tl.load(arrived_words + row * arrived_words_stride + w)
        note = tl.sum(((mine != theirs) & (w < checked)).to(tl.int32) << w, axis=0)
        united = mine | theirs
        united = tl.where(w == flags, united | tl.where(note != 0, mismatch, 0), united | note)
        tl.store(header, tl.where((w == flags) | (w == HEADER - 1), united, mine))


@op(
    merge_signs_kernel,
    writes=("bits", "words"),
    derive={**WORDS, "first_digit": ("i32", lambda threshold: trailing_zeros(threshold))},
)
def merge_signs(
    bits: Words, arrived_bits: Words, threshold: int, seed: int, words: Annotated[Flag, "W WORDS"],
    arrived_words: Annotated[Flag, "W WORDS"], checked: int, flags: int, mismatch: int,
) -> None:  # fmt: skip
    """Marsit's operator on packed bits: v = (v AND v*) OR ((v XOR v*) AND b), b the transient vector (eq. 2).

    Where both agree it stays so; where not, b is the own bit with probability threshold / 2^32. The
    headers travel along: a checked word that differs is noted in the last word, and sets a flag;
    flags and notes are united.

    Args:
        bits: v*, own signs, uint8 [n, stride], rows of a multiple of 16 bytes; overwritten by the result.
        arrived_bits: v, uint8 [n, stride]: those of all workers before this one.
        threshold: round(2^32 / j), with this worker the j-th.
        seed: 31 bits, others for each merge of the same elements.
        words: Own headers, read and written.
        arrived_words: int32 [n, 8].
        checked: The first so many words must be equal.
        flags: Index of the word of flags; notes are in word 7.
        mismatch: The flag to set where they are not.
    """
    for row in range(len(bits)):
        for part, place in _at_a_time(bits):
            own, arrived = _as_words(bits[row, part]), _as_words(arrived_bits[row, part])
            keep = bernoulli(threshold, seed, place + row * (bits.shape[1] // 4))
            transient = keep ^ own ^ WORD  # b of eq. 2: 1 with probability 1/j where v* = 1, (j - 1)/j where not
            bits[row, part] = _as_bytes((arrived & own) | ((arrived ^ own) & transient))
    differ = (words[:, :checked] != arrived_words[:, :checked]).int()
    note = (differ << torch.arange(checked, dtype=torch.int32, device=bits.device)).sum(1, dtype=torch.int32)
    words[:, flags] |= arrived_words[:, flags] | (note != 0).int() * mismatch
    words[:, 7] |= arrived_words[:, 7] | note


@jit(do_not_specialize=["rank", "seed"])
def pick_owned_kernel(bits, bits_stride, quads, rank, world_size, seed, owners, picked, WORDS: tl.constexpr):
    """owners[r] = where the shift is r; picked = the own bits there.

    Grid: ceil(4 quads / WORDS). Bytes per element: 1/4.
    """
    i = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = i < quads * QUAD
    place = i.to(tl.uint32)
    left = tl.full([WORDS], 0xFFFFFFFF, tl.uint32)
    chosen = tl.zeros([WORDS], tl.uint32)
    plane = owners + i
    for shift in range(world_size):
        taken = left
        if shift + 1 < world_size:
            threshold = _threshold_of(tl.zeros([], tl.int64) + world_size - shift)
            taken = left & bernoulli_words(threshold, 0, _shift_seed(seed, shift), place)
        left ^= taken
        tl.store(plane, taken, mask=inside)
        plane += quads * QUAD
        chunk = (rank - shift + world_size) % world_size
        chosen |= tl.load(bits + chunk.to(tl.int64) * bits_stride * QUAD + i, mask=inside, other=0) & taken
    tl.store(picked + i, chosen, mask=inside)


@op(pick_owned_kernel, writes=("owners", "picked"), derive={**WORDS, "programs": ("i32", lambda parts: parts)})
def pick_owned(bits: Words, rank: int, seed: int, owners: Words, picked: Annotated[Words, "1 stride"]) -> None:
    """Draw whose sign each coordinate gets, and pick those of this rank: D/W bits of D.

    At place p of a chunk a shift r is drawn, uniform in 0 ... W - 1, the same on all ranks; worker
    (k + r) mod W gives the sign there of chunk k. So each worker gives as many, and one to each place.

    Args:
        bits: Own signs, uint8 [W, stride], rows of a multiple of 16 bytes.
        rank: This rank.
        seed: 31 bits, equal on all ranks.
        owners: Written: plane r has the places where the shift is r.
        picked: Written.
    """
    world_size = len(bits)
    for part, words in _at_a_time(bits):
        left, chosen = torch.full_like(words, WORD), torch.zeros_like(words)
        for shift in range(world_size):
            others = world_size - shift
            taken = left & bernoulli(threshold_of(others), hashed(seed + shift), words) if others > 1 else left
            left = left ^ taken
            owners[shift, part] = _as_bytes(taken)
            chosen |= _as_words(bits[(rank - shift) % world_size, part]) & taken
        picked[0, part] = _as_bytes(chosen)


@jit()
def place_owned_kernel(gathered, gathered_stride, owners, quads, world_size, bits, bits_stride, WORDS: tl.constexpr):
    """bits[k] = OR over r of gathered[k + r] AND owners[r]. Grid: programs * W.

    Bytes per element: W/4 + 1/8, of which all but 3/8 come from a cache: the W programs that read the
    same words are neighbours.
    """
    p = tl.program_id(0).to(tl.int64)
    part = p // world_size
    chunk = p - part * world_size
    i = part * WORDS + tl.arange(0, WORDS)
    inside = i < quads * QUAD
    result = tl.zeros([WORDS], tl.uint32)
    plane = owners + i
    for shift in range(world_size):
        owner = chunk + shift
        owner = tl.where(owner < world_size, owner, owner - world_size)
        theirs = tl.load(gathered + owner * gathered_stride * QUAD + i, mask=inside, other=0)
        result |= theirs & tl.load(plane, mask=inside, other=0)
        plane += quads * QUAD
    tl.store(bits + chunk * bits_stride * QUAD + i, result, mask=inside)


@op(place_owned_kernel, writes=("bits",), derive=WORDS)
def place_owned(gathered: Words, owners: Words, bits: Words) -> None:
    """Put what all ranks have picked where it belongs: the inverse of ``pick_owned``.

    Args:
        gathered: What each rank has picked.
        owners: From ``pick_owned``.
        bits: Written.
    """
    torch.bitwise_and(gathered, owners[0], out=bits)
    for shift in range(1, len(bits)):
        # Chunk k has worker (k + shift) mod W there, for all k together: no loop over pairs of workers.
        bits[:-shift] |= gathered[shift:] & owners[shift]
        bits[-shift:] |= gathered[:shift] & owners[shift]


def bernoulli(threshold: int, seed: int, words: Tensor) -> Tensor:
    """32 draws in each word, int64: bits that are 1 with probability ``threshold`` / 2^32, exactly.

    By the binary digits of the probability, from the last: or-ing with a fair bit halves the
    distance to 1, and-ing halves the probability. Digits that are zero at the end cost nothing.
    ``words`` are places, int64 [n] in [0, 2^32).
    """
    first, drawn = trailing_zeros(threshold), torch.zeros_like(words)
    digits = torch.arange(first + 1, DIGITS + 1, device=words.device)
    fair = bit_rules.mixed(words ^ bit_rules.mixed((seed + digits * GOLDEN) & WORD)[:, None])
    for digit, bits in enumerate(fair, start=first):
        drawn = drawn | bits if threshold >> digit & 1 else drawn & bits
    return drawn


def trailing_zeros(threshold: int) -> int:
    """Count the last digits of a threshold that cost nothing."""
    return (threshold & -threshold).bit_length() - 1 if threshold else DIGITS


def threshold_of(count: int) -> int:
    """round(2^32 / count), for ``count`` >= 2."""
    return (2**32 + count // 2) // count


def hashed(word: int) -> int:
    """``bit_rules.mixed`` of one number, on the host, without the top bit: a seed."""
    return bit_rules.mixed(word & WORD) & 0x7FFFFFFF


def _as_words(bits: Tensor) -> Tensor:
    """uint8 [..., 4 n] as int64 [..., n] in [0, 2^32), a copy."""
    return bits.contiguous().view(torch.int32).to(torch.int64) & WORD


def _as_bytes(words: Tensor) -> Tensor:
    return words.to(torch.int32).view(torch.uint8)


def _at_a_time(bits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Return the bytes of a row that are drawn for at once, and the words' places in the row."""
    words, step = bits.shape[1] // 4, _AT_A_TIME.get(bits.device.type, 1 << 20)
    for first, last in pairwise([*range(0, words, step), words]):
        yield slice(4 * first, 4 * last), torch.arange(first, last, device=bits.device)
