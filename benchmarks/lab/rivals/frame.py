"""What all rivals have in common: one optimizer that stands for all W workers of a run.

Its state is one line of n parameters, [n], of what workers share, and [W, n] of what each has of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..setting import BETAS, EPS, Params, Setting
from .blocks import Blocks
from .collectives import StackedCollectives


class Rival(torch.optim.Optimizer):
    """All workers' optimizer; a subclass says in ``move`` how ``self.x`` moves.

    Args:
        params: Rank 0's parameters; all workers start with their values.
        of: What the run is.
        options: What a subclass was made with, and its constants; a record's fingerprint follows from them.

    Attributes:
        x: Parameters [n], or [W, n] where workers have their own.
        done: Steps taken.
    """

    def __init__(self, params: Params, of: Setting, **options: Any) -> None:
        super().__init__(params, {"lr": of.lr, "betas": BETAS, "eps": EPS, "weight_decay": of.weight_decay})
        self.options = (type(self).__name__, options)
        self.transport, self.wires = of.transport, StackedCollectives(of.transport)
        self.workers = of.transport.world_size
        own = [p for group in self.param_groups for p in group["params"]]
        self._models: list[list[Tensor]] = [[p.detach() for p in own]]
        self.shapes = [p.shape for p in own]
        ends = [0, *torch.tensor([p.numel() for p in own]).cumsum(0).tolist()]
        self.slices = [slice(*ends) for ends in pairwise(ends)]
        self.x = torch.cat([p.reshape(-1) for p in self._models[0]])
        self.done = 0
        self._given: Tensor | None = None

    @property
    def lr(self) -> float:
        """Return the learning rate of this step."""
        return float(self.param_groups[0]["lr"])

    @property
    def weight_decay(self) -> float:
        """Return the decoupled weight decay."""
        return float(self.param_groups[0]["weight_decay"])

    def stand_for(self, others: Sequence[Params]) -> None:
        """Write the ``others``' parameters as well, each worker's in this one's order."""
        self._models += [list(params) for params in others]

    def give(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        """Take each worker's gradients by parameter, of the coming step."""
        self._given = torch.cat([g.reshape(-1) for row in gradients for g in row.values()]).view(self.workers, -1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take all workers' step.

        Raises:
            RuntimeError: where ``give`` was not called before.
        """
        if self._given is None:
            raise RuntimeError(f"{type(self).__name__} stands for all workers: call give(gradients) before each step")
        gradients, self._given = self._given, None
        self.transport.traffic.start_step()
        self.done += 1
        self.move(gradients)
        for params, x in zip(self._models, self.x.view(-1, self.slices[-1].stop), strict=True):
            torch._foreach_copy_(params, self.cut(x))

    def cut(self, line: Tensor) -> list[Tensor]:
        """Return views of a line [n], one for each parameter."""
        return [line[part].view(shape) for part, shape in zip(self.slices, self.shapes, strict=True)]

    def blocks_of(self, largest: int | None = None) -> Blocks:
        """Return blocks of each parameter that share a scale, of so many elements at most; None: all of it."""
        return Blocks([shape.numel() for shape in self.shapes], self.workers, largest)

    def move(self, gradients: Tensor) -> None:
        """Move ``self.x`` by all workers' gradients [W, n]."""
        raise NotImplementedError


class Adam:
    """AdamW (Loshchilov & Hutter, Algorithm 2) on one line, or on each worker's: as ``torch.optim.AdamW``."""

    def __init__(self, x: Tensor) -> None:
        self.exp_avg, self.exp_avg_sq, self.steps = torch.zeros_like(x), torch.zeros_like(x), 0

    def step(self, x: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        """Move ``x``, in place, by gradients of its shape."""
        (beta1, beta2), self.steps = BETAS, self.steps + 1
        self.exp_avg.lerp_(gradient, 1 - beta1)
        self.exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denom = (self.exp_avg_sq.sqrt() / (1 - beta2**self.steps) ** 0.5).add_(EPS)
        x.mul_(1 - lr * weight_decay).addcdiv_(self.exp_avg, denom, value=-lr / (1 - beta1**self.steps))


class AveragingRival(Rival):
    """AdamW on what a subclass makes of the mean of the workers' gradients."""

    def __init__(self, params: Params, of: Setting, **options: Any) -> None:
        super().__init__(params, of, **options)
        self.adam = Adam(self.x)

    def move(self, gradients: Tensor) -> None:
        self.adam.step(self.x, self.mean(gradients), self.lr, self.weight_decay)

    def mean(self, gradients: Tensor) -> Tensor:
        """Return all workers' approximation [n] of the mean of their gradients [W, n]."""
        raise NotImplementedError


class RoundRival(Rival):
    """Each worker takes AdamW steps by itself; a subclass says in ``meet`` how all agree at the end of a round.

    Where a run is evaluated or ends within a round, nothing happens here: the lab looks at the mean of the workers.

    Args:
        length: H, steps of a round.
    """

    def __init__(self, params: Params, of: Setting, length: int, **options: Any) -> None:
        super().__init__(params, of, length=length, **options)
        self.anchor = self.x  # where all were when the round began
        self.x = self.anchor.repeat(self.workers, 1)
        self.adam, self.length = Adam(self.x), length

    def move(self, gradients: Tensor) -> None:
        self.adam.step(self.x, gradients, self.lr, self.weight_decay)
        if self.done % self.length == 0:
            self.meet(self.anchor - self.x)
            self.x.copy_(self.anchor)

    def meet(self, deltas: Tensor) -> None:
        """Move ``self.anchor`` [n] by how far each worker has come, with a minus: [W, n]."""
        raise NotImplementedError
