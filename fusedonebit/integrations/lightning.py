"""Lightning, by one callback."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from ..core.optimizer import DistributedOptimizer
from ..core.sharding import plain
from . import of_each_rank

KEY = "optimizer_states_of_ranks"
"""Of a checkpoint: one list for each rank, of its optimizers' states."""


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
            states = [None] * trainer.world_size if trainer.global_rank == 0 else None
            dist.gather_object(own, states)
            checkpoint[KEY] = states

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


def _ours(trainer: Trainer) -> list[DistributedOptimizer]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, DistributedOptimizer)]
