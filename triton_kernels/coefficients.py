"""The per-tensor coefficients that kernels read from one small device table."""

from __future__ import annotations

from enum import IntEnum


class Coef(IntEnum):
    """Columns of ``coef``, float32 [tensors, len(Coef)]. Computed in float64, rounded once."""

    BETA1 = 0
    ONE_MINUS_BETA1 = 1
    """Negative where the objective is maximised."""
    BETA2 = 2
    ONE_MINUS_BETA2 = 3
    STEP_SIZE = 4
    """lr / (1 - beta1^t)."""
    DECAY = 5
    """1 - lr * weight_decay."""
    RSQRT_BIAS2 = 6
    """1 / sqrt(1 - beta2^t), frozen with the variance."""
    EPS = 7
    UNIT = 8
    """What the momentum is multiplied with before it is compressed (1-bit LAMB, 4.3)."""
