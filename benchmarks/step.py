"""The compression-stage step of one rank against torch's fused AdamW, by turns in one process."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedonebit import Lamb, OneBitAdam, OneBitLamb

from .timing import alternate


def parameters(numel: int, tensors: int) -> list[Tensor]:
    """``tensors`` parameters of ``numel`` elements together, with gradients."""
    params = [torch.nn.Parameter(torch.randn(numel // tensors)) for _ in range(tensors)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def run(numel: int = 1 << 23, tensors: int = 64) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    adamw = torch.optim.AdamW(parameters(numel, tensors), fused=True)
    lamb = Lamb(parameters(numel, tensors))
    adam_bits = OneBitAdam(parameters(numel, tensors), freeze_step=1)
    lamb_bits = OneBitLamb(parameters(numel, tensors), freeze_step=1, beta3=0.0)
    for optimizer in (adam_bits, lamb_bits):
        optimizer.step()
    medians = alternate(
        {
            "AdamW(fused=True)": adamw.step,
            "OneBitAdam, compression": adam_bits.step,
            "Lamb": lamb.step,
            "OneBitLamb, compression": lamb_bits.step,
        }
    )
    torch.set_num_threads(threads)
    print(f"Optimizer step, {numel:,} fp32 parameters in {tensors} tensors, world size 1, one thread")
    base = medians["AdamW(fused=True)"]
    for name, seconds in medians.items():
        print(f"{name:26} {seconds * 1e3:8.2f} ms  {seconds / base:6.2f} x")
    for stats in (adam_bits.stats(), lamb_bits.stats()):
        assert (stats["phase"], stats["skipped_steps"]) == ("compression", 0)
    print(f"backend: {stats['backend']}")
