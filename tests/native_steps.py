"""A few steps whose backend and bits tell which kernels were there."""

from __future__ import annotations

import torch

from fusedonebit import Faults, OneBitAdam


def steps() -> tuple[str, str]:
    """The backend of a few steps, and the bits that they end with."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(3000, generator=generator))
    optimizer = OneBitAdam([p], 1e-2, freeze_step=2, faults=Faults(guard="off"))
    for _ in range(4):
        p.grad = torch.randn(3000, generator=generator)
        optimizer.step()
    return str(optimizer.stats()["backend"]), str(p.detach().view(torch.int32).sum().item())
