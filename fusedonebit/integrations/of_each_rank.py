"""Keeps each rank's state beside a checkpoint of another library, which keeps that of rank 0 alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..comm import Transport, agree
from ..core.frame import Frame
from ..core.optimizer import DistributedOptimizer, frame_of
from .ddp import Handle, attach


def ours(optimizer: Any) -> DistributedOptimizer:
    """Return the optimizer of this package inside wrappers such as accelerate's; TypeError if there is none."""
    inside = optimizer
    while not isinstance(inside, DistributedOptimizer):
        if not hasattr(inside, "optimizer"):
            raise TypeError(f"optimizer must be one of fusedonebit's, got {type(optimizer).__name__}")
        inside = inside.optimizer
    return inside


def attach_once(model: Any, optimizer: DistributedOptimizer) -> Handle | None:
    """Do what ``ddp.attach`` does where ``model`` is in DDP and it was not done; one process has no DDP."""
    frame = frame_of(optimizer)
    if isinstance(model, DistributedDataParallel) and frame is not None and not frame.under_ddp.attached:
        return attach(model, optimizer)
    return None


def refuse_clipping(frame: Frame, setting: str, given: Any, off: Any) -> None:
    """Raise ValueError if the library is to clip gradients of several ranks, each by its own norm."""
    if given and frame.ranks.transport.world_size > 1:
        raise ValueError(
            f"{setting} must be {off!r} with {frame.name}, got {given!r}: each rank would clip its own "
            f"gradients by its own norm; pass max_grad_norm={given!r} to the optimizer instead"
        )


def path_of(transport: Transport, folder: str | Path) -> Path:
    """Return where this rank's state lies in ``folder``."""
    return Path(folder) / f"onebit-rank-{transport.rank}-of-{transport.world_size}.pt"


def save(frame: Frame, state_dict: Callable[[], dict[str, Any]], folder: str | Path) -> None:
    """Write this rank's state, which ``state_dict`` returns, into ``folder``; every rank calls it.

    Raises:
        OSError: if it can't be written; the other ranks raise ``DisagreementError``.
    """
    path, error = path_of(frame.ranks.transport, folder), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        torch.save(state_dict(), partial)
        partial.replace(path)  # a crash leaves the old file or the new one
    except Exception as caught:
        error = caught
    agree(frame.ranks.transport, [], frame.device, error, f"{folder} holds no whole checkpoint")


def hand_over(optimizer: DistributedOptimizer, folder: str | Path) -> None:
    """Let the next ``load_state_dict`` take this rank's state in ``folder``, whatever it is given; all ranks call it.

    Where ``folder`` has none of any rank, it takes what it is given.

    Raises:
        FileNotFoundError: if files are there, but not this rank's; the other ranks raise ``DisagreementError``.
    """
    transport, device = optimizer.frame.ranks.transport, optimizer.frame.device
    path, error, state = path_of(transport, folder), None, None
    try:
        if path.exists():
            state = torch.load(path, map_location="cpu", weights_only=True)
        elif others := sorted(each.name for each in Path(folder).glob("onebit-rank-*.pt")):
            raise FileNotFoundError(
                f"{path} is missing, but {folder} has {', '.join(others[:4])}: resume on as many ranks as have saved, "
                "each with its file within reach"
            )
    except Exception as caught:
        error = caught
    agree(transport, [("each rank has a file", str(state is not None))], device, error)
    if state is None:
        return
    hook = optimizer.register_load_state_dict_pre_hook(lambda _, given: state)

    def remove(_: torch.optim.Optimizer) -> None:
        with suppress(RuntimeError):
            hook.remove()
            after.remove()

    after = optimizer.register_load_state_dict_post_hook(remove)
