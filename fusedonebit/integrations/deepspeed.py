"""Reads the optimizer block of a DeepSpeed config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..optim.policies import DeepSpeedRounds, DeepSpeedVariance

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


def onebit_adam_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translates DeepSpeed's ``OneBitAdam`` settings to keyword arguments of ours.

    Args:
        config: ``{"type": "OneBitAdam", "params": {...}}`` or just the params.

    Raises:
        ValueError: for another optimizer, an unknown key, or a value with no counterpart.
    """
    given = _params(config, "OneBitAdam")
    return _common_arguments(given, "OneBitAdam") | _nothing_left(given)


def onebit_lamb_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translates DeepSpeed's ``OneBitLamb`` settings to keyword arguments of ours; as above."""
    given = _params(config, "OneBitLamb")
    arguments = _common_arguments(given, "OneBitLamb") | {"variant": "deepspeed"}
    for key, (ours, default) in _LAMB_KEYS.items():
        arguments[ours] = given.pop(key, default)
    return arguments | _nothing_left(given)


def zero_one_adam_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translates DeepSpeed's ``ZeroOneAdam`` settings to keyword arguments of ours; as above."""
    given = _params(config, "ZeroOneAdam")
    frozen = given.pop("var_freeze_step", 100_000)
    if "freeze_step" in given:
        raise ValueError('unknown keys in the DeepSpeed config: freeze_step; 0/1 Adam\'s is "var_freeze_step"')
    given["freeze_step"] = 2  # which 1-bit Adam would ask for
    arguments = _common_arguments(given, "ZeroOneAdam")
    for name in ("freeze_step", "guard", "dead_coordinates"):
        del arguments[name]
    policies = {
        "variance_policy": DeepSpeedVariance(frozen, given.pop("var_update_scaler", 16)),
        "sync_policy": DeepSpeedRounds(
            frozen, given.pop("local_step_scaler", 32_678), given.pop("local_step_clipper", 16)
        ),
    }
    return arguments | policies | _nothing_left(given)


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
    """Takes out of ``given`` what all of DeepSpeed's 1-bit optimizers share."""
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
    freeze_step = given.pop("freeze_step", 100_000)
    if isinstance(freeze_step, bool) or not isinstance(freeze_step, int) or freeze_step < 2:
        raise ValueError(
            f"freeze_step must be an int >= 2, got {freeze_step!r}: DeepSpeed's first step changes nothing "
            "but is counted, so that smaller ones leave no warm-up"
        )
    return {
        "lr": given.pop("lr", 1e-3),
        "betas": given.pop("betas", (0.9, 0.999)),
        "eps": given.pop("eps", 1e-8),
        "weight_decay": given.pop("weight_decay", 0.0),
        "freeze_step": freeze_step - 1,
        "scale_norm": "l2",
        "scale_scope": "global",
        "precondition": False,
        "variance_floor": 0.0,
        "guard": "off",
        "bias_correction": False,
        "dead_coordinates": "keep",
    }


def _nothing_left(given: dict[str, Any]) -> dict[str, Any]:
    if given:
        raise ValueError(f"unknown keys in the DeepSpeed config: {', '.join(sorted(given))}")
    return {}
