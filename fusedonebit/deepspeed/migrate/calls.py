"""Writes the calls that make the optimizer, each with the lines that it needs to run as pasted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..config import LAMB_KEYS
from ..intervals import DeepSpeedRounds, DeepSpeedVariance
from .deepspeed_config import Config

PARAMS = "optimizer.params."
COMMON = ("lr", "betas", "eps", "weight_decay")
LAMB = {theirs: ours for theirs, (ours, _) in LAMB_KEYS.items()}
"""DeepSpeed's names of what 1-bit LAMB adds, and ours."""

TRAINERS = {
    "lr": "args.learning_rate",
    "betas": "(args.adam_beta1, args.adam_beta2)",
    "eps": "args.adam_epsilon",
    "weight_decay": "args.weight_decay",
    "max_grad_norm": "args.max_grad_norm",
}
"""What stands for "auto" in a call."""

IMPORTS = {
    "Layerwise": "fusedonebit",
    "Numerics": "fusedonebit",
    "policies": "fusedonebit",
    "MPITransport": "fusedonebit.comm.mpi",
}


def write(config: Config, name: str, optimizer: Any, given: Mapping[str, Any], more: Mapping[str, str]) -> list[str]:
    """Write the constructor, with DeepSpeed's defaults for what is left out, and ``from_deepspeed``.

    Args:
        config: The whole config.
        name: Our class.
        optimizer: One of that config.
        given: What the config's block says of it, by DeepSpeed's names, but for "auto".
        more: Arguments that are not in the block, and the text of each.
    """
    ours = {**_arguments(config, name, optimizer), **more}
    halved = any(config.get(f"{block}.enabled") is True for block in ("fp16", "bf16", "bfloat16"))
    theirs = {**more}
    if halved:
        theirs["numerics"] = "Numerics(master_weights=True)"
    elif name != "OneBitLamb":
        # Without its 16-bit wrapper, which fuses parameters, DeepSpeed compresses each by itself.
        theirs["numerics"] = "Numerics(scale_scope='layer')"
    block = {k: repr(v) for k, v in given.items()} | {k: TRAINERS[k] for k in COMMON if _is_auto(config, k)}
    params = ", ".join(f"{key!r}: {text}" for key, text in block.items())
    auto = ["# args: the TrainingArguments of Hugging Face's Trainer."] * any(map(_is_auto, [config] * 4, COMMON))
    return [
        "# Our numerics, which hold where DeepSpeed's diverge:",
        *auto,
        *_imports(name, ours.values()),
        f"optimizer = {name}(model.parameters(), {_joined(ours)})",
        "",
        "# DeepSpeed's own formulas:",
        *auto,
        *_imports(name, theirs.values()),
        f"block = {{'type': '{name}', 'params': {{{params}}}}}",
        f"optimizer = {name}.from_deepspeed(model.parameters(), block{', ' * bool(theirs)}{_joined(theirs)})",
    ]


def _arguments(config: Config, name: str, optimizer: Any) -> dict[str, str]:
    """Return the constructor's arguments for what the block says, and the text of each."""
    group = optimizer.param_groups[0]
    arguments = {k: TRAINERS[k] if _is_auto(config, k) else repr(group[k]) for k in COMMON if k in group}
    if bounds := {k: repr(group[k]) for k in LAMB.values() if k in group}:
        arguments["layerwise"] = f"Layerwise({_joined(bounds)})"
    if name != "ZeroOneAdam":
        return arguments | {"freeze_step": str(optimizer.frame.options.freeze_step)}
    variance, rounds = optimizer.frame.options.variance_policy, optimizer.frame.options.sync_policy
    assert isinstance(variance, DeepSpeedVariance)
    assert isinstance(rounds, DeepSpeedRounds)
    frozen, most = variance.var_freeze_step, 1 << (rounds.local_step_clipper.bit_length() - 1)
    scaler, doubled = variance.var_update_scaler, rounds.local_step_scaler
    arguments["variance_policy"] = f"policies.DoublingVariance(scaler={scaler}, until={frozen})"
    arguments["sync_policy"] = f"policies.DoublingRounds(after={frozen}, scaler={doubled}, most={most})"
    return arguments


def _is_auto(config: Config, key: str) -> bool:
    return config.is_filled_in(PARAMS + key)


def _joined(arguments: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={text}" for key, text in arguments.items())


def _imports(name: str, texts: Iterable[str]) -> list[str]:
    """Write the import lines of the class, and of what occurs in ``texts``."""
    used = "".join(texts)
    modules = {name: "fusedonebit"} | {known: module for known, module in IMPORTS.items() if known in used}
    return [
        f"from {module} import {', '.join(sorted(n for n, where in modules.items() if where == module))}"
        for module in sorted(set(modules.values()))
    ]
