"""Transfers between host and device on which neither waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return small host values as a tensor on ``device``, from pinned memory, so that nobody waits."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def upload_into(target: Tensor, values: Sequence[Any]) -> None:
    """Overwrite a small tensor on a device, as ``upload`` makes one."""
    host = torch.tensor(values, dtype=target.dtype, pin_memory=target.device.type == "cuda")
    target.copy_(host, non_blocking=True)


class _OnItsWay(NamedTuple):
    """A word that is being copied to pinned memory; both are used again and again."""

    host: Tensor
    """int32 [1]."""
    event: torch.cuda.Event


class HostMirror:
    """Brings words, int32 [1], from the device to the host without a stall.

    ``push`` returns the words that were pushed ``depth`` calls ago (none, at first). On CUDA each
    is copied to pinned memory behind an event; after ``depth`` steps that event has long passed.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self.depth = depth
        self._cuda = device.type == "cuda"
        self._queue: deque[int | _OnItsWay] = deque()
        self._spare: list[_OnItsWay] = []

    def push(self, value: Tensor | int) -> list[int]:
        """Send ``value`` on its way, unless it is known; return what has arrived, in order."""
        self._queue.append(self._sent(value) if self._cuda and isinstance(value, Tensor) else int(value))
        arrived = [self._queue.popleft() for _ in range(len(self._queue) - self.depth)]
        return [word if isinstance(word, int) else self._read(word) for word in arrived]

    def flush(self) -> list[int]:
        """Wait for everything under way and return it."""
        arrived = [word if isinstance(word, int) else self._read(word) for word in self._queue]
        self._queue.clear()
        return arrived

    def flush_pending(self) -> list[int]:
        """Wait for what is under way, and return it without taking it."""
        arrived = self.flush()
        self.refill(arrived)
        return arrived

    def refill(self, values: Sequence[int]) -> None:
        """Put back what ``flush_pending`` returned."""
        self.flush()
        self._queue.extend(values)

    def _sent(self, value: Tensor) -> _OnItsWay:
        if not self._spare:
            self._spare.append(_OnItsWay(torch.empty(1, dtype=torch.int32, pin_memory=True), torch.cuda.Event()))
        word = self._spare.pop()
        word.host.copy_(value, non_blocking=True)
        word.event.record(torch.cuda.current_stream(value.device))
        return word

    def _read(self, word: _OnItsWay) -> int:
        word.event.synchronize()
        self._spare.append(word)
        return int(word.host)
