"""Every kernel against a device copy, measured by turns with it, of the bytes that the audit counts for the kernel."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from .audit_kernels import audited
from .registry import TIMES, Record, Report, case, times
from .timing import copy_of, time_by_turns
from .workload import Workload

FULL = 340_000_000
NEEDED = 40
"""Bytes per element of the kernel that works on most, with its copy."""
FAILED = "FAILED: "
BF16 = torch.bfloat16


class Kernel(NamedTuple):
    """A kernel to measure; ``name`` is the audit's."""

    name: str
    world_size: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def op(self) -> str:
        """Of ``torch.ops.fusedonebit``."""
        return self.name.partition(", ")[0]


KERNELS = (
    Kernel("pack"),
    Kernel("unpack"),
    Kernel("flatten"),
    Kernel("gradient_squares"),
    Kernel("gradient_squares, bf16", dtype=BF16),
    Kernel("momentum_compress"),
    Kernel("momentum_compress, preconditioned"),
    Kernel("momentum_compress, bf16", dtype=BF16),
    Kernel("finish"),
    *(Kernel(f"server_reduce, W={w}", world_size=w) for w in (2, 8, 64)),
    Kernel("receive"),
    Kernel("apply_momentum"),
    Kernel("apply_momentum, preconditioned"),
    Kernel("apply_momentum, bf16", dtype=BF16),
    Kernel("adam_update"),
    Kernel("lamb_update"),
    Kernel("lamb_coefficient"),
    Kernel("lamb_move"),
    Kernel("lamb_ratio"),
    Kernel("lamb_ratio, preconditioned"),
    Kernel("lamb_rescale"),
    Kernel("lamb_follow"),
    Kernel("local_step"),
    Kernel("local_step, preconditioned"),
    Kernel("rebuild_momentum, preconditioned"),
    Kernel("lion_compress"),
    Kernel("lion_compress, bf16", dtype=BF16),
)
COLUMNS = {"kernel": "<34", "elements": ">13,", "B/element": ">9.3f"} | TIMES | {"GB/s": ">8.1f", "of a copy": ">9.3f"}


def rows(numel: int, device: torch.device, rounds: int) -> Iterator[Record]:
    """A row for each kernel; one that fails, or has not the memory, says so and ends none behind it."""
    bytes_of = audited()
    for kernel in KERNELS:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info()[0] < NEEDED * numel:
                yield {"kernel": kernel.name, "elements": numel, "10-90 %": "skipped: memory"}
                continue
        try:
            yield _row(kernel, bytes_of[kernel.name], numel, device, rounds)
        except Exception as error:
            traceback.print_exc()
            yield {"kernel": kernel.name, "elements": numel, "10-90 %": f"{FAILED}{type(error).__name__}"}


def _row(kernel: Kernel, per_element: float, numel: int, device: torch.device, rounds: int) -> Record:
    work = Workload((numel,), device, kernel.world_size, kernel.dtype, "preconditioned" in kernel.name)
    call = work.call(kernel.op)
    elements = work.layout.chunk_numel if kernel.op == "server_reduce" else work.layout.numel
    moved = per_element * elements
    # `finish` moves so little that its copy would be a launch and nothing else; it is timed all the same.
    timed = time_by_turns({"kernel": call, "copy": copy_of(moved, device)}, device, rounds)
    ours, copy = timed["kernel"], timed["copy"]
    row = {"kernel": kernel.name, "elements": elements, "B/element": per_element, **times(ours)}
    return row | {"GB/s": moved / ours.median / 1e6, "copy_ms": copy.median, "of a copy": copy.median / ours.median}


def _raise_for(found: Iterable[Record]) -> None:
    failed = [row["kernel"] for row in found if row["10-90 %"].startswith(FAILED)]
    if failed:
        raise AssertionError(f"failed: {', '.join(failed)}")


@case("kernels", "cuda")
def kernels(report: Report) -> None:
    """Every kernel of a step, server_reduce at W = 2, 8 and 64 and bf16 among them, against a copy of its bytes."""
    numel = report.numel or FULL
    table = report.table(f"each at {numel:,} elements in all; medians, by turns with the copy", COLUMNS)
    for row in rows(numel, report.device, report.rounds or 30):
        table.add(**row)
    _raise_for(table.rows)


@case("roofline", "cuda")
def roofline(report: Report) -> None:
    """Bandwidth of every kernel from 10^4 elements on, under a device copy's (on a GPU up to 10^9)."""
    full = report.numel or FULL
    # A full run goes on to 10^9, where buffers of the largest kernel take 28 GB.
    points = [n for n in (10**4, 10**5, 10**6, 10**7, 10**8) if n < full] + [full] + [10**9] * (full >= FULL)
    rounds = report.rounds or 10
    table = report.table("each kernel by size", COLUMNS)
    for numel in points:
        for row in rows(numel, report.device, rounds):
            table.add(**row)
    _raise_for(table.rows)
    speed = copy_speed(full, report.device, rounds)
    report.table("a device copy, read and written", {"elements": ">13,", "GB/s": ">8.1f"}).add(
        elements=full, **{"GB/s": speed}
    )


@case("machine", "cuda")
def machine(report: Report) -> None:
    """The device, its versions (in the record's facts), and the bandwidth of a copy in its memory."""
    numel = report.numel or 1 << 28
    table = report.table("a device copy, read and written", {"elements": ">13,", "GB/s": ">8.1f"})
    table.add(elements=numel, **{"GB/s": copy_speed(numel, report.device, report.rounds or 20)})


def copy_speed(numel: int, device: torch.device, rounds: int) -> float:
    """GB/s that a copy of so many float32 reads and writes."""
    return 8 * numel / time_by_turns({"copy": copy_of(8 * numel, device)}, device, rounds)["copy"].median / 1e6
