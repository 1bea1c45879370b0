"""Distributed Lion (Liu et al., 2024, Algorithm 1): each worker's Lion sends signs, servers vote or average."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..setting import BETAS, Params, Setting
from .bits import pack, unpack
from .frame import Rival

Aggregation = Literal["mavo", "avg"]


class DistributedLion(Rival):
    """Lion by signs that travel to servers in one bit, and back as what becomes of them.

    A majority vote, sign(sum), is 0 where votes tie, and so takes two bits; a mean is one of W + 1 values. One bit has
    no 0: what is 0 counts as positive and as negative in turn, so that what never has a gradient stays in place.

    Args:
        params: See ``Rival``.
        of: See ``Rival``.
        aggregation: "mavo", majority vote, or "avg".
    """

    def __init__(self, params: Params, of: Setting, aggregation: Aggregation) -> None:
        super().__init__(params, of, aggregation=aggregation)
        self.momentum = self.x.new_zeros(self.workers, self.x.numel())
        self.votes = aggregation == "mavo"
        self.chunk = -(-self.x.numel() // self.workers)

    def move(self, gradients: Tensor) -> None:
        """See ``Rival``."""
        beta1, beta2 = BETAS
        update = self.momentum.lerp(gradients, 1 - beta1)
        self.momentum.lerp_(gradients, 1 - beta2)
        total = self._sum_of_signs(update > 0 if self.done % 2 else update >= 0)
        change = total.sign() if self.votes else total / self.workers
        self.x -= self.lr * (change.to(self.x.dtype) + self.weight_decay * self.x)

    def _sum_of_signs(self, positive: Tensor) -> Tensor:
        """Return the sum of signs, or its sign, int64 [n], of where workers' are positive, bool [W, n]."""
        missing = self.workers * self.chunk - positive.shape[-1]
        bits = torch.nn.functional.pad(positive, (0, missing)).unflatten(-1, (self.workers, self.chunk))
        arrived = self.wires.all_to_all(pack(bits, 1))
        counts = unpack(arrived, 1, self.chunk).sum(1)  # [servers, chunk], 0..W
        if self.votes:
            signs = (2 * counts - self.workers).sign()
            told = unpack(self.wires.all_gather(pack(signs + 1, 2)), 2, self.chunk) - 1
        else:
            width = self.workers.bit_length()
            told = 2 * unpack(self.wires.all_gather(pack(counts, width)), width, self.chunk) - self.workers
        return told.flatten()[: self.x.numel()]
