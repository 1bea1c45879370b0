"""LoCo (Xie et al., 2024): gradients in four bits, compensated by a moving average of what rounding took away.

With h = g + e the moving average is e <- beta e + (1 - beta) (h - Q(h)), as in DeepSpeed's LoCo-ZeRO++ and its kernel
``loco_swizzled_quant_kernel``; now and then it starts from 0. It is kept in eight bits, as in the paper, DeepSpeed's in
16. Scales are those of ``quantised``. Servers average what arrives in float32, and send back one of:

    "parameters"  the paper's and DeepSpeed's: optimizers are sharded (ZeRO, FSDP), and a server updates its part, whose
                  parameters all get in bfloat16
    "gradients"   our adaptation to optimizers that are not: the averages, by the same code with a moving average of the
                  server's. In DeepSpeed the second stage of that code is between nodes, and gradients stay sharded
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..setting import Params, Setting
from .blocks import Blocks
from .codes import IntegerCode
from .frame import Adam, Rival
from .quantised import BLOCK

BITS, ERROR_BITS = 4, 8
ERROR_BETA = 0.8
"""DeepSpeed's ``err_beta``."""
RESET = 128
"""Steps after which the moving average starts from 0. The number is ours: DeepSpeed's, ``reset_T``, is 1024, more
than a run of the lab has."""

Down = Literal["parameters", "gradients"]


class Compensated:
    """Codes chunks [..., W, chunk] in four bits, after adding the moving average of earlier errors."""

    def __init__(self, blocks: Blocks, like: Tensor) -> None:
        self.code, self.stored = IntegerCode(BITS, blocks), IntegerCode(ERROR_BITS, blocks)
        self.error = self.stored.encode(like)
        self.steps = 0

    def encode(self, values: Tensor) -> Tensor:
        """Return the message, uint8 [..., bytes]."""
        error, self.steps = self.stored.decode(self.error, values.dtype), self.steps + 1
        compensated = values + error
        sent = self.code.encode(compensated)
        error = ERROR_BETA * error + (1 - ERROR_BETA) * (compensated - self.decode(sent, values.dtype))
        self.error = self.stored.encode(error if self.steps % RESET else torch.zeros_like(error))
        return sent

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of a message."""
        return self.code.decode(message, dtype)


class LoCo(Rival):
    """AdamW, sharded or not, on gradients that were averaged in four bits.

    Args:
        down: What servers send back.
    """

    def __init__(self, params: Params, of: Setting, down: Down) -> None:
        super().__init__(params, of, down=down, error_beta=ERROR_BETA, reset=RESET)
        self.down, self.blocks = down, self.blocks_of(BLOCK)
        self.up = Compensated(self.blocks, self.x.new_zeros(self.workers, self.workers, self.blocks.chunk))
        self.back = Compensated(self.blocks, self.x.new_zeros(self.workers, self.blocks.chunk))
        self.master, self.adam = self.x.clone(), Adam(self.x)

    def move(self, gradients: Tensor) -> None:
        blocks, dtype = self.blocks, gradients.dtype
        sent = self.up.encode(blocks.cut(gradients))
        # By sender and server: the code goes by servers last.
        mean = self.up.decode(self.wires.all_to_all(sent, blocks.unused).transpose(0, 1), dtype).mean(0)
        if self.down == "gradients":
            mean = self.back.decode(self.wires.all_gather(self.back.encode(mean), blocks.unused), dtype)
        self.adam.step(self.master, blocks.join(mean), self.lr, self.weight_decay)
        self.x = self.master
        if self.down == "parameters":
            halves = blocks.cut(self.master).to(torch.bfloat16)
            self.x = blocks.join(self.wires.all_gather(halves)).to(dtype)
