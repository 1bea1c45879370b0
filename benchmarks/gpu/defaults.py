"""Optimizers as a user makes them, on a GPU: 50 steps in a row, renewals of the variance among them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedonebit import MarsitAdam, Numerics, OneBitAdam, OneBitLamb, OneBitLion, Rounds, ZeroOneAdam
from fusedonebit.optim.policies import FixedRounds

from ..audit_steps import STEPS, round_bytes, step_bytes
from ..kernels import audited, copy_speed
from ..optimizers import FUSED, LR, adamw, numel_of, of_shapes
from ..registry import Record, Report, Table, case
from ..timing import Call, host_time, synchronise, time_by_turns, until_idle
from .profiled import launched, shortened
from .smoke import Alike
from .steps import KERNELS, SHOWN, SMALLEST, shapes_of

WORLD_SIZE = 8
PERIOD = 50
"""Steps that are averaged over: a variance is renewed in one of so many, when it has lived long enough."""
SETTLED = 260
"""Steps after which it has."""
COLUMNS = {"optimizer": "<36", "parameters": "<10", "ms": ">8.3f", "10-90 %": ">17", "AdamW ms": ">8.3f"}
COLUMNS |= {"x AdamW": ">8.3f", "B/param": ">8.2f", "of a copy": ">9.3f", "host ms": ">8.3f"}
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Usual(NamedTuple):
    """An optimizer with its defaults, but that warming up takes two steps.

    Attributes:
        step: Of ``STEPS``; None of Marsit's.
        settled: Steps to take before it is measured.
    """

    name: str
    make: Callable[..., Any]
    step: str | None
    settled: int = 4
    dtype: torch.dtype = torch.float32

    def bytes_per_param(self) -> float:
        """Return bytes per parameter and step that the audit counts, at ``WORLD_SIZE`` ranks."""
        if self.step is None:
            return round_bytes(audited(), "MarsitAdam", WORLD_SIZE)
        return step_bytes(audited(), STEPS[self.step], WORLD_SIZE)


USUAL = (
    Usual("OneBitAdam", partial(OneBitAdam, warmup=2), "1-bit Adam, living, mean over 50 steps", SETTLED),
    Usual("OneBitLamb", partial(OneBitLamb, warmup=2), "1-bit LAMB, living, mean over 50 steps", SETTLED),
    Usual(
        "OneBitAdam, 8-bit state",
        partial(OneBitAdam, warmup=2, numerics=Numerics(state="8bit")),
        "1-bit Adam, bf16, state in codes, living, mean over 50 steps",
        SETTLED,
        torch.bfloat16,
    ),
    Usual("OneBitLion", OneBitLion, "OneBitLion"),
    Usual("MarsitAdam", partial(MarsitAdam, rounds=Rounds(full_precision_every=0)), None),
    *(
        Usual(
            f"ZeroOneAdam, rounds of {length}",
            partial(ZeroOneAdam, sync_policy=FixedRounds(length)),
            f"ZeroOneAdam, own variances, mean over a round of {length}",
        )
        for length in (1, 4)
    ),
)


def repeated(step: Call, calls: int) -> Call:
    """Return what takes so many steps."""

    def call() -> None:
        for _ in range(calls):
            step()

    return call


def _measure(table: Table, usual: Usual, params: Sequence[Tensor], copy: float, report: Report) -> Any:
    """Add a row of one of them, by turns with fused AdamW on the same parameters; return the optimizer."""
    device, rounds = report.device, report.rounds or 7
    steps, settled = (2, 4) if report.dry_run else (PERIOD, usual.settled)
    base = adamw(params)
    optimizer = usual.make(params, lr=LR, process_group=Alike(WORLD_SIZE))
    repeated(optimizer.step, settled)()
    peers = {FUSED: repeated(base, steps), usual.name: repeated(optimizer.step, steps)}
    timed = time_by_turns(peers, device, rounds, 1, until_idle(device, 1))
    ours, theirs = timed[usual.name], timed[FUSED]
    moved, numel = usual.bytes_per_param(), sum(p.numel() for p in params)
    row: Record = {
        "optimizer": usual.name,
        "parameters": DTYPES[usual.dtype],
        "ms": ours.median / steps,
        "10-90 %": f"{ours.low / steps:.3f} to {ours.high / steps:.3f}",
        "AdamW ms": theirs.median / steps,
        "x AdamW": ours.median / theirs.median,
        "B/param": moved,
        "of a copy": moved * numel / (ours.median / steps) / 1e6 / copy,
        "host ms": host_time(optimizer.step, device, 9),
    }
    table.add(**row)
    stats = optimizer.stats()
    if stats["skipped_steps"] or stats["phase"] in ("warmup", "uncompressed"):
        raise AssertionError(f"{usual.name}: {stats['skipped_steps']} steps skipped, phase {stats['phase']}")
    return optimizer


def _count(table: Table, usual: Usual, optimizer: Any, report: Report) -> None:
    """Add what a step launches in the mean, from a profile."""
    steps = 2 if report.dry_run else PERIOD
    for each in shortened(launched(repeated(optimizer.step, steps), report.device), SHOWN):
        table.add(
            optimizer=usual.name, way="eager", kernel=each.name, **{"a step": each.count / steps, "us": each.us / steps}
        )


def defaults(size: str, report: Report) -> None:
    """Measure all at a size, one after the other."""
    shapes = shapes_of(size, report)
    numel = numel_of(shapes)
    copy = copy_speed(numel, report.device, 5)
    table = report.table(
        f"{size}: {numel:,} parameters in {len(shapes)} tensors, W = {WORLD_SIZE}; "
        f"a copy moves {copy:,.0f} GB/s; ms of a step, the mean of {PERIOD}, host and device",
        COLUMNS,
    )
    told = {name: spec for name, spec in KERNELS.items() if name in ("optimizer", "way", "kernel", "a step", "us")}
    counts = report.table("Launches of a step in the mean, from a profile", told)
    for usual in USUAL:
        params = of_shapes(shapes, report.device, usual.dtype)
        optimizer = _measure(table, usual, params, copy, report)
        _count(counts, usual, optimizer, report)
        del optimizer, params
        gc.collect()
        if report.device.type == "cuda":
            torch.cuda.empty_cache()


def warm(usual: Usual, report: Report) -> None:
    """Take its steps until the variance has been renewed, so that its kernels are in Triton's cache."""
    params = of_shapes(shapes_of(SMALLEST, report), report.device, usual.dtype)
    optimizer = usual.make(params, lr=LR, process_group=Alike(WORLD_SIZE))
    repeated(optimizer.step, 4 if report.dry_run else 16)()
    synchronise(report.device)
    report.note(f"{usual.name}: {optimizer.stats()['step']} steps that compile")


for _size in (SMALLEST, "340M"):
    _about = f"Every optimizer's defaults at {_size} parameters, renewals included, W = 8, against fused AdamW."
    case(f"defaults-{_size}", "cuda", about=_about)(partial(defaults, _size))
for _i, _usual in enumerate(USUAL):
    _about = f"Compiles the kernels of {_usual.name}, with its defaults."
    case(f"warm-defaults-{_i}", "cuda", about=_about)(partial(warm, _usual))
