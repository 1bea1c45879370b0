"""Generate digits with a GAN and a variational autoencoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call

from .images import Linears, digits, layers, norm
from .supervised import Learner, fixed, split
from .trial import Params, Trial

LATENT = 16
SAMPLES = 1000
GANS, BLUR = 24, 1.3


class Gan(Trial):
    """DCGAN: the discriminator's step, then the generator's; group norm, since each of 64 workers has one image."""

    def __init__(self) -> None:
        discriminator = nn.Sequential(
            *(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(8, 32, 4, 2, 1), norm(32), nn.LeakyReLU(0.2)),
            *(nn.Flatten(), nn.Linear(128, 1), nn.Flatten(0)),
        )
        generator = nn.Sequential(
            *(nn.Linear(LATENT, 32 * 4), nn.Unflatten(1, (32, 2, 2)), norm(32), nn.ReLU()),
            *(nn.ConvTranspose2d(32, 8, 4, 2, 1), norm(8), nn.ReLU()),
            *(nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid()),
        )
        self.models: list[nn.Module] = [discriminator, generator]
        for layer in (*discriminator, *generator):
            if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
                # DCGAN's are 0.02; these layers are narrow.
                nn.init.normal_(layer.weight, std=0.1)
        (self.images, self.held_out), (self.classes, _) = map(split, digits())

    def pick(self, draw: torch.Generator, size: int) -> Tensor:
        return torch.randint(len(self.images), (size,), generator=draw)

    def source(self, picked: Tensor) -> Tensor:
        """See ``Trial``: the class of the real image."""
        return self.classes[picked]

    def complete(self, picked: Tensor, draw: torch.Generator, share: float) -> tuple[Tensor, ...]:
        return self.images[picked], torch.randn(len(picked), LATENT, generator=draw)

    def loss(self, player: int, params: Sequence[Params], batch: tuple[Tensor, ...]) -> Tensor:
        real, noise, *blur = batch
        discriminate, generate = (dict(p) for p in params)
        fake = sum(blur, functional_call(self.models[1], generate, (noise,)))
        if player == 1:
            return F.softplus(-functional_call(self.models[0], discriminate, (fake,))).mean()
        logits = functional_call(self.models[0], discriminate, (torch.cat([real, fake.detach()]),))
        on_real, on_fake = logits.chunk(2)
        return F.softplus(-on_real).mean() + F.softplus(on_fake).mean()

    @torch.no_grad()
    def validate(self, params: Sequence[Params]) -> float:
        """Compute the Frechet distance, in pixels, between normal fits to samples and to the held-out digits."""
        noise = torch.randn(SAMPLES, LATENT, generator=fixed())
        return self._distance(functional_call(self.models[1], dict(params[1]), (noise,)))

    def _distance(self, samples: Tensor) -> float:
        a, b = samples.flatten(1).double(), self.held_out.flatten(1).double()
        mean, (c, d) = a.mean(0) - b.mean(0), (a.T.cov(), b.T.cov())
        roots = torch.linalg.eigvals(c @ d).real.clamp(min=0).sqrt()
        return float(mean @ mean + c.trace() + d.trace() - 2 * roots.sum())


class Gans(Gan):
    """``GANS`` small ones at once, whose mean distance differs less between seeds than one's.

    Images and samples get Gaussian noise before they are told apart, with which such training converges.
    """

    def __init__(self) -> None:
        several = partial(layers, activation=partial(nn.LeakyReLU, 0.2), linear=partial(Linears, GANS))
        self.models = [several(64, 32, 32, 1), nn.Sequential(*several(LATENT, 32, 32, 64), nn.Sigmoid())]
        (self.images, self.held_out), (self.classes, _) = map(split, digits())

    def complete(self, picked: Tensor, draw: torch.Generator, share: float) -> tuple[Tensor, ...]:
        """See ``Trial``; real images and the fake ones' noise [size, gans, 64], and what the latter are made of."""
        real, noise, blur = (torch.randn(len(picked), GANS, n, generator=draw) for n in (64, LATENT, 64))
        return self.images[picked].flatten(1)[:, None] + BLUR * real, noise, BLUR * blur

    @torch.no_grad()
    def validate(self, params: Sequence[Params]) -> float:
        noise = torch.randn(SAMPLES, 1, LATENT, generator=fixed()).expand(-1, GANS, -1)
        samples = functional_call(self.models[1], dict(params[1]), (noise,))
        return fmean(map(self._distance, samples.unbind(1)))


class Vae(Learner):
    """Minimise minus the evidence lower bound of digits, whose pixels are Bernoulli variables."""

    COPIES = 4  # of the held-out digits, with different noise

    def __init__(self) -> None:
        super().__init__(_Autoencoder(), _minus_lower_bound)
        (images, held_out), (self.classes, _) = map(split, digits())
        self.images, held_out = images.flatten(1), held_out.flatten(1)
        held_out = held_out.repeat(self.COPIES, 1)
        self.held_out = held_out, torch.randn(len(held_out), LATENT, generator=fixed()), held_out

    def pick(self, draw: torch.Generator, size: int) -> Tensor:
        return torch.randint(len(self.images), (size,), generator=draw)

    def source(self, picked: Tensor) -> Tensor:
        return self.classes[picked]

    def complete(self, picked: Tensor, draw: torch.Generator, share: float) -> tuple[Tensor, ...]:
        images = self.images[picked]
        return images, torch.randn(len(picked), LATENT, generator=draw), images


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = layers(64, 64, 2 * LATENT), layers(LATENT, 64, 64)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """Logits of the pixels, the mean and the logarithm of the variance, side by side."""
        mean, log_variance = self.encode(images).chunk(2, 1)
        return torch.cat([self.decode(mean + noise * (log_variance / 2).exp()), mean, log_variance], 1)


def _minus_lower_bound(output: Tensor, images: Tensor) -> Tensor:
    logits, mean, log_variance = output.split([64, LATENT, LATENT], 1)
    reconstruction = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1)
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
    return (reconstruction + divergence).mean()
