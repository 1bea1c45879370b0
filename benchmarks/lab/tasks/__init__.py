"""The lab's tasks: what is trained, on what, and what is measured in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from . import adapters, control, generative, images, synthetic, text
from .trial import Trial


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
    milder: float = 1.0
    """What a rate that was found is multiplied with before runs are reported: at the best one seeds may differ most."""
    sources: int = 0
    """Classes, parts of a text or users by which workers' data may differ (``Trial.source``)."""


def _seeded(build: Callable[[], Trial]) -> Callable[[int], Trial]:
    def make(seed: int) -> Trial:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return make


IMAGE, BYTE = "nats per image", "nats per byte"
CLASSES, PARTS = images.CLASSES, text.PARTS
_of_sums = partial(
    Task,
    metric="nats per sum",
    steps=600,
    lr=2e-2,
    lamb=1.0,
    weight_decay=0.1,
    noiseless=True,
    sources=synthetic.MODULUS,
)
TASKS = {
    "vgg": Task(_seeded(images.vgg), IMAGE, 500, lr=1e-2, lamb=2.0, sources=CLASSES),
    "resnet": Task(_seeded(images.resnet), IMAGE, 300, lr=1e-2, lamb=1.0, sources=CLASSES),
    "mlp": Task(_seeded(images.mlp), IMAGE, 500, lr=1.5e-2, lamb=1.0, sources=CLASSES),
    "gan": Task(_seeded(generative.Gan), "Frechet distance, pixels", 500, lr=1.5e-3, lamb=3.0, sources=CLASSES),
    "causal": Task(_seeded(text.causal), BYTE, 600, lr=1e-2, lamb=3.0, sources=PARTS),
    "masked": Task(_seeded(text.masked), "nats per hidden byte", 600, lr=1e-2, lamb=3.0, sources=PARTS),
    "regression": Task(_seeded(synthetic.regression), "squared error", 300, lr=1e-3, lamb=1.0),
    "modadd": _of_sums(_seeded(synthetic.modadd)),
    "fit": Task(_seeded(synthetic.Fit), "squared error", 500, lr=3e-2, lamb=1.0, noiseless=True),
    "recsys": Task(_seeded(synthetic.Recommender), "squared error", 500, lr=4e-2, lamb=1.0, sources=synthetic.GROUPS),
    "late": Task(_seeded(synthetic.Late), IMAGE, 500, lr=1.5e-2, lamb=1.0, sources=CLASSES),
    "lstm": Task(_seeded(text.lstm), BYTE, 500, lr=4e-2, lamb=1.0, sources=PARTS),
    "vae": Task(_seeded(generative.Vae), IMAGE, 500, lr=1e-2, lamb=3.0, sources=CLASSES),
    "policy": Task(_seeded(control.Policy), "cost of a step", 500, lr=3e-2, lamb=1.0),
    "adders": _of_sums(_seeded(synthetic.Adders), milder=0.6),
    "gans": Task(_seeded(generative.Gans), "Frechet distance, pixels", 500, lr=3e-3, lamb=3.0, sources=CLASSES),
    "policies": Task(_seeded(control.Policies), "cost of a step", 500, lr=3e-2, lamb=1.0),
    "adapters": Task(_seeded(adapters.adapters), BYTE, 600, lr=3e-2, lamb=1.0, sources=PARTS),
}
"""By name."""
QUICK = ("mlp", "regression", "modadd", "fit", "recsys", "late", "vae")
"""The half whose runs take least, made with 64 workers as well."""
LATER = ("adders", "gans", "policies", "adapters")
FIRST = tuple(name for name in TASKS if name not in LATER)
"""Those that all recorded optimizers were run on; the ``LATER`` ones were added for our defaults and their parents."""
