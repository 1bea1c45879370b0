"""Means in float32 of what travels in few bits: bfloat16, or integers with a scale for every few hundred elements.

``BFloat16`` is DDP's ``bf16_compress_hook``: cast, divided by W, summed by a ring that rounds at each hop.
``Quantised`` is of the kind of torchft's ``allreduce_quantized`` and ZeRO++'s qgZ (Wang et al., 2023): quantised
all-to-all, mean in float32, quantised all-gather. What has a scale, and what becomes of errors, is our choice: torchft
has one for each row of a tensor, qgZ one for each of a tensor's groups, and neither feeds errors back; here blocks of
``BLOCK`` elements of a tensor have one, and errors are kept on both sides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..setting import Params, Setting
from .codes import CodedAllReduce, IntegerCode
from .frame import AveragingRival

BLOCK = 512
"""Elements of a tensor that share a scale at most."""


class BFloat16(AveragingRival):
    """AdamW on gradients that were averaged in bfloat16."""

    def mean(self, gradients: Tensor) -> Tensor:
        halves = gradients.to(torch.bfloat16).div_(self.workers)
        return self.wires.all_reduce(halves).to(gradients.dtype)


class Quantised(AveragingRival):
    """AdamW on gradients that were averaged in integers of ``bits``."""

    def __init__(self, params: Params, of: Setting, bits: int) -> None:
        super().__init__(params, of, bits=bits, block=BLOCK)
        self.mean_of = CodedAllReduce(self.wires, IntegerCode(bits, self.blocks_of(BLOCK)), self.x)

    def mean(self, gradients: Tensor) -> Tensor:
        return self.mean_of(gradients)
