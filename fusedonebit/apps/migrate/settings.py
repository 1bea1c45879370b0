"""Translates DeepSpeed's optimizer, batches, precision and schedule; ``reasons`` has what is not carried over."""

from __future__ import annotations

from typing import Any

import torch

from ... import OneBitAdam, OneBitLamb, ZeroOneAdam, policies
from ..arguments import InputError
from . import reasons, schedules
from .config import AUTO, Config

OPTIMIZERS: dict[str, Any] = {"OneBitAdam": OneBitAdam, "OneBitLamb": OneBitLamb, "ZeroOneAdam": ZeroOneAdam}
"""By our names, which are DeepSpeed's names in a config but for case."""

REPLACES = dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam"), "OneBitAdam")
REPLACES |= dict.fromkeys(("lamb", "fusedlamb"), "OneBitLamb")
"""Optimizers that average whole gradients, by DeepSpeed's names in lower case, and ours that sends bits instead."""

UNCOMPRESSED = (
    ", which sends whole gradients; {ours} is the optimizer that sends bits instead: write that type, and a "
    '"freeze_step" (15 to 20 % of all steps, behind the learning-rate warm-up) into params, and migrate that'
)

PARAMS = "optimizer.params."
COMMON = ("lr", "betas", "eps", "weight_decay")
LAMB = {
    "max_coeff": "c_max",
    "min_coeff": "c_min",
    "coeff_beta": "beta3",
    "factor_max": "r_max",
    "factor_min": "r_min",
    "factor_threshold": "r_threshold",
}
"""DeepSpeed's names of what 1-bit LAMB adds, and ours."""

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
    "max_grad_norm": "DeepSpeed's engine refuses it; gradient_clipping is what it clips by",
    "cuda_aware": "MPITransport asks the MPI library itself",
}
"""Keys of all three optimizers that change no number."""

BLOCKS = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast")
"""Of mixed precision: one of them can be on."""


def translate(config: Config) -> list[str]:
    """Find what each key becomes; return the calls that make the optimizer.

    Raises:
        InputError: if the config makes no sense: what the optimizer or the schedule refuses is told now.
    """
    name = _optimizer(config)
    further = _further(config, name)
    _batches(config)
    _precision(config)
    optimizer = _constructed(config, name, further)
    calls = _calls(config, name, optimizer, further)
    _schedule(config, optimizer)  # which changes learning rates
    reasons.explain(config)
    known = (*reasons.REASONS, *reasons.DETAILS, *COMMON, *LAMB, *ZERO_ONE, *IGNORED)
    config.close(path.rpartition(".")[2] for path in (*known, "freeze_step", *BATCHES, "gradient_clipping"))
    return calls


def _optimizer(config: Config) -> str:
    if "optimizer" not in config.values:
        raise InputError(
            f'{config.name} has no "optimizer" block; what each of its arguments becomes is in '
            "docs/migrating-from-deepspeed.md"
        )
    config.block("optimizer")
    config.block("optimizer.params")
    given, known = config.get("optimizer.type"), {name.lower(): name for name in OPTIMIZERS}
    lower = given.lower() if isinstance(given, str) else ""
    if lower not in known:
        way = UNCOMPRESSED.format(ours=REPLACES[lower]) if lower in REPLACES else ""
        raise config.error("optimizer.type", f"one of {', '.join(OPTIMIZERS)}", given, way)
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


def _further(config: Config, name: str) -> dict[str, Any]:
    """Return arguments that are not in the optimizer's block."""
    further = {}
    path = PARAMS + "comm_backend_name"
    if (backend := config.get(path)) == "mpi":
        config.carried(path, "process_group=fusedonebit.comm.mpi.MPITransport(): needs mpi4py, and mpirun as before")
        further["process_group"] = "MPITransport()"
    elif backend is not None:
        text = "the process group decides; init_process_group() takes NCCL for GPUs and gloo for CPUs"
        config.explained(path, f"{config.shown(path)}: {text}")
    if config.get("gradient_clipping", 0) == 0:
        config.explained("gradient_clipping", "nothing to do: 0 is off")
    else:
        config.carried("gradient_clipping", "max_grad_norm=: don't clip gradients yourself")
        further["max_grad_norm"] = (
            "..." if config.is_filled_in("gradient_clipping") else config.get("gradient_clipping")
        )
    return further


def _constructed(config: Config, name: str, further: dict[str, Any]) -> torch.optim.Optimizer:
    """Make the optimizer of DeepSpeed's block, which checks every value in it."""
    known = (*COMMON, "freeze_step", *LAMB, *ZERO_ONE, "amsgrad")
    params = config.given("optimizer.params", [key for key in known if _is_spoken_of(config, PARAMS + key)])
    clipping = {k: v for k, v in further.items() if k == "max_grad_norm" and v != "..."}
    try:
        return OPTIMIZERS[name].from_deepspeed(
            [torch.nn.Parameter(torch.zeros(8))], {"type": name, "params": params}, **clipping
        )
    except (ArithmeticError, TypeError, ValueError) as error:
        raise InputError(f"{config.name}: optimizer: {_first_line(error)}") from error


def _is_spoken_of(config: Config, path: str) -> bool:
    return any(entry.path == path for entry in config.entries)


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()
    return text[0] if text else type(error).__name__


def _calls(config: Config, name: str, optimizer: Any, further: dict[str, Any]) -> list[str]:
    """Write the constructor, with DeepSpeed's defaults for what is left out, and ``from_deepspeed``."""
    group, more = optimizer.param_groups[0], [f"{key}={value}" for key, value in further.items()]
    arguments = [f"{k}={'...' if config.is_filled_in(PARAMS + k) else repr(group[k])}" for k in COMMON if k in group]
    if bounds := [f"{k}={group[k]!r}" for k in LAMB.values() if k in group]:
        arguments.append(f"layerwise=Layerwise({', '.join(bounds)})")
    if name == "ZeroOneAdam":
        variance, rounds = optimizer.options.variance_policy, optimizer.options.sync_policy
        assert isinstance(variance, policies.DeepSpeedVariance)
        assert isinstance(rounds, policies.DeepSpeedRounds)
        frozen, most = variance.var_freeze_step, 1 << (rounds.local_step_clipper.bit_length() - 1)
        scaler, doubled = variance.var_update_scaler, rounds.local_step_scaler
        arguments.append(f"variance_policy=policies.DoublingVariance(scaler={scaler}, until={frozen})")
        arguments.append(f"sync_policy=policies.DoublingRounds(after={frozen}, scaler={doubled}, most={most})")
    else:
        arguments.append(f"freeze_step={optimizer.options.freeze_step}")
    halved = any(config.get(f"{block}.enabled") is True for block in ("fp16", "bf16", "bfloat16"))
    theirs = ['config["optimizer"]', *more]
    if halved:
        theirs.append("numerics=Numerics(master_weights=True)")
    elif (
        name != "OneBitLamb"
    ):  # without its 16-bit wrapper, which fuses parameters, DeepSpeed compresses each by itself
        theirs.append("numerics=Numerics(scale_scope='layer')")
    return [
        "# Our numerics, which hold where DeepSpeed's diverge:",
        f"optimizer = {name}(model.parameters(), {', '.join([*arguments, *more])})",
        "# DeepSpeed's own formulas:",
        f"optimizer = {name}.from_deepspeed(model.parameters(), {', '.join(theirs)})",
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
    config.carried("scheduler.type", 'fusedonebit.apps.migrate.schedule(optimizer, config["scheduler"])')
    for key in known:
        path = f"scheduler.params.{key}"
        if "mom" in key and kind == "OneCycle":
            config.explained(path, "only the learning rate goes in a cycle; betas stay, as the frozen variance does")
        else:
            config.carried(path, "in the schedule, in place of lr=" if key.endswith("max_lr") else "in the schedule")
    for key in ("last_batch_iteration", "last_epoch"):
        config.explained(f"scheduler.params.{key}", "load_deepspeed() says where a schedule stood")
