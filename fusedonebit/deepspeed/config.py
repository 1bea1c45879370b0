"""Makes optimizers of the optimizer block of a DeepSpeed config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, overload

from .. import Faults, Layerwise, Numerics, OneBitAdam, OneBitLamb, ZeroOneAdam
from ..core.settings import FAULTS, NUMERICS, Params, Ranks
from .intervals import DeepSpeedRounds, DeepSpeedVariance
from .numerics import DeepSpeedLayerwise, DeepSpeedZeroOneAdam

_TRANSPORT_KEYS = ("cuda_aware", "comm_backend_name")
"""How DeepSpeed moved bytes; here the process group says that."""

_UNSUPPORTED = {"amsgrad": False, "eps_inside_sqrt": False, "max_grad_norm": 0.0, "exp_avg_mask": None}
"""Keys accepted only at the value that DeepSpeed itself treats as off."""

LAMB_KEYS = {
    "max_coeff": ("c_max", 10.0),
    "min_coeff": ("c_min", 0.01),
    "coeff_beta": ("beta3", 0.9),
    "factor_max": ("r_max", 4.0),
    "factor_min": ("r_min", 0.5),
    "factor_threshold": ("r_threshold", 0.1),
}
"""DeepSpeed's names of what 1-bit LAMB adds: ours, and its defaults."""

_T = TypeVar("_T", Numerics, Faults)
_Optimizer = TypeVar("_Optimizer", bound=Any)

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


@overload
def from_config(
    params: Params, config: Mapping[str, Any], process_group: Ranks = ..., *, kind: type[_Optimizer], **options: Any
) -> _Optimizer: ...


@overload
def from_config(
    params: Params, config: Mapping[str, Any], process_group: Ranks = ..., **options: Any
) -> OneBitAdam | OneBitLamb | ZeroOneAdam: ...


def from_config(
    params: Params,
    config: Mapping[str, Any],
    process_group: Ranks = None,
    *,
    kind: type[Any] | None = None,
    **options: Any,
) -> Any:
    """Make the optimizer that a DeepSpeed config describes, with DeepSpeed 0.19.6's numerics.

    Those are: l2 scales over everything, a server on one rank alone too, and no bias correction. Of two stages also:
    coordinates with v == 0 are left as they are, and ``freeze_step`` F means F - 1 uncompressed updates: DeepSpeed's
    first ``step()`` only sets up its buffers and drops the gradient, but is counted. Ours drops none. Of LAMB also: a
    ratio of roots, blended with the share of the weight decay and clipped the other way round. Of 0/1 Adam: intervals
    count steps, that first one included; gradients are compressed until the variance is frozen, and weight decay is
    part of what is summed and of the rebuilt momentum. Where learning rates change the residuals follow them; those of
    DeepSpeed's 0/1 Adam do not.

    Args:
        params: As for the constructor; per-group settings override the config's.
        config: The optimizer block, ``{"type": "OneBitAdam", "params": {...}}``, or, with a ``kind``, its params.
        process_group: As for the constructor.
        kind: ``OneBitAdam``, ``OneBitLamb``, ``ZeroOneAdam`` or a subclass; None: what the config's ``"type"`` says.
        options: Further arguments of the constructor; they go before the config's, and so does what ``numerics``
            and ``faults`` say. ``layerwise`` goes with a config that has none of DeepSpeed's names for what it says.

    Raises:
        TypeError, ValueError: for another optimizer, an unknown key, or a value with no counterpart.
    """
    base = _base(kind, config)
    arguments = _ARGUMENTS[base](config, **options)
    # DeepSpeed's steps of 0/1 Adam are others than ours.
    made = DeepSpeedZeroOneAdam if base is ZeroOneAdam else kind or base
    return made(params, **arguments, process_group=process_group)


def _base(kind: type[Any] | None, config: Mapping[str, Any]) -> type[Any]:
    """Return which of the three optimizers is asked for, by its class or in the config."""
    if not isinstance(config, Mapping):
        raise TypeError(f'config must be a dict, DeepSpeed\'s config["optimizer"], got {type(config).__name__}')
    if "optimizer" in config:
        raise ValueError('config must be the optimizer block, got a whole DeepSpeed config; pass config["optimizer"]')
    names, said = ", ".join(base.__name__ for base in _ARGUMENTS), str(config.get("type")).lower()
    for base in _ARGUMENTS:
        if base.__name__.lower() == said if kind is None else issubclass(kind, base):
            return base
    if kind is None:
        raise ValueError(f'config["type"] must be one of {names}, got {config.get("type")!r}')
    raise TypeError(f"kind must be one of {names}, or a subclass, got {kind.__name__}")


def _onebit_adam_arguments(
    config: Mapping[str, Any], *, numerics: Numerics = NUMERICS, faults: Faults = FAULTS, **options: Any
) -> dict[str, Any]:
    given = _params(config, "OneBitAdam")
    return _two_stages(given, "OneBitAdam", numerics, faults) | _nothing_left(given) | options


def _onebit_lamb_arguments(
    config: Mapping[str, Any],
    *,
    numerics: Numerics = NUMERICS,
    faults: Faults = FAULTS,
    layerwise: Layerwise | None = None,
    **options: Any,
) -> dict[str, Any]:
    given = _params(config, "OneBitLamb")
    arguments = _two_stages(given, "OneBitLamb", numerics, faults)
    if layerwise is not None and (twice := sorted(LAMB_KEYS.keys() & given.keys())):
        raise ValueError(f"layerwise must be None where the config has {', '.join(twice)}; take them out of the config")
    bounds = {ours: given.pop(key, default) for key, (ours, default) in LAMB_KEYS.items()}
    said = bounds if layerwise is None else vars(layerwise)
    return arguments | {"layerwise": DeepSpeedLayerwise(**said)} | _nothing_left(given) | options


def _zero_one_adam_arguments(
    config: Mapping[str, Any], *, numerics: Numerics = NUMERICS, **options: Any
) -> dict[str, Any]:
    given = _params(config, "ZeroOneAdam")
    frozen = given.pop("var_freeze_step", 100_000)
    if "freeze_step" in given:
        raise ValueError('unknown keys in the DeepSpeed config: freeze_step; 0/1 Adam\'s is "var_freeze_step"')
    arguments = _common_arguments(given, "ZeroOneAdam") | {"numerics": _completed(numerics, NUMERICS_OF_ALL)}
    rounds = (frozen, given.pop("local_step_scaler", 32_678), given.pop("local_step_clipper", 16))
    arguments["variance_policy"] = DeepSpeedVariance(frozen, given.pop("var_update_scaler", 16))
    return arguments | {"sync_policy": DeepSpeedRounds(*rounds)} | _nothing_left(given) | options


def _params(config: Mapping[str, Any], expected: str) -> dict[str, Any]:
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
    said, usual = vars(options), vars(otherwise)
    return replace(options, **{name: usual[name] for name, value in said.items() if value is None})


def _nothing_left(given: dict[str, Any]) -> dict[str, Any]:
    if given:
        raise ValueError(f"unknown keys in the DeepSpeed config: {', '.join(sorted(given))}")
    return {}


_ARGUMENTS: dict[type[Any], Callable[..., dict[str, Any]]] = {
    OneBitAdam: _onebit_adam_arguments,
    OneBitLamb: _onebit_lamb_arguments,
    ZeroOneAdam: _zero_one_adam_arguments,
}
"""What translates a config to keyword arguments of ours."""
