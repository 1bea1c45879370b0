"""dist-EF-blockSGDM (Zheng et al., 2019): scaled signs of Nesterov's momentum, error feedback both ways.

Its blocks are tensors; here servers are as many as ranks, and a tensor that lies on two is two blocks. Weight decay,
which the paper's algorithm has not, is decoupled as everywhere in the lab: momentum and errors are gradients' alone.
"""

from __future__ import annotations

from torch import Tensor

from ..setting import Params, Setting
from .codes import CodedAllReduce, SignCode
from .frame import Rival

MOMENTUM = 0.9


class ErrorFeedbackSGDM(Rival):
    """SGD with Nesterov's momentum on each worker, whose directions travel as scaled signs."""

    def __init__(self, params: Params, of: Setting) -> None:
        super().__init__(params, of, momentum=MOMENTUM)
        self.mean_of = CodedAllReduce(self.wires, SignCode(self.blocks_of()), self.x)
        self.momentum = self.x.new_zeros(self.workers, self.x.numel())
        self.last_lr = 0.0

    def move(self, gradients: Tensor) -> None:
        ratio, self.last_lr = self.last_lr / self.lr, self.lr
        self.momentum.mul_(MOMENTUM).add_(gradients)  # m = mu m + g
        # What is compressed is p = mu m + g + eta_(t-1) / eta_t e, Nesterov's direction and an error, on both sides.
        direction = self.mean_of(gradients + MOMENTUM * self.momentum, kept=ratio)
        self.x.mul_(1 - self.lr * self.weight_decay).sub_(direction, alpha=self.lr)
