"""1-bit optimizers for PyTorch: one bit per parameter on the wire.

``OneBitAdam`` stands where ``torch.optim.AdamW`` stood, ``OneBitLamb`` where ``Lamb`` did, ``MarsitSGD``
where ``torch.optim.SGD`` did. ``comm`` holds
the compressed collectives, ``triton_kernels`` the kernels; both can be used by themselves.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .comm import CollectiveError, DisagreementError
from .core.settings import Faults, Freeze, Layerwise, Numerics, Wire
from .errors import AbortedStepError, CheckpointError, FusedOneBitWarning, NonFiniteGradientError, OutOfStepError
from .integrations import amp, ddp, recording
from .integrations.buffers import broadcast_buffers
from .integrations.recording import Recorder
from .optim import policies
from .optim.adam import OneBitAdam
from .optim.adamw import AdamW
from .optim.lamb import Lamb
from .optim.lion import OneBitLion
from .optim.marsit import MarsitAdam, MarsitSGD, Rounds
from .optim.onebit_lamb import OneBitLamb
from .optim.two_stage import OneBitOptimizer
from .optim.zero_one import ZeroOneAdam

if TYPE_CHECKING:
    from .checkpoint import dcp

__version__ = "0.1.0"

__all__ = [
    "AbortedStepError",
    "AdamW",
    "CheckpointError",
    "CollectiveError",
    "DisagreementError",
    "Faults",
    "Freeze",
    "FusedOneBitWarning",
    "Lamb",
    "Layerwise",
    "MarsitAdam",
    "MarsitSGD",
    "NonFiniteGradientError",
    "Numerics",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitLion",
    "OneBitOptimizer",
    "OutOfStepError",
    "Recorder",
    "Rounds",
    "Wire",
    "ZeroOneAdam",
    "__version__",
    "amp",
    "broadcast_buffers",
    "dcp",
    "ddp",
    "policies",
    "recording",
]


_LATER = {
    "dcp": ".checkpoint.dcp",  # takes a second
    # Want packages that are no requirements.
    "accelerate": ".integrations.accelerate",
    "lightning": ".integrations.lightning",
    "transformers": ".integrations.transformers",
}


def __getattr__(name: str) -> Any:
    """Import what is imported only when it is asked for."""
    if name in _LATER:
        return import_module(_LATER[name], __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
