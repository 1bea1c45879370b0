"""Keeps moments in float32, in bfloat16, or in codes of a byte, which are read and filled in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..core.spec import StateSpec
from ..triton_kernels.codes import in_float32, keep_nearest
from ..triton_kernels.nouns import Moments
from .averaging import Averaging

OCTAVES = {"exp_avg": 0, "worker_error": 0, "exp_avg_sq": 1, "worker_sq": 2}
"""Rows of octaves, by the name of what they are of; residuals lie where momentum was."""


class NarrowState(Averaging):
    """Skeleton of an algorithm whose moments take ``Numerics(state=...)``."""

    _octaves: Tensor | None = None  # made when they are first needed

    @property
    def octaves(self) -> Tensor | None:
        """Return where codes of each block lie, uint8 [3, B], see ``OCTAVES``; None: nothing is kept in codes."""
        frame = self.frame
        if self._octaves is None and self.options.state == "8bit":
            self._octaves = torch.zeros(3, frame.layout.n_blocks, dtype=torch.uint8, device=frame.device)
        return self._octaves

    @property
    def moments(self) -> Moments:
        """Return m and v as ops take them."""
        drawn = None if self.options.state == "fp32" else self.frame.steps.updates
        return Moments(self.exp_avg, self.exp_avg_sq, self.octaves, drawn)

    def held(self) -> list[Tensor]:
        return [*super().held(), *([] if self._octaves is None else [self._octaves])]

    # ---------------------------------------------------------------- what is kept in codes

    def octaves_of(self, spec: StateSpec) -> Tensor | None:
        """Return those of something that is kept in codes, uint8 [its blocks]; None: it is not."""
        return None if self.octaves is None or spec.name not in OCTAVES else self.octaves[OCTAVES[spec.name]]

    def part_of(self, spec: StateSpec, i: int) -> Tensor:
        """Return a parameter's part of something kept, in memory as it is; of codes a float32 copy."""
        octaves = self.octaves_of(spec)
        if octaves is None:
            return super().part_of(spec, i)
        kept, octaves = self._coded(spec, octaves, i)
        x = in_float32(kept, octaves, signed=not spec.not_negative)
        return self.frame.parameters.shaped(x, i, 0).clone() if spec.per == "element" else x

    def keep_part(self, spec: StateSpec, i: int, part: Tensor) -> None:
        """Keep ``part``, which ``part_of`` has returned; codes are rounded to nearest."""
        octaves = self.octaves_of(spec)
        if octaves is None:
            return
        kept, octaves = self._coded(spec, octaves, i)
        x = torch.zeros(kept.shape, device=self.frame.device)
        (self.frame.parameters.shaped(x, i, 0) if spec.per == "element" else x).copy_(part)
        keep_nearest(x, kept, octaves, signed=not spec.not_negative)

    def _coded(self, spec: StateSpec, octaves: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """Return codes, uint8 [n], and their octaves: of the blocks of one parameter, or of all that there is."""
        frame = self.frame
        codes = spec.tensor(self).view(-1)
        if spec.per != "element":
            return codes, octaves
        first, end = frame.layout.first_block[i : i + 2]
        return codes.view(frame.layout.n_blocks, -1)[first:end].view(-1), octaves[first:end]

    @contextmanager
    def _moments_in_float32(self) -> Iterator[None]:
        """Let moments that are kept in codes be float32 for a while, which takes 8 bytes an element as long."""
        if self.octaves is None:
            yield
            return
        m, v = self.moments.stored
        self.exp_avg, self.exp_avg_sq = in_float32(*m), in_float32(*v, signed=False)
        try:
            yield
            keep_nearest(self.exp_avg, *m)
            keep_nearest(self.exp_avg_sq, *v, signed=False)
        finally:
            self.exp_avg, self.exp_avg_sq = m.numbers, v.numbers
