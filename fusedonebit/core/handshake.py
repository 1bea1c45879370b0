"""Tells all ranks, in the all-reduce of averaged gradients, what they must know of each other.

Eight words, and one for each tensor: how many ranks have a gradient of it. What all ranks have of the sum afterwards
they must have alike, to the bit: libraries send around what one rank has added up, or add in an order that all share.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from ..comm import Flag
from ..comm.agreement import sum_of_words
from ..triton_kernels import TAIL
from .telemetry import upload


class HandshakeWord(IntEnum):
    """The words, float32, summed over the ranks; small enough to be exact."""

    NONFINITE = 0
    """Ranks with a gradient that is not finite; ``flatten`` writes it."""
    ABORT = 1
    """Ranks that can't take the step."""
    OVERFLOW = 2
    """Ranks whose GradScaler has found an inf."""
    STEP = 3
    TAG = 4
    STEP_SQUARED = 5
    TAG_SQUARED = 6
    DIGEST = 7
    """Of what ranks have received alike before, modulo ``Handshake.digests``."""


_COMPARED = slice(HandshakeWord.STEP, HandshakeWord.DIGEST + 1)
_FLAGS = Flag.NONFINITE, Flag.ABORT, Flag.MISMATCH
"""The first bits, in their order: of the first words, and of those that are compared."""


class Handshake:
    """Two numbers that must be equal on all ranks, told by their sums and sums of squares; a digest; and three counts.

    The digest has no room for squares: where one rank's differs, or some ranks' in one way, all ranks see it; where
    several differ so that their mean is another rank's, that one does not.

    ``step`` is as this rank's user counts, ``tag`` a hash of the hyper-parameters; this rank has no gradient of the
    tensors that are ``missing``. One that ``skips`` does not take the step, which is right if none does.
    """

    def __init__(
        self, world_size: int, step: int, tag: int, tensors: int, missing: Sequence[int], skips: bool = False
    ) -> None:
        self._modulus = modulus = int((2**24 / world_size) ** 0.5)
        compared = ((step + skips * (modulus // 2)) % modulus, tag % modulus)
        self._compared = [*compared, *(number * number for number in compared)]
        self._world_size = world_size
        # Odd: so another bit of a word, 2^k more or less, is another remainder. W of them are added exactly.
        self.digests = (2**24 // world_size - 1) | 1
        self._missing = bool(missing)
        self._present = [1.0] * tensors
        for i in missing:
            self._present[i] = 0.0

    def write(self, tail: Tensor, abort: bool, found_inf: Tensor | None, digest: Tensor | None) -> None:
        """Write this rank's words to ``tail`` float32 [TAIL + tensors]; ``digest`` int64 [], or None where one is."""
        words = [0.0, float(abort), 0.0, *self._compared]
        words += [0.0] * (TAIL - len(words))
        tail.copy_(upload(words + self._present, torch.float32, tail.device))
        if found_inf is not None:
            tail[HandshakeWord.OVERFLOW] = found_inf > 0
        if digest is not None:
            tail[HandshakeWord.DIGEST] = digest % self.digests
        self._expected = tail[_COMPARED] * self._world_size

    def add_values(self, tail: Tensor, values: Tensor) -> None:
        """Make ``values``, which must be equal on all ranks, part of the digest."""
        tail[HandshakeWord.DIGEST] = (tail[HandshakeWord.DIGEST].long() + sum_of_words(values)) % self.digests
        self._expected = tail[_COMPARED] * self._world_size

    def read(self, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Return what all ranks' words say: flags int32 [1], and where they differ: bool [5], words from STEP on."""
        differ = tail[_COMPARED] != self._expected
        found = torch.empty(1, len(_FLAGS), dtype=torch.bool, device=tail.device)
        torch.gt(tail[: HandshakeWord.ABORT + 1], 0, out=found[0, :-1])
        torch.any(differ, 0, out=found[0, -1])
        # Made on the device: uploading a tensor from the host would wait for it.
        place = torch.arange(len(_FLAGS), dtype=torch.int32, device=tail.device)
        return (found << place).sum(1, dtype=torch.int32), differ

    def absent(self, tail: Tensor) -> Tensor | None:
        """Return whether no rank has a gradient, by tensor, bool [tensors]; None if this rank has all."""
        return tail[TAIL:] == 0 if self._missing else None
