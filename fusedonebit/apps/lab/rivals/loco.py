"""LoCo (Xie et al., 2024): gradients in four bits, compensated by a moving average of what rounding took away.

With h = g + e the moving average is e <- beta e + (1 - beta) (h - Q(h)), as in DeepSpeed's
``loco_swizzled_quant_kernel``, and is kept in eight bits, as the paper has it. Servers average what arrives in float32.
What they send back is what the paper or what DeepSpeed does:

    "parameters"  optimizers are sharded (ZeRO, FSDP): a server updates its part, whose parameters all get in bfloat16
    "gradients"   a second stage of the same code, with a moving average of its own, as between DeepSpeed's nodes
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..setting import Params, Setting
from .frame import Adam, Rival
from .quantised import BlockCode, blocks_of_chunk, in_chunks

BITS, ERROR_BITS = 4, 8
ERROR_BETA = 0.8
"""DeepSpeed's ``err_beta``."""
RESET = 128
"""Steps after which the moving average starts from 0: DeepSpeed's 1024 are more than a run of the lab has."""

Down = Literal["parameters", "gradients"]


class Compensated:
    """Codes blocks [..., blocks, size] in four bits, after adding the moving average of earlier errors."""

    def __init__(self, like: Tensor) -> None:
        blocks, size = like.shape[-2:]
        self.code, self.stored = BlockCode(BITS, blocks, size), BlockCode(ERROR_BITS, blocks, size)
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
        params: See ``Rival``.
        of: See ``Rival``.
        down: What servers send back.
    """

    def __init__(self, params: Params, of: Setting, down: Down) -> None:
        super().__init__(params, of, down=down, error_beta=ERROR_BETA, reset=RESET)
        self.down, self.shape = down, blocks_of_chunk(self.x.numel(), self.workers)
        self.up = Compensated(self.x.new_zeros(self.workers, self.workers, *self.shape))
        self.back = Compensated(self.x.new_zeros(self.workers, *self.shape))
        self.master, self.adam = self.x.clone(), Adam(self.x)

    def move(self, gradients: Tensor) -> None:
        """See ``Rival``."""
        sent = self.up.encode(in_chunks(gradients, self.workers, *self.shape))
        mean = self.up.decode(self.wires.all_to_all(sent), gradients.dtype).mean(1)
        if self.down == "gradients":
            mean = self.back.decode(self.wires.all_gather(self.back.encode(mean)), gradients.dtype)
        self.adam.step(self.master, mean.flatten()[: self.x.numel()], self.lr, self.weight_decay)
        self.x = self.master
        if self.down == "parameters":
            halves = in_chunks(self.master, self.workers, *self.shape).to(torch.bfloat16)
            self.x = self.wires.all_gather(halves).flatten()[: self.x.numel()].to(self.master.dtype)
