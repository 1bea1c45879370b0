"""What tests of torch's promises train, and the ways to construct what trains it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler
from torch_infos import NAMES, STAGES, constructors

from fusedonebit import Numerics

OURS = tuple(STAGES)

QUICK = {"OneBitAdam, warm-up", "Lamb", "AdamW", *(name for name in OURS if name.endswith("bits"))}
PARAMS = {name: name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in NAMES}
EACH = pytest.mark.parametrize("name", PARAMS.values())
EACH_OF_OURS = pytest.mark.parametrize("name", [PARAMS[name] for name in OURS])
EACH_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=["float32", "bfloat16"]
)

HELD: Counter[str] = Counter()


def held_and_refused() -> str:
    """Return a line that tells how many promises this process has tested."""
    return f"\nof torch's promises {HELD['held']} held, {HELD['refused']} refused as listed, in this process"


def ways(name: str, dtype: torch.dtype, everything: bool) -> Iterator[Callable[..., Any]]:
    """Yield ways to construct an optimizer: the first, or all of them where ``everything``."""
    for desc, kind, kwargs in constructors(name, dtype, everything):

        def make(params: Any, _kind: Any = kind, _kwargs: dict = kwargs, **more: Any) -> Any:
            return _kind(params, **{**copy.deepcopy(_kwargs), **more})

        ascends = kwargs.get("maximize", False) or kwargs.get("numerics", Numerics()).maximize
        make.desc, make.maximize = desc, ascends  # type: ignore[attr-defined]
        yield make
        HELD["held"] += 1


class Problem:
    """A small regression: what torch's tests train."""

    def __init__(self, dtype: torch.dtype = torch.float32, contiguous: bool = True) -> None:
        torch.manual_seed(3)
        if contiguous:
            self.weight, self.bias = Parameter(torch.randn(10, 5, dtype=dtype)), Parameter(torch.randn(10, dtype=dtype))
        else:
            self.weight = Parameter(torch.randn(10, 5, 2, dtype=dtype)[..., 0])
            self.bias = Parameter(torch.randn(10, 2, dtype=dtype)[..., 0])
        self.given = torch.randn(5, dtype=dtype)
        self.params = [self.weight, self.bias]

    def loss(self) -> Tensor:
        return (self.weight.float().mv(self.given.float()) + self.bias.float()).square().sum()

    def closure(self) -> Tensor:
        for p in self.params:
            p.grad = None
        loss = self.loss()
        loss.backward()
        return loss

    def train(self, optimizer: Any, steps: int) -> list[Tensor]:
        for _ in range(steps):
            self.closure()
            optimizer.step()
        return [p.detach().clone() for p in self.params]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def goes_right(problem: Problem, optimizer: Any, make: Any, schedulers: Any = ()) -> None:
    first = problem.loss().item()
    for _ in range(20):
        optimizer.step(problem.closure)
        for scheduler in schedulers:
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(problem.loss().item())
            else:
                scheduler.step()
    last = problem.loss().item()
    assert (last > first) if make.maximize else (last < first), (make.desc, first, last)
