"""Reads the optimizer block of a DeepSpeed config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..core.settings import FAULTS, NUMERICS, Faults, Layerwise, Numerics, values_of
from ..optim.adam import OneBitAdam
from ..optim.onebit_lamb import OneBitLamb
from ..optim.policies import DeepSpeedRounds, DeepSpeedVariance
from ..optim.zero_one import ZeroOneAdam
from .deepspeed_zero_one import DeepSpeedZeroOneAdam

_TRANSPORT_KEYS = ("cuda_aware", "comm_backend_name")
"""How DeepSpeed moved bytes; here the process group says that."""

_UNSUPPORTED = {"amsgrad": False, "eps_inside_sqrt": False, "max_grad_norm": 0.0, "exp_avg_mask": None}
"""Keys accepted only at the value that DeepSpeed itself treats as off."""

_LAMB_KEYS = {
    "coeff_beta": ("beta3", 0.9),
    "max_coeff": ("c_max", 10.0),
    "min_coeff": ("c_min", 0.01),
    "factor_max": ("r_max", 4.0),
    "factor_min": ("r_min", 0.5),
    "factor_threshold": ("r_threshold", 0.1),
}
"""DeepSpeed's names of what 1-bit LAMB adds: ours, and its defaults."""

_T = TypeVar("_T", Numerics, Faults)

NUMERICS_OF_ALL = Numerics(
    scale_norm="l2",
    scale_scope="global",
    precondition=False,
    variance_floor=0.0,
    bias_correction=False,
    serve_alone=True,
)
"""DeepSpeed's numerics."""

NUMERICS_OF_TWO_STAGES = replace(NUMERICS_OF_ALL, dead_coordinates="keep")


@dataclass(frozen=True, kw_only=True)
class DeepSpeedLayerwise(Layerwise):
    """DeepSpeed's LAMB: a ratio of roots, blended with the share of the weight decay and clipped the other way round.

    Coefficients of 1 are left out of the average: a layer that had no other stands still after the freeze.
    """

    variant: str = "deepspeed"


def onebit_adam_arguments(
    config: Mapping[str, Any], *, numerics: Numerics = NUMERICS, faults: Faults = FAULTS, **options: Any
) -> dict[str, Any]:
    """Translate DeepSpeed's ``OneBitAdam`` settings to keyword arguments of ours.

    Args:
        config: ``{"type": "OneBitAdam", "params": {...}}`` or just the params.
        numerics: Whose fields that are not None go before DeepSpeed's numerics.
        faults: Likewise; DeepSpeed has no guard.
        options: Further arguments, which go before the config's.

    Raises:
        ValueError: for another optimizer, an unknown key, or a value with no counterpart.
    """
    given = _params(config, "OneBitAdam")
    return _two_stages(given, "OneBitAdam", numerics, faults) | _nothing_left(given) | options


def onebit_lamb_arguments(
    config: Mapping[str, Any],
    *,
    numerics: Numerics = NUMERICS,
    faults: Faults = FAULTS,
    layerwise: Layerwise | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Translate DeepSpeed's ``OneBitLamb`` settings to keyword arguments of ours; as above.

    ``layerwise`` goes with a config that has none of DeepSpeed's names for what it says.
    """
    given = _params(config, "OneBitLamb")
    arguments = _two_stages(given, "OneBitLamb", numerics, faults)
    if layerwise is not None and (twice := sorted(_LAMB_KEYS.keys() & given.keys())):
        raise ValueError(f"layerwise must be None where the config has {', '.join(twice)}; take them out of the config")
    bounds = {ours: given.pop(key, default) for key, (ours, default) in _LAMB_KEYS.items()}
    said = bounds if layerwise is None else values_of(layerwise)
    return arguments | {"layerwise": DeepSpeedLayerwise(**said)} | _nothing_left(given) | options


def zero_one_adam_arguments(
    config: Mapping[str, Any], *, numerics: Numerics = NUMERICS, **options: Any
) -> dict[str, Any]:
    """Translate DeepSpeed's ``ZeroOneAdam`` settings to keyword arguments of ours; as above."""
    given = _params(config, "ZeroOneAdam")
    frozen = given.pop("var_freeze_step", 100_000)
    if "freeze_step" in given:
        raise ValueError('unknown keys in the DeepSpeed config: freeze_step; 0/1 Adam\'s is "var_freeze_step"')
    arguments = _common_arguments(given, "ZeroOneAdam") | {"numerics": _completed(numerics, NUMERICS_OF_ALL)}
    rounds = (frozen, given.pop("local_step_scaler", 32_678), given.pop("local_step_clipper", 16))
    arguments["variance_policy"] = DeepSpeedVariance(frozen, given.pop("var_update_scaler", 16))
    return arguments | {"sync_policy": DeepSpeedRounds(*rounds)} | _nothing_left(given) | options


def _params(config: Mapping[str, Any], expected: str) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        raise TypeError(f'config must be a dict, DeepSpeed\'s config["optimizer"], got {type(config).__name__}')
    if "optimizer" in config:
        raise ValueError('config must be the optimizer block, got a whole DeepSpeed config; pass config["optimizer"]')
    name = config.get("type", expected)
    if str(name).lower() != expected.lower():
        raise ValueError(f'config["type"] must be "{expected}", got {name!r}')
    return dict((config.get("params") or {}) if "type" in config or "params" in config else config)


def _common_arguments(given: dict[str, Any], name: str) -> dict[str, Any]:
    """Take out of ``given`` what all of DeepSpeed's 1-bit optimizers share."""
    for key in _TRANSPORT_KEYS:
        given.pop(key, None)
    # "bias_correction" is accepted and ignored by DeepSpeed: its update has none.
    given.pop("bias_correction", None)
    for key, off in _UNSUPPORTED.items():
        value = given.pop(key, off)
        if value != off:
            raise ValueError(
                f"{key} must be {off!r} to be carried over, got {value!r}; "
                f"take it out of the config and pass what {name} has instead as a keyword argument"
            )
    return {
        "lr": given.pop("lr", 1e-3),
        "betas": given.pop("betas", (0.9, 0.999)),
        "eps": given.pop("eps", 1e-8),
        "weight_decay": given.pop("weight_decay", 0.0),
    }


def _two_stages(given: dict[str, Any], name: str, numerics: Numerics, faults: Faults) -> dict[str, Any]:
    """Translate what 1-bit Adam and 1-bit LAMB share."""
    numerics, faults = _completed(numerics, NUMERICS_OF_TWO_STAGES), _completed(faults, Faults(guard="off"))
    arguments = _common_arguments(given, name) | {"numerics": numerics, "faults": faults}
    freeze_step = given.pop("freeze_step", 100_000)
    if isinstance(freeze_step, bool) or not isinstance(freeze_step, int):
        raise ValueError(f"freeze_step must be an int >= 2, got {freeze_step!r}; write it without a point or exponent")
    if freeze_step < 2:
        raise ValueError(
            f"freeze_step must be an int >= 2, got {freeze_step!r}: DeepSpeed's first step changes nothing "
            "but is counted, so that smaller ones leave no warm-up"
        )
    return arguments | {"freeze_step": freeze_step - 1}


def _completed(options: _T, otherwise: _T) -> _T:
    """Return an option object with ``otherwise``'s values where it says None."""
    said, usual = values_of(options), values_of(otherwise)
    return replace(options, **{name: usual[name] for name, value in said.items() if value is None})


def _nothing_left(given: dict[str, Any]) -> dict[str, Any]:
    if given:
        raise ValueError(f"unknown keys in the DeepSpeed config: {', '.join(sorted(given))}")
    return {}


_ARGUMENTS: dict[type[Any], Callable[..., dict[str, Any]]] = {
    OneBitAdam: onebit_adam_arguments,
    OneBitLamb: onebit_lamb_arguments,
    ZeroOneAdam: zero_one_adam_arguments,
}


def translated(kind: type[Any], config: Mapping[str, Any], **options: Any) -> tuple[type[Any], dict[str, Any]]:
    """Return the class to make of a config where ``kind`` was asked for, and its arguments; see ``from_deepspeed``."""
    base = next(base for base in kind.__mro__ if base in _ARGUMENTS)
    # DeepSpeed's steps of 0/1 Adam are others than ours.
    return DeepSpeedZeroOneAdam if base is ZeroOneAdam else kind, _ARGUMENTS[base](config, **options)
