"""Whether there is a device to measure on, and what it is."""

from __future__ import annotations

from ..kernels import copy_speed
from ..registry import Report, case


@case("machine", "cuda")
def machine(report: Report) -> None:
    """The device, its versions (in the record's facts), and the bandwidth of a copy in its memory."""
    numel = report.numel or 1 << 28
    table = report.table("a device copy, read and written", {"elements": ">13,", "GB/s": ">8.1f"})
    table.add(elements=numel, **{"GB/s": copy_speed(numel, report.device, report.rounds or 20)})
