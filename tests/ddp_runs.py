"""Shares what tests of ddp and others set up."""

from __future__ import annotations

from typing import Any

import torch
from optimizers import UNGUARDED, construct
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedonebit import ddp

FREEZE, STEPS, MICROS = 20, 50, 4


class Net(nn.Module):
    """Has a layer that a step can do without."""

    def __init__(self, middle: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Linear(12, 40), nn.Linear(40, 40, dtype=middle), nn.Linear(40, 5)

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if side:
            hidden = hidden + self.side(hidden.to(self.side.weight.dtype)).float()
        return self.last(hidden)


def make(name: str, wrap: dict | None, middle: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Any]:
    """A model, by itself or (``wrap``) in DDP and attached, and its optimizer."""
    torch.manual_seed(0)
    net = Net(middle)
    model = net if wrap is None else DistributedDataParallel(net, **wrap)
    optimizer = construct(name, net.parameters(), **{"lr": 1e-3, "freeze_step": FREEZE} | UNGUARDED | options)
    if wrap is not None:
        ddp.attach(model, optimizer)
    return model, optimizer


def loss_of(model: nn.Module, rank: int, step: int, micro: int = 0, side: bool = True) -> Tensor:
    """Of data that no other rank, step or micro-batch has."""
    generator = torch.Generator().manual_seed(rank + 10 * micro + 100 * step)
    x = torch.randn(8, 12, generator=generator)
    return (model(x, side) - x[:, :5].sin()).square().mean()


class Sent(TorchDispatchMode):
    """Notes what reaches torch.distributed's own ops, whoever calls them, and how many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            elements = sum(leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            self.calls.append((func._opname, elements))
        return func(*args, **(kwargs or {}))
