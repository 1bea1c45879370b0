"""Tasks on generated data, and a small regression on real data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call

from .images import CLASSES, NOISE, digits, layers
from .supervised import Learner, Supervised, fixed
from .trial import Params

MODULUS, ADDERS = 31, 16
FIT_INPUTS = 4
USERS, ITEMS, FACTORS = 1000, 2000, 4
GROUPS = 64  # of users
RATING_NOISE = 0.3
HELD_OUT = 4096
LATE = 0.3  # of the run's steps


def regression() -> Supervised:
    """Predict the progress of diabetes."""
    return Supervised(layers(10, 32, 32, 1), _diabetes(), F.mse_loss, noise=0.5)


@lru_cache(maxsize=1)
def _diabetes() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_diabetes

    x, y = (torch.tensor(a, dtype=torch.float32) for a in load_diabetes(return_X_y=True))
    order = torch.randperm(len(y), generator=fixed())
    return (x / x.std(0))[order], ((y - y.mean()) / y.std())[order, None]


def modadd() -> Supervised:
    """Learn a + b modulo a prime from nine tenths of all pairs, until the rest follows."""
    return Supervised(_Adder(), _sums(), F.cross_entropy, share=0.1)


def _sums() -> tuple[Tensor, Tensor]:
    pairs = torch.cartesian_prod(torch.arange(MODULUS), torch.arange(MODULUS))
    pairs = pairs[torch.randperm(len(pairs), generator=fixed())]
    return pairs, pairs.sum(1) % MODULUS


class Adders(Supervised):
    """The same by ``ADDERS`` models at once, whose geometric mean differs less between seeds than one's loss."""

    def __init__(self) -> None:
        super().__init__(_Several([_Adder() for _ in range(ADDERS)]), _sums(), _sum_of_losses, share=0.1)

    @torch.no_grad()
    def validate(self, params: Sequence[Params]) -> float:
        pairs, sums = self.held_out
        logits = functional_call(self.models[0], dict(params[0]), (pairs,))
        each = [F.cross_entropy(of_one, sums).double().log() for of_one in logits.unbind(1)]
        return float(torch.stack(each).mean().exp())


def _sum_of_losses(logits: Tensor, sums: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(of_one, sums) for of_one in logits.unbind(1)]).sum()


class _Several(nn.Module):
    """What each of some modules returns, side by side."""

    def __init__(self, each: Sequence[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(each)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([module(x) for module in self.each], 1)


class _Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(MODULUS, 64)
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, MODULUS, bias=False)

    def forward(self, pairs: Tensor) -> Tensor:
        """Logits [batch, modulus]; a square represents products of waves, which add their phases."""
        return self.down(self.up(self.embed(pairs).sum(1)).square())


class Fit(Learner):
    """Fit a smooth function without noise, on inputs that are new in each batch."""

    def __init__(self) -> None:
        super().__init__(layers(FIT_INPUTS, 64, 64, 1, activation=nn.Tanh), F.mse_loss)
        self.held_out = self.batch(fixed(), HELD_OUT, 1.0)

    def pick(self, draw: torch.Generator, size: int) -> Tensor:
        return torch.rand(size, FIT_INPUTS, generator=draw) * 2 - 1

    def complete(self, picked: Tensor, draw: torch.Generator, share: float) -> tuple[Tensor, ...]:
        a, b, c, d = picked.unbind(1)
        return picked, ((2 * a).sin() * b + (c - d).square() / 2)[:, None]


class Recommender(Learner):
    """Predict ratings by users of items, both drawn by Zipf's law: many are first seen late, or never."""

    def __init__(self) -> None:
        super().__init__(_Factors(), F.mse_loss)
        self.users, self.items = torch.randn(USERS + ITEMS, FACTORS, generator=fixed()).split([USERS, ITEMS])
        self.held_out = self.batch(fixed(), HELD_OUT, 1.0)

    def pick(self, draw: torch.Generator, size: int) -> Tensor:
        """See ``Trial``: users and items [size, 2]."""
        return torch.stack([_zipf(len(rows), size, draw) for rows in (self.users, self.items)], 1)

    def source(self, picked: Tensor) -> Tensor:
        """See ``Trial``: one of ``GROUPS`` of users, each with frequent ones and seldom ones."""
        return picked[:, 0] % GROUPS

    def complete(self, picked: Tensor, draw: torch.Generator, share: float) -> tuple[Tensor, ...]:
        user, item = picked.unbind(1)
        u, i = self.users[user], self.items[item]
        noise = RATING_NOISE * torch.randn(len(picked), generator=draw)
        return user, item, u[:, 0] + i[:, 0] + (u * i)[:, 1:].mean(1) + noise


def _zipf(count: int, size: int, draw: torch.Generator) -> Tensor:
    return torch.multinomial(1 / torch.arange(1.0, count + 1), size, replacement=True, generator=draw)


class _Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 2 * FACTORS), nn.Embedding(ITEMS, 2 * FACTORS)
        self.rate = layers(4 * FACTORS, 32, 1)
        for rows in (self.users, self.items):
            nn.init.normal_(rows.weight, std=0.1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, i = self.users(user), self.items(item)
        return self.rate(torch.cat([u, i], 1)).squeeze(1) + (u * i).sum(1)


class Late(Learner):
    """Classify digits by their left halves and, from ``LATE`` on, by a second branch for their right halves too."""

    def __init__(self) -> None:
        super().__init__(_TwoBranches(), F.cross_entropy)
        self.base = Supervised(self.models[0], digits(), F.cross_entropy, NOISE)
        images, classes = self.base.held_out
        self.held_out = images, torch.ones(len(images)), classes

    def pick(self, draw: torch.Generator, size: int) -> Tensor:
        return self.base.pick(draw, size)

    def source(self, picked: Tensor) -> Tensor:
        return self.base.source(picked)

    def complete(self, picked: Tensor, draw: torch.Generator, share: float) -> tuple[Tensor, ...]:
        images, classes = self.base.complete(picked, draw, share)
        return images, torch.full((len(picked),), float(share >= LATE)), classes


class _TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = layers(32, 64, 32), layers(32, 64, 32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor, use_right: Tensor) -> Tensor:
        left, right = (half.flatten(1) for half in images.chunk(2, 3))
        return self.head(F.relu(self.left(left) + use_right[:, None] * self.right(right)))
