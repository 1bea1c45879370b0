"""The whole step as one op, ``fusedonebit::step``, for ``torch.compile``.

A step is kernels that are fused already, two collectives between them, and a host that counts, warns
and decides when to freeze. Nothing of it gains from being traced: a compiler that saw inside would
specialise on every counter. What users gain is a graph without breaks from the forward pass to the
update, the same bits as without a compiler, and no recompilation, whatever changes in ``param_groups``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .interrupts import SignalsWait


class _TakesSteps(Protocol):
    def take_step(self, given: Sequence[Tensor], params: Sequence[Tensor] | None = None, checked: bool = False) -> None:
        """Take a step on ``given`` gradients, as ``DistributedOptimizer.take_step``."""


_numbers = itertools.count()
_optimizers: WeakValueDictionary[int, _TakesSteps] = WeakValueDictionary()

_LIBRARY = torch.library.Library("fusedonebit", "FRAGMENT")
# What the host decides in a step must be decided in every step: no replay of a CUDA graph that the compiler makes.
_TAGS = [tag for name in ("cudagraph_unsafe",) if (tag := getattr(torch.Tag, name, None)) is not None]
_LIBRARY.define("step(Tensor(a!)[] params, Tensor[] grads, int optimizer, bool checked) -> ()", tags=_TAGS)


def number_of(optimizer: _TakesSteps) -> int:
    """Register an optimizer; return the number by which the op finds it, while it lives."""
    number = next(_numbers)
    _optimizers[number] = optimizer
    return number


# Or Dynamo would look at every Python frame in it.
@torch._disable_dynamo
def _step(params: Sequence[Tensor], grads: Sequence[Tensor], optimizer: int, checked: bool) -> None:
    with SignalsWait():
        _optimizers[optimizer].take_step(grads, params, checked)


_LIBRARY.impl("step", _step, "CompositeExplicitAutograd")
torch.library.register_fake("fusedonebit::step", lambda params, grads, optimizer, checked: None, lib=_LIBRARY)
