"""The script that a config becomes, and what it says of each key."""

from __future__ import annotations

from . import optimizers, precision, reasons, schedules, torch_schedules
from .config import AUTO, FILLED_IN, Config, Fate
from .optimizers import Call, Numerics
from .precision import Precision
from .schedules import Schedule

CHOICE = {
    "recommended": "Numerics: ours, which hold where DeepSpeed's diverge; --numerics deepspeed takes DeepSpeed's.",
    "deepspeed": "Numerics: DeepSpeed 0.19.6's formulas, which may diverge; --numerics recommended takes ours.",
}


def translate(config: Config, numerics: Numerics) -> str:
    """The whole output: a program that needs ``model``, ``batches`` and ``loss_of``, then comments on every key.

    Raises:
        InputError: if the config makes no sense.
    """
    call = optimizers.translate(config, numerics)
    mixed = precision.translate(config, numerics)
    schedule = schedules.translate(config, call)
    _clipping(config, call)
    accumulation = _accumulation(config, call)
    if mixed.cast:
        call.arguments["master_weights"] = "True"
    reasons.explain(config)
    config.close(KNOWN)
    lines = [
        # Python looks for an encoding in the first two lines: nothing of the user's may stand there.
        "# By `fusedonebit migrate`: docs/migrating-from-deepspeed.md.",
        f"# {CHOICE[numerics]}",
        f"# From {_one_line(config.name)}.",
        *_imports(call, mixed, schedule),
        "",
        "# Yours: model, on its device and with equal values on all ranks; batches, of this rank;",
        "# and loss_of(model, batch). No engine: don't wrap the model, the optimizer averages.",
        "# Where you had parameter groups, give the optimizer the same in place of model.parameters().",
    ]
    lines += [f'{c.name} = {c.default}  # "auto": what TrainingArguments had as {c.argument}' for c in config.constants]
    lines += accumulation
    lines += _setup(call, mixed, schedule)
    lines += ["", *_loop(mixed, schedule), "", *_ledger(config)]
    return "\n".join(lines) + "\n"


def _one_line(name: str) -> str:
    return name.encode("unicode_escape").decode("ascii")


def _imports(call: Call, mixed: Precision, schedule: Schedule | None) -> list[str]:
    standard = sorted(set(schedule.imports if schedule else []))
    ours = [
        *call.imports,
        *(["from fusedonebit.integrations.amp import GradScaler"] if mixed.scaler is not None else []),
    ]
    return [
        *standard,
        *([""] if standard else []),
        "import torch",
        *([] if call.mpi else ["import torch.distributed as dist"]),
        "",
        *sorted(ours),
    ]


def _clipping(config: Config, call: Call) -> None:
    norm = config.source("gradient_clipping", "number >= 0", 0)
    if norm in ("0", "0.0"):
        config.explained("gradient_clipping", "nothing to do: 0 is off")
        return
    call.arguments["max_grad_norm"] = norm
    config.carried("gradient_clipping", f"{call.name}(max_grad_norm=): don't clip gradients yourself")


def _accumulation(config: Config, call: Call) -> list[str]:
    """Lines that set the size of micro-batches and how many make an update."""
    batch, micro = "train_batch_size", "train_micro_batch_size_per_gpu"
    total = config.values.get(batch)
    if total != AUTO:
        total = config.value(batch, "whole >= 1")
    size = config.source(micro, "whole >= 1", None)
    steps = config.source("gradient_accumulation_steps", "whole >= 1", None)
    lines = []
    config.carried(micro, "MICRO_BATCH_SIZE, for your DataLoader")
    config.carried("gradient_accumulation_steps", "ACCUMULATION_STEPS, in the loop")
    if size not in ("None", "MICRO_BATCH_SIZE"):
        lines.append(f"MICRO_BATCH_SIZE = {size}  # per rank: DataLoader(batch_size=)")
    elif size == "None" and isinstance(total, int):
        split = "" if steps == "None" else f" // {steps}"
        lines.append(f"MICRO_BATCH_SIZE = max(1, {total} // RANKS{split})  # per rank: DataLoader(batch_size=)")
        config.carried(batch, "MICRO_BATCH_SIZE")
    if steps == "None":
        derived = isinstance(total, int) and size != "None"
        steps = f"max(1, {total} // (MICRO_BATCH_SIZE * RANKS))" if derived else "1"
        if derived:
            config.carried(batch, "ACCUMULATION_STEPS")
    if steps != "ACCUMULATION_STEPS":
        lines.append(f"ACCUMULATION_STEPS = {steps}")
    if call.mpi:
        join, ranks = ["transport = MPITransport()"], "transport.world_size"
    else:
        join = ["if dist.is_torchelastic_launched():  # by torchrun", "    dist.init_process_group()"]
        ranks = "dist.get_world_size() if dist.is_initialized() else 1"
    count = [f"RANKS = {ranks}"] if any("RANKS" in line for line in lines) else []
    return [*join, *count, *lines]


def _setup(call: Call, mixed: Precision, schedule: Schedule | None) -> list[str]:
    lines = [f"model.{mixed.cast}()  # inputs as well"] if mixed.cast else []
    lines += _construction(call)
    if schedule:
        lines += schedule.lines
    if mixed.autocast or mixed.scaler is not None:
        lines.append("device = next(model.parameters()).device.type")
    if mixed.scaler is not None:
        scaler = "".join(f", {name}={source}" for name, source in mixed.scaler.items())
        lines.append(f"scaler = GradScaler(device{scaler})  # one scale for all ranks")
    lines.append("# fusedonebit.apps.migrate.load_deepspeed(optimizer, folder) goes on from DeepSpeed's checkpoint.")
    return lines


def _construction(call: Call) -> list[str]:
    comments = {name: f"  # {text}" for name, text in call.comments.items()}
    block = [f"        {name!r}: {call.arguments[name]},{comments.get(name, '')}" for name in call.in_config]
    return [
        f"optimizer = {call.name}(",
        "    model.parameters(),",
        *(["    config={", *block, "    },"] if block else []),
        *(f"    {n}={s},{comments.get(n, '')}" for n, s in call.arguments.items() if n not in call.in_config),
        ")",
    ]


def _loop(mixed: Precision, schedule: Schedule | None) -> list[str]:
    lines = ["for number, batch in enumerate(batches, start=1):"]
    forward = "loss = loss_of(model, batch)"
    if mixed.autocast:
        lines += [f"    with torch.autocast(device, {mixed.autocast}):", f"        {forward}"]
    else:
        lines.append(f"    {forward}")
    loss = "loss / ACCUMULATION_STEPS"
    lines.append(f"    ({loss}).backward()" if mixed.scaler is None else f"    scaler.scale({loss}).backward()")
    lines += ["    if number % ACCUMULATION_STEPS:", "        continue"]
    step = "scheduler.step()" if schedule else None
    if mixed.scaler is None:
        lines.append("    optimizer.step()")
        lines += [f"    {step}"] if step else []
    else:
        dynamic = step and mixed.update == "scaler.update()"
        lines += ["    scale = scaler.get_scale()"] if dynamic else []
        lines += ["    scaler.step(optimizer)", f"    {mixed.update}"]
        if dynamic:
            lines += [
                "    if scaler.get_scale() >= scale:  # after an overflow DeepSpeed's schedule waits",
                f"        {step}",
            ]
        elif step:
            lines.append(f"    {step}")
    return [*lines, "    optimizer.zero_grad()"]


def _ledger(config: Config) -> list[str]:
    counts = [
        f"{config.count(fate)} {word}" for fate, word in WORDS.items() if config.count(fate) or fate is Fate.UNKNOWN
    ]
    lines = [f"# All {len(config.paths())} keys of {_one_line(config.name)}: {', '.join(counts)}."]
    for fate in Fate:
        entries = [entry for entry in config.entries if entry.fate is fate]
        if entries:
            lines += [f"# {fate.value}:"]
            lines += [f"#   {_one_line(entry.path)}: {_one_line(entry.text)}" for entry in entries]
    return lines


KNOWN = {
    *reasons.REASONS,
    *reasons.ZERO_KEYS,
    *(path.rpartition(".")[2] for path in FILLED_IN),
    *(*optimizers.COMMON, *optimizers.LAMB_KEYS, *optimizers.SHARED, *optimizers.ZERO_ONE_KEYS, "freeze_step"),
    *(*precision.BLOCKS, *precision.FP16_KEYS),
    *(key for arguments in torch_schedules.ARGUMENTS.values() for key in arguments),
    *("optimizer", "scheduler", "type", "params", "zero_optimization", "gradient_allreduce_op", "data_types"),
}
"""Names that a typing error may have meant."""

WORDS = {
    Fate.CARRIED: "carried over",
    Fate.FILL_IN: "to fill in",
    Fate.EXPLAINED: "explained",
    Fate.UNKNOWN: "unknown",
}
