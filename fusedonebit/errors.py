"""What can go wrong in a step, and the one warning category of the package."""

from __future__ import annotations

import sys
import warnings


class FusedOneBitWarning(UserWarning):
    """Something was left out or skipped; training goes on."""


def warn(text: str) -> None:
    """Warn, pointing at the user's line: the first that lies neither here nor in torch."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("fusedonebit", "torch"):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(text, FusedOneBitWarning, stacklevel=level)


class NonFiniteGradientError(FloatingPointError):
    """A gradient had NaN or Inf elements on some rank and ``nonfinite="raise"`` was asked for."""


class AbortedStepError(RuntimeError):
    """Another rank could not take its step; no rank has.

    Parameters and step counts are as before. In the compression stage the other ranks' gradients of
    this step are kept as residual: go on with new gradients, don't repeat the step with the same.
    """


class OutOfStepError(RuntimeError):
    """Ranks disagree about the step, the layout, the hyper-parameters or the last synchronisation."""


class CheckpointError(ValueError):
    """A checkpoint can't be saved, or can't be loaded; every rank raises it, naming the rank that failed and why."""
