"""What a run of the lab trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Params = Mapping[str, Tensor]
"""A model's named parameters."""


class Trial(ABC):
    """What one run trains, from initial values that are the same on all workers.

    Losses are pure functions of parameters and batch, so that ``torch.func.vmap`` computes all
    workers' gradients at once; what is random comes with the batch.
    """

    models: list[nn.Module]
    """One; the GAN has two, discriminator and generator, which are updated in turn."""

    @abstractmethod
    def pick(self, draw: torch.Generator, size: int) -> Tensor:
        """Draw ``size`` examples, [size, ...]: their numbers, as a rule."""

    def source(self, picked: Tensor) -> Tensor:
        """Return which class, part of a text or user each is of, int64 [size], below the task's ``sources``."""
        raise NotImplementedError(f"{type(self).__name__} has no sources by which workers' data could differ")

    @abstractmethod
    def complete(self, picked: Tensor, draw: torch.Generator, share: float) -> tuple[Tensor, ...]:
        """Make a batch of them at ``share`` (0 to 1) of the run; shapes depend on their number only."""

    def batch(self, draw: torch.Generator, size: int, share: float) -> tuple[Tensor, ...]:
        """Draw one worker's ``size`` examples at ``share`` of the run."""
        return self.complete(self.pick(draw, size), draw, share)

    @abstractmethod
    def loss(self, player: int, params: Sequence[Params], batch: tuple[Tensor, ...]) -> Tensor:
        """Compute the loss of ``models[player]``, [], from all models' parameters."""

    @abstractmethod
    def validate(self, params: Sequence[Params]) -> float:
        """Compute the held-out loss, of which less is better."""
