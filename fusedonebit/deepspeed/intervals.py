"""When DeepSpeed's 0/1 Adam renews its variance, and when its workers synchronise."""

from __future__ import annotations

from dataclasses import dataclass

from .. import policies
from ..core.options import check_count

_FIRST = 2
"""DeepSpeed's number of our first step: its own first one changes nothing, but is counted."""


@dataclass(frozen=True)
class DeepSpeedVariance:
    """DeepSpeed 0.19.6's variance policy, which counts steps: renewals where the step is a multiple of an interval.

    Args:
        var_freeze_step: Behind this step the variance is frozen.
        var_update_scaler: Renewals before the interval doubles.
    """

    var_freeze_step: int = 100_000
    var_update_scaler: int = 16

    def __post_init__(self) -> None:
        check_count("var_freeze_step", self.var_freeze_step, least=_FIRST)
        check_count("var_update_scaler", self.var_update_scaler, least=1)

    def frozen(self, done: policies.Progress) -> bool:
        """Tell whether the variance is frozen for good: then momenta are synchronised instead of gradients."""
        return done.steps + _FIRST > self.var_freeze_step + 1

    def renews(self, done: policies.Progress) -> bool:
        """See ``VariancePolicy``."""
        step, begin, interval = done.steps + _FIRST, _FIRST, 1
        if self.frozen(done):
            return False
        while True:
            first = -(-begin // interval) * interval
            last = first + (self.var_update_scaler - 1) * interval
            if step <= last:
                return step >= first and step % interval == 0
            begin, interval = last + 1, 2 * interval


@dataclass(frozen=True)
class DeepSpeedRounds:
    """DeepSpeed 0.19.6's local-step policy, which counts steps from the variance's freeze on.

    Args:
        var_freeze_step: As for ``DeepSpeedVariance``.
        local_step_scaler: Steps before the interval doubles.
        local_step_clipper: The largest interval.
    """

    var_freeze_step: int = 100_000
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16

    def __post_init__(self) -> None:
        check_count("var_freeze_step", self.var_freeze_step, least=_FIRST)
        check_count("local_step_scaler", self.local_step_scaler, least=1)
        check_count("local_step_clipper", self.local_step_clipper, least=1)

    def steps(self, done: policies.Progress) -> int:
        """See ``SyncPolicy``."""
        begin = step = done.steps + _FIRST
        while step % self._interval(step):
            step += 1
        return step - begin + 1

    def _interval(self, step: int) -> int:
        doublings = max(0, step - self.var_freeze_step - _FIRST) // self.local_step_scaler
        return min(self.local_step_clipper, 1 << min(doublings, self.local_step_clipper.bit_length()))
