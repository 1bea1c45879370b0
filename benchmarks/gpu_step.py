"""The whole step on a GPU: BERT-Large, one rank of 8, with the numbers to meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from . import deepspeed_peer
from .audit_cases import STEPS, step_bytes
from .bert import WORLD_SIZE, shapes_of
from .kernels import BF16, audited, copy_speed
from .optimizers import (
    AGAINST_ADAMW,
    ONEBIT,
    THEIRS,
    Maker,
    Step,
    against_adamw,
    deepspeed,
    lamb,
    makers,
    note_deepspeed,
    numel_of,
    of_shapes,
)
from .registry import Record, Report, Table, case
from .timing import Call, host_time
from .workload import Workload

COLUMNS = AGAINST_ADAMW | {"host ms": ">8.3f", "of its bound": ">12.3f", "extra B/param": ">13.4f"}
AUDITED = {"OneBitAdam": "1-bit Adam, preconditioned", "OneBitLamb": "1-bit LAMB, preconditioned"}
TIMES_ADAMW = {"OneBitAdam": 0.95, "OneBitLamb": 1.35}
OF_BOUND, FASTER_THAN_DEEPSPEED, EXTRA = 0.85, 8.0, 0.05
KERNELS_OF = "kernels of {}"
ONE_TENSOR = "DeepSpeed OnebitAdam, one tensor"
"""As its wrapper for 16-bit parameters has them, with fewer launches; its OnebitLamb flattens by itself."""


def kernels_of_a_step(params: Sequence[Tensor], name: str) -> Call:
    """All kernels of a rank's step, back to back; nothing travels, nothing is checked."""
    counts = tuple(p.numel() for p in params)
    return Workload(counts, params[0].device, WORLD_SIZE, params[0].dtype).step(lamb=name == "OneBitLamb")


def _peers(device: torch.device) -> dict[str, Maker]:
    made: dict[str, Maker] = {KERNELS_OF.format(n): partial(kernels_of_a_step, name=n) for n in ONEBIT}
    made |= makers(device, WORLD_SIZE)
    made |= {"Lamb": lamb, "OneBitAdam, alone (W=1)": lambda params: Step("OneBitAdam", params)}
    if deepspeed_peer.available():
        make = deepspeed("OnebitAdam", WORLD_SIZE)
        made[ONE_TENSOR] = lambda params: make(of_shapes([(sum(p.numel() for p in params),)], device))
    return made


def _bounds(numel: int, gigabytes_per_second: float) -> dict[str, float]:
    """Milliseconds in which a copy moves the bytes of each optimizer's step."""
    return {
        name: step_bytes(audited(), STEPS[case_name], WORLD_SIZE) * numel / gigabytes_per_second / 1e6
        for name, case_name in AUDITED.items()
    }


def _measure(
    report: Report, table: Table, params: Sequence[Tensor], peers: Mapping[str, Maker], bounds: Mapping[str, float]
) -> dict[str, Record]:
    found: dict[str, Record] = {}

    def add(row: Record, call: Call) -> None:
        if "ms" in row:
            row["host ms"] = host_time(call, report.device)
            bound = next((ms for name, ms in bounds.items() if row["optimizer"] == KERNELS_OF.format(name)), None)
            row["of its bound"] = bound / row["ms"] if bound else None
        found[row["optimizer"]] = table.add(**row)

    against_adamw(params, peers, report.rounds or 30, add)
    return found


@case("gpu-step", "cuda")
def gpu_step(report: Report) -> None:
    """BERT-Large's whole step, one rank of 8, against fused AdamW, its byte bound and DeepSpeed; peak memory; bf16."""
    device = report.device
    shapes, model = shapes_of(report.numel)
    n, tensors = numel_of(shapes), len(shapes)
    speed = copy_speed(n, device, report.rounds or 30)
    title = f"{model}: {n:,} parameters in {tensors} tensors, one rank of {WORLD_SIZE}, messages copied on the device"
    table = report.table(f"{title}, fp32; a copy moves {speed:.0f} GB/s", COLUMNS)
    found = _measure(report, table, of_shapes(shapes, device), _peers(device), _bounds(n, speed))
    _numbers_to_meet(report, found)
    table = report.table(f"{title}, bf16 gradients and parameters", COLUMNS)
    half = {name: make for name, make in _peers(device).items() if not name.startswith(("DeepSpeed", "kernels"))}
    _measure(report, table, of_shapes(shapes, device, BF16), half, {})
    note_deepspeed(report)


def _numbers_to_meet(report: Report, found: Mapping[str, Record]) -> None:
    table = report.table("Numbers to meet", {"what": "<58", "measured": ">9.3f", "limit": "<24"})

    def add(what: str, measured: float | None, at_most: float | None = None, at_least: float | None = None) -> None:
        table.add(what=what, measured=measured, limit=report.limit(measured, at_most, at_least))

    ours = {n: next((r for name, r in found.items() if name.startswith(f"{n}, ")), {}) for n in ONEBIT}
    for name, theirs in zip(ONEBIT, THEIRS, strict=True):
        kernels = found[KERNELS_OF.format(name)]
        add(f"{name}: kernels, x AdamW(fused)", kernels.get("x AdamW(fused)"), at_most=TIMES_ADAMW[name])
        add(f"{name}: kernels, share of their byte bound", kernels.get("of its bound"), at_least=OF_BOUND)
        their_ms = min((r["ms"] for n, r in found.items() if n.startswith(theirs) and "ms" in r), default=None)
        faster = their_ms / ours[name]["ms"] if their_ms and "ms" in ours[name] else None
        add(f"{name}: whole step, times as fast as {theirs}", faster, at_least=FASTER_THAN_DEEPSPEED)
        add(f"{name}: extra memory at a step's peak, B/param", ours[name].get("extra B/param"), at_most=EXTRA)
