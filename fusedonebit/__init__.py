"""1-bit optimizers for PyTorch: one bit per parameter on the wire.

``OneBitAdam`` stands where ``torch.optim.AdamW`` stood, ``OneBitLamb`` where ``Lamb`` did, ``MarsitSGD``
where ``torch.optim.SGD`` did. ``comm`` holds
the compressed collectives, ``triton_kernels`` the kernels; both can be used by themselves.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import amp, baselines, ddp, policies
from .adam import OneBitAdam
from .buffers import broadcast_buffers
from .comm import CollectiveError, DisagreementError
from .errors import AbortedStepError, CheckpointError, FusedOneBitWarning, NonFiniteGradientError, OutOfStepError
from .lamb import Lamb
from .marsit import MarsitAdam, MarsitSGD
from .onebit import OneBitOptimizer
from .onebit_lamb import OneBitLamb
from .onebit_lion import OneBitLion
from .recording import Recorder
from .zero_one_adam import ZeroOneAdam

if TYPE_CHECKING:
    from . import dcp, migrate, plan

__version__ = "0.1.0"

__all__ = [
    "AbortedStepError",
    "CheckpointError",
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
    "Recorder",
    "ZeroOneAdam",
    "__version__",
    "amp",
    "baselines",
    "broadcast_buffers",
    "dcp",
    "ddp",
    "migrate",
    "plan",
    "policies",
]


def __getattr__(name: str) -> Any:
    """Imports what not every program needs when it is asked for: dcp alone takes a second."""
    if name in ("dcp", "migrate", "plan"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
