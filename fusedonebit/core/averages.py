"""Averages gradients over the ranks, in float32, by one all-reduce; a handshake of the ranks rides on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Transport
from ..comm.agreement import sum_of_words
from ..comm.message import OUT_OF_STEP, RECEIVED
from ..triton_kernels import TAIL, FlatLayout, flatten
from ..triton_kernels.tables import Listed
from .handshake import Handshake, HandshakeWord
from .scaling import LossScale, overflow_flags


class Averages:
    """The averages of one step's gradients, in memory that is there from the first step until ``drop``.

    Args:
        layout: The flat index space.
        transport: Connects the ranks.
        device: Where everything lies.

    Attributes:
        buffer: The gradients, and the handshake behind them: float32 [P + TAIL + tensors]; None: nobody averages.
    """

    def __init__(self, layout: FlatLayout, transport: Transport, device: torch.device) -> None:
        self.layout, self.transport, self.device = layout, transport, device
        self.buffer: Tensor | None = None
        self._listed: Listed | None = None
        self._differs = torch.zeros(5, dtype=torch.bool, device=device)

    def make(self) -> Tensor:
        """Make ``buffer``, and return it."""
        self.buffer, self._listed = room_for(self.layout, self.device), None
        return self.buffer

    def drop(self) -> None:
        """Give the memory back."""
        self.buffer = self._listed = None

    @property
    def values(self) -> Tensor:
        """Return the averages by flat index, float32 [P]."""
        assert self.buffer is not None
        return self.buffer[: self.layout.numel]

    @property
    def of_tensors(self) -> Listed:
        """Return the averages, one of each tensor."""
        if self._listed is None:
            self._listed = Listed.of(self.layout.cut(self.values))
        return self._listed

    def add_up(
        self,
        grads: Sequence[Tensor],
        handshake: Handshake,
        loss_scale: LossScale,
        updates: Tensor,
        digest: Tensor | None,
        *,
        abort: bool,
        averaged: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Average over the ranks.

        Args:
            grads: This rank's; all ranks' mean where DDP has ``averaged`` them: then only the handshake is summed.
            handshake: Of this step.
            loss_scale: A GradScaler's.
            updates: Done so far, int64 [], part of the next digest.
            digest: Checksums of what all ranks have received last, int64 [n], of which the handshake compares the
                first, and which is written for the next; None: nobody compares.
            abort: Whether this rank can't take the step.

        Returns:
            The step's flags, int32 [1], and the tensors of which no rank has a gradient, bool [tensors], or None.
        """
        buffer, ranks = self.make() if self.buffer is None else self.buffer, self.transport.world_size
        values, tail = self.values, buffer[self.layout.numel :]
        handshake.write(tail, abort, loss_scale.found_inf, None if digest is None else digest[0])
        share, layout = 1.0 if averaged else 1 / ranks, self.layout
        flatten(grads, layout.sizes, layout.block_size, share, loss_scale.factor(), buffer[: layout.numel + TAIL])
        if averaged:  # somebody may have changed or dropped them since, or unscaled them otherwise, on one rank
            handshake.add_values(tail, values)
        summed = tail if averaged else buffer
        self.transport.all_reduce(summed)
        flags, self._differs = handshake.read(tail)
        if loss_scale.found_inf is not None:
            flags = flags | overflow_flags(tail[HandshakeWord.OVERFLOW], ranks)
        _sum_up(summed, flags, updates, digest)
        return flags, handshake.absent(tail)

    def tail_of(self, handshake: Handshake, digest: Tensor | None) -> Tensor:
        """Return what ``skip`` sends: a handshake alone, float32 [TAIL + tensors]."""
        tail = torch.zeros(TAIL + len(self.layout.sizes) + 1, device=self.device)[:-1]
        handshake.write(tail, False, None, None if digest is None else digest[0])
        return tail

    def skip(self, tail: Tensor, handshake: Handshake, updates: Tensor, digest: Tensor | None) -> Tensor:
        """Take part with nothing in a step that all ranks throw away; return its flags, int32 [1]."""
        self.transport.all_reduce(tail)
        flags, _ = handshake.read(tail)
        _sum_up(tail, flags, updates, digest)
        return flags

    def describe(self, under_ddp: bool) -> str:
        """Name what ranks have differed in; waits for the device."""
        step, tag, steps, tags, _ = self._differs.tolist()
        what = "hyper-parameters (learning rate and the like) or the parameter layout"
        if not (step or tag or steps or tags):
            what = RECEIVED
        if under_ddp:
            what += (
                ", or the gradients that DDP has averaged: change or drop them on all ranks alike, with one loss scale "
                "(fusedonebit.amp.GradScaler)"
            )
        return f"number of steps ({OUT_OF_STEP})" if step or steps else what

    def held(self) -> list[Tensor]:
        """Return what the next step needs of the last, and what is allocated for it."""
        return [*([] if self.buffer is None else [self.buffer]), self._differs]


def room_for(layout: FlatLayout, device: torch.device) -> Tensor:
    """Return memory as ``buffer`` needs it, and one element more where that makes whole words of 8 bytes; zeros."""
    length = layout.numel + TAIL + len(layout.sizes)
    return torch.zeros(length + length % 2, device=device)[:length]


def _sum_up(summed: Tensor, flags: Tensor, updates: Tensor, digest: Tensor | None) -> None:
    """Make the next digest of a sum over the ranks, which all have received, and of updates done.

    Of a sum that ``flags`` int32 [1] make all ranks throw away nothing counts: libraries may hand out NaNs of several
    kinds.
    """
    if digest is not None:
        words = sum_of_words(summed.as_strided((len(summed) + len(summed) % 2,), (1,)))
        torch.add(words * (flags == 0), updates, out=digest[:1])


class ElementFlags:
    """Flags of a rank alone, whose update leaves out elements of gradients that do not count.

    Each is int32 [1] and aligned, so that kernels are compiled once for all of them, and in no capture anew.

    Attributes:
        this, before: This step's, and the last one's.
        none: None, for whoever needs some.
        made: Whether this step's update has been made.
    """

    def __init__(self, device: torch.device) -> None:
        words = torch.zeros(5, 4, dtype=torch.int32, device=device)[:, :1]
        self.this, self.before, self.in_replays, self._unread, self.none = words
        self.made = False

    def turn(self) -> None:
        """Begin with a step that no CUDA graph captures."""
        self.this, self.before = self.before, self.this

    def of_step(self, captured: bool) -> tuple[Tensor, Tensor]:
        """Return what the update of a step writes; nobody reads what replays of captured ones find."""
        return (self.in_replays, self._unread) if captured else (self.this, self.before)

    def known(self, flags: Tensor) -> Tensor:
        """Return a step's flags, with those of elements."""
        if not self.made:
            return flags
        found: Tensor = self.this if flags is self.none else flags | self.this
        return found
