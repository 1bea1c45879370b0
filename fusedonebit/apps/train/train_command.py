"""The body of ``fusedonebit train``."""

from __future__ import annotations

import argparse
import os
import sys

from ..parsing import InputError, listed, need, positive, whole

DESCRIPTION = "Train a byte-level transformer language model on several processes, with the optimizer of choice."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add, count = parser.add_argument, whole(1)
    help_text = "files to learn, or folders of them (default: Python's documentation topics)"
    add("stray", nargs="*", help=argparse.SUPPRESS)
    add("--text", nargs="+", default=[], metavar="PATH", help=help_text)
    add(
        "--optimizer",
        default="onebit-adam",
        metavar="NAME",
        help="adamw, onebit-adam, zero-one-adam, onebit-lion, muon, onebit-muon, lamb, onebit-lamb, "
        "onebit-lamb-frozen, marsit, or one of those that Marsit is measured against: psgd, signsgd, ef-signsgd, "
        "ssdm, cascading",
    )
    add("--compare", metavar="A,B", help="train with each of these, one after the other, instead")
    add("--nproc", type=whole(1, 1024), default=1, help="processes to start (not with torchrun)")
    help_device = "where to train; auto: CUDA where there is a GPU"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=help_device)
    help_ddp = "wrap the model in DistributedDataParallel, attached: as in a loop that has it already"
    add("--ddp", action="store_true", help=help_ddp)
    add("--steps", type=count, default=500, help="updates")
    help_freeze = "updates before the variance is frozen, or auto (default: steps / 5; for onebit-adam, -lamb: never)"
    add("--freeze-step", type=_freeze_step, default=None, help=help_freeze)
    add("--topology", choices=("ring", "torus", "owner", "auto"), default="ring", help="of marsit's rounds")
    help_every = "rounds of marsit of which one is of full precision; 0: none"
    add("--full-precision-every", type=whole(0), default=100, metavar="K", help=help_every)
    help_local = "steps of a round of marsit and the like; of zero-one-adam the most (at least 4)"
    add("--local-steps", type=count, default=1, help=help_local)
    add("--model", default="small", help="tiny, small, medium or large")
    add("--batch-size", type=count, default=16, help="sequences per process")
    add("--seq-len", type=count, default=64, help="bytes per sequence")
    help_lr = "peak learning rate; rises over 5%% of the steps, then falls (default: 3e-3, LAMB 2e-2, Lion 1e-3)"
    add("--lr", type=positive(), default=None, help=help_lr)
    add("--seed", type=whole(0, 2**32 - 1), default=0, help="of the initial values and the batches")
    add("--out", default="runs/train", metavar="DIR", help="for metrics.jsonl, pictures and checkpoints")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    add("--eval-every", type=count, default=50, help="steps between held-out losses")
    add("--save-every", type=count, default=100, help="steps between checkpoints")


def run(arguments: argparse.Namespace) -> int:
    """Check everything that can be checked beforehand, then train."""
    need("rich")
    if arguments.stray:
        raise InputError(f"train takes flags alone, got {arguments.stray[0]!r}; files or folders to learn: --text PATH")
    names = listed(arguments.compare) or [arguments.optimizer]
    if os.environ.get("RANK", "0") == "0":  # torch alone takes a second or two, in this process and then in each rank
        count = int(os.environ.get("WORLD_SIZE", arguments.nproc))
        print(f"starting {' and '.join(names)} on {count} process{'es' * (count > 1)}", file=sys.stderr, flush=True)
    from . import launch
    from .optimizers import OPTIMIZERS, Job
    from .run import check

    for name in names:
        if name not in OPTIMIZERS:
            flag = "--compare" if arguments.compare else "--optimizer"
            raise InputError(f"{flag} must be of {', '.join(OPTIMIZERS)}, got {name!r}")
    nproc = _world_size(arguments.nproc, arguments.device)
    given = vars(arguments).copy()
    for key in ("command", "optimizer", "compare", "nproc", "text", "freeze_step", "stray"):
        del given[key]
    job = Job(
        optimizers=tuple(names),
        text=tuple(arguments.text),
        freeze_step=max(1, arguments.steps // 5) if arguments.freeze_step is None else arguments.freeze_step,
        lr_warmup_steps=max(1, arguments.steps // 20),
        warmup=max(1, arguments.steps // 20) if arguments.freeze_step is None else None,
        **given,
    )
    check(job, nproc)
    return launch.run(job, nproc)


def _world_size(nproc: int, device: str) -> int:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device must be cpu or auto where torch finds no GPU, got cuda")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if device != "cpu" and torch.cuda.is_available() and nproc > torch.cuda.device_count():
        raise InputError(f"--nproc must be at most the number of GPUs, {torch.cuda.device_count()}, got {nproc}")
    return nproc


def _freeze_step(text: str) -> int | str:
    try:
        return text if text == "auto" else whole(1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(str(error).replace(", got", " or auto, got")) from None
