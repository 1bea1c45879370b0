"""Classify scikit-learn's digits, float32 [batch, 1, 8, 8], with small versions of the papers' networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .supervised import Supervised, fixed

CLASSES = 10
NOISE = 0.4  # of pixels between 0 and 1


@lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor]:
    """Load all images and their classes in a fixed random order."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=fixed())
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return images[order], torch.tensor(data.target)[order]


def vgg() -> Supervised:
    """Convolutions and ReLUs without any normalisation: what 1-bit Adam is known to diverge on."""
    widths = (1, 8, 8, 16, 16)
    convs = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in pairwise(widths)]
    features = (*convs[:2], nn.MaxPool2d(2), *convs[2:], nn.MaxPool2d(2), nn.Flatten())
    return _classifier(nn.Sequential(*features, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)))


def resnet() -> Supervised:
    """Residual blocks; group norm instead of ResNet's batch norm, since each of 64 workers has one image."""
    stem = (nn.Conv2d(1, 8, 3, padding=1, bias=False), norm(8), nn.ReLU())
    blocks = (_Residual(8), nn.MaxPool2d(2), _Residual(8), nn.Flatten())
    return _classifier(nn.Sequential(*stem, *blocks, nn.Linear(128, CLASSES)))


def mlp() -> Supervised:
    """Two hidden layers."""
    return _classifier(nn.Sequential(nn.Flatten(), layers(64, 64, 64, CLASSES)))


def layers(
    *widths: int,
    activation: Callable[[], nn.Module] = nn.ReLU,
    linear: Callable[[int, int], nn.Module] = nn.Linear,
) -> nn.Sequential:
    """Linear layers with activations between them."""
    pairs = pairwise(widths)
    return nn.Sequential(*[m for a, b in pairs for m in (linear(a, b), activation())][:-1])


class Linears(nn.Module):
    """A linear layer of each of ``count`` networks side by side, from [..., count, a] to [..., count, b]."""

    def __init__(self, count: int, a: int, b: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, a, b) / a**0.5)
        self.bias = nn.Parameter(torch.zeros(count, b))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...na,nab->...nb", x, self.weight) + self.bias


def norm(channels: int) -> nn.GroupNorm:
    """Normalise groups of four channels."""
    return nn.GroupNorm(channels // 4, channels)


def _classifier(model: nn.Module) -> Supervised:
    return Supervised(model, digits(), F.cross_entropy, NOISE)


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = norm(channels), norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))
