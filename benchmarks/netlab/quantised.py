"""An all-reduce in 8-bit integers, of torchft's kind, of one line of elements; ranks keep what rounding takes away.

    1. quantise     the worker's line and residual, W chunks: a signed byte each, a float32 scale for every ``BLOCK``
    2. all-to-all   chunk k goes to server k
    3. average      what arrives, in float32, and the server's residual
    4. quantise     the mean
    5. all-gather   all have all means

The arithmetic is that of ``benchmarks.lab.rivals.quantised``, on a line that zeros fill up to whole blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

BLOCK, SCALE_BYTES = 512, 4
"""Elements that share a scale, and its bytes."""
LARGEST = 127


class QuantisedLine:
    """One rank's part in the mean of a line.

    Args:
        numel: Elements of the line.
        world_size: W.

    Attributes:
        worker_error: This rank's residual, float32 [W, chunk].
        server_error: Of the chunk that it serves, float32 [1, chunk].
    """

    def __init__(self, numel: int, world_size: int) -> None:
        self.numel, self.world_size = numel, world_size
        self.chunk = -(-numel // (world_size * BLOCK)) * BLOCK
        self.worker_error = torch.zeros(world_size, self.chunk)
        self.server_error = torch.zeros(1, self.chunk)
        self.arrived, self.gathered = (torch.empty(world_size, self.nbytes, dtype=torch.uint8) for _ in range(2))

    @property
    def nbytes(self) -> int:
        """Of a message: a chunk's integers and scales."""
        return self.chunk + SCALE_BYTES * self.chunk // BLOCK

    def compress(self, line: Tensor) -> Tensor:
        """Quantise this rank's ``line`` float32 [numel] with its residual: uint8 [W, nbytes]."""
        filled = F.pad(line, (0, self.world_size * self.chunk - self.numel))
        compensated = self.worker_error.add_(filled.view(self.world_size, self.chunk))
        sent = encode(compensated)
        compensated.sub_(decode(sent))
        return sent

    def serve(self) -> Tensor:
        """Average what has ``arrived``, and quantise the mean with the server's residual: uint8 [1, nbytes]."""
        compensated = self.server_error.add_(decode(self.arrived).mean(0))
        served = encode(compensated)
        compensated.sub_(decode(served))
        return served

    def result(self) -> Tensor:
        """The mean float32 [numel] of what was ``gathered``."""
        return decode(self.gathered).view(-1)[: self.numel]


def encode(values: Tensor) -> Tensor:
    """Quantise rows float32 [R, chunk]: uint8 [R, chunk + 4 chunk/BLOCK], integers first, then scales."""
    rows = len(values)
    blocks = values.view(rows, -1, BLOCK)
    scales = blocks.abs().amax(-1) / LARGEST
    divisor = torch.where(scales > 0, scales, 1.0)[..., None]
    integers = (blocks / divisor).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return torch.cat([integers.view(rows, -1).view(torch.uint8), scales.view(torch.uint8)], -1)


def decode(message: Tensor) -> Tensor:
    """Return the rows that ``encode`` was given, as far as they are kept."""
    chunk = message.shape[-1] * BLOCK // (BLOCK + SCALE_BYTES)
    integers, scales = message.split([chunk, message.shape[-1] - chunk], -1)
    blocks = integers.view(torch.int8).float().view(len(message), -1, BLOCK)
    return (blocks * scales.contiguous().view(torch.float32)[..., None]).view(len(message), chunk)
