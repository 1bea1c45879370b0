"""The outcomes of steps: counts them, warns and raises, alike on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm import Flag
from ..errors import AbortedStepError, NonFiniteGradientError, OutOfStepError, warn
from ..triton_kernels.headers import PARTLY
from .interrupts import SignalsWait
from .telemetry import HostMirror

Describe = Callable[[Flag], str]


class Outcomes:
    """Follows the flags of each step from the device and acts on them.

    On a CPU the flags of a step are known when it returns. On CUDA they arrive one step later, so
    that no step waits; a skipped step has changed nothing in the meantime, whoever raises when.

    ``nonfinite`` is "skip" (count and warn) or "raise" (at once: waits for the device).
    """

    def __init__(self, device: torch.device, nonfinite: str) -> None:
        self.attempts = 0  # steps begun
        self.skipped = 0  # those known to have been skipped
        self.vetoed = 0  # those of them that the divergence guard refused
        self.veto_at: int | None = None  # the first that it refused since somebody set this to None
        self.partial = 0  # steps, not skipped, in which elements were left out that did not count
        self._arrived = 0
        self._skips: deque[int] = deque(maxlen=4)  # the last attempts that were
        self._warned_at = 0
        self._warned_of_drift = False
        self._replays: Tensor | None = None
        self._unread: Tensor | None = None
        self._replayed = False
        self.scaler_is_told = False  # whether the GradScaler learns what other ranks' gradients are like
        self.on_replays: Callable[[int], None] | None = None  # told how many steps replayed graphs have taken
        self._nonfinite = nonfinite
        self._mirror = HostMirror(device, depth=1 if device.type == "cuda" else 0)

    @property
    def updates(self) -> int:
        """Return the steps that changed the parameters, as far as known."""
        return self.attempts - self.skipped

    def resume(self, updates: int, skipped: int) -> None:
        """Take the counts of a checkpoint."""
        self._mirror.flush()
        self.attempts, self.skipped = updates + skipped, skipped
        self._arrived = self.attempts

    def record(self, flags: Tensor | int, failed: bool = False) -> list[int]:
        """Count by the flags, int32 [1], of the step that has just ended; return what has arrived, for ``act``.

        ``failed``: whether this rank is about to raise an error of its own instead.
        """
        arrived = self._mirror.push(flags)
        if failed or self._nonfinite == "raise":
            arrived += self._mirror.flush()
        for each in arrived:
            self._count(each)
        return arrived

    def act(self, counted: Sequence[int], describe: Describe) -> None:
        """Raise on every rank, or warn of, what flags tell that were counted.

        ``describe`` is called with MISMATCH or VETO for the details. It is not kept: it belongs to an optimizer, which
        would then be part of a reference cycle.
        """
        for flags in counted:
            if flags:
                self._act(flags, describe)

    def counters(self, captured: bool) -> Tensor | None:
        """Return what the op that ends a step counts besides, where steps may be captured.

        In a CUDA graph it does what ``record`` does, on the device, whenever the graph is replayed: steps, skipped,
        vetoed, out of step; int64 [4]. Other steps count what nobody reads, or a capture would be the first to launch
        such kernels, and to load them.
        """
        assert not captured or self._replays is not None  # allocated before the capture, or replays would zero it
        self._replayed |= captured
        return self._replays if captured else self._unread

    def count_replays(self, device: torch.device) -> None:
        """Make what ``counters`` returns."""
        self._replays, self._unread = torch.zeros(2, 4, dtype=torch.int64, device=device)

    def absorb_replays(self) -> None:
        """Take over what replayed graphs have counted; wait for the device. OutOfStepError if any was out of step."""
        if self._replays is None or not self._replayed:
            return
        steps, skipped, vetoed, bad = self._replays.tolist()
        self._replays.zero_()
        self.attempts += steps
        self._arrived += steps
        if self.on_replays is not None:
            self.on_replays(steps)
        self.skipped += skipped
        self.vetoed += vetoed
        if vetoed and self.veto_at is None:
            self.veto_at = self._arrived
        if bad:
            raise OutOfStepError(
                f"{bad} of {steps} steps that a CUDA graph has replayed were out of step with another rank's and were "
                "skipped; every rank must replay equally often"
            )

    def was_skipped(self, attempt: int) -> bool | None:
        """Return whether one of the last attempts was skipped; None until all ranks know, however early one looks."""
        return self.seems_skipped(attempt) if self.attempts >= attempt + self._mirror.depth else None

    def seems_skipped(self, attempt: int) -> bool:
        """Return whether one of the last attempts was skipped, as far as this rank knows."""
        return attempt in self._skips

    def veto_is_due(self) -> bool:
        """Return whether the last veto is known to all ranks by now, however early one has looked."""
        return self.veto_at is not None and self.attempts >= self.veto_at + self._mirror.depth

    def catch_up(self, describe: Describe) -> None:
        """Wait for what is under way, count it and act on it; raise as ``act`` does."""
        self.absorb_replays()
        with SignalsWait():
            arrived = self._mirror.flush()
            for each in arrived:
                self._count(each)
        self.act(arrived, describe)

    def _count(self, flags: int) -> None:
        self._arrived += 1
        self.partial += flags & PARTLY != 0
        flags &= ~PARTLY
        self.skipped += flags != 0
        if flags:
            self._skips.append(self._arrived)
        if flags & Flag.VETO:
            self.vetoed += 1
            self.veto_at = self._arrived if self.veto_at is None else self.veto_at

    def _act(self, flags: int, describe: Describe) -> None:
        if flags == PARTLY:
            self._warn_of_elements()
        flags &= ~PARTLY
        if not flags:
            return
        if flags & Flag.ABORT:
            raise AbortedStepError(
                f"another rank could not take the step after {self.updates} updates (its own error says why); "
                "no parameter was changed on any rank"
            )
        if flags & Flag.MISMATCH:
            raise OutOfStepError(
                f"ranks are out of step after {self.updates} updates: {describe(Flag.MISMATCH)}. "
                "No parameter was changed; every rank must call step() equally often, with equal hyper-parameters, "
                "resuming from the same checkpoint"
            )
        if flags & Flag.OVERFLOW:
            self._act_on_overflow(flags)
            return
        if flags & Flag.VETO:
            if self.vetoed & (self.vetoed - 1) == 0:
                warn(f"every rank skipped the step after {self.updates} updates: {describe(Flag.VETO)}")
            return
        self._act_on_nonfinite()

    def _act_on_overflow(self, flags: int) -> None:
        """Leave a GradScaler's skips to it, unless scalers part ways."""
        if flags & Flag.LOCAL and not self.scaler_is_told and not self._warned_of_drift:
            self._warned_of_drift = True
            warn(
                "a GradScaler found infinite gradients on some ranks only; every rank skipped the step, but only those "
                "will lower their loss scale. Use fusedonebit.amp.GradScaler, which lowers it on all"
            )

    def _warn_of_elements(self) -> None:
        """Warn of the 1st, 2nd, 4th, 8th ... of such steps."""
        if self.partial & (self.partial - 1) == 0:
            warn(
                f"elements of a gradient were not finite, or too large, in update {self.updates}: they alone were left "
                f"out, and their moments stayed as they were ({self.partial} such steps so far)"
            )

    def _act_on_nonfinite(self) -> None:
        text = (
            f"a gradient on some rank was not finite after {self.updates} updates; "
            f"every rank skipped the step ({self.skipped} so far)"
        )
        if self._nonfinite == "raise":
            raise NonFiniteGradientError(text)
        # Loss scaling makes skips common: warn of the 1st, 2nd, 4th, 8th ..., as above.
        if self.skipped >= 2 * self._warned_at:
            self._warned_at = self.skipped
            warn(text)
