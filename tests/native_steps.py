"""A few steps whose backend and bits tell which kernels were there, here or in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from fusedonebit import Faults, OneBitAdam

STEPS = "import torch, native_steps; print(*native_steps.steps(), sep='\\n')\n"


def steps() -> tuple[str, str]:
    """The backend of a few steps, and the bits that they end with."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(3000, generator=generator))
    optimizer = OneBitAdam([p], 1e-2, freeze_step=2, faults=Faults(guard="off"))
    for _ in range(4):
        p.grad = torch.randn(3000, generator=generator)
        optimizer.step()
    return str(optimizer.stats()["backend"]), str(p.detach().view(torch.int32).sum().item())


def alone(program: str = STEPS, **environment: str) -> list[str]:
    """What a program prints in a process with this environment besides what there is."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    told = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return told.stdout.splitlines()
