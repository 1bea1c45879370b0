"""Hugging Face's Trainer, by one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback

from . import of_each_rank


class _Attach(TrainerCallback):  # type: ignore[misc]  # of a package without types
    """Has DDP average only while the optimizer wants averages; Trainer makes both when training begins."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        optimizer = of_each_rank.ours(self._trainer.optimizer)
        of_each_rank.refuse_clipping(optimizer.frame, "TrainingArguments(max_grad_norm=...)", args.max_grad_norm, 0)
        of_each_rank.attach_once(self._trainer.model_wrapped, optimizer)


def attach(trainer: Trainer) -> None:
    """Make a Trainer compress, and its checkpoints keep each rank's state; call it before ``trainer.train()``.

    Trainer keeps rank 0's state alone; so each rank writes a file of its own into each checkpoint's folder,
    ``onebit-rank-R-of-W.pt``, and takes it when it resumes there, on as many ranks. All ranks must reach that folder.

    Args:
        trainer: With one of this package's optimizers, best by ``optimizer_cls_and_kwargs``: then it is made after the
            process group.

    Raises:
        RuntimeError: if this Trainer is not as those of transformers 5 are.
        TypeError, ValueError: when training begins, on every rank, if its optimizer is another, or if it clips.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
    # Private ones: it has no public place for this.
    for name, wrap in (("_save_optimizer_and_scheduler", _saving), ("_load_optimizer_and_scheduler", _loading)):
        if not hasattr(trainer, name):
            raise RuntimeError(f"this {type(trainer).__name__} has no {name}(); use one of transformers 5")
        setattr(trainer, name, wrap(trainer, getattr(trainer, name)))
    trainer.add_callback(_Attach(trainer))


def _saving(trainer: Trainer, theirs: Callable[[str], None]) -> Callable[[str], None]:
    def save(output_dir: str) -> None:
        theirs(output_dir)
        optimizer = of_each_rank.ours(trainer.optimizer)
        of_each_rank.save(optimizer.frame, optimizer.state_dict, output_dir)

    return save


def _loading(trainer: Trainer, theirs: Callable[[str | None], None]) -> Callable[[str | None], None]:
    def load(checkpoint: str | None) -> None:
        if checkpoint is not None:
            of_each_rank.hand_over(of_each_rank.ours(trainer.optimizer), checkpoint)
        theirs(checkpoint)

    return load
