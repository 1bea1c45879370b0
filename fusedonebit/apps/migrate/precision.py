"""DeepSpeed's fp16, bf16, amp and torch_autocast blocks: autocast, loss scaling, master weights."""

from __future__ import annotations

from dataclasses import dataclass

from .config import AUTO, Config, InputError
from .optimizers import Numerics

BLOCKS = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast")

FP16_KEYS = (
    *("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
    *("consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"),
)

OFF = "nothing to do: it is off"

STATIC = "scaler.update({scale})  # DeepSpeed's static loss scale never changes"


@dataclass
class Precision:
    """What the script needs for mixed precision.

    Attributes:
        autocast: The type of ``torch.autocast``, as source; None: no autocast.
        cast: Of the whole model, ``"half"`` or ``"bfloat16"``; None: it stays as it is.
        scaler: Arguments of ``GradScaler`` as source; None: no scaler.
        update: The statement that updates the scaler.
    """

    autocast: str | None = None
    cast: str | None = None
    scaler: dict[str, str] | None = None
    update: str = "scaler.update()"


def translate(config: Config, numerics: Numerics) -> Precision:
    """The mixed precision of the config.

    Raises:
        InputError: if two kinds are on, or for a bad value.
    """
    on = [block for block in BLOCKS if _is_on(config, block)]
    if len(on) > 1:
        raise InputError(f"{config.name}: only one of {', '.join(BLOCKS)} can be enabled, got {' and '.join(on)}")
    precision = Precision()
    fp16 = on in (["fp16"], ["amp"])
    if on:
        number = "torch.float16" if fp16 else _autocast_type(config) if on == ["torch_autocast"] else "torch.bfloat16"
        halves = numerics == "deepspeed" and on[0] in ("fp16", "bf16", "bfloat16")
        if halves:
            precision.cast = "half" if fp16 else "bfloat16"
        else:
            precision.autocast = number
        if number == "torch.float16":
            precision.scaler = {}
    how = f"model.{precision.cast}() and master_weights=True" if precision.cast else "torch.autocast"
    for block in on:
        config.carried(f"{block}.enabled", how + (", GradScaler" if precision.scaler is not None else ""))
    _scaling(config, precision)
    _rest(config)
    for block in BLOCKS:
        if block not in on:
            config.explained(block, OFF)
    return precision


def _is_on(config: Config, block: str) -> bool:
    enabled = config.value(f"{block}.enabled", "flag or auto", False) if config.block(block) else False
    if enabled == AUTO:
        config.explained(
            f"{block}.enabled", '"auto": an argument of Hugging Face\'s Trainer; taken as off, write true and run again'
        )
    return enabled is True


def _autocast_type(config: Config) -> str:
    number = config.value("torch_autocast.dtype", "text", "bfloat16")
    known = {
        "bfloat16": "torch.bfloat16",
        "bf16": "torch.bfloat16",
        "float16": "torch.float16",
        "fp16": "torch.float16",
    }
    number = number.removeprefix("torch.")
    if number not in known:
        raise config.error("torch_autocast.dtype", '"bfloat16" or "float16"', number)
    config.carried("torch_autocast.dtype", "torch.autocast's second argument")
    return known[number]


def _scaling(config: Config, precision: Precision) -> None:
    scale = config.value("fp16.loss_scale", "loss scale", 0)
    power = config.value("fp16.initial_scale_power", "power of two", 16)
    window = config.value("fp16.loss_scale_window", "whole >= 1", 1000)
    if precision.scaler is None or not config.block("fp16").get("enabled"):
        return
    if scale:
        precision.scaler = {"init_scale": repr(float(scale))}
        precision.update = STATIC.format(scale=float(scale))
        for key in ("initial_scale_power", "loss_scale_window"):
            config.explained(f"fp16.{key}", "nothing to do: the loss scale is fixed")
    else:
        precision.scaler = {"init_scale": f"2.0**{power}", "growth_interval": str(window)}
        config.carried("fp16.initial_scale_power", "GradScaler(init_scale=)")
        config.carried("fp16.loss_scale_window", "GradScaler(growth_interval=)")
    config.carried("fp16.loss_scale", "scaler.update() with that scale" if scale else "0: dynamic, as GradScaler's is")


def _rest(config: Config) -> None:
    hysteresis = "GradScaler halves the scale at every overflow, at once"
    reasons = {
        "fp16.hysteresis": hysteresis,
        "fp16.consecutive_hysteresis": hysteresis,
        "fp16.min_loss_scale": "GradScaler has no least scale; look at scaler.get_scale()",
        "fp16.auto_cast": "autocast takes inputs of any type; with model.half(), cast your inputs",
        "fp16.fp16_master_weights_and_grads": "about ZeRO-Offload; masters are float32 here",
        "bf16.bf16_master_weights_and_grads": "masters are float32 here; without any: stochastic_rounding=True",
        "bf16.bf16_optimizer_states": "state is float32 here; frozen_dtype=torch.bfloat16 halves the frozen variance",
        "torch_autocast.lower_precision_safe_modules": "about the type of messages, which are float32 or bits here",
    }
    for block in ("bf16", "bfloat16"):
        reasons[f"{block}.immediate_grad_update"] = "gradients accumulate in p.grad"
        reasons[f"{block}.check_grad_overflow"] = "every step looks for NaN and Inf here: nonfinite="
    for path, reason in reasons.items():
        config.explained(path, reason)
    for key in config.block("amp"):
        if key != "enabled" and "." not in key:
            config.explained(
                f"amp.{key}", "an argument of Apex's amp.initialize; torch.autocast chooses types by itself"
            )
