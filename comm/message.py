"""Lays out the message: one uint8 buffer that holds a header, the scales and one bit per element.

    bytes  0..31   header, eight int32 words (below)
    then           one bit per tensor, LSB first, 1 = no gradient; zero-padded to a multiple of 16 bytes
    then           scales, float32 [slots], zero-padded to a multiple of 16 bytes
    in some        numbers that travel as they are, zero-padded to a multiple of 16 bytes
    then           bits, one per element, LSB first, 1 = non-negative
    where ternary  bits, one per element, LSB first, 1 = not zero

Everything is little-endian and 16-byte aligned.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..triton_kernels import FlatLayout
from ..triton_kernels.headers import Word
from ..triton_kernels.nouns import Coefficients, Limit

MAGIC = 0x04314F46  # "FO1", and the format's version
ALIGNMENT = 16
HEADER_BYTES = 4 * len(Word)


class StepContext(NamedTuple):
    """Holds what a rank tells the others of a step, and what it keeps, besides what it compresses.

    Args:
        tag: A 31-bit number that must be equal on all ranks, such as a hash of the hyper-parameters; else all skip.
        number: Of the step, an int32 that must be equal on all ranks; else all skip. None: of the synchronisation.
        abort: Makes every rank skip this step.
        hold: int32 [1], flags equal on all ranks: where any is set nothing changes, the last result included, but for
            the count of synchronisations. None: none.
        pending: int32 [1], flags of this rank alone, such as earlier steps of a round have set; they are taken, and 0
            afterwards. None: none.
        missing: Tensors of which this rank has no gradient: zeros, unless all ranks miss them and ``restore`` follows.
        changed: float32 [P] each: what ``compress`` changes besides residuals, and ``restore`` puts back.
        coef: float32 [tensors, columns of ``Coef``]: LR * GLOBAL_RATIO * ``steps`` is how far each coordinate goes in a
            round of signs (eta_s). None where scales are measured.
        steps: Of the round.
        limit: For which results all ranks skip. None: for none.
        sums: Whether the caller applies the result with ``apply_momentum``, and hands it ``Reducer.digest``.
        renewal: Coefficients that ``finish`` renews; None: none. Where the step is added to those of a round, one
            ``finish`` alone gets them.
        drawn: Updates done, int64 [], with which residuals and squares are rounded. None: all are float32.
        unite: Adds to this rank's flags, int32 [1], those of other ranks that skip a step with it, before they travel;
            servers then do the same there. None: there are none.
        updates: Done so far, int64 [], equal on all ranks: part of what the next messages' digests compare; or None.
    """

    tag: int = 0
    number: int | Tensor | None = None
    abort: bool = False
    hold: Tensor | None = None
    pending: Tensor | None = None
    missing: Sequence[int] = ()
    changed: Sequence[Tensor] = ()
    coef: Tensor | None = None
    steps: int = 1
    limit: Limit | None = None
    sums: bool = False
    renewal: Coefficients | None = None
    drawn: Tensor | None = None
    unite: Callable[[Tensor], None] | None = None
    updates: Tensor | None = None


class Messages:
    """Lays out a batch of equally long messages in one buffer, with views of their parts.

    Args:
        count: Number of messages.
        slots: Scales in each.
        layout: Its chunk length gives the bits of each, its fingerprint the layout word.
        device: Where the buffer lies.
        ternary: Two planes of bits instead of one.
        buffer: uint8 [count, nbytes], zeros, to use; None allocates.
        carried: Bytes of numbers that travel as they are.

    Attributes:
        buffer: uint8 [count, nbytes].
        words: int32 [count, 8], the headers.
        absent: uint8 [count, tensors / 8], bits of tensors of which the sender has no gradient (``absent``).
        head: int32 [count, 8 and more], words and ``absent`` together.
        scales: float32 [count, slots].
        bits: uint8 [count, chunk_bytes], or [count, 2, chunk_bytes] where ternary.
        front: uint8, all that lies before the bits, words included; what is carried comes last.
    """

    def __init__(
        self,
        count: int,
        slots: int,
        layout: FlatLayout,
        device: torch.device,
        ternary: bool = False,
        buffer: Tensor | None = None,
        carried: int = 0,
    ) -> None:
        absent_bytes = -(-len(layout.sizes) // 8)
        head = HEADER_BYTES + aligned(absent_bytes)
        after = head + aligned(4 * slots)
        bits = after + aligned(carried)
        nbytes = bits + layout.chunk_bytes * (2 if ternary else 1)
        if buffer is None:
            buffer = torch.zeros(count, nbytes, dtype=torch.uint8, device=device)
        self.buffer = buffer
        self.head = buffer[:, :head].view(torch.int32)
        self.words = self.head[:, : len(Word)]
        self.absent = buffer[:, HEADER_BYTES : HEADER_BYTES + absent_bytes]
        self.scales = buffer[:, head:after].view(torch.float32)[:, :slots]
        self.bits = buffer[:, bits:].view(count, 2, layout.chunk_bytes) if ternary else buffer[:, bits:]
        self.front = buffer[:, :bits]
        self.words[:, Word.MAGIC] = MAGIC
        self.words[:, Word.LAYOUT] = layout_word(layout, nbytes, ternary)

    @property
    def slots(self) -> int:
        """Return how many scales each has."""
        return self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Return the bytes of one."""
        return self.buffer.shape[1]

    @property
    def payload(self) -> Tensor:
        """Return all behind the words: uint8 [count, nbytes - 32]."""
        return self.buffer[:, HEADER_BYTES:]

    def rows(self, chosen: slice, layout: FlatLayout) -> Messages:
        """Return some of the messages, in the same memory, as those of ``layout``."""
        buffer, ternary = self.buffer[chosen], self.bits.dim() == 3
        return Messages(len(buffer), self.slots, layout, buffer.device, ternary, buffer)

    @staticmethod
    def size(slots: int, layout: FlatLayout, ternary: bool = False) -> int:
        """Return the bytes of one message."""
        return Messages(0, slots, layout, torch.device("cpu"), ternary).nbytes


def layout_word(layout: FlatLayout, *more: object) -> int:
    """Return 31 bits that say how a message must be read: its layout, its length, and whatever else that depends on.

    The length counts: a library may take a message that is too short for a whole one, and leave the rest as it was.
    """
    return (layout.fingerprint ^ zlib.crc32(repr(more).encode())) & 0x7FFFFFFF


def aligned(nbytes: int) -> int:
    """Return how many bytes a part of a message takes, padding included."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


OUT_OF_STEP = (
    "a rank has skipped or repeated a step(), or its optimizer.zero_grad() has dropped gradients that were made for "
    "another purpose: model.zero_grad() is for those"
)
"""How the numbers of steps come to differ, and the way out."""

RECEIVED = (
    "digest of the last synchronisation: what one has received was changed, or its count of updates, its variance or "
    "its parameters were"
)
"""What lies behind another digest."""

_MEANING = {
    Word.MAGIC: "message format",
    Word.STEP: f"number of steps ({OUT_OF_STEP})",
    Word.LAYOUT: "parameter layout",
    Word.DIGEST: RECEIVED,
    Word.TAG: "hyper-parameters (learning rate and the like), as a hash",
}


def describe_note(note: int) -> str:
    """Name the checked words in which ranks differ, from their bits in a note (``merge_signs``)."""
    names = [name for word, name in _MEANING.items() if note >> word & 1]
    return " and ".join(names) or "a message arrived damaged"


def describe_mismatch(
    arrived: Tensor, otherwise: str = "a message arrived damaged", out_of_step: str = OUT_OF_STEP
) -> str:
    """Name the first checked word in which a rank differs from rank 0, else ``otherwise``; reads from the device.

    ``arrived``: int32 [W, 8], the headers of all ranks. ``out_of_step``: how numbers of steps come to differ here.
    """
    words = arrived.cpu()
    for word, name in _MEANING.items():
        differing = (words[:, word] != words[0, word]).nonzero()
        if len(differing):
            rank = int(differing[0])
            if word is Word.STEP:
                first, other = (int(words[r, word]) % 2**32 for r in (0, rank))
                return f"{first} steps on rank 0, {other} on rank {rank} ({out_of_step})"
            return f"{name}: {int(words[0, word])} on rank 0, {int(words[rank, word])} on rank {rank}"
    return otherwise
