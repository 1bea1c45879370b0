"""BERT-Large's 302 tensors, one rank of 8: what a step launches, sends and keeps, exactly, and how long it takes.

Every optimizer takes turns with torch's fused AdamW on the same parameters; what would travel is
copied on the device. Kernels are counted as ops: each is one launch, as the tests of the kernels check.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from fusedonebit.triton_kernels.ops import KERNELS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedonebit import Lamb, OneBitAdam, OneBitLamb

from .device_timing import time_by_turns
from .loopback import Loopback
from .shapes import bert_large

WORLD_SIZE = 8
LAMB = {"freeze_step": 1, "beta3": 0.0}  # one step of warm-up is no average of anything
KINDS: dict[str, Callable[..., Any]] = {
    "OneBitAdam": lambda p, **given: OneBitAdam(p, lr=1e-6, freeze_step=1, **given),
    "Lamb": lambda p, **given: Lamb(p, lr=1e-6, **given),
    "OneBitLamb": lambda p, **given: OneBitLamb(p, lr=1e-6, **LAMB, **given),
    "OneBitLamb, frozen": lambda p, **given: OneBitLamb(p, lr=1e-6, **LAMB, layerwise="frozen", **given),
}


class _Count(TorchDispatchMode):
    """Counts the calls of ops that are kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = function.name().split("::")
        self.calls[name] += namespace == "fusedonebit" and name in KERNELS
        return function(*args, **(kwargs or {}))


def run(shapes: list[tuple[int, ...]] | None = None, rounds: int = 3) -> None:
    shapes = shapes or bert_large()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    n = sum(math.prod(shape) for shape in shapes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print(f"BERT-Large: {n:,} fp32 parameters in {len(shapes)} tensors, one rank of {WORLD_SIZE}, compression stage")
    print(
        f"{'optimizer':20} {'kernels':>7} {'collectives':>11} {'bytes sent':>13} {'of fp32':>8} {'state':>9}", end=" "
    )
    print(f"{'ms':>9} {'x AdamW(fused)':>14}")
    for name, make in KINDS.items():
        print(f"{name:20}", end=" ", flush=True)
        row = _measure(make, params, device, rounds)
        sent = f"{row['bytes_step']:13,} {row['bytes_step'] / (8 * n * (WORLD_SIZE - 1) / WORLD_SIZE):8.5f}"
        print(f"{row['kernels']:7} {row['collectives_step']:11} {sent}", end=" ")
        print(f"{row['state_bytes'] / n:7.3f} B {row['ms']:9.2f} {row['ratio']:14.2f}", flush=True)
    torch.set_num_threads(threads)
    print("bytes of fp32: against a ring all-reduce; state: bytes per parameter, after the freeze")


def _measure(make: Callable[..., Any], params: list[Tensor], device: torch.device, rounds: int) -> dict[str, Any]:
    optimizer = make(params, process_group=Loopback(WORLD_SIZE))
    optimizer.step()
    with _Count() as count:
        optimizer.step()
    adamw = torch.optim.AdamW(params, lr=1e-6, fused=True)
    timed = time_by_turns({"adamw": adamw.step, "ours": optimizer.step}, device, rounds, warmup=1)
    stats = optimizer.stats()
    assert stats["skipped_steps"] == 0
    ratio = timed["ours"].median / timed["adamw"].median
    return stats | {"kernels": count.calls.total(), "ms": timed["ours"].median, "ratio": ratio}
