"""Shares what tests of simulated and others set up."""

from __future__ import annotations

import torch
from optimizers import construct

from fusedonebit.comm import Transport

SHAPES = ((7,), (33, 40), (1024,), (0,), (3, 5, 7))

FREEZE = 4


def train(rank: int, transport: Transport | None, name: str, steps: int = 12) -> dict[str, object]:
    """Warm-up gradients have few bits, so that their sums are exact in any order."""
    generator = torch.Generator().manual_seed(7)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = construct(name, params, 1e-2, freeze_step=FREEZE, scale_scope="layer", process_group=transport)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        for p in params:
            exact = torch.randint(-8, 9, p.shape, generator=generator).float()
            p.grad = exact if step < FREEZE else torch.randn(p.shape, generator=generator)
        optimizer.step()
    stats = optimizer.stats()
    return {
        "params": [p.detach() for p in params],
        "worker_error": [optimizer.worker_error(p) for p in params],
        "traffic": (stats["collectives_step"], stats["bytes_step"], stats["bytes_total"]),
        "transport": stats["transport"],
    }
