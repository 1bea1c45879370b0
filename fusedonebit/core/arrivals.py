"""Watches gradients arrive in the backward pass: what sends them early has in common with what uses them up early."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Arrivals:
    """Is told of each parameter's gradient, by hooks that do not keep it alive; a subclass says what follows."""

    _paused = False

    def arrived(self, i: int) -> None:
        """Take note that the gradient of parameter ``i`` is there."""
        raise NotImplementedError

    def watch(self, owners: Iterable[Tensor]) -> list[RemovableHandle]:
        """Return the handles of hooks on parameters, with which ``take_away`` ends this."""
        this = weakref.ref(self)
        return [owner.register_post_accumulate_grad_hook(_hook(this, i)) for i, owner in enumerate(owners)]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward passes in here only accumulate gradients."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


def take_away(handles: Iterable[RemovableHandle]) -> None:
    """Remove hooks."""
    for handle in handles:
        handle.remove()


def _hook(arrivals: weakref.ref[Arrivals], i: int) -> Callable[[Tensor], None]:
    def arrived(_: Tensor) -> None:
        if (watching := arrivals()) is not None:
            watching.arrived(i)

    return arrived


def after_backward(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call it when the backward pass is over and DDP, which does so in a callback of its own, has written back."""
    engine: Any = torch.autograd.Variable._execution_engine

    def call() -> None:
        if (found := method()) is not None:
            found()

    engine.queue_callback(lambda: engine.queue_callback(call))
