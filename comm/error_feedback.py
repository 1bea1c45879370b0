"""Keeps, of what is compressed, the error that the next step compensates (1-bit Adam, Algorithm 1: both deltas)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..triton_kernels import finish, finish_alone, renew, rules, settle
from ..triton_kernels.codes import in_float32
from ..triton_kernels.finish import Segments
from ..triton_kernels.nouns import Codes, Coefficients, Compensated, Header, Places, Preconditioner, Signs, Stored
from .absent import Backup
from .message import Messages
from .shared_squares import Unit
from .verdict import Scaled, Verdict


class SideOfParts(Scaled):
    """Has those of several parts, one behind the other, in memory of which each part's own get views.

    Args:
        sides: Of each part, just made.
    """

    def __init__(self, sides: Sequence[ErrorFeedback]) -> None:
        for name in ("measured", "scale", "settled"):
            each = [getattr(side, name) for side in sides]
            setattr(self, name, torch.cat(each))
            for side, view in zip(sides, getattr(self, name).split([len(own) for own in each]), strict=True):
                setattr(side, name, view)
        for side in sides:
            side.measure_into(side.measured)
        first, segments = 0, []
        for side in sides:
            segments.append(side.segment + first)
            first += len(side.measured)
        self.segment = torch.cat(segments)


class ErrorFeedback(Scaled):
    """Keeps what a worker, or a server, could not send: e = c - s*sign(c), of compensated values c and scales s.

    e is formed when it is next read. sign(0) is 0 where ternary.

    Args:
        compensated: float32, bfloat16 or codes [n], c; zeros at the start.
        segment: int64 [blocks], the scale that each block shares; rising without gaps.
        norm: One of ``SCALE_NORMS``' values.
        ternary: Whether zeros stay zeros.
        measures: Whether scales are measured; else messages have scales of their own.
        exponents: uint8 [1 or more, blocks], in the first row those of codes in ``compensated``; None: there are none.

    Attributes:
        scale: float32 [blocks], s.
        measured: float32 [segments], what ``finish`` has measured; ``receive`` makes ``scale`` of it.
        measures: As given.
        norm: As given; another may take its place between two steps.
        settled: float32 [blocks], the s with which ``settle`` has formed e since the last step; else 0.
        segment: int32 [blocks], as given.
        partials: float64 [2, blocks], or [3, blocks] where ternary, for the op that compresses.
        places: Where its elements lie, and which of them count.
    """

    def __init__(
        self,
        compensated: Tensor,
        segment: Tensor,
        norm: int,
        ternary: bool = False,
        measures: bool = True,
        exponents: Tensor | None = None,
    ) -> None:
        device, blocks = compensated.device, len(segment)
        self.compensated, self.exponents, self.measures = compensated, exponents, measures
        self.scale, self.settled = torch.zeros(blocks, device=device), torch.zeros(blocks, device=device)
        self.partials = torch.zeros(3 if ternary else 2, blocks, dtype=torch.float64, device=device)
        self.norm = norm
        self.segment = segment.to(device, torch.int32)
        self.measured = torch.zeros(int(segment[-1]) + 1, device=device)
        self._work = Segments.of(segment if measures else segment[:0], self.measured)

    def set_live(self, places: Places, numel: Tensor) -> None:
        """Say which elements of this side count, and how many of each block, int32 [blocks]."""
        self.places, self._numel = places, numel
        if len(self._work.live):
            self._work.live.zero_().index_add_(0, self.segment, numel.double())

    @property
    def ternary(self) -> bool:
        """Tell whether sign(0) is 0: then elements that are not zero are counted besides."""
        return len(self.partials) == 3

    @property
    def stored(self) -> Stored:
        """Return c."""
        return Stored.row(self.compensated, self.exponents, 0)

    def read_by(self, drawn: Tensor | None) -> Compensated:
        """Return c as ops take it that read and write it; ``drawn`` as of ``Compensated``."""
        return Compensated(self.compensated, self.scale, self.exponents, drawn)

    def backup(
        self, rows: Tensor, elements: Sequence[Tensor] = (), bits: Sequence[Tensor] = (), tables: Sequence[Tensor] = ()
    ) -> Backup:
        """Keep these rows, int64 [n], of all that a step changes here, and of what else ``Backup`` names."""
        own = [self.compensated] if self.compensated.numel() else []  # a majority's servers keep nothing
        own_tables = [self.scale, self.settled, self.partials, *([] if self.exponents is None else [self.exponents])]
        return Backup(rows, self.places.block_tensor, [*own, *elements], bits=bits, tables=[*own_tables, *tables])

    def renew(
        self, places: Places, exp_avg: Signs | None, ternary: bool, unit: Unit, v: Preconditioner, means: Codes,
        writes: bool,
    ) -> None:  # fmt: skip
        """Renew v, if this ``writes``, and bring c, and the momentum, to its unit; see the op ``renew``."""
        own = self.stored, self.scale, self.settled
        renew(places, *own, exp_avg, ternary, unit.coef, v, means, unit.factors, writes)

    def finish(self, to: Messages, header: Header, verdict: Verdict, renewal: Coefficients | None = None) -> None:
        """Make ``measured`` from ``partials``, and write that and the header into messages; see the op ``finish``."""
        assert verdict.digest is not None
        work, norm, digest = self._work, self.norm, verdict.digest
        finish(self.partials, work, norm, self.segment, to.scales, to.words, header, digest, verdict.hold, renewal)

    def finish_alone(self, scale: Tensor, *more: Any) -> None:
        """Make ``scale`` float32 [blocks], this one's and the result's, from ``partials``, and a header.

        ``more``: The last arguments of the op ``finish_alone``, from ``words`` on.
        """
        finish_alone(self.partials, self._work, self.norm, scale, self.scale, self.settled, *more)

    def measure_into(self, measured: Tensor) -> None:
        """Let ``finish`` write what it measures there: a view of several parts'."""
        self._work = self._work._replace(measured=measured)

    def settle(self) -> None:
        """Form the deferred residual in place: ``compensated`` holds e, and the scales are 0."""
        if not self.compensated.numel():  # nothing is kept
            return
        self.settled += self.scale
        settle(self.read_by(None), self.ternary, self.places)

    def values(self) -> Tensor:
        """Return c, float32 [n]; after ``settle`` e. Where it is kept in float32, that memory."""
        return in_float32(*self.stored)

    def forget(self) -> None:
        """Drop the residual, settled before, which ``take_residuals`` has taken."""
        for tensor in (self.compensated, self.settled, self.partials):
            tensor.zero_()

    @property
    def scratch(self) -> tuple[Tensor, ...]:
        """Return what no later step reads."""
        measured = (self.measured,) if len(self._work.live) else ()  # else they are what they were made
        return self.partials, self.settled, *measured, self._work.sums, self._work.tickets

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Return what says how scales are measured."""
        return self._work.start, self._work.single, self._work.pieces, self._work.live

    def norms(self) -> tuple[float, float]:
        """Return |c| and |e| of the last step; waits for the device."""
        compensated, left = (square.sum().clamp(min=0).sqrt() for square in self.squares())
        return float(compensated), float(left)

    def squares(self) -> tuple[Tensor, Tensor]:
        """Return c^2 and |e|^2 of each block in the last step, float64 [blocks] each; also after ``settle``.

        Reads no element. Rounding errors are included: |e|^2 may be below 0.
        """
        absolute, square, *nonzero = self.partials.unbind(0)
        numel = nonzero[0] if nonzero else self._numel
        return square, rules.residual_square(absolute, square, self.scale + self.settled, numel)
