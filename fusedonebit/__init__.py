"""1-bit optimizers for PyTorch: one bit per parameter on the wire.

``OneBitAdam`` stands where ``torch.optim.AdamW`` stood, ``OneBitLamb`` where ``Lamb`` did, ``MarsitSGD``
where ``torch.optim.SGD`` did. ``comm`` holds
the compressed collectives, ``triton_kernels`` the kernels; both can be used by themselves.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import comm as comm
    from . import triton_kernels as triton_kernels
    from .checkpoint import dcp
    from .comm import CollectiveError, DisagreementError
    from .core.settings import Faults, Freeze, Layerwise, Numerics, Wire
    from .errors import AbortedStepError, CheckpointError, FusedOneBitWarning, NonFiniteGradientError, OutOfStepError
    from .integrations import amp, ddp, recording
    from .integrations.any_optimizer import compress
    from .integrations.buffers import broadcast_buffers
    from .integrations.recording import Recorder
    from .optim import policies
    from .optim.adam import OneBitAdam
    from .optim.adamw import AdamW
    from .optim.lamb import Lamb
    from .optim.lion import OneBitLion
    from .optim.marsit import MarsitAdam, MarsitSGD
    from .optim.marsit_options import Rounds
    from .optim.muon import OneBitMuon
    from .optim.onebit_lamb import OneBitLamb
    from .optim.zero_one import ZeroOneAdam

__version__ = "0.2.0"

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
    "OneBitMuon",
    "OutOfStepError",
    "Recorder",
    "Rounds",
    "Wire",
    "ZeroOneAdam",
    "__version__",
    "amp",
    "broadcast_buffers",
    "compress",
    "dcp",
    "ddp",
    "policies",
    "recording",
]


_HOMES = {
    ".checkpoint": ["dcp"],
    ".comm": ["CollectiveError", "DisagreementError"],
    ".core.settings": ["Faults", "Freeze", "Layerwise", "Numerics", "Wire"],
    ".errors": [
        *("AbortedStepError", "CheckpointError", "FusedOneBitWarning", "NonFiniteGradientError", "OutOfStepError")
    ],
    ".integrations": ["amp", "ddp", "recording", "accelerate", "lightning", "transformers"],
    ".integrations.any_optimizer": ["compress"],
    ".integrations.buffers": ["broadcast_buffers"],
    ".integrations.recording": ["Recorder"],
    ".optim": ["policies"],
    ".optim.adam": ["OneBitAdam"],
    ".optim.adamw": ["AdamW"],
    ".optim.lamb": ["Lamb"],
    ".optim.lion": ["OneBitLion"],
    ".optim.marsit": ["MarsitAdam", "MarsitSGD"],
    ".optim.marsit_options": ["Rounds"],
    ".optim.muon": ["OneBitMuon"],
    ".optim.onebit_lamb": ["OneBitLamb"],
    ".optim.zero_one": ["ZeroOneAdam"],
    "": ["checkpoint", "comm", "core", "deepspeed", "errors", "integrations", "optim", "triton_kernels"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what is asked for: torch takes a second, and the command line has something to say before."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOME_OF[name] or ".", __name__)
    found = vars(home).get(name) or import_module(f"{_HOME_OF[name]}.{name}", __name__)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOME_OF})
