"""Lays out the words in a message's header, and finds what the headers of all ranks say together.

The first ``CHECKED`` words must be equal on all ranks: comparing them finds ranks that are out of step, have another
layout, or gathered other bits last time, for no extra collective.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import torch
from torch import Tensor

from .jit import jit, tl


class Word(IntEnum):
    """Names the header's words."""

    MAGIC = 0
    STEP = 1
    """The step's number, modulo 2^32: how many this rank has taken, as the caller counts them."""
    LAYOUT = 2
    """``layout_word``."""
    DIGEST = 3
    """``folded``: the wrapping sum of the 8-byte words of all that the last gathered messages had behind these."""
    TAG = 4
    """Whatever else the caller wants equal on all ranks: a hash of the hyper-parameters."""
    SENDER = 5
    FLAGS = 6
    SIGNAL = 7
    """Bits of a float32: the norm of the sender's residual."""


class Flag(IntFlag):
    """Why a step is skipped on every rank. Workers' headers tell the first two, servers' all but VETO."""

    NONFINITE = 1
    """A gradient had NaN or Inf elements."""
    ABORT = 2
    """A rank could not take its step; its own error says why."""
    MISMATCH = 4
    """The checked words differ between ranks."""
    VETO = 8
    """The caller has refused the result, on all ranks alike."""
    OVERFLOW = 16
    """A GradScaler found an infinite gradient: nothing at all may change."""
    LOCAL = 32
    """Only some ranks' GradScalers did."""


CHECKED = 5
STEP, DIGEST, TAG, FLAGS, SIGNAL = Word.STEP, Word.DIGEST, Word.TAG, Word.FLAGS, Word.SIGNAL
WORDS = len(Word)
NONFINITE, MISMATCH, VETO = Flag.NONFINITE, Flag.MISMATCH, Flag.VETO
KNOWN = len(Flag)  # bits
ALL = (1 << KNOWN) - 1
PARTLY = 1 << KNOWN
"""A flag in no header: a gradient had elements that did not count, and they alone were left out; the step counts."""
RANKS = 16  # headers that a program compares together
BITS = 5  # that count up to RANKS


def union(flags: Tensor, differ: Tensor | None = None) -> Tensor:
    """Return all flags that any rank has set, int32 [1], of ``flags`` int32 [W], and where any ``differ`` MISMATCH."""
    # Made on the device: uploading a tensor from the host would wait for it.
    each = 2 ** torch.arange(len(Flag), dtype=torch.int32, device=flags.device)
    found = (((flags[:, None] & each) != 0).any(0) * each).sum(0, keepdim=True, dtype=torch.int32)
    return found if differ is None else found | (differ.any() * int(Flag.MISMATCH)).to(torch.int32)


def agreed_flags(arrived: Tensor, own: Tensor, hold: Tensor | None = None) -> Tensor:
    """Return the flags of a step, int32 [1], equal on every rank.

    They are those of all ranks' headers int32 [W, 8], compared with this rank's, [8], and those of ``hold`` int32 [1].
    A bit that is no flag is MISMATCH.
    """
    unknown = arrived[:, Word.FLAGS, None] & ~ALL != 0
    flags = union(arrived[:, Word.FLAGS], (arrived[:, :CHECKED] != own[:CHECKED]) | unknown)
    return flags if hold is None else flags | hold


def folded(total: Tensor) -> Tensor:
    """Return int64 sums as words of a header: their halves combined, int32."""
    return (total ^ (total >> 32)).to(torch.int32)


def unfolded(word: int) -> int:
    """Return a sum of which ``folded`` makes the int32 ``word``."""
    return word & 0xFFFFFFFF


@jit()
def fold(total):
    """Do as ``folded``."""
    return (total ^ (total >> 32)).to(tl.int32)


@jit()
def _header(words, rank, stride):
    """Where ranks' headers begin: no number is negative, and of two of 32 bits one multiplication makes 64."""
    if stride.dtype == tl.int32:
        stride = stride.to(tl.uint32)
    return words + rank.to(tl.uint32).to(tl.int64) * stride.to(tl.int64)


@jit()
def count_flags(words, stride, own, world_size):
    """Count, BITS to each, in how many places of RANKS each flag of ``agreed_flags`` is told; int32, 0 if none."""
    tl.static_assert(KNOWN * BITS < 32)
    found = tl.zeros([RANKS], tl.int32)
    differ = tl.zeros([RANKS], tl.int32)
    for first in range(0, world_size, RANKS):
        # Behind the last rank the last once more, which changes nothing: no load is masked.
        rank = tl.minimum(first + tl.arange(0, RANKS), world_size - 1)
        header = _header(words, rank, stride)
        found |= tl.load(header + FLAGS)
        for word in tl.static_range(CHECKED):
            differ |= tl.load(header + word) ^ tl.load(own + word)
    found |= tl.where((differ != 0) | (found >> KNOWN != 0), MISMATCH, 0)
    counted = tl.zeros([RANKS], tl.int32)
    for bit in tl.static_range(KNOWN):
        counted |= ((found >> bit) & 1) << (BITS * bit)
    bad = tl.sum(counted, axis=0)  # one reduction for all
    return bad  # noqa: RET504 - the audit of bytes knows it by this name


@jit()
def flags_of(counts):
    """Return the flags that ``count_flags`` has counted, int32."""
    flags = 0
    for bit in tl.static_range(KNOWN):
        flags |= (((counts >> (BITS * bit)) & ((1 << BITS) - 1)) != 0).to(tl.int32) << bit
    return flags


@jit()
def write_words(words, header, digest, flags):
    """Write what changes from step to step into a header, but for what a sender leaves: SIGNAL is 0."""
    step = header.number
    if header.counter is not None:
        step = tl.load(header.counter)
    tl.store(words + STEP, step)
    tl.store(words + DIGEST, digest)
    tl.store(words + TAG, header.tag)
    tl.store(words + FLAGS, flags)
    tl.store(words + SIGNAL, 0)


@jit()
def keep_words(b, words, stride, kept, world_size):
    """Copy headers to ``kept`` int32 [W, 8]: program ``b`` RANKS of them, and go on behind those of all others."""
    if b * RANKS < world_size:
        word = tl.arange(0, WORDS)[None, :]
        step = tl.minimum(tl.num_programs(0), world_size) * RANKS
        for first in range((b * RANKS).to(tl.int32), world_size, step):
            rank = tl.minimum(first + tl.arange(0, RANKS)[:, None], world_size - 1)
            tl.store(kept + rank.to(tl.int64) * WORDS + word, tl.load(_header(words, rank, stride) + word))
