"""1-bit optimizers for PyTorch: one bit per parameter on the wire.

``OneBitAdam`` stands where ``torch.optim.AdamW`` stood, ``OneBitLamb`` where ``Lamb`` did, ``MarsitSGD``
where ``torch.optim.SGD`` did. ``comm`` holds
the compressed collectives, ``triton_kernels`` the kernels; both can be used by themselves.
"""

from __future__ import annotations

from . import amp, ddp, policies
from .adam import OneBitAdam
from .buffers import broadcast_buffers
from .comm import CollectiveError, DisagreementError
from .errors import AbortedStepError, FusedOneBitWarning, NonFiniteGradientError, OutOfStepError
from .lamb import Lamb
from .marsit import MarsitAdam, MarsitSGD
from .onebit import OneBitOptimizer
from .onebit_lamb import OneBitLamb
from .onebit_lion import OneBitLion
from .zero_one_adam import ZeroOneAdam

__version__ = "0.1.0"

__all__ = [
    "AbortedStepError",
    "CollectiveError",
    "DisagreementError",
    "FusedOneBitWarning",
    "Lamb",
    "MarsitAdam",
    "MarsitSGD",
    "NonFiniteGradientError",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitLion",
    "OneBitOptimizer",
    "OutOfStepError",
    "ZeroOneAdam",
    "__version__",
    "amp",
    "broadcast_buffers",
    "ddp",
    "policies",
]
