"""Trials of one model that learns targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .trial import Params, Trial

FIXED = 987_654_321  # a seed that no run takes: with a run's own, its first batch would be held-out examples


def fixed() -> torch.Generator:
    """Return the generator that data and held-out examples are drawn with."""
    return torch.Generator().manual_seed(FIXED)


def split(data: Tensor, share: float = 0.2) -> tuple[Tensor, Tensor]:
    """Cut off the last ``share``, which is held out."""
    cut = int(len(data) * (1 - share))
    return data[:cut], data[cut:]


class Learner(Trial):
    """One model, whose loss compares its output for all but the last tensor of a batch with that last one.

    A subclass has ``pick`` and ``complete``, and sets ``held_out``, a batch.
    """

    held_out: tuple[Tensor, ...]

    def __init__(self, model: nn.Module, objective: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.models, self.objective = [model], objective

    def loss(self, player: int, params: Sequence[Params], batch: tuple[Tensor, ...]) -> Tensor:
        return self.objective(functional_call(self.models[0], dict(params[0]), batch[:-1]), batch[-1])

    @torch.no_grad()
    def validate(self, params: Sequence[Params]) -> float:
        return float(self.loss(0, params, self.held_out))


class Supervised(Learner):
    """Learn from a set of inputs and targets, whose last ``share`` is held out; inputs may get Gaussian noise.

    The noise keeps a small set from being learned by heart, after which a better optimizer would have
    a worse held-out loss; held-out inputs come with ``COPIES`` fixed draws of it.
    """

    COPIES = 8

    def __init__(
        self,
        model: nn.Module,
        data: tuple[Tensor, Tensor],
        objective: Callable[[Tensor, Tensor], Tensor],
        noise: float = 0.0,
        share: float = 0.2,
    ) -> None:
        super().__init__(model, objective)
        self.noise = noise
        (self.inputs, held_inputs), (self.targets, held_targets) = (split(t, share) for t in data)
        copies = torch.arange(len(held_inputs)).repeat(self.COPIES if noise else 1)
        self.held_out = self._noisy(held_inputs[copies], fixed()), held_targets[copies]

    def pick(self, draw: torch.Generator, size: int) -> Tensor:
        return torch.randint(len(self.inputs), (size,), generator=draw)

    def source(self, picked: Tensor) -> Tensor:
        return self.targets[picked]

    def complete(self, picked: Tensor, draw: torch.Generator, share: float) -> tuple[Tensor, ...]:
        return self._noisy(self.inputs[picked], draw), self.targets[picked]

    def _noisy(self, inputs: Tensor, draw: torch.Generator) -> Tensor:
        return inputs + self.noise * torch.randn(inputs.shape, generator=draw) if self.noise else inputs
