"""Distributed Lion (Liu et al., 2024, Algorithm 1): each worker's Lion sends signs, servers vote or average."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..setting import BETAS, Params, Setting
from .bits import pack, unpack
from .frame import Rival

Aggregation = Literal["mavo", "mavo-1", "avg"]


class DistributedLion(Rival):
    """Lion by signs that travel to servers in one bit, and back as what becomes of them.

    One bit has no 0: what is 0 counts as positive and as negative in turn, so that what never has a gradient stays in
    place. So does a tie of votes that travels back in one bit. A mean is one of W + 1 values.

    Args:
        aggregation: "mavo", a majority vote, sign(sum), which is 0 where votes tie and so takes two bits. "mavo-1": one
            that takes the one bit that the paper counts. "avg": the mean.
    """

    def __init__(self, params: Params, of: Setting, aggregation: Aggregation) -> None:
        super().__init__(params, of, aggregation=aggregation)
        self.momentum = self.x.new_zeros(self.workers, self.x.numel())
        self.aggregation = aggregation
        self.chunk = -(-self.x.numel() // self.workers)

    def move(self, gradients: Tensor) -> None:
        beta1, beta2 = BETAS
        update = self.momentum.lerp(gradients, 1 - beta1)
        self.momentum.lerp_(gradients, 1 - beta2)
        even = self.done % 2 == 0
        total = self._sum_of_signs(update >= 0 if even else update > 0, even)
        change = total / self.workers if self.aggregation == "avg" else total.sign()
        self.x -= self.lr * (change.to(self.x.dtype) + self.weight_decay * self.x)

    def _sum_of_signs(self, positive: Tensor, ties: bool) -> Tensor:
        """Sum signs, or tell which are more: int64 [n].

        Args:
            positive: Where each worker's are, bool [W, n].
            ties: Whether a tie that can't be told counts as positive.
        """
        missing = self.workers * self.chunk - positive.shape[-1]
        bits = torch.nn.functional.pad(positive, (0, missing)).unflatten(-1, (self.workers, self.chunk))
        arrived = self.wires.all_to_all(pack(bits, 1))
        sums = 2 * unpack(arrived, 1, self.chunk).sum(1) - self.workers  # [servers, chunk], -W..W
        if self.aggregation == "mavo-1":
            told = 2 * self._told(sums >= 0 if ties else sums > 0, 1) - 1
        elif self.aggregation == "mavo":
            told = self._told(sums.sign() + 1, 2) - 1
        else:
            told = 2 * self._told((sums + self.workers) // 2, self.workers.bit_length()) - self.workers
        return told.flatten()[: self.x.numel()]

    def _told(self, values: Tensor, bits: int) -> Tensor:
        """Send servers' values [W, chunk] to all, in so many bits: int64 of the same shape."""
        return unpack(self.wires.all_gather(pack(values, bits)), bits, self.chunk)
