"""The lab's tasks: what is trained, on what, and what is looked at in the end.

A trial is one training run's models on one worker. It yields losses one after the other, each of
some of its parameters; all but the GAN have one.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ..corpus import Corpus, load_text
from ..transformer import ByteTransformer, Size
from .nets import NOISE, Discriminator, Generator, ResNetLike, VggLike, mlp, small_weights

SEQ_LEN = 32
TRANSFORMER = Size(width=64, layers=2, heads=2)
SOURCE_BYTES = 2_000_000
MASKED = 0.15  # of the bytes, as BERT does


class Trial(Protocol):
    """A worker's models; those of all workers start from the same values."""

    models: list[nn.Module]

    def losses(self, draw: torch.Generator, batch_size: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (index into ``models``, loss of a batch drawn with ``draw``), updates happening in between."""

    def metric(self) -> float:
        """Return what counts in the end, on held-out data."""


@dataclass(frozen=True)
class Task:
    """A task and how it is trained.

    ``make`` builds a trial from the global random state; ``batch_size`` is that of all workers
    together; ``lr`` is Adam's, SGD's and LAMB's are ``sgd`` and ``lamb`` times that; ``higher`` says
    whether a higher metric is better, ``images`` what is looked at.
    """

    make: Callable[[], Trial]
    metric: str
    steps: int
    batch_size: int
    lr: float
    lamb: float
    sgd: float = 30.0
    higher: bool = False
    images: bool = False


@lru_cache(maxsize=1)
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return images[order], torch.tensor(digits.target)[order]


@lru_cache(maxsize=1)
def _diabetes() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_diabetes

    x, y = (torch.tensor(a, dtype=torch.float32) for a in load_diabetes(return_X_y=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return (x / x.std(0))[order], ((y - y.mean()) / y.std())[order, None]


@lru_cache(maxsize=2)
def _corpus(source: bool) -> Corpus:
    if not source:
        return Corpus(load_text(()), SEQ_LEN)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return Corpus(load_text([str(file) for file in files])[:SOURCE_BYTES], SEQ_LEN)


class Supervised:
    """Some inputs, some targets, one model; a fifth is held out."""

    def __init__(self, model: nn.Module, data: tuple[Tensor, Tensor], loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.models, self.loss = [model], loss
        cut = len(data[0]) * 4 // 5
        self.x, self.y = (t[:cut] for t in data)
        self.held_x, self.held_y = (t[cut:] for t in data)

    def losses(self, draw: torch.Generator, batch_size: int) -> Iterator[tuple[int, Tensor]]:
        """See ``Trial``."""
        batch = torch.randint(len(self.x), (batch_size,), generator=draw)
        yield 0, self.loss(self.models[0](self.x[batch]), self.y[batch])

    @torch.no_grad()
    def metric(self) -> float:
        """Percent of held-out images classified right, or the mean squared error."""
        out = self.models[0].eval()(self.held_x)
        self.models[0].train()
        if self.held_y.dtype == torch.int64:
            return float((out.argmax(1) == self.held_y).double().mean() * 100)
        return float(self.loss(out, self.held_y))


class Language:
    """A byte-level transformer on real text: the next byte, or hidden ones."""

    def __init__(self, causal: bool) -> None:
        self.causal, self.corpus = causal, _corpus(source=not causal)
        self.models: list[nn.Module] = [ByteTransformer(TRANSFORMER, SEQ_LEN, causal)]

    def losses(self, draw: torch.Generator, batch_size: int) -> Iterator[tuple[int, Tensor]]:
        """See ``Trial``."""
        seed = int(torch.randint(1 << 24, (), generator=draw))
        yield 0, self._loss(self.corpus.batch(batch_size, seed, 0, 0), draw)

    def _loss(self, tokens: Tensor, draw: torch.Generator) -> Tensor:
        model = self.models[0]
        if self.causal:
            return model(tokens)
        targets = tokens[:, 1:]
        hidden = torch.rand(targets.shape, generator=draw) < MASKED
        logits = model.logits(targets.masked_fill(hidden, 0))  # type: ignore[operator]
        return F.cross_entropy(logits[hidden], targets[hidden])

    @torch.no_grad()
    def metric(self) -> float:
        """Held-out loss, nats per byte."""
        draw = torch.Generator().manual_seed(0)
        batches = [self.corpus.held_out_batch(64, i, 4) for i in range(4)]
        return float(sum(self._loss(batch, draw) for batch in batches) / len(batches))


class Gan:
    """DCGAN: the discriminator's step, then the generator's."""

    def __init__(self) -> None:
        self.generator, self.discriminator = Generator(), Discriminator()
        self.models: list[nn.Module] = [self.discriminator, self.generator]
        for model in self.models:
            small_weights(model)
        images, _ = _digits()
        cut = len(images) * 4 // 5
        self.images, self.held_out = images[:cut], images[cut:]

    def losses(self, draw: torch.Generator, batch_size: int) -> Iterator[tuple[int, Tensor]]:
        """See ``Trial``."""
        real = self.images[torch.randint(len(self.images), (batch_size,), generator=draw)]
        noise = torch.randn(batch_size, NOISE, generator=draw)
        fake = self.generator(noise)
        one, zero = torch.ones(batch_size), torch.zeros(batch_size)
        guess = F.binary_cross_entropy_with_logits
        yield 0, guess(self.discriminator(real), one) + guess(self.discriminator(fake.detach()), zero)
        yield 1, guess(self.discriminator(fake), one)

    @torch.no_grad()
    def metric(self) -> float:
        """Frechet distance, in pixels, between normal fits to 1000 samples and to the held-out digits."""
        self.generator.eval()
        samples = self.generator(torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(0)))
        self.generator.train()
        a, b = samples.flatten(1).double(), self.held_out.flatten(1).double()
        mean, (c, d) = a.mean(0) - b.mean(0), (a.T.cov(), b.T.cov())
        roots = torch.linalg.eigvals(c @ d).real.clamp(min=0).sqrt()
        return float(mean @ mean + c.trace() + d.trace() - 2 * roots.sum())


def _squared(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target)


def _digits_task(model: Callable[[], nn.Module], steps: int, lr: float = 1e-3, sgd: float = 90.0) -> Task:
    make = lambda: Supervised(model(), _digits(), F.cross_entropy)  # noqa: E731
    return Task(make, "accuracy, %", steps, batch_size=64, lr=lr, lamb=7.0, sgd=sgd, higher=True, images=True)


TASKS = {
    "vgg": _digits_task(VggLike, 500, lr=5e-4),
    "resnet": _digits_task(ResNetLike, 300, sgd=30.0),
    "mlp": _digits_task(lambda: mlp(64, 64, 10), 500),
    "gan": Task(Gan, "Frechet distance", 500, batch_size=64, lr=1e-3, lamb=3.0),
    "causal": Task(lambda: Language(causal=True), "nats per byte", 600, batch_size=32, lr=3e-3, lamb=3.0),
    "masked": Task(lambda: Language(causal=False), "nats per hidden byte", 600, batch_size=32, lr=3e-3, lamb=3.0),
    "regression": Task(
        lambda: Supervised(mlp(10, 32, 1), _diabetes(), _squared), "mean squared error", 300, 64, lr=1e-3, lamb=7.0
    ),
}
"""By name."""
