"""Momentum and variance as they are stored: in float32, in bfloat16, or in codes of a byte; and AdamW's update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..core.frame import Frame
from ..core.part import Part
from ..core.state_tensor import StateTensor
from ..triton_kernels import adam_update
from ..triton_kernels.codes import in_float32, keep_nearest
from ..triton_kernels.nouns import Moments, Preconditioner, Stored
from ..triton_kernels.renewal import variance


class MomentBuffers(Part):
    """The moments of all parameters, by flat index.

    Args:
        frame: Of the optimizer; its ``options.formats.moments`` say in which form they are stored.

    Attributes:
        exp_avg: m, [P]; in the compression stage workers' compensated values are there.
        exp_avg_sq: v, [P]; empty where that is made of ``mean_sq``.
        mean_sq: Codes of the workers' mean squares, [P], of which a shared v is made; None: it is ``exp_avg_sq``.
        factors: With which it is, float32 [3, tensors], or None.
        of_means: Whether the compression stage's v may be made so; nobody sees it in ``optimizer.state`` then.
        exponents: Of codes, those of each block: of m, of v, and of what is stored beside in the same form, uint8
            [3, B]; None: there are no codes.
        squares: Sums of v by block, float64 [B], which updates write where somebody watches v; else None.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame, layout, device = frame, frame.layout, frame.device
        dtype, coded, _ = frame.options.formats.moments
        self.exp_avg, self.exp_avg_sq = (torch.zeros(layout.numel, dtype=dtype, device=device) for _ in range(2))
        self.exponents = torch.zeros(3, layout.n_blocks, dtype=torch.uint8, device=device) if coded else None
        self.squares: Tensor | None = None
        self.mean_sq: Stored | None = None
        self.factors: Tensor | None = None
        self.of_means = self._captured = False

    @property
    def stored(self) -> Moments:
        """Return m and v as ops take them."""
        drawn = self._frame.steps.updates if self._frame.options.formats.moments.random else None
        return Moments(self.exp_avg, self.exp_avg_sq, self.exponents, drawn)

    def preconditioner(self, eps_inside_sqrt: bool) -> Preconditioner:
        """Return v as ops take it that divide gradients by its root."""
        self._captured |= self._frame.steps.captured  # its address
        if self.mean_sq is not None:
            return Preconditioner(*self.mean_sq, eps_inside_sqrt, self.factors)
        return Preconditioner(self.exp_avg_sq, None if self.exponents is None else self.exponents[1], eps_inside_sqrt)

    def room_for_means(self) -> Stored | None:
        """Return where a renewal puts the mean squares of which v is made then; None: v stays as it is stored.

        A byte for each is the same v. But a CUDA graph that has captured where v lies goes on reading it there.
        """
        if self._captured or not (self.of_means and self.mean_sq is None):
            return None
        codes = torch.empty_like(self.exp_avg_sq, dtype=torch.uint8)
        return Stored(codes, codes.new_empty(self._frame.layout.n_blocks))

    def make_of(self, mean_sq: Stored, factors: Tensor) -> None:
        """Make v of what is in ``mean_sq``, which ``room_for_means`` has returned, and in ``factors`` from now on."""
        self.mean_sq, self.factors, self.exp_avg_sq = mean_sq, factors, self.exp_avg_sq.new_empty(0)

    def written_out(self) -> Tensor:
        """Return v, [P]: where it is made of anything, in other memory."""
        if self.mean_sq is None:
            return self.exp_avg_sq
        return variance(self._frame.places, self.preconditioner(False))

    def write_out(self) -> None:
        """Let ``exp_avg_sq`` be v again, for a warm-up: what was captured before it is void."""
        self.exp_avg_sq, self.mean_sq, self.factors, self._captured = self.written_out(), None, None, False

    def watch(self) -> None:
        """Let updates write ``squares`` from now on."""
        self.squares = torch.zeros(self._frame.layout.n_blocks, dtype=torch.float64, device=self._frame.device)

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Let moments that are stored in codes be float32 for a while, which takes 8 bytes an element as long."""
        if self.exponents is None:
            yield
            return
        m, v = self.stored.stored
        self.exp_avg, self.exp_avg_sq = in_float32(*m), in_float32(*v, signed=False)
        try:
            yield
            keep_nearest(self.exp_avg, *m)
            keep_nearest(self.exp_avg_sq, *v, signed=False)
        finally:
            self.exp_avg, self.exp_avg_sq = m.numbers, v.numbers

    # ---------------------------------------------------------------- a part of an algorithm

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        """Return both; in a compressed stage v alone, as residuals are where m was. Nobody else could read codes."""
        of_m, of_v = (None, None) if self.exponents is None else self.exponents[:2]
        shown = self.exponents is None
        m = StateTensor("exp_avg", "element", self.exp_avg, of_m, published=shown)
        numbers, of_v = (self.exp_avg_sq, of_v) if self.mean_sq is None else self.mean_sq
        shown &= not (compressed and self.of_means)
        v = StateTensor(
            "exp_avg_sq", "element", numbers, of_v, published=shown, not_negative=True, factors=self.factors
        )
        return (v,) if compressed else (m, v)

    def held(self) -> Sequence[Tensor]:
        of_means = None if self.mean_sq is None else self.mean_sq.exponents
        held = (self.exponents, self.squares, of_means)
        return [tensor for tensor in held if tensor is not None]

    def close(self) -> None:
        self.exp_avg, self.exp_avg_sq = self.exp_avg.new_empty(0), self.exp_avg_sq.new_empty(0)
        self.mean_sq = self.factors = None


class AdamUpdate:
    """AdamW's update from averaged gradients: what ``AdamW`` does always, and 1-bit Adam in its warm-up.

    Args:
        frame: Of the optimizer.
        moments: Which it updates.
    """

    def __init__(self, frame: Frame, moments: MomentBuffers) -> None:
        self._frame, self._moments = frame, moments

    def __call__(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        """Make one update, as ``averaging.Update``."""
        frame, moments = self._frame, self._moments
        flag, before = found or (None, None)
        how = (moments.squares, frame.rounding, flag, before, frame.parameters.corrections.table)
        adam_update(frame.parameters.dense, grads, frame.places, moments.stored, coef, skip, *how)
