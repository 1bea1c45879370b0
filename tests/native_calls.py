"""Shares what tests of native and others set up."""

from __future__ import annotations

import os
import subprocess
import sys

ALONE = """
import torch
from fusedonebit import Faults, OneBitAdam
from fusedonebit.triton_kernels import using
torch.manual_seed(0)
p = torch.nn.Parameter(torch.randn(3000))
optimizer = OneBitAdam([p], 1e-2, freeze_step=5, faults=Faults(guard="off"))
for _ in range(10):
    p.grad = torch.randn(3000)
    optimizer.step()
print(optimizer.stats()["backend"])
print(p.detach().view(torch.int32).sum().item())
"""


def alone(program: str = ALONE, **environment: str) -> list[str]:
    """What a program prints in a process with this environment besides what there is."""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.splitlines()
