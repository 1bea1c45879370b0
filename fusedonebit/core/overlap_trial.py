"""Finds out whether it pays to send in the backward pass: steps that do and steps that don't take turns, and are timed.

Where hosts share cores, or the network is fast, what compresses and sends takes from the backward pass more than it
hides. Which way a step goes changes no bit, nor any message, but whether buckets travel each by itself or all together:
so ranks agree on it.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch

from ..comm import Transport

SETTLES, EACH = 4, 12
"""The first steps, which count for nothing; then steps of each kind."""


Clock = Any
"""Seconds, or an event of CUDA's."""
Span = tuple[Clock, Clock]


class Timed(NamedTuple):
    """Seconds from a step's first gradient to the end of its exchange, medians over steps, means over ranks."""

    overlapped: float
    after: float


class OverlapTrial:
    """Says of each step whether it overlaps, until it has been decided which is faster.

    Args:
        device: Where gradients are. On CUDA events tell the time, which are read once, when all have been recorded.

    Attributes:
        found: What was measured; None before, and where no rank had a gradient.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._began: Clock | None = None
        self._spans: tuple[list[Span], list[Span]] = ([], [])
        self.found: Timed | None = None

    @property
    def is_over(self) -> bool:
        """Tell whether it has been decided."""
        return self._steps >= SETTLES + 2 * EACH

    @property
    def overlaps(self) -> bool:
        """Tell whether the coming step does: the first, each second one, and all if that was the faster way."""
        if self.is_over:
            return self.found is None or self.found.overlapped <= self.found.after
        return self._steps % 2 == 0

    def begin_step(self) -> None:
        """Take the time, at a step's first gradient."""
        if not self.is_over:
            self._began = self._now()

    def end_step(self, transport: Transport) -> bool:
        """Take the time when a step's exchange is over; all ranks together. Tell whether that has decided it."""
        if self.is_over:
            return False
        if self._began is not None and self._steps >= SETTLES:
            self._spans[self._steps % 2].append((self._began, self._now()))
        self._began, self._steps = None, self._steps + 1
        if self.is_over:
            self._decide(transport)
        return self.is_over

    def _now(self) -> Clock:
        if self._device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _decide(self, transport: Transport) -> None:
        medians = [statistics.median(map(_seconds, spans)) for spans in self._spans if spans]
        told = torch.tensor([*medians, 1.0] if len(medians) == 2 else [0.0] * 3, device=self._device)
        transport.all_reduce(told)
        overlapped, after, ranks = told.tolist()
        if ranks > 0:
            self.found = Timed(overlapped / ranks, after / ranks)
        self._spans = ([], [])


def _seconds(span: Span) -> float:
    began, ended = span
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return 1e-3 * float(began.elapsed_time(ended))
