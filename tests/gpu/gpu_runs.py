"""Shares what tests of gpu steps and others set up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optimizers import UNGUARDED, objects
from torch import Tensor

from fusedonebit import Lamb, OneBitAdam, OneBitLamb
from fusedonebit.comm import Transport

SHAPES = ((7,), (33, 40), (1024,), (1,), (0,), (3, 5, 7))

LARGE_SHAPES = (*SHAPES, (1000, 1025), (300_001,))

FREEZE = 10

PLAIN = {"precondition": False, "scale_norm": "l2"}

KINDS: dict[str, dict[str, Any]] = {
    "adam": {},
    "adam, plain": PLAIN | UNGUARDED,
    "adam, ternary": {"ternary": True},
    "lamb": {"make": OneBitLamb},
    "lamb, plain": {"make": OneBitLamb} | PLAIN,
    "lamb, preconditioned": {"make": OneBitLamb, "precondition": True},
    "lamb, frozen": {"make": OneBitLamb, "adaptive": False},
    "lamb, deepspeed": {"make": OneBitLamb, "variant": "deepspeed"} | PLAIN,
    "lamb, ternary": {"make": OneBitLamb, "ternary": True},
}

every_kind = pytest.mark.parametrize("kind", KINDS)


class Run:
    """A model-free training run: the same gradients for the same rank, whatever else differs."""

    def __init__(
        self,
        device: torch.device,
        shapes: tuple[tuple[int, ...], ...],
        rank: int = 0,
        transport: Transport | None = None,
        dtype: torch.dtype = torch.float32,
        make: type[torch.optim.Optimizer] = OneBitAdam,
        **options: object,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes
        ]
        self.rank = rank
        freeze = {} if make is Lamb else {"freeze_step": FREEZE}
        self.optimizer = make(self.params, **objects(**{"lr": 1e-2, "process_group": transport} | freeze | options))

    def set_gradients(self, step: int, nan: bool = False) -> None:
        generator = torch.Generator().manual_seed(1000 * self.rank + step)
        for i, p in enumerate(self.params):
            scale = 10.0 ** (i % 6 - 2)
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)
        if nan:
            self.params[1].grad[3, 3] = torch.nan

    def steps(self, first: int, last: int, nan_at: int | None = None) -> list[Tensor]:
        for step in range(first, last):
            self.set_gradients(step, nan=step == nan_at)
            self.optimizer.step()
        return [p.detach().clone() for p in self.params]


@contextmanager
def without_waiting() -> Iterator[None]:
    """Whoever waits for the device in here gets an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)
