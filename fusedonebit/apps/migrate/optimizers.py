"""DeepSpeed's optimizer block as a call of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ...integrations.deepspeed import onebit_adam_arguments
from .config import Config, InputError

Numerics = Literal["deepspeed", "recommended"]

PARAMS = "optimizer.params."

SHARED = {
    "bias_correction": "DeepSpeed takes it and never looks at it",
    "eps_inside_sqrt": "DeepSpeed takes it and never looks at it; here eps_inside_sqrt= does something",
    "cuda_aware": "MPITransport asks the MPI library itself",
    "comm_backend_name": "",  # as ``_transport`` says
}
"""Keys that all three of DeepSpeed's 1-bit optimizers have, and that change no number."""

LAMB_KEYS = {
    "max_coeff": ("c_max", "number > 0", 10.0),
    "min_coeff": ("c_min", "number >= 0", 0.01),
    "coeff_beta": ("beta3", "number in [0, 1)", 0.9),
    "factor_max": ("r_max", "number > 0", 4.0),
    "factor_min": ("r_min", "number > 0", 0.5),
    "factor_threshold": ("r_threshold", "number in [0, 1)", 0.1),
}
"""DeepSpeed's names of what 1-bit LAMB adds: ours, what they may be, DeepSpeed's defaults."""

ZERO_ONE_KEYS = {
    "var_freeze_step": 100_000,
    "var_update_scaler": 16,
    "local_step_scaler": 32_678,
    "local_step_clipper": 16,
}
"""What 0/1 Adam adds, and DeepSpeed's defaults."""

REPLACES = dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam"), "OneBitAdam")
REPLACES |= dict.fromkeys(("lamb", "fusedlamb"), "OneBitLamb")
"""Optimizers that average whole gradients, by DeepSpeed's names in lower case, and ours that sends bits instead."""

UNCOMPRESSED = (
    ", which sends whole gradients; {ours} is the optimizer that sends bits instead: write that type, and a "
    '"freeze_step" (15 to 20 % of all steps, behind the learning-rate warm-up) into params, and migrate that'
)

COMMON: dict[str, tuple[str, Any]] = {
    "lr": ("number > 0", 1e-3),
    "betas": ("betas", (0.9, 0.999)),
    "eps": ("number >= 0", 1e-8),
    "weight_decay": ("number >= 0", 0.0),
}
"""What all three have; DeepSpeed's defaults are written out, because ours are others."""


@dataclass
class Call:
    """An optimizer in the script: its class, what it needs imported, and its arguments as source, with comments.

    Those of ``in_config`` go into the dict that ``from_deepspeed`` takes.
    """

    name: str
    imports: list[str]
    mpi: bool = False
    arguments: dict[str, str] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    in_config: tuple[str, ...] = ()


def translate(config: Config, numerics: Numerics) -> Call:
    """The optimizer of the config.

    Raises:
        InputError: if it has none, or another than DeepSpeed's 1-bit optimizers, or a bad value.
    """
    name = _name(config)
    call = Call(name, [f"from fusedonebit import {name}"])
    config.carried("optimizer.type", name)
    config.explained("optimizer.legacy_fusion", "about DeepSpeed's own kernels")
    _refuse_amsgrad(config)
    for key, reason in SHARED.items():
        config.explained(PARAMS + key, reason or _transport(config, call))
    config.explained(PARAMS + "max_grad_norm", "DeepSpeed's engine refuses it; gradient_clipping is what it clips by")
    for key in ("torch_adam", "adam_w_mode"):
        config.explained(PARAMS + key, "of DeepSpeed's Adam, not of its 1-bit optimizers")
    for key, (kind, default) in COMMON.items():
        call.arguments[key] = config.source(PARAMS + key, kind, default)
        if not config.has(PARAMS + key):
            call.comments[key] = "DeepSpeed's default"
        config.carried(PARAMS + key, f"{name}({key}=)")
    TRANSLATIONS[name](config, call, numerics)
    if call.mpi:
        call.arguments["process_group"] = "transport"
    return call


def _name(config: Config) -> str:
    if "optimizer" not in config.values:
        raise InputError(
            f'{config.name} has no "optimizer" block: where the script constructs the optimizer, replace that '
            "line; what each argument becomes is in docs/migrating-from-deepspeed.md"
        )
    config.block("optimizer")
    given = config.value("optimizer.type", "text")
    known = {name.lower(): name for name in TRANSLATIONS}
    if given is None or given.lower() not in known:
        ours = REPLACES.get((given or "").lower())
        way = "" if ours is None else UNCOMPRESSED.format(ours=ours)
        raise config.error("optimizer.type", f"one of {', '.join(TRANSLATIONS)}", given, way)
    config.block("optimizer.params")
    return known[given.lower()]


def _refuse_amsgrad(config: Config) -> None:
    if config.value(PARAMS + "amsgrad", "flag", False):
        raise config.error(PARAMS + "amsgrad", "false, as in DeepSpeed, whose 1-bit optimizers refuse it,", True)
    config.explained(PARAMS + "amsgrad", "nothing to do: there is no amsgrad, here as there")


def _transport(config: Config, call: Call) -> str:
    """How the bytes travel; over MPI without torch.distributed."""
    backend = config.value(PARAMS + "comm_backend_name", "text", "nccl")
    if backend == "mpi":
        call.imports.append("from fusedonebit.comm.mpi import MPITransport")
        call.mpi = True
        return "process_group=MPITransport(): needs mpi4py, and mpirun as before"
    return f'"{backend}": the process group decides; init_process_group() takes NCCL for GPUs and gloo for CPUs'


def deepspeeds() -> dict[str, str]:
    """DeepSpeed's numerics as arguments of ours, in source."""
    arguments = onebit_adam_arguments({})
    return {name: repr(value) for name, value in arguments.items() if name not in (*COMMON, "freeze_step")}


def _freeze_step(config: Config, call: Call) -> None:
    frozen = config.value(PARAMS + "freeze_step", "whole >= 2", 100_000)
    call.arguments["freeze_step"] = str(frozen - 1)
    call.comments["freeze_step"] = f"{frozen} in DeepSpeed, whose first step changes nothing but is counted"
    config.carried(PARAMS + "freeze_step", "one less: DeepSpeed's first step() is counted, and drops its gradient")


def _scope(config: Config, call: Call) -> None:
    """Without its 16-bit wrapper, which fuses parameters, DeepSpeed has a scale of its own for each of them."""
    halved = any(config.value(f"{block}.enabled", "flag or auto", False) is True for block in ("fp16", "bf16"))
    if not halved:
        call.arguments["scale_scope"] = "'layer'"
        call.comments["scale_scope"] = "in fp32 DeepSpeed compresses each parameter by itself"


def _onebit_adam(config: Config, call: Call, numerics: Numerics) -> None:
    _freeze_step(config, call)
    if numerics == "deepspeed":
        call.arguments |= deepspeeds()
        _scope(config, call)


def _onebit_lamb(config: Config, call: Call, numerics: Numerics) -> None:
    _freeze_step(config, call)
    for key, (ours, kind, default) in LAMB_KEYS.items():
        call.arguments[ours] = config.source(PARAMS + key, kind, default)
        config.carried(PARAMS + key, f"OneBitLamb({ours}=)")
    for least, most in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
        _check_bounds(config, least, most)
    if numerics == "deepspeed":
        call.arguments |= deepspeeds() | {"variant": "'deepspeed'"}


def _check_bounds(config: Config, least: str, most: str) -> None:
    """Raises InputError where a lower bound, given or DeepSpeed's own, is above the upper one."""
    low, high = (config.value(PARAMS + key, *LAMB_KEYS[key][1:]) for key in (least, most))
    if low > high:
        of_deepspeed = "" if config.has(PARAMS + least) else ", which is DeepSpeed's default"
        raise config.error(PARAMS + most, f"at least {least} ({low}{of_deepspeed})", high)


def _zero_one_adam(config: Config, call: Call, numerics: Numerics) -> None:
    kinds = {key: f"whole >= {2 if key == 'var_freeze_step' else 1}" for key in ZERO_ONE_KEYS}
    given = {key: config.source(PARAMS + key, kinds[key], default) for key, default in ZERO_ONE_KEYS.items()}
    if numerics == "deepspeed":  # its numerics are another class', which that makes
        call.name = "ZeroOneAdam.from_deepspeed"
        call.arguments |= given
        call.in_config = (*COMMON, *ZERO_ONE_KEYS)
        for key in ZERO_ONE_KEYS:
            config.carried(PARAMS + key, "the same, in steps as DeepSpeed counts them")
        _scope(config, call)
        return
    variance, sync = zero_one_policies(given)
    call.arguments |= {"variance_policy": variance, "sync_policy": sync}
    call.comments["variance_policy"] = call.comments["sync_policy"] = "in rounds; DeepSpeed counts steps"
    names = [text.partition("(")[0] for text in (variance, sync)]
    call.imports.append(f"from fusedonebit.optim.policies import {', '.join(sorted(names))}")
    for key in ZERO_ONE_KEYS:
        policy = names[0 if key.startswith("var") else 1]
        config.carried(PARAMS + key, f"{policy}, which counts rounds, not steps: choose anew (docs/zero-one-adam.md)")


def zero_one_policies(given: dict[str, str]) -> tuple[str, str]:
    """0/1 Adam's two policies, as source, from DeepSpeed's four numbers; rounds are a power of two."""
    freeze, scaler = given["var_freeze_step"], given["var_update_scaler"]
    local, most = given["local_step_scaler"], given["local_step_clipper"]
    return (
        f"DoublingVariance(scaler={scaler}, until={freeze})",
        f"DoublingRounds(after={freeze}, scaler={local}, most={_power_of_two(most)})",
    )


def _power_of_two(number: str) -> str:
    """The largest that is not above a whole number; what is no number stays."""
    return str(1 << (int(number).bit_length() - 1)) if number.isdigit() else number


TRANSLATIONS: dict[str, Callable[[Config, Call, Numerics], None]] = {
    "OneBitAdam": _onebit_adam,
    "OneBitLamb": _onebit_lamb,
    "ZeroOneAdam": _zero_one_adam,
}
"""By our names, which are DeepSpeed's names in a config but for case."""
