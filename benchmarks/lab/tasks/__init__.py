"""The lab's tasks: what is trained, on what, and what is measured in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from . import control, generative, images, synthetic, text
from .supervised import Params


class Trial(Protocol):
    """What one run trains, from initial values that are the same on all workers.

    Losses are pure functions of parameters and batch, so that ``torch.func.vmap`` computes all
    workers' gradients at once; what is random comes with the batch.
    """

    models: list[nn.Module]
    """One; the GAN has two, discriminator and generator, which are updated in turn."""

    def batch(self, draw: torch.Generator, size: int, share: float) -> tuple[Tensor, ...]:
        """Draw one worker's ``size`` examples at ``share`` (0 to 1) of the run; shapes depend on ``size`` only."""

    def loss(self, player: int, params: Sequence[Params], batch: tuple[Tensor, ...]) -> Tensor:
        """Compute the loss of ``models[player]``, [], from all models' parameters."""

    def validate(self, params: Sequence[Params]) -> float:
        """Compute the held-out loss, of which less is better."""


@dataclass(frozen=True)
class Task:
    """A task and how it is trained."""

    make: Callable[[int], Trial]
    """Builds the trial of a seed."""
    metric: str
    """What ``validate`` returns."""
    steps: int
    lr: float
    """Centre of AdamW's grid of rates."""
    lamb: float
    """Centre of LAMB's grid, as a multiple of ``lr``."""
    batch_size: int = 64
    """Examples a step, of all workers together; 64 workers get one each."""
    weight_decay: float = 0.0
    noiseless: bool = False
    """Whether the loss has no floor, so that differences count in decades."""


def _seeded(build: Callable[[], Trial]) -> Callable[[int], Trial]:
    def make(seed: int) -> Trial:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return make


IMAGE, BYTE = "nats per image", "nats per byte"
TASKS = {
    "vgg": Task(_seeded(images.vgg), IMAGE, 500, lr=1e-2, lamb=2.0),
    "resnet": Task(_seeded(images.resnet), IMAGE, 300, lr=1e-2, lamb=1.0),
    "mlp": Task(_seeded(images.mlp), IMAGE, 500, lr=1.5e-2, lamb=1.0),
    "gan": Task(_seeded(generative.Gan), "Frechet distance, pixels", 500, lr=1.5e-3, lamb=3.0),
    "causal": Task(_seeded(text.causal), BYTE, 600, lr=1e-2, lamb=3.0),
    "masked": Task(_seeded(text.masked), "nats per hidden byte", 600, lr=1e-2, lamb=3.0),
    "regression": Task(_seeded(synthetic.regression), "squared error", 300, lr=1e-3, lamb=1.0),
    "modadd": Task(_seeded(synthetic.modadd), "nats per sum", 600, lr=2e-2, lamb=1.0, weight_decay=0.1, noiseless=True),
    "fit": Task(_seeded(synthetic.Fit), "squared error", 500, lr=3e-2, lamb=1.0, noiseless=True),
    "recsys": Task(_seeded(synthetic.Recommender), "squared error", 500, lr=4e-2, lamb=1.0),
    "late": Task(_seeded(synthetic.Late), IMAGE, 500, lr=1.5e-2, lamb=1.0),
    "lstm": Task(_seeded(text.lstm), BYTE, 500, lr=4e-2, lamb=1.0),
    "vae": Task(_seeded(generative.Vae), IMAGE, 500, lr=1e-2, lamb=3.0),
    "policy": Task(_seeded(control.Policy), "cost of a step", 500, lr=3e-2, lamb=1.0),
}
"""By name."""
