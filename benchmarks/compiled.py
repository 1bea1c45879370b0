"""A step under ``torch.compile`` (Inductor) against the same step without, by turns in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fusedonebit import Lamb, OneBitAdam, OneBitLamb, OneBitOptimizer

from .step import parameters
from .timing import alternate

ROUNDS = 20
MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "OneBitAdam, compression": partial(OneBitAdam, freeze_step=1),
    "OneBitLamb, compression": partial(OneBitLamb, freeze_step=1, beta3=0.0),
    "Lamb": Lamb,
}


def run(numel: int = 1 << 23, tensors: int = 64) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print(f"Compiled against eager step, {numel:,} fp32 parameters in {tensors} tensors, world size 1, one thread")
    for name, make in MAKE.items():
        # One optimizer for both: two would lie in other memory, which makes more of a difference.
        optimizer = make(parameters(numel, tensors))
        step = torch.compile(optimizer.step, fullgraph=True)
        for _ in range(3):  # compiles, and freezes
            step()
        medians = alternate({"eager": optimizer.step, "compiled": step}, rounds=ROUNDS)
        ratio = medians["compiled"] / medians["eager"]
        times = ", ".join(f"{way} {seconds * 1e3:.2f} ms" for way, seconds in medians.items())
        print(f"{name:26} {times}: {ratio:.3f} x (at most 1, but for noise; median of {ROUNDS})")
        if isinstance(optimizer, OneBitOptimizer):
            assert optimizer.phase == "compression"
    torch.set_num_threads(threads)
