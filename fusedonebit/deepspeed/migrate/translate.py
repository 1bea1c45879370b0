"""Translates DeepSpeed's optimizer, batches, precision and schedule; ``reasons`` has what is not carried over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...apps.parsing import InputError
from .. import schedules
from ..config import from_config
from . import calls, reasons
from .calls import COMMON, LAMB, PARAMS
from .deepspeed_config import AUTO, Config

REPLACES = dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam"), "OneBitAdam")
REPLACES |= dict.fromkeys(("lamb", "fusedlamb"), "OneBitLamb")
"""Optimizers that average whole gradients, by DeepSpeed's names in lower case, and ours that sends bits instead."""

UNCOMPRESSED = (
    ", which sends whole gradients; {ours} is the optimizer that sends bits instead: write that type, and a "
    '"freeze_step" (15 to 20 % of all steps, behind the learning-rate warm-up) into params, and migrate that'
)

ROUNDS = "which counts rounds, not steps: choose anew (docs/zero-one-adam.md)"
ZERO_ONE = {
    "var_freeze_step": f"DoublingVariance(until=), {ROUNDS}",
    "var_update_scaler": f"DoublingVariance(scaler=), {ROUNDS}",
    "local_step_scaler": f"DoublingRounds(scaler=), {ROUNDS}",
    "local_step_clipper": f"DoublingRounds(most=), the power of two that is not above it, {ROUNDS}",
}
IGNORED = {
    "bias_correction": "DeepSpeed takes it and never looks at it",
    "eps_inside_sqrt": "DeepSpeed takes it and never looks at it; here eps_inside_sqrt= does something",
    "amsgrad": "nothing to do: there is no amsgrad, here as there",
    "cuda_aware": "MPITransport asks the MPI library itself",
}
"""Keys of all three optimizers that change no number."""

CLIPPING = "gradient_clipping"

OWN = {
    "OneBitAdam": (*COMMON, "freeze_step", "amsgrad"),
    "OneBitLamb": (*COMMON, "freeze_step", *LAMB, "amsgrad"),
    "ZeroOneAdam": (*COMMON, *ZERO_ONE, "amsgrad"),
}
"""DeepSpeed's names of what each optimizer reads; ours are called as they are there, but for case."""

BLOCKS = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast")
"""Of mixed precision: one of them can be on."""


def translate(config: Config) -> list[str]:
    """Find what each key becomes; return the calls that make the optimizer.

    Raises:
        InputError: if the config makes no sense: what the optimizer or the schedule refuses is told now.
    """
    name = _optimizer(config)
    more = _transport(config) | _clipping(config)
    _batches(config)
    _precision(config)
    spoken_of = {entry.path for entry in config.entries}
    given = config.given("optimizer.params", [key for key in OWN[name] if PARAMS + key in spoken_of])
    optimizer = _constructed(config, name, given, more)
    written = calls.write(config, name, optimizer, given, more)
    _schedule(config, optimizer)  # which changes learning rates
    for path in ("optimizer.params", "scheduler.params"):
        if not config.block(path):
            config.explained(path, "empty: DeepSpeed's defaults")
    reasons.explain(config)
    known = (*reasons.REASONS, *reasons.DETAILS, *OWN[name], *IGNORED, *BATCHES, CLIPPING, "max_grad_norm")
    config.close(path.rpartition(".")[2] for path in known)
    return [*_early_freeze(config, name), *written]


def _optimizer(config: Config) -> str:
    if "optimizer" not in config.values:
        raise InputError(
            f'{config.name} has no "optimizer" block; what each of its arguments becomes is in '
            "docs/migrating-from-deepspeed.md"
        )
    config.block("optimizer")
    config.block("optimizer.params")
    given, known = config.get("optimizer.type"), {name.lower(): name for name in OWN}
    lower = given.lower() if isinstance(given, str) else ""
    if lower not in known:
        way = UNCOMPRESSED.format(ours=REPLACES[lower]) if lower in REPLACES else ""
        raise config.error("optimizer.type", f"one of {', '.join(OWN)}", given, way)
    name = known[lower]
    config.carried("optimizer.type", name)
    config.explained("optimizer.legacy_fusion", "about DeepSpeed's own kernels")
    for key in COMMON:
        config.carried(PARAMS + key, f"{key}={config.shown(PARAMS + key)}")
    if name != "ZeroOneAdam":
        text = "freeze_step=, one less: DeepSpeed's first step() is counted, and drops its gradient"
        config.carried(PARAMS + "freeze_step", text)
    if name == "OneBitLamb":
        for key, ours in LAMB.items():
            config.carried(PARAMS + key, f"{ours}={config.shown(PARAMS + key)}")
    if name == "ZeroOneAdam":
        for key, text in ZERO_ONE.items():
            config.carried(PARAMS + key, text)
    for key, reason in IGNORED.items():
        config.explained(PARAMS + key, reason)
    return name


def _transport(config: Config) -> dict[str, str]:
    """Return the argument that says who moves bytes, where that is not the process group's affair."""
    path = PARAMS + "comm_backend_name"
    if (backend := config.get(path)) == "mpi":
        config.carried(path, "process_group=fusedonebit.comm.mpi.MPITransport(): needs mpi4py, and mpirun as before")
        return {"process_group": "MPITransport()"}
    if backend is not None:
        text = "the process group decides; init_process_group() takes NCCL for GPUs and gloo for CPUs"
        config.explained(path, f"{config.shown(path)}: {text}")
    return {}


def _clipping(config: Config) -> dict[str, str]:
    """Return the argument that clips, from either place where a config says it."""
    inner = PARAMS + "max_grad_norm"
    said = {path: value for path in (CLIPPING, inner) if (value := config.get(path, 0)) != 0}
    for path in (CLIPPING, inner):
        if path not in said:
            config.explained(path, "nothing to do: 0 is off")
    if not said:
        return {}
    if len(said) == 2 and said[CLIPPING] != said[inner]:
        raise config.error(inner, f"{CLIPPING}, {config.shown(CLIPPING)}, or left out", said[inner])
    config.carried(CLIPPING, "max_grad_norm=: don't clip gradients yourself")
    config.carried(inner, f"max_grad_norm=: DeepSpeed's engine refuses it here and asks for {CLIPPING}")
    text = calls.TRAINERS["max_grad_norm"] if config.is_filled_in(CLIPPING) else repr(next(iter(said.values())))
    return {"max_grad_norm": text}


def _constructed(config: Config, name: str, given: Mapping[str, Any], more: Mapping[str, str]) -> Any:
    """Make the optimizer of DeepSpeed's block, which checks every value in it."""
    clips = "max_grad_norm" in more and not config.is_filled_in(CLIPPING)
    clipping = {"max_grad_norm": config.get(CLIPPING, 0) or config.get(PARAMS + "max_grad_norm")} if clips else {}
    try:
        return from_config([torch.nn.Parameter(torch.zeros(8))], {"type": name, "params": given}, **clipping)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise InputError(f"{config.name}: optimizer: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return [*str(error).splitlines(), type(error).__name__][0]


def _early_freeze(config: Config, name: str) -> list[str]:
    """Warn of a variance that is frozen while the schedule's learning rate rises."""
    key, default = ("var_freeze_step", 100_000) if name == "ZeroOneAdam" else ("freeze_step", 100_000)
    frozen = config.get(PARAMS + key, default)
    rises = schedules.rising_steps(config.block("scheduler"))
    if rises is None or frozen > rises:
        return []
    beta2 = 0.999 if config.is_filled_in(PARAMS + "betas") else float(config.get(PARAMS + "betas", (0.9, 0.999))[1])
    memory = round(1.0 / (1.0 - beta2))
    lives = [f"# Or leave freeze_step= out of {name}(...): then its variance goes on living."]
    return [
        f"# CAUTION: {key} is {frozen:,}, but the learning rate rises for {rises:,} steps. Frozen before gradients are",
        "# those of training, the variance makes steps that are far too long: the run may end at chance. Safe is",
        f"# {key} >= {rises + memory:,}: the rise, and the 1/(1 - beta2) = {memory:,} steps that v remembers.",
        *(lives if name != "ZeroOneAdam" else []),
        "",
    ]


# ---------------------------------------------------------------- beside the optimizer

BATCHES = {
    "train_micro_batch_size_per_gpu": "DataLoader(batch_size={})",
    "gradient_accumulation_steps": "step() and zero_grad() after every so many backward() of loss / {}",
}


def _batches(config: Config) -> None:
    for key, text in BATCHES.items():
        config.carried(key, text.format(config.shown(key)))


def _precision(config: Config) -> None:
    on = [block for block in BLOCKS if config.block(block) and _is_on(config, block)]
    if len(on) > 1:
        raise InputError(f"{config.name}: only one of {', '.join(BLOCKS)} can be enabled, got {' and '.join(on)}")
    for block in on:
        half = block in ("fp16", "amp") or (block == "torch_autocast" and _autocast_type(config) == "float16")
        text = f"torch.autocast(device, torch.{'float16' if half else 'bfloat16'})"
        if half:
            text += f" and fusedonebit.amp.GradScaler(device{_scaling(config) if block == 'fp16' else ''})"
        if block in ("fp16", "bf16", "bfloat16"):
            text += f"; with DeepSpeed's formulas model.{'half' if half else 'bfloat16'}() instead of autocast"
        config.carried(f"{block}.enabled", text)
        if block == "torch_autocast":
            config.carried("torch_autocast.dtype", "torch.autocast's second argument")
        if block == "amp":
            for key in config.block("amp"):
                config.explained(f"amp.{key}", "an argument of Apex's amp.initialize; autocast chooses types by itself")
    for path, reason in reasons.DETAILS.items():
        config.explained(path, reason)
    for block in BLOCKS:
        if block not in on:
            config.explained(block, "nothing to do: it is off")


def _is_on(config: Config, block: str) -> bool:
    enabled = config.get(f"{block}.enabled", False)
    if not isinstance(enabled, bool) and enabled != AUTO:
        raise config.error(f"{block}.enabled", 'true, false or "auto"', enabled)
    if enabled == AUTO:
        text = '"auto": an argument of Hugging Face\'s Trainer; taken as off, write true and run again'
        config.explained(f"{block}.enabled", text)
    return enabled is True


def _autocast_type(config: Config) -> str:
    given = config.get("torch_autocast.dtype", "bfloat16")
    known = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16"}
    short = given.removeprefix("torch.") if isinstance(given, str) else ""
    if short not in known:
        raise config.error("torch_autocast.dtype", '"bfloat16" or "float16"', given)
    return known[short]


def _scaling(config: Config) -> str:
    scale = config.number("fp16.loss_scale", 0, 2.0**127)
    power = config.number("fp16.initial_scale_power", 16, 127, int)
    window = config.number("fp16.loss_scale_window", 1000, kind=int)
    if scale:
        config.carried("fp16.loss_scale", f"scaler.update({float(scale)}) after each step: a static one never changes")
        for key in ("initial_scale_power", "loss_scale_window"):
            config.explained(f"fp16.{key}", "nothing to do: the loss scale is fixed")
        return f", init_scale={float(scale)}"
    config.carried("fp16.loss_scale", "0: dynamic, as GradScaler's is")
    config.carried("fp16.initial_scale_power", f"GradScaler(init_scale=2.0**{power})")
    config.carried("fp16.loss_scale_window", f"GradScaler(growth_interval={window})")
    return f", init_scale=2.0**{power}, growth_interval={window}"


def _schedule(config: Config, optimizer: torch.optim.Optimizer) -> None:
    block = config.block("scheduler")
    if not block:
        config.explained("scheduler", "nothing to do: there is none")
        return
    kind = config.get("scheduler.type")
    config.block("scheduler.params")
    known = schedules.parameters(kind) if kind in (*schedules.RULES, *schedules.TORCHS) else []
    params = config.given("scheduler.params", known)
    if config.is_filled_in("scheduler.params.total_num_steps"):
        params["total_num_steps"] = 10_000
    try:
        schedules.schedule(optimizer, {"type": kind, "params": params})
    except ValueError as error:
        raise InputError(f"{config.name}: scheduler: {_first_line(error)}") from error
    config.carried("scheduler.type", 'fusedonebit.deepspeed.schedule(optimizer, config["scheduler"])')
    for key in known:
        path = f"scheduler.params.{key}"
        if "mom" in key and kind == "OneCycle":
            config.explained(path, "only the learning rate goes in a cycle; betas stay, as the frozen variance does")
        else:
            config.carried(path, "in the schedule, in place of lr=" if key.endswith("max_lr") else "in the schedule")
    for key in ("last_batch_iteration", "last_epoch"):
        config.explained(f"scheduler.params.{key}", "load_deepspeed() says where a schedule stood")
