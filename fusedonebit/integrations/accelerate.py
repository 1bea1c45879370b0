"""Hugging Face's accelerate, by one call."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from ..core.compression import Compression, Feedback
from . import of_each_rank
from .ddp import Handle


def attach(accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer) -> Handle | None:
    """Make a prepared model and optimizer compress, and ``save_state`` keep each rank's state.

    accelerate keeps rank 0's state alone; so each rank writes a file of its own into the folder of ``save_state``,
    ``onebit-rank-R-of-W.pt``, and ``load_state`` takes it, on as many ranks. All ranks must reach that folder.
    ``accelerator.clip_grad_norm_`` must not be called: pass ``max_grad_norm`` to the optimizer.

    Args:
        accelerator: That has prepared both.
        model: As ``accelerator.prepare`` has returned it.
        optimizer: One of this package's, made of the prepared model's parameters, as ``prepare`` has returned it.

    Returns:
        What ``fusedonebit.ddp.attach`` does; None where it was attached already, or there is no DDP.

    Raises:
        TypeError, ValueError: on every rank, if they don't belong together, or were not prepared.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError(
            f"optimizer must be what accelerator.prepare(optimizer) has returned, got {type(optimizer).__name__}"
        )
    inside = of_each_rank.ours(optimizer)
    handle = of_each_rank.attach_once(model, inside)

    def save(models: list[torch.nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        of_each_rank.save(inside.frame.ranks, inside.state_dict, output_dir)

    def load(models: list[torch.nn.Module], input_dir: str) -> None:
        of_each_rank.hand_over(inside, input_dir)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return handle


def compress(
    accelerator: Accelerator, model: torch.nn.Module, bits: int = 4, *, feedback: Feedback = "default"
) -> Compression | None:
    """Do what ``fusedonebit.compress`` does, with any optimizer; let ``save_state`` and ``load_state`` keep residuals.

    Each rank writes a file of its own into the folder, ``onebit-compression-rank-R-of-W.pt``, which all ranks must
    reach. ``load_state`` takes those of any number of ranks.

    Args:
        accelerator: That has prepared the model.
        model: As ``accelerator.prepare`` has returned it.
        bits, feedback: As of ``fusedonebit.compress``.

    Returns:
        What ``fusedonebit.compress`` does; None in a single process.

    Raises:
        TypeError, ValueError, RuntimeError: on every rank, as ``fusedonebit.compress`` does.
    """
    made = of_each_rank.compress_once(model, bits, feedback, accelerator.scaler)
    if made is None:
        return None

    def save(models: list[torch.nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        of_each_rank.save(made.world, made.state_dict, output_dir, of_each_rank.RESIDUALS)

    def load(models: list[torch.nn.Module], input_dir: str) -> None:
        of_each_rank.load_residuals(made, input_dir)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return made
