"""Keeps each rank's state beside a checkpoint of another library, which keeps that of rank 0 alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..comm import Transport, agree
from ..core.compression import Compression, Feedback
from ..core.frame import Frame
from ..core.optimizer import DistributedOptimizer, frame_of
from ..core.world import World
from .any_optimizer import DdpCompression, compress
from .ddp import Handle, attach
from .fsdp_compression import FsdpCompression
from .seat import Seat

OPTIMIZER, RESIDUALS = "onebit", "onebit-compression"
"""What files of each rank's state are called."""


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


def compressed(model: Any) -> Compression | None:
    """Return what compresses a model's gradients; None if nothing does."""
    if isinstance(model, DistributedDataParallel):
        taken_by = None if (seat := Seat.of(model)) is None else seat.taken_by
        return taken_by if isinstance(taken_by, DdpCompression) else None
    return FsdpCompression.of(model)


def compress_once(model: Any, bits: int, feedback: Feedback, scaler: torch.amp.GradScaler | None) -> Compression | None:
    """Do what ``compress`` does where it was not done; a process that is alone has nobody to send to."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    made = compressed(getattr(model, "_orig_mod", model))
    if made is not None and made.is_like(bits, feedback, scaler):
        return made
    return compress(model, bits, feedback=feedback, scaler=scaler)


def path_of(transport: Transport, folder: str | Path, what: str = OPTIMIZER) -> Path:
    """Return where this rank's state lies in ``folder``."""
    return Path(folder) / f"{what}-rank-{transport.rank}-of-{transport.world_size}.pt"


def save(ranks: World, state_dict: Callable[[], dict[str, Any]], folder: str | Path, what: str = OPTIMIZER) -> None:
    """Write this rank's state, which ``state_dict`` returns, into ``folder``; every rank calls it.

    Files of another number of ranks, which an older checkpoint may have left there, are removed.

    Raises:
        OSError: if it can't be written; the other ranks raise ``DisagreementError``.
    """
    path, error = path_of(ranks.transport, folder, what), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        torch.save(state_dict(), partial)
        partial.replace(path)  # a crash leaves the old file or the new one
    except Exception as caught:
        error = caught
    agree(ranks.transport, [], ranks.device, error, f"{folder} holds no whole checkpoint")
    if ranks.transport.rank == 0:
        for other in path.parent.glob(f"{what}-rank-*.pt"):
            if not other.name.endswith(f"-of-{ranks.transport.world_size}.pt"):
                other.unlink()


def load_residuals(compression: Compression, folder: str | Path) -> None:
    """Take the residuals that lie in ``folder``, of as many ranks as there were; all ranks call it.

    Where there are none they begin at zero, as in a run that was not compressed before.

    Raises:
        OSError, ValueError: if files are missing, or of another model; the other ranks raise ``DisagreementError``.
    """

    def read() -> dict[str, Any] | None:
        if not (found := sorted(Path(folder).glob(f"{RESIDUALS}-rank-*.pt"))):
            return None
        of = found[0].stem.rpartition("-")[2]
        names = [Path(folder) / f"{RESIDUALS}-rank-{rank}-of-{of}.pt" for rank in range(int(of))]
        return share(compression, lambda rank: torch.load(names[rank], map_location="cpu", weights_only=True))

    take(compression, read, f"all ranks must reach all files in {folder}")


def take(compression: Compression, read: Callable[[], dict[str, Any] | None], hint: str = "") -> None:
    """Take the residuals that ``read`` returns, None if there are none; all ranks call it, and one error is all's."""
    state, error = None, None
    try:
        state = read()
    except Exception as caught:
        error = caught
    agree(compression.ranks, [("each rank has residuals", str(state is not None))], compression.device, error, hint)
    if state is not None:
        compression.load_state_dict(state)


def share(compression: Compression, state_of: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Return what this rank takes of the states of all ranks that saved; ValueError if they are of another model."""
    first = state_of(0)
    taken = {"about": first["about"]}
    for rank in compression.whose(first["about"]):
        taken |= first if rank == 0 else state_of(rank)
    compression.check(taken)
    return taken


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
        elif others := sorted(each.name for each in Path(folder).glob(f"{OPTIMIZER}-rank-*.pt")):
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
