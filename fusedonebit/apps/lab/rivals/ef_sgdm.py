"""dist-EF-blockSGDM (Zheng et al., 2019): scaled signs of Nesterov's momentum, error feedback both ways.

Its blocks are tensors; here servers are as many as ranks, and a tensor that lies on two is two blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..setting import Params, Setting
from .bits import as_bytes, pack, packed_bytes, unpack
from .frame import Rival

MOMENTUM = 0.9


class SignCode:
    """Codes chunks [..., W, chunk] as signs and the mean magnitude of each of a chunk's blocks.

    Args:
        tensor_of: Which tensor each element of the line is of, int64 [n]; -1 fills up the last chunk.
        workers: W, number of chunks.
    """

    def __init__(self, tensor_of: Tensor, workers: int) -> None:
        self.chunk = -(-len(tensor_of) // workers)
        padded = torch.nn.functional.pad(tensor_of, (0, workers * self.chunk - len(tensor_of)), value=-1)
        changes = padded.view(workers, self.chunk).diff(dim=-1, prepend=padded[:: self.chunk, None]) != 0
        self.block = changes.long().cumsum(-1)  # [W, chunk], from 0 in each chunk
        self.blocks = int(self.block.max()) + 1
        ones = torch.ones_like(self.block, dtype=torch.float32)
        self.sizes = torch.zeros(workers, self.blocks).scatter_add_(-1, self.block, ones).clamp(min=1)

    def encode(self, values: Tensor) -> Tensor:
        """Code values [..., W, chunk]: uint8 [..., W, bytes], signs first, then a float32 for each block."""
        block = self.block.expand(values.shape)
        sums = values.new_zeros(*values.shape[:-1], self.blocks).scatter_add_(-1, block, values.abs())
        return torch.cat([pack(values >= 0, 1), as_bytes((sums / self.sizes).float())], -1)

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values [..., W, chunk] of messages, whose last but one dimension is the chunk's."""
        end = packed_bytes(self.chunk, 1)
        scales = message[..., end:].contiguous().view(torch.float32).to(dtype)
        by_element = scales.gather(-1, self.block.expand(*message.shape[:-1], self.chunk))
        return by_element * (2 * unpack(message[..., :end], 1, self.chunk) - 1)


class ErrorFeedbackSGDM(Rival):
    """SGD with Nesterov's momentum on each worker, whose directions travel as scaled signs."""

    def __init__(self, params: Params, of: Setting) -> None:
        super().__init__(params, of, momentum=MOMENTUM)
        numbers = [torch.full((part.stop - part.start,), i) for i, part in enumerate(self.slices)]
        self.code = SignCode(torch.cat(numbers), self.workers)
        shape = (self.workers, self.workers, self.code.chunk)
        self.momentum = self.x.new_zeros(self.workers, self.x.numel())
        self.worker_error, self.server_error = self.x.new_zeros(shape), self.x.new_zeros(shape[1:])
        self.last_lr = 0.0

    def move(self, gradients: Tensor) -> None:
        """See ``Rival``."""
        dtype, ratio, self.last_lr = self.x.dtype, self.last_lr / self.lr, self.lr
        gradients = gradients + self.weight_decay * self.x
        self.momentum.mul_(MOMENTUM).add_(gradients)  # m = mu m + g
        direction = gradients + MOMENTUM * self.momentum  # Nesterov's
        missing = self.worker_error[0].numel() - self.x.numel()
        direction = torch.nn.functional.pad(direction, (0, missing)).view_as(self.worker_error)
        compensated = direction + ratio * self.worker_error  # p = mu m + g + eta_(t-1) / eta_t e
        sent = self.code.encode(compensated)
        self.worker_error = compensated - self.code.decode(sent, dtype)  # e = p - C(p)
        # By sender and server: the code goes by servers last.
        arrived = self.code.decode(self.wires.all_to_all(sent).transpose(0, 1), dtype)
        compensated = arrived.mean(0) + ratio * self.server_error  # the server's p: the mean, and its e
        served = self.code.encode(compensated)
        self.server_error = compensated - self.code.decode(served, dtype)
        told = self.code.decode(self.wires.all_gather(served), dtype).flatten()[: self.x.numel()]
        self.x -= self.lr * told
