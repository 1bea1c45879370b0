"""Carries along what a worker, or a server, could not send: one side of the error feedback."""

from __future__ import annotations

import torch
from torch import Tensor

from ..triton_kernels import LiveTable, finish, settle
from .message import Messages, Word


class ErrorFeedback:
    """The compensated values c, their scales s, and so the residual e = c - s*sign(c); sign(0) is 0 where ternary.

    Args:
        compensated: float32 [n], c; zeros at the start.
        segment: int64 [blocks], the scale that each block shares; rising without gaps.
        norm: One of ``SCALE_NORMS``' values.
        ternary: Whether zeros stay zeros.

    Attributes:
        scale: float32 [blocks], s.
        segment: int32 [blocks], as given.
        partials: float64 [3, blocks], or [4, blocks] where ternary, for the op that compresses.
    """

    def __init__(self, compensated: Tensor, segment: Tensor, norm: int, ternary: bool = False) -> None:
        device, blocks = compensated.device, len(segment)
        self.compensated = compensated
        self.scale = torch.zeros(blocks, device=device)
        self.partials = torch.zeros(4 if ternary else 3, blocks, dtype=torch.float64, device=device)
        self._norm = norm
        self._ternary = ternary
        self._settled: tuple[Tensor, Tensor] | None = None  # the squares of the last step, which settling would lose
        lengths = torch.unique_consecutive(segment, return_counts=True)[1]
        self.segment = segment.to(device, torch.int32)
        self._segment_start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)
        self._count = torch.zeros(len(lengths), dtype=torch.float64, device=device)

    def set_live(self, live: LiveTable) -> None:
        """Says which elements of this side count."""
        self._live = live
        self._count.zero_().index_add_(0, self.segment, live.numel.double())

    def finish(self, messages: Messages) -> None:
        """Makes the scales from ``partials`` and writes them, and the flag, into the messages."""
        self._settled = None
        finish(
            self.partials,
            self.segment,
            self._segment_start,
            self._count,
            self._norm,
            self.scale,
            messages.scales,
            messages.words[:, Word.FLAGS],
        )

    def settle(self) -> None:
        """Forms the deferred residual in place: ``compensated`` holds e, and the scales are 0."""
        square, errors = self._squares()
        self._settled = square.clone(), errors
        if not self.compensated.numel():  # nothing is kept
            return
        settle(self.compensated, self.scale, self._ternary, self._live.bits, self._live.row)

    def forget(self) -> None:
        """Drops the residual, settled before, which somebody else has taken."""
        self.compensated.zero_()
        self._settled = (torch.zeros_like(self.partials[0]),) * 2

    def norms(self) -> tuple[float, float]:
        """|c| and |e| of the last step; waits for the device."""
        return float(self._squares()[0].sum().sqrt()), float(self.error_norm())

    def error_norm(self) -> Tensor:
        """|e| of the last step, float64 []: from the sums of |c| and c^2 alone."""
        return self._squares()[1].sum().clamp(min=0).sqrt()

    def error_squares(self) -> Tensor:
        """|e|^2 of each block in the last step, float64 [blocks]; also after ``settle``. Reads no element."""
        return self._squares()[1].clamp(min=0)

    def _squares(self) -> tuple[Tensor, Tensor]:
        """c^2 and |e|^2 of each block in the last step, rounding errors included: float64 [blocks] each."""
        if self._settled is not None:
            return self._settled
        absolute, square, _, *nonzero = self.partials.unbind(0)
        s, numel = self.scale.double(), nonzero[0] if self._ternary else self._live.numel
        return square, square - s * (2 * absolute - s * numel)
