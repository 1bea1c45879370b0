"""What can go wrong in a step, and the one warning category of the package."""

from __future__ import annotations


class FusedOneBitWarning(UserWarning):
    """Something was left out or skipped; training goes on."""


class NonFiniteGradientError(FloatingPointError):
    """A gradient had NaN or Inf elements on some rank and ``nonfinite="raise"`` was asked for."""


class AbortedStepError(RuntimeError):
    """Another rank could not take its step; no rank has.

    Parameters and step counts are as before. In the compression stage the other ranks' gradients of
    this step are kept as residual: go on with new gradients, don't repeat the step with the same.
    """


class OutOfStepError(RuntimeError):
    """Ranks disagree about the step, the layout, the hyper-parameters or the last synchronisation."""
