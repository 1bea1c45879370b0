"""Lays out the message: one uint8 buffer that holds a header, the scales and one bit per element.

    bytes  0..31   header, eight int32 words (below)
    then           one bit per tensor, LSB first, 1 = no gradient; zero-padded to a multiple of 16 bytes
    then           scales, float32 [slots], zero-padded to a multiple of 16 bytes
    then           bits, one per element, LSB first, 1 = non-negative
    where ternary  bits, one per element, LSB first, 1 = not zero

Everything is little-endian and 16-byte aligned. The first ``CHECKED`` words must be equal on all
ranks: comparing them finds ranks that are out of step, have another layout, or gathered other bits last
time, for no extra collective.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import NamedTuple

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout

MAGIC = 0x03314F46  # "FO1", and the format's version
ALIGNMENT = 16


class Word(IntEnum):
    """Names the header's words."""

    MAGIC = 0
    STEP = 1
    """The step's number, modulo 2^32: how many this rank has taken, as the caller counts them."""
    LAYOUT = 2
    """``layout_word``."""
    DIGEST = 3
    """``checksum_of`` the last gathered messages, but for their words."""
    TAG = 4
    """Whatever else the caller wants equal on all ranks: a hash of the hyper-parameters."""
    SENDER = 5
    FLAGS = 6
    SIGNAL = 7
    """Bits of a float32: the norm of a worker's residual."""


CHECKED = 5
HEADER_BYTES = 4 * len(Word)


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


class Told(NamedTuple):
    """Holds what a rank tells the others of a step, and what it keeps, besides what it compresses.

    Args:
        tag: A 31-bit number that must be equal on all ranks, such as a hash of the hyper-parameters; else all skip.
        number: Of the step, an int32 that must be equal on all ranks; else all skip. None: of the synchronisation.
        abort: Makes every rank skip this step.
        hold: int32 [1], flags equal on all ranks: where any is set nothing changes, the last result included, but for
            the count of synchronisations. None: none.
        pending: int32 [1], flags of this rank alone, such as earlier steps of a round have set. None: none.
        missing: Tensors of which this rank has no gradient: zeros, unless all ranks miss them and ``restore`` follows.
        changed: float32 [P] each: what ``compress`` changes besides residuals, and ``restore`` puts back.
        goes: float32 [B]: how far each coordinate goes in a round of signs (eta_s). None where scales are measured.
    """

    tag: int = 0
    number: int | Tensor | None = None
    abort: bool = False
    hold: Tensor | None = None
    pending: Tensor | None = None
    missing: Sequence[int] = ()
    changed: Sequence[Tensor] = ()
    goes: Tensor | None = None


class Messages:
    """Lays out a batch of equally long messages in one buffer, with views of their parts.

    Args:
        count: Number of messages.
        slots: Scales in each.
        layout: Its chunk length gives the bits of each, its fingerprint the layout word.
        device: Where the buffer lies.
        ternary: Two planes of bits instead of one.
        buffer: uint8 [count, nbytes], zeros, to use; None allocates.

    Attributes:
        buffer: uint8 [count, nbytes].
        words: int32 [count, 8], the headers.
        absent: uint8 [count, tensors / 8], bits of tensors of which the sender has no gradient (``absent``).
        head: int32 [count, 8 and more], words and ``absent`` together.
        signal: float32 [count], their last words.
        scales: float32 [count, slots].
        bits: uint8 [count, chunk_bytes], or [count, 2, chunk_bytes] where ternary.
    """

    def __init__(
        self,
        count: int,
        slots: int,
        layout: FlatLayout,
        device: torch.device,
        ternary: bool = False,
        buffer: Tensor | None = None,
    ) -> None:
        self.slots = slots
        absent_bytes = -(-len(layout.sizes) // 8)
        head = HEADER_BYTES + _aligned(absent_bytes)
        bits = head + _aligned(4 * slots)
        self.nbytes = bits + layout.chunk_bytes * (2 if ternary else 1)
        if buffer is None:
            buffer = torch.zeros(count, self.nbytes, dtype=torch.uint8, device=device)
        self.buffer = buffer
        self.head = buffer[:, :head].view(torch.int32)
        self.words = self.head[:, : len(Word)]
        self.absent = buffer[:, HEADER_BYTES : HEADER_BYTES + absent_bytes]
        self.scales = buffer[:, head:bits].view(torch.float32)[:, :slots]
        self.signal = self.words[:, Word.SIGNAL :].view(torch.float32)[:, 0]
        self.bits = buffer[:, bits:].view(count, 2, layout.chunk_bytes) if ternary else buffer[:, bits:]
        self.words[:, Word.MAGIC] = MAGIC
        self.words[:, Word.LAYOUT] = layout_word(layout, self.nbytes, ternary)

    def write_headers(self, told: Told, number: int | Tensor, digest: Tensor) -> None:
        """Write what must be equal on all ranks into all headers, and add this rank's flags."""
        self.words[:, Word.STEP] = number
        self.words[:, Word.DIGEST] = digest
        self.words[:, Word.TAG].fill_(told.tag)
        if told.abort:
            self.words[:, Word.FLAGS] |= int(Flag.ABORT)
        if told.pending is not None:
            self.words[:, Word.FLAGS] |= told.pending

    def rows(self, chosen: slice, layout: FlatLayout) -> Messages:
        """Return some of the messages, in the same memory, as those of ``layout``."""
        buffer, ternary = self.buffer[chosen], self.bits.dim() == 3
        return Messages(len(buffer), self.slots, layout, buffer.device, ternary, buffer)

    @staticmethod
    def size(slots: int, layout: FlatLayout, ternary: bool = False) -> int:
        """Return the bytes of one message."""
        return Messages(0, slots, layout, torch.device("cpu"), ternary).nbytes

    @property
    def payload(self) -> Tensor:
        """Return all behind the words, uint8 [count, nbytes - 32]."""
        return self.buffer[:, HEADER_BYTES:]


def layout_word(layout: FlatLayout, *more: object) -> int:
    """Return 31 bits that say how a message must be read: its layout, its length, and whatever else that depends on.

    The length counts: a library may take a message that is too short for a whole one, and leave the rest as it was.
    """
    return (layout.fingerprint ^ zlib.crc32(repr(more).encode())) & 0x7FFFFFFF


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def agreed_flags(arrived: Tensor, own: Tensor, hold: Tensor | None = None) -> Tensor:
    """Return the flags of a step, int32 [1], equal on every rank.

    They are those of all ranks' headers int32 [W, 8], compared with this rank's, [8], and those of ``hold`` int32 [1].
    """
    flags = union(arrived[:, Word.FLAGS], arrived[:, :CHECKED] != own[:CHECKED])
    return flags if hold is None else flags | hold


def union(flags: Tensor, differ: Tensor | None = None) -> Tensor:
    """Return all flags that any rank has set, int32 [1], of ``flags`` int32 [W], and where any ``differ`` MISMATCH."""
    # Made on the device: uploading a tensor from the host would wait for it.
    each = 2 ** torch.arange(len(Flag), dtype=torch.int32, device=flags.device)
    found = (((flags[:, None] & each) != 0).any(0) * each).sum(0, keepdim=True, dtype=torch.int32)
    return found if differ is None else found | (differ.any() * int(Flag.MISMATCH)).to(torch.int32)


OUT_OF_STEP = (
    "a rank has skipped or repeated a step(), or its optimizer.zero_grad() has dropped gradients that were made for "
    "another purpose: model.zero_grad() is for those"
)
"""How the numbers of steps come to differ, and the way out."""

_MEANING = {
    Word.MAGIC: "message format",
    Word.STEP: f"number of steps ({OUT_OF_STEP})",
    Word.LAYOUT: "parameter layout",
    Word.DIGEST: "digest of the last synchronisation",
    Word.TAG: "hyper-parameters (learning rate and the like), as a hash",
}


def describe_note(note: int) -> str:
    """Name the checked words in which ranks differ, from their bits in a note (``merge_signs``)."""
    names = [name for word, name in _MEANING.items() if note >> word & 1]
    return " and ".join(names) or "a message arrived damaged"


def describe_mismatch(arrived: Tensor, otherwise: str = "a message arrived damaged") -> str:
    """Name the first checked word in which a rank differs from rank 0, else ``otherwise``; reads from the device.

    ``arrived``: int32 [W, 8], the headers of all ranks.
    """
    words = arrived.cpu()
    for word, name in _MEANING.items():
        differing = (words[:, word] != words[0, word]).nonzero()
        if len(differing):
            rank = int(differing[0])
            if word is Word.STEP:
                first, other = (int(words[r, word]) % 2**32 for r in (0, rank))
                return f"{first} steps on rank 0, {other} on rank {rank} ({OUT_OF_STEP})"
            return f"{name}: {int(words[0, word])} on rank 0, {int(words[rank, word])} on rank {rank}"
    return otherwise


def checksum_of(values: Tensor) -> Tensor:
    """Return the wrapping 64-bit sum of the bits of ``values``, its halves combined, int32 []; stays on the device."""
    # Not summed as int32: on a CPU that first makes an int64 copy of all of it.
    total = values.view(torch.int64).sum()
    return (total ^ (total >> 32)).to(torch.int32)
