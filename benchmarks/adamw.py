"""AdamW on one device with nobody to talk to: ours, with moments in each of their dtypes, against torch's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedonebit import AdamW, Numerics

from .optimizers import FOREACH, FUSED, LR, of_shapes
from .registry import Report, case
from .timing import one_thread, time_by_turns

NUMEL = 1 << 23
TENSORS = (1, 302)
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
OURS = {"fp32": "", "bf16": ", moments in bf16", "8bit": ", moments in codes"}
"""States, by how the audit calls them."""
COLUMNS = {
    "optimizer": "<22",
    "ms": ">8.2f",
    "x AdamW(fused)": ">15.2f",
    "state B": ">8.2f",
    "moved B": ">8.2f",
    "limit": ">14",
}
MOST = {"fp32": 1.05, "bf16": 0.80}
"""Times of torch's fused step on float32 parameters, by state; no more is claimed."""
LIMITS = Path(__file__).with_name("limits.json")

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def peers() -> dict[str, Make]:
    """Torch's two, and ours by state."""
    made: dict[str, Make] = {
        FUSED: lambda params: torch.optim.AdamW(params, lr=LR, fused=True),
        FOREACH: lambda params: torch.optim.AdamW(params, lr=LR, foreach=True),
    }
    ours: dict[str, Make] = {
        f"AdamW, {state}": partial(AdamW, lr=LR, numerics=Numerics(state=state)) for state in ("fp32", "bf16", "8bit")
    }
    return made | ours


def moved(name: str, dtype: torch.dtype) -> float | None:
    """Bytes that a step moves for each parameter: ours from compiled code, torch's fused step's by its operands."""
    if name == FUSED:  # reads g, x, m and v, and writes all but g: moments have the parameter's dtype
        return 7.0 * dtype.itemsize
    if name == FOREACH:
        return None
    of_dtype = "" if dtype is torch.float32 else f", {DTYPES[dtype]}"
    limits: dict[str, Any] = json.loads(LIMITS.read_text())["sm_90"]
    return float(limits[f"adam_update, alone{of_dtype}{OURS[name.rpartition(', ')[2]]}"]["bytes_per_element"])


def held(optimizer: torch.optim.Optimizer, numel: int) -> float:
    """Bytes of state for each parameter, as it lies in memory."""
    if isinstance(optimizer, AdamW):
        return float(optimizer.stats()["state_bytes"]) / numel
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors) / numel


@case("adamw", "both")
def adamw(report: Report) -> None:
    """Uncompressed AdamW, alone: torch's and ours with moments in float32, bfloat16 and a byte, one thread."""
    numel = report.numel or NUMEL
    with one_thread():
        for dtype, name in DTYPES.items():
            for tensors in TENSORS:
                table = report.table(f"{numel:,} {name} parameters in {tensors} tensors", COLUMNS)
                shapes = [(max(1, numel // tensors),)] * tensors
                made = {peer: make(of_shapes(shapes, report.device, dtype)) for peer, make in peers().items()}
                calls = {peer: optimizer.step for peer, optimizer in made.items()}
                timed = time_by_turns(calls, report.device, report.rounds or 31)
                for peer, timing in timed.items():
                    row = {"optimizer": peer, "ms": timing.median, "low": timing.low, "high": timing.high}
                    times = timing.median / timed[FUSED].median
                    most = MOST.get(peer.removeprefix("AdamW, ")) if dtype is torch.float32 else None
                    ratio = {"x AdamW(fused)": times, "limit": report.limit(times, at_most=most)}
                    bytes_of = {"state B": held(made[peer], numel), "moved B": moved(peer, dtype)}
                    table.add(**row, **ratio, **bytes_of)
    report.note("torch's moments have the parameters' dtype; bytes that ours move are from code compiled for sm_90")
