"""Averages gradients beside bits, in their messages: each rank serves an equal part of them.

They are rounded on both ways, as DDP's bf16_compress_hook rounds them on each hop; sums are in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..triton_kernels import TAIL, FlatLayout, flatten
from ..triton_kernels.headers import Flag
from ..triton_kernels.tables import Listed
from .message import ALIGNMENT, Messages


class Carried:
    """Gradients that travel as they are.

    Args:
        layout: Their flat index space.
        parts: Who serves: W, an equal part each.
        dtype: In which they travel, ``torch.bfloat16`` or ``torch.float32``.
        device: Where they lie.
        share: What each rank's are multiplied with; None: 1 / parts, but in a simulation.

    Attributes:
        nbytes: Of one message.
        averages: What ``receive`` has left, one of each tensor, float32: the same objects in every step.
    """

    def __init__(
        self, layout: FlatLayout, parts: int, dtype: torch.dtype, device: torch.device, share: float | None = None
    ) -> None:
        self.layout, self.dtype, self._share = layout, dtype, 1 / parts if share is None else share
        least = ALIGNMENT // dtype.itemsize
        length = -(-layout.numel // (parts * least)) * least
        self.nbytes = length * dtype.itemsize
        flat = torch.zeros(parts * length + TAIL, device=device)
        self._rows, self._flat = flat[: parts * length].view(parts, length), flat[: layout.numel + TAIL]
        self._padding, self._bad = flat[layout.numel :], flat[layout.numel :][:1]  # which ``flatten`` sets
        self.averages = Listed.of(layout.cut(flat[: layout.numel]))

    def write(self, grads: Sequence[Tensor], by: Tensor | None, to_servers: Messages, found: Tensor) -> None:
        """Write this rank's gradients, times ``by`` [] or 1; set a flag in ``found`` where any is not finite.

        An empty tensor stands for zeros.
        """
        self._padding.zero_()
        flatten(grads, self.layout.sizes, self.layout.block_size, self._share, by, self._flat)
        found |= (self._bad * int(Flag.NONFINITE)).int()
        self._numbers(to_servers).copy_(self._rows)

    def serve(self, arrived: Messages, served: Messages) -> None:
        """Add up this rank's part."""
        self._numbers(served).copy_(torch.sum(self._numbers(arrived), 0, keepdim=True, dtype=torch.float32))

    def receive(self, gathered: Messages) -> None:
        """Take what all ranks have served."""
        self._rows.copy_(self._numbers(gathered))

    def _numbers(self, messages: Messages) -> Tensor:
        return messages.front[:, -self.nbytes :].view(self.dtype)
