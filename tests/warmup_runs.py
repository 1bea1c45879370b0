"""Shares what tests of warmup and others set up."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter


def gradient(rank: int, step: int, p: Tensor, i: int) -> Tensor:
    """Repeatable on every rank; of another size in every tensor."""
    generator = torch.Generator().manual_seed(1 + rank + 10 * step + 100_000 * i)
    return (torch.randn(p.shape, generator=generator) * 10.0 ** (i % 5 - 2)).to(p.dtype)


def averaged(world_size: int, step: int, p: Tensor, i: int) -> Tensor:
    return (sum(gradient(r, step, p, i).double() for r in range(world_size)) / world_size).float()


def relative(ours: Tensor, reference: Tensor) -> float:
    """The largest deviation, of the largest element."""
    if not reference.numel():
        return 0.0
    return float((ours.detach() - reference.detach()).abs().max() / reference.detach().abs().max())


def ulps(ours: Tensor, reference: Tensor) -> int:
    """The largest distance in representable numbers of a 16-bit dtype."""
    if not ours.numel():
        return 0
    ordered = [t.detach().contiguous().view(torch.int16).int() for t in (ours, reference)]
    ours, reference = (torch.where(t < 0, -(t & 0x7FFF), t) for t in ordered)
    return int((ours - reference).abs().max())


def with_odd_memory() -> list[Parameter]:
    return [
        Parameter(torch.randn(6, 5, 4, 3).to(memory_format=torch.channels_last)),
        Parameter(torch.randn(30, 20).t()),
        Parameter(torch.randn(40, 50)[::3, 5:40:2]),
        Parameter(torch.randn(9, 1, 8).transpose(0, 2)),
        Parameter(torch.randn(70)[::7]),
        Parameter(torch.randn(0, 3)),
    ]
