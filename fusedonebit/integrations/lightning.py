"""Lightning, by one callback: with an optimizer of ours, or with any."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from ..core.compression import Compression, Feedback, check_form
from ..core.optimizer import DistributedOptimizer
from ..core.sharding import plain
from . import of_each_rank

KEY, RESIDUALS = "optimizer_states_of_ranks", "residuals_of_ranks"
"""Of a checkpoint: one list for each rank, of its optimizers' states; each rank's residuals."""


class OneBit(Callback):  # type: ignore[misc]  # of a package without types
    """Makes a Trainer compress, and its checkpoints keep each rank's state: ``Trainer(callbacks=[OneBit()])``.

    Lightning keeps rank 0's state alone; so in the compression stage rank 0 gathers those of all ranks into the
    checkpoint, under ``optimizer_states_of_ranks``, and each takes its own when it resumes, on as many ranks.
    Rank 0 holds all of them for a moment.

    Raises:
        ValueError: when training begins, on every rank, if ``gradient_clip_val`` is set; when it resumes, on another
            number of ranks.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See Lightning: all is made and loaded, and no backward pass was done."""
        clips = trainer.gradient_clip_val
        for optimizer in _ours(trainer):
            of_each_rank.refuse_clipping(optimizer.frame, "Trainer(gradient_clip_val=...)", clips, None)
            of_each_rank.attach_once(trainer.strategy.model, optimizer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """See Lightning; on all ranks."""
        own = checkpoint["optimizer_states"] = plain(checkpoint["optimizer_states"])  # Lightning can't load DTensors
        if trainer.world_size > 1 and any(optimizer.algorithm.compressed for optimizer in _ours(trainer)):
            checkpoint[KEY] = _of_all(trainer, own)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """See Lightning; on all ranks, before the optimizers' states are restored."""
        states = checkpoint.get(KEY)
        if states is None:
            return
        if len(states) != trainer.world_size:
            raise ValueError(
                f"the checkpoint has the states of {len(states)} ranks, but this Trainer has {trainer.world_size}: "
                "resume on as many"
            )
        checkpoint["optimizer_states"] = states[trainer.global_rank]


class Compress(Callback):  # type: ignore[misc]
    """Makes a Trainer do what ``fusedonebit.compress`` does: ``Trainer(callbacks=[Compress(bits=4)])``.

    Its optimizers are any; Trainer may clip. In a checkpoint rank 0 gathers all ranks' residuals, under
    ``residuals_of_ranks``, and holds all of them for a moment; a run that resumes takes them, on any number of ranks.

    Args:
        bits, feedback: As of ``fusedonebit.compress``.

    Raises:
        TypeError, ValueError, RuntimeError: when training begins, on every rank, as ``fusedonebit.compress`` does.
    """

    def __init__(self, bits: int = 4, *, feedback: Feedback = "default") -> None:
        check_form(bits, feedback)
        self._how: tuple[int, Feedback] = bits, feedback
        self._made: Compression | None = None
        self._saved: list[dict[str, Any]] | None = None  # of a checkpoint, which is loaded before training begins

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See Lightning: all is made and loaded, and no backward pass was done."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._made = of_each_rank.compress_once(trainer.strategy.model, *self._how, scaler)
        saved, self._saved = self._saved, None
        if self._made is not None and saved is not None:
            share = partial(of_each_rank.share, self._made, saved.__getitem__)
            of_each_rank.take(self._made, share)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """See Lightning; on all ranks."""
        if self._made is not None:
            checkpoint[RESIDUALS] = _of_all(trainer, self._made.state_dict())

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """See Lightning; on all ranks, before training begins."""
        self._saved = checkpoint.get(RESIDUALS)


def _of_all(trainer: Trainer, own: Any) -> list[Any] | None:
    """Return what each rank has, on rank 0."""
    states = [None] * trainer.world_size if trainer.global_rank == 0 else None
    dist.gather_object(own, states)
    return states


def _ours(trainer: Trainer) -> list[DistributedOptimizer]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, DistributedOptimizer)]
