"""PowerSGD (Vogels et al., 2019, Algorithms 1 and 2) as torch's ``powerSGD_hook`` has it: matrices of low rank.

Tensors are matrices of their first dimension by all others. Those that would not become ``MIN_COMPRESSION_RATE`` times
smaller, vectors among them, are averaged in float32, and so is everything in the first steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..setting import Params, Setting
from .frame import AveragingRival

MIN_COMPRESSION_RATE = 2
"""torch's default."""
START = 10
"""``start_powerSGD_iter`` of the example in torch's documentation; 2 is the least, and the default, 1000, is more than
the lab's runs have."""
LATE = 0.1
"""Share of a run's steps with which its documentation says to begin a search for that number."""


@dataclass
class Alike:
    """Matrices of one shape, which are multiplied at once.

    Attributes:
        where: Places of their elements in the line, int64 [T, rows, columns].
        q: Right factor, which all ranks share: [T, columns, rank].
    """

    where: Tensor
    q: Tensor


class PowerSGD(AveragingRival):
    """AdamW on gradients that were averaged as products of two thin matrices, with error feedback and warm start.

    Args:
        params: See ``Rival``.
        of: See ``Rival``; its seed is that of the first right factors.
        rank: ``matrix_approximation_rank``.
        late: Whether compression begins after ``LATE`` of the steps, and not after ``START``.
    """

    def __init__(self, params: Params, of: Setting, rank: int, late: bool = False) -> None:
        start = max(2, int(LATE * of.steps)) if late else START
        super().__init__(params, of, rank=rank, start=start)
        self.start = start
        self.error = self.x.new_zeros(self.workers, self.x.numel())
        places, draw = torch.arange(self.x.numel()), torch.Generator().manual_seed(of.seed)
        plain, shapes = [places[:0]], dict[tuple[int, int], list[Tensor]]()
        for tensor in self.cut(places):
            matrix = tensor.view(tensor.shape[0], -1)
            rows, columns = matrix.shape
            if (rows + columns) * min(rows, columns, rank) * MIN_COMPRESSION_RATE < rows * columns:
                shapes.setdefault((rows, columns), []).append(matrix)
            else:
                plain.append(tensor.reshape(-1))
        self.plain, self.alike = torch.cat(plain), list[Alike]()
        for (rows, columns), matrices in shapes.items():
            q = torch.randn(len(matrices), columns, min(rows, columns, rank), generator=draw, dtype=self.x.dtype)
            self.alike.append(Alike(torch.stack(matrices), q))

    def mean(self, gradients: Tensor) -> Tensor:
        if self.done <= self.start:
            return self.wires.all_reduce(gradients) / self.workers
        compensated = gradients + self.error
        result = torch.empty_like(self.x)
        result[self.plain] = self.wires.all_reduce(compensated[:, self.plain]) / self.workers
        matrices = [compensated[:, each.where] for each in self.alike]  # [W, T, rows, columns]
        right = [orthogonal(each.q) for each in self.alike]
        left = self._sum([m @ q for m, q in zip(matrices, right, strict=True)])  # P <- all-reduce of M Q
        left = [orthogonal(p) for p in left]
        right = self._sum([m.mT @ p for m, p in zip(matrices, left, strict=True)])  # Q <- all-reduce of M^T P
        for each, p, q in zip(self.alike, left, right, strict=True):
            each.q = q / self.workers  # with which the next step begins: warm start
            result[each.where] = p @ each.q.mT
            self.error[:, each.where] = compensated[:, each.where] - result[each.where]
        return result

    def _sum(self, factors: list[Tensor]) -> list[Tensor]:
        """Sum factors [W, T, ...] over the workers in one all-reduce."""
        empty = self.x.new_empty(self.workers, 0)
        line = self.wires.all_reduce(torch.cat([empty, *(factor.flatten(1) for factor in factors)], 1))
        parts = line.split([factor[0].numel() for factor in factors])
        return [part.view_as(factor[0]) for part, factor in zip(parts, factors, strict=True)]


def orthogonal(matrices: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of matrices [T, rows, rank]."""
    return torch.linalg.qr(matrices)[0]
