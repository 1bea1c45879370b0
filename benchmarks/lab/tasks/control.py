"""Steer a point mass with a policy that is learned by REINFORCE with a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call

from .images import Linears, layers
from .supervised import fixed
from .trial import Params, Trial

STEPS = 10
EPISODES = 1024  # held out
GUSTS = 0.05
POLICIES = 16
THRUSTS = torch.tensor([(0.0, 0.0), (1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)])


class Policy(Trial):
    """Bring a point to the origin: every step costs its squared distance; actions are drawn with Gumbel noise.

    The network sees position and velocity; its outputs are the actions' logits and the baseline, which
    learns the cost still to come.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = [layers(4, 32, 32, len(THRUSTS) + 1, activation=nn.Tanh)]
        self.held_out = self.batch(fixed(), EPISODES, 1.0)

    def pick(self, draw: torch.Generator, size: int) -> Tensor:
        return torch.rand(size, 2, generator=draw) * 2 - 1

    def complete(self, picked: Tensor, draw: torch.Generator, share: float) -> tuple[Tensor, ...]:
        """See ``Trial``; starts [size, 2], gusts [size, steps, 2] and Gumbel noise [size, steps, actions]."""
        size = len(picked)
        gusts = GUSTS * torch.randn(size, STEPS, 2, generator=draw)
        uniform = torch.rand(size, STEPS, len(THRUSTS), generator=draw).clamp(min=1e-6)
        return picked, gusts, -torch.log(-torch.log(uniform))

    def loss(self, player: int, params: Sequence[Params], batch: tuple[Tensor, ...]) -> Tensor:
        states, actions, costs = self._episodes(params[0], batch)
        to_come = costs.flip(1).cumsum(1).flip(1) / STEPS
        logits, baseline = self._network(params[0], states)
        chosen = logits.log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1)
        return ((to_come - baseline.detach()) * chosen).mean() + F.mse_loss(baseline, to_come)

    @torch.no_grad()
    def validate(self, params: Sequence[Params]) -> float:
        """Compute the mean cost of a step."""
        return float(self._episodes(params[0], self.held_out)[2].mean())

    def _network(self, params: Params, states: Tensor) -> tuple[Tensor, Tensor]:
        output = functional_call(self.models[0], dict(params), (states,))
        return output[..., :-1], output[..., -1]

    def _episodes(self, params: Params, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Play; return states [size, steps, 4], actions and costs [size, steps], without a gradient."""
        position, gusts, gumbel = batch
        velocity, params = torch.zeros_like(position), {name: p.detach() for name, p in params.items()}
        states, actions, costs = [], [], []
        for gust, noise in zip(gusts.unbind(1), gumbel.unbind(1), strict=True):
            states.append(torch.cat([position, velocity], -1))
            actions.append((self._network(params, states[-1])[0] + noise).argmax(-1))
            velocity = 0.7 * velocity + 0.3 * THRUSTS[actions[-1]] + gust
            position = position + velocity
            costs.append(position.square().sum(-1))
        return torch.stack(states, 1), torch.stack(actions, 1), torch.stack(costs, 1)


class Policies(Policy):
    """Learn ``POLICIES`` at once, at each of the same starts; their mean cost differs less between seeds than one's."""

    def __init__(self) -> None:
        linear = partial(Linears, POLICIES)
        self.models = [layers(4, 32, 32, len(THRUSTS) + 1, activation=nn.Tanh, linear=linear)]
        self.held_out = self.batch(fixed(), EPISODES, 1.0)

    def complete(self, picked: Tensor, draw: torch.Generator, share: float) -> tuple[Tensor, ...]:
        """See ``Trial``; starts [size, policies, 2] and the rest [size, steps, policies, ...]."""
        every = picked.repeat_interleave(POLICIES, 0)
        starts, *rest = super().complete(every, draw, share)
        return starts.unflatten(0, (-1, POLICIES)), *(x.unflatten(0, (-1, POLICIES)).transpose(1, 2) for x in rest)
