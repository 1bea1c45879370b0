"""DiLoCo (Douillard et al., 2023, Algorithm 1): AdamW by oneself for H steps, then Nesterov's momentum on the means.

With an outer rate of 1 and no momentum it is local AdamW: all parameters are averaged every H steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..setting import Params, Setting
from .codes import CodedAllReduce, IntegerCode
from .frame import RoundRival
from .quantised import BLOCK

NESTEROV = (0.7, 0.9)
"""Learning rate and momentum of the paper's outer optimizer; no schedule touches them."""
SHORT = {"momentum-0.8": (0.7, 0.8), "outer-0.5": (0.5, 0.9), "outer-1": (1.0, 0.9)}
"""Others, by what differs, that may suit runs of few rounds better: the paper's was found on long ones."""
AVERAGE = (1.0, 0.0)
"""Those that average parameters."""


class DiLoCo(RoundRival):
    """Average what workers have come in H steps, and move by Nesterov's momentum of it.

    Args:
        length: H.
        outer: Learning rate and momentum of the outer optimizer.
        bits: None: differences travel in float32, as in the paper. Else in integers, with errors kept on both sides.
    """

    def __init__(
        self, params: Params, of: Setting, length: int, outer: tuple[float, float] = NESTEROV, bits: int | None = None
    ) -> None:
        super().__init__(params, of, length, outer=outer, bits=bits)
        self.outer = outer
        self.momentum = torch.zeros_like(self.anchor)
        self.coded = None
        if bits:
            self.coded = CodedAllReduce(self.wires, IntegerCode(bits, self.blocks_of(BLOCK)), self.anchor)

    def meet(self, deltas: Tensor) -> None:
        delta = self.coded(deltas) if self.coded else self.wires.all_reduce(deltas) / self.workers
        lr, momentum = self.outer
        self.momentum.mul_(momentum).add_(delta)  # OuterOpt, as torch.optim.SGD(nesterov=True)
        self.anchor.sub_(delta + momentum * self.momentum, alpha=lr)
