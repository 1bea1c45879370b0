"""Columns of the tables that kernels read: hyper-parameters by tensor and by group; and rows of what LAMB keeps."""

from __future__ import annotations

from enum import IntEnum

LARGEST_GRADIENT = 1.8e19
"""Elements of gradients beyond it, whose squares float32 can't hold (from 2^64 on), are taken for infinite."""


class Coef(IntEnum):
    """Columns of ``coef``, float32 [tensors, len(Coef)]. Computed in float64, rounded once.

    ``STEP_SIZE`` and ``DECAY`` are what moves a parameter: x = DECAY*x - STEP_SIZE*m/denom. LAMB
    writes both, once it knows the layer's coefficient c.
    """

    BETA1 = 0
    ONE_MINUS_BETA1 = 1
    """Negative where the objective is maximised."""
    BETA2 = 2
    ONE_MINUS_BETA2 = 3
    STEP_SIZE = 4
    """lr * c / (1 - beta1^t)."""
    DECAY = 5
    """1 - lr * c * weight_decay."""
    RSQRT_BIAS2 = 6
    """1 / sqrt(1 - beta2^t), frozen with the variance."""
    EPS = 7
    UNIT = 8
    """What the momentum is multiplied with before it is compressed (1-bit LAMB, 4.3)."""
    LR = 9
    UNBIAS1 = 10
    """1 / (1 - beta1^t)."""
    WEIGHT_DECAY = 11
    C_MIN = 12
    """Bounds of LAMB's coefficient (1-bit LAMB, eq. 2)."""
    C_MAX = 13
    BETA3 = 14
    """Of the coefficient's moving average (Algorithm 1, line 2)."""
    R_MIN = 15
    """Bounds of the ratio (line 19), and of its change in one step (line 18)."""
    R_MAX = 16
    R_THRESHOLD = 17
    GLOBAL_RATIO = 18
    """eta_s / eta_l (Marsit, Algorithm 2)."""
    GRAD_LIMIT = 19
    """``LARGEST_GRADIENT`` times the loss scale: no larger element of a gradient, as it is handed over, counts."""


class Group(IntEnum):
    """Columns of a group's row, float64, behind those of ``Coef``, of which it has what is alike for its tensors."""

    CORRECTION1 = len(Coef)
    """beta of the momentum's bias correction, 0 without one."""
    CORRECTION2 = len(Coef) + 1
    """The same of the variance, as it was made."""
    FLOOR = len(Coef) + 2
    """Share of a tensor's mean variance that is added to v, with eps^2; 0: eps is added to the root."""


class Layer(IntEnum):
    """Rows of LAMB's ``layers``, float32 [len(Layer), tensors], kept from step to step."""

    AVERAGE = 0
    """c_avg, the moving average of the warm-up's coefficients."""
    RATIO = 1
    """r_t; 1 until the compression stage."""
    COEFFICIENT = 2
    """c_t of the last step."""


class Factor(IntEnum):
    """Rows of ``factors``, float32 [len(Factor), tensors]: what a living v is made with of workers' mean squares."""

    FACTOR = 0
    """What these are multiplied with."""
    USUAL = 1
    """v where there are none; 0 of a tensor that waits for its first gradient, whose v is 0."""
    LEAST = 2
    """The least v."""
