"""The command line: ``fusedonebit train``, ``report``, ``lab``, ``plan`` and ``migrate``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from ..errors import printable
from .extras import missing
from .migrate import command as migration
from .migrate.config import InputError as ConfigError
from .plan import command as planner
from .report import command as reporter

USAGE_ERROR = 2
INTERRUPTED = 130  # as a shell reports SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 2 for bad input, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="fusedonebit", description="1-bit optimizers for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fusedonebit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_train(commands)
    _add_report(commands)
    _add_lab(commands)
    _add_plan(commands)
    _add_migrate(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, [], False) else action.help


def _add_train(commands: argparse._SubParsersAction) -> None:
    train = commands.add_parser(
        "train",
        help="train a byte-level transformer",
        description="Train a byte-level transformer language model on several processes, with the optimizer of choice.",
        formatter_class=_Defaults,
    )
    add = train.add_argument
    add("--text", nargs="+", default=[], metavar="FILE", help="text to learn (default: Python's documentation topics)")
    add(
        "--optimizer",
        default="onebit-adam",
        metavar="NAME",
        help="adamw, onebit-adam, zero-one-adam, onebit-lion, lamb, onebit-lamb, onebit-lamb-frozen, marsit, or one of "
        "those that Marsit is measured against: psgd, signsgd, ef-signsgd, ssdm, cascading",
    )
    add("--compare", metavar="A,B", help="train with each of these, one after the other, instead")
    add("--nproc", type=_whole("--nproc", 1), default=1, help="processes to start (not with torchrun)")
    add("--steps", type=_whole("--steps", 1), default=500, help="updates")
    add("--freeze-step", type=_freeze_step, default=None, help="uncompressed updates, or auto (default: steps / 5)")
    add("--topology", choices=("ring", "torus", "owner", "auto"), default="ring", help="of marsit's rounds")
    add(
        "--full-precision-every",
        type=_whole("--full-precision-every", 0),
        default=100,
        metavar="K",
        help="rounds of marsit of which one is of full precision; 0: none",
    )
    add(
        "--local-steps",
        type=_whole("--local-steps", 1),
        default=1,
        help="steps of a round of marsit and the like; of zero-one-adam the most (at least 4)",
    )
    add("--model", default="small", help="tiny, small, medium or large")
    add("--batch-size", type=_whole("--batch-size", 1), default=16, help="sequences per process")
    add("--seq-len", type=_whole("--seq-len", 1), default=64, help="bytes per sequence")
    add(
        "--lr",
        type=_rate,
        default=None,
        help="peak learning rate; rises over 5%% of the steps, then falls (default: 3e-3, LAMB 2e-2, Lion 1e-3)",
    )
    add("--seed", type=_whole("--seed", 0), default=0, help="of the initial values and the batches")
    add("--out", default="runs/train", metavar="DIR", help="for metrics.jsonl, pictures and checkpoints")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    add("--eval-every", type=_whole("--eval-every", 1), default=50, help="steps between held-out losses")
    add("--save-every", type=_whole("--save-every", 1), default=100, help="steps between checkpoints")
    train.set_defaults(run=_train)


def _add_report(commands: argparse._SubParsersAction) -> None:
    report = commands.add_parser(
        "report",
        help="one page of what runs have recorded",
        description="Make one self-contained HTML page, which opens offline, of one or several runs: losses, phases, "
        "bytes, compression error, layers over time, settings and versions.",
    )
    reporter.add_arguments(report)
    report.set_defaults(run=_report)


def _add_lab(commands: argparse._SubParsersAction) -> None:
    lab = commands.add_parser(
        "lab",
        help="compare optimizers on small real tasks",
        description="Train small real tasks with named optimizers on simulated workers; a table and a page of plots.",
        formatter_class=_Defaults,
    )
    add = lab.add_argument
    add("--tasks", metavar="A,B", help="some of the tasks (default: all; --list names them)")
    add("--optimizers", metavar="A,B", help="some of the optimizers (default: all)")
    add("--seeds", type=_whole("--seeds", 1), default=3, help="paired seeds, from 0")
    add("--workers", type=_whole("--workers", 1), default=4, help="simulated workers of each run")
    add("--out", default="runs/lab", metavar="DIR", help="for runs.jsonl, the table and the plots; what is there stays")
    add("--list", action="store_true", help="name the tasks and the optimizers")
    lab.set_defaults(run=_lab)


def _add_plan(commands: argparse._SubParsersAction) -> None:
    plan = commands.add_parser(
        "plan",
        help="what a step's messages cost on your network, and whether to compress them",
        description="Estimate what the messages of one optimizer step cost, uncompressed and compressed, on 2 to "
        "16,384 GPUs; name the cheapest, and say where compressing does not pay.",
        formatter_class=_Defaults,
    )
    planner.add_arguments(plan)
    plan.set_defaults(run=_plan)


def _add_migrate(commands: argparse._SubParsersAction) -> None:
    migrate = commands.add_parser(
        "migrate",
        help="what a DeepSpeed config is in Python, key by key",
        description="Print the Python lines that stand for a DeepSpeed config with OneBitAdam, OneBitLamb or "
        "ZeroOneAdam, and say of every key what became of it. Exit status 1: some key is unknown; 2: a bad file.",
        formatter_class=_Defaults,
    )
    migration.add_arguments(migrate)
    migrate.set_defaults(run=_migrate)


def _migrate(arguments: argparse.Namespace) -> int:
    try:
        return migration.run(arguments)
    except ConfigError as error:
        return _refuse(str(error))


def _report(arguments: argparse.Namespace) -> int:
    try:
        return reporter.run(arguments)
    except reporter.InputError as error:
        return _refuse(str(error))


def _plan(arguments: argparse.Namespace) -> int:
    if absent := missing("rich"):
        return _refuse(f"this command needs {absent}")
    try:
        return planner.run(arguments)
    except planner.InputError as error:
        return _refuse(str(error))


def _lab(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from .lab.contenders import CONTENDERS
    from .lab.tasks import TASKS

    if arguments.list:
        print("\n".join(["tasks:", *(f"  {name}" for name in TASKS), "optimizers:", *(f"  {n}" for n in CONTENDERS)]))
        return 0
    tasks = _listed(arguments.tasks) or list(TASKS)
    optimizers = _listed(arguments.optimizers) or list(CONTENDERS)
    for flag, given, known in (("--tasks", tasks, TASKS), ("--optimizers", optimizers, CONTENDERS)):
        for name in given:
            if name not in known:
                return _refuse(f"{flag} must be of {', '.join(known)}, got {name!r}")
    if absent := missing("rich", "sklearn"):
        return _refuse(f"this command needs {absent}")
    from .lab.launch import run_lab

    run_lab(tasks, optimizers, arguments.seeds, arguments.workers, Path(arguments.out))
    return 0


def _listed(names: str | None) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in names.split(","))) if names else []


def _train(arguments: argparse.Namespace) -> int:
    if absent := missing("rich"):
        return _refuse(f"this command needs {absent}")
    from .train import launch
    from .train.data import InputError
    from .train.run import Job, check

    try:
        nproc = _world_size(arguments.nproc)
        job = Job(
            optimizers=_names(arguments),
            text=tuple(arguments.text),
            steps=arguments.steps,
            freeze_step=max(1, arguments.steps // 5) if arguments.freeze_step is None else arguments.freeze_step,
            model=_model(arguments.model),
            batch_size=arguments.batch_size,
            seq_len=arguments.seq_len,
            lr=arguments.lr,
            lr_warmup_steps=max(1, arguments.steps // 20),
            seed=arguments.seed,
            out=arguments.out,
            resume=arguments.resume,
            eval_every=arguments.eval_every,
            save_every=arguments.save_every,
            topology=arguments.topology,
            full_precision_every=arguments.full_precision_every,
            local_steps=arguments.local_steps,
        )
        check(job, nproc)
    except InputError as error:
        return _refuse(str(error))
    return launch.run(job, nproc)


def _world_size(nproc: int) -> int:
    import os

    import torch

    from .train.data import InputError

    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available() and nproc > torch.cuda.device_count():
        raise InputError(f"--nproc must be at most the number of GPUs, {torch.cuda.device_count()}, got {nproc}")
    return nproc


def _names(arguments: argparse.Namespace) -> tuple[str, ...]:
    from .train.data import InputError
    from .train.optimizers import OPTIMIZERS

    flag, given = ("--compare", arguments.compare) if arguments.compare else ("--optimizer", arguments.optimizer)
    names = tuple(name.strip() for name in given.split(",")) if arguments.compare else (given,)
    for name in names:
        if name not in OPTIMIZERS:
            raise InputError(f"{flag} must be of {', '.join(OPTIMIZERS)}, got {name!r}")
    return tuple(dict.fromkeys(names))


def _model(name: str) -> str:
    from .train.data import InputError
    from .train.model import SIZES

    if name not in SIZES:
        raise InputError(f"--model must be one of {', '.join(SIZES)}, got {name!r}")
    return name


def _whole(flag: str, least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text!r}")
        return int(text)

    return parse


def _freeze_step(text: str) -> int | str:
    try:
        return text if text == "auto" else _whole("--freeze-step", 1)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1 or auto, got {text!r}") from None


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return value


def _refuse(message: str) -> int:
    print(f"fusedonebit: {printable(message)}", file=sys.stderr)  # a message may quote what a file holds
    return USAGE_ERROR
