"""Hugging Face's Trainer, by one call: with an optimizer of ours, or with any."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import Trainer, TrainerCallback

from ..core.compression import Compression, Feedback, check_form
from . import of_each_rank


class _Callback(TrainerCallback):  # type: ignore[misc]  # of a package without types
    """Does its part when training begins, and where Trainer saves and loads (``theirs``)."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def save(self, theirs: Callable[[str], None], output_dir: str) -> None:
        """Save what Trainer does, and this rank's state."""
        raise NotImplementedError

    def load(self, theirs: Callable[[str | None], None], checkpoint: str | None) -> None:
        """Load what Trainer does, and this rank's state; None: nothing."""
        raise NotImplementedError


class _Attach(_Callback):
    """Has DDP average only while the optimizer wants averages; Trainer makes both when training begins."""

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        optimizer = of_each_rank.ours(self._trainer.optimizer)
        of_each_rank.refuse_clipping(optimizer.frame, "TrainingArguments(max_grad_norm=...)", args.max_grad_norm, 0)
        of_each_rank.attach_once(self._trainer.model_wrapped, optimizer)

    def save(self, theirs: Callable[[str], None], output_dir: str) -> None:
        theirs(output_dir)
        optimizer = of_each_rank.ours(self._trainer.optimizer)
        of_each_rank.save(optimizer.frame.ranks, optimizer.state_dict, output_dir)

    def load(self, theirs: Callable[[str | None], None], checkpoint: str | None) -> None:
        if checkpoint is not None:
            of_each_rank.hand_over(of_each_rank.ours(self._trainer.optimizer), checkpoint)
        theirs(checkpoint)


class _Compress(_Callback):
    """Compresses the gradients of what Trainer has wrapped when training begins."""

    def __init__(self, trainer: Trainer, bits: int, feedback: Feedback) -> None:
        super().__init__(trainer)
        check_form(bits, feedback)
        self._how: tuple[int, Feedback] = bits, feedback
        self._made: Compression | None = None
        self._folder: str | None = None  # of a checkpoint, which Trainer loads before training begins

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer
        self._made = of_each_rank.compress_once(trainer.model_wrapped, *self._how, trainer.accelerator.scaler)
        folder, self._folder = self._folder, None
        if self._made is not None and folder is not None:
            of_each_rank.load_residuals(self._made, folder)

    def save(self, theirs: Callable[[str], None], output_dir: str) -> None:
        theirs(output_dir)
        if self._made is not None:
            of_each_rank.save(self._made.world, self._made.state_dict, output_dir, of_each_rank.RESIDUALS)

    def load(self, theirs: Callable[[str | None], None], checkpoint: str | None) -> None:
        theirs(checkpoint)
        self._folder = checkpoint


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
    _add(trainer, _Attach(trainer))


def compress(trainer: Trainer, bits: int = 4, *, feedback: Feedback = "default") -> None:
    """Make a Trainer do what ``fusedonebit.compress`` does, whatever its optimizer; call it before ``trainer.train()``.

    Each rank writes its residuals into each checkpoint's folder, ``onebit-compression-rank-R-of-W.pt``, which all ranks
    must reach. A run that resumes there takes them, on any number of ranks.

    Args:
        trainer: With any optimizer; Trainer clips, which is right, since gradients are averages.
        bits, feedback: As of ``fusedonebit.compress``.

    Raises:
        RuntimeError: if this Trainer is not as those of transformers 5 are.
        TypeError, ValueError, RuntimeError: when training begins, on every rank, as ``fusedonebit.compress`` does.
    """
    _add(trainer, _Compress(trainer, bits, feedback))


def _add(trainer: Trainer, callback: _Callback) -> None:
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
    # Private ones: it has no public place for this.
    for name, call in (
        ("_save_optimizer_and_scheduler", callback.save),
        ("_load_optimizer_and_scheduler", callback.load),
    ):
        if not hasattr(trainer, name):
            raise RuntimeError(f"this {type(trainer).__name__} has no {name}(); use one of transformers 5")
        setattr(trainer, name, partial(call, getattr(trainer, name)))
    trainer.add_callback(callback)
