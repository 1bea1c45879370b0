"""The lab's models, small versions of those in the papers; images are 8 x 8, float32 [batch, 1, 8, 8]."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

CLASSES = 10
NOISE = 16


class VggLike(nn.Module):
    """Convolutions and ReLUs without any normalisation: what 1-bit Adam is known to diverge on."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.classify = nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, 10] of images."""
        return self.classify(self.features(images))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class ResNetLike(nn.Module):
    """Residual blocks with batch norm; every worker keeps running statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.blocks = nn.Sequential(_Residual(32), nn.MaxPool2d(2), _Residual(32))
        self.classify = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, 10] of images."""
        return self.classify(self.blocks(self.stem(images)).mean((2, 3)))


def mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    hidden = (nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, outputs))


class Generator(nn.Module):
    """DCGAN's, for 8 x 8: noise [batch, 16] to images in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(NOISE, 64 * 4), nn.Unflatten(1, (64, 2, 2)), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Sigmoid()),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Noise to images."""
        return self.layers(noise)


class Discriminator(nn.Module):
    """DCGAN's, for 8 x 8: images to logits [batch]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(32, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.LeakyReLU(0.2)),
            *(nn.Flatten(), nn.Linear(256, 1)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of images."""
        return self.layers(images).squeeze(1)


@torch.no_grad()
def small_weights(model: nn.Module) -> None:
    """Normal initial values, as DCGAN's; a standard deviation of 0.1, since these layers are narrow."""
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            nn.init.normal_(layer.weight, std=0.1)
