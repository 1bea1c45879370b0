"""Forms the gradients of all of a run's workers at once, from a graph of its operations that is traced once.

Steps of models as small as these are calls more than arithmetic: a graph spares autograd's and vmap's, and has the bits
of what it was traced from, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from .tasks import Trial
from .tasks.supervised import Params

Gradients = tuple[dict[str, Tensor], Tensor]
"""By name, of each worker, [W, ...]; and losses [W]."""
EveryWorker = Callable[[Params, Sequence[Params], tuple[Tensor, ...]], Gradients]
"""Of the parameters of the model that is moved, those of all models, and all workers' batches [W, ...]."""


class Which(NamedTuple):
    """What a graph follows from besides the batch's shape: a trial's loss is the same function, whatever its seed."""

    task: str
    player: int
    apart: bool
    """Whether parameters are each worker's own, [W, ...]."""


_graphs: dict[tuple[Which, Sequence[torch.Size]], EveryWorker] = {}


def untraced(which: Which, trial: Trial) -> EveryWorker:
    """Return the function that is traced: the gradients by one model's parameters of each worker's loss."""
    player, stacked = which.player, 0 if which.apart else None

    def loss(own: Params, everyone: Sequence[Params], batch: tuple[Tensor, ...]) -> Tensor:
        return trial.loss(player, [*everyone[:player], own, *everyone[player + 1 :]], batch)

    return vmap(grad_and_value(loss), in_dims=(stacked, stacked, 0))


def gradients(which: Which, trial: Trial, params: Sequence[Params], batches: tuple[Tensor, ...]) -> Gradients:
    """Form one model's gradients of all workers.

    Args:
        which: Which model, of which task.
        trial: Of the task.
        params: By name, of each model: float, or [W, ...] where workers have their own.
        batches: Of all workers, [W, ...].

    Returns:
        Gradients by name [W, ...], and losses [W].
    """
    given = (params[which.player], params, batches)
    key = which, tuple(each.shape for each in batches)
    if key not in _graphs:
        _graphs[key] = make_fx(untraced(which, trial))(*given)
    with torch.no_grad():
        return _graphs[key](*given)
