"""What happens on the device, told to the host without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return small host values as a tensor on ``device``, from pinned memory, so that nobody waits."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class HostMirror:
    """Brings small device tensors to the host without a stall.

    ``push`` returns the values that were pushed ``depth`` calls ago (none, at first). On CUDA each
    is copied to pinned memory behind an event; after ``depth`` steps that event has long passed.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self.depth = depth
        self._cuda = device.type == "cuda"
        self._queue: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def push(self, value: Tensor) -> list[Tensor]:
        """Send ``value`` on its way; return what has arrived, in order."""
        if self._cuda:
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            host.copy_(value, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(value.device))
            self._queue.append((host, event))
        else:
            self._queue.append((value.clone(), None))
        arrived = []
        while len(self._queue) > self.depth:
            arrived.append(self._take())
        return arrived

    def flush(self) -> list[Tensor]:
        """Wait for everything under way and return it."""
        return [self._take() for _ in range(len(self._queue))]

    def flush_pending(self) -> list[Tensor]:
        """Wait for what is under way, and return it without taking it."""
        for _, event in self._queue:
            if event is not None:
                event.synchronize()
        return [host.clone() for host, _ in self._queue]

    def refill(self, values: Sequence[Tensor]) -> None:
        """Put back what ``flush_pending`` returned."""
        self._queue = deque((value.clone(), None) for value in values)

    def _take(self) -> Tensor:
        host, event = self._queue.popleft()
        if event is not None:
            event.synchronize()
        return host
