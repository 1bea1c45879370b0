"""What a step launches on the device, from torch's profiler, and the bytes that our kernels of it move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..audit_steps import Step
from ..timing import Call, synchronise

PROFILED = 5
ADAMW_BYTES = 28.0
"""Per parameter: gradient, parameter and two moments read, all but the gradient written."""


class Launched(NamedTuple):
    """One kernel, copy or fill of a step: how often it is launched, and microseconds of all of them."""

    name: str
    count: float
    us: float

    def bytes_of(self, moved: Mapping[str, float]) -> float | None:
        """Bytes per parameter that launches of this kernel move, from those of each op."""
        name = self.name.removesuffix("_kernel")
        op = max((op for op in moved if name.endswith(op) or name.startswith(op)), key=len, default=None)
        return None if op is None else moved[op]


def launched(call: Call, device: torch.device) -> list[Launched]:
    """Profile a few calls; on a CPU, where nothing is launched, torch's own operations stand in for kernels."""
    cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    call()
    synchronise(device)
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(PROFILED):
            call()
        synchronise(device)
    return summed(profile.events(), PROFILED, cuda)


def summed(events: Iterable[Any], steps: int, cuda: bool) -> list[Launched]:
    """Sum a profiler's events by name, the longest first."""
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    found: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.device_type != wanted or _is_annotation(event) or (not cuda and _is_part(event)):
            continue
        count, us = found.get(event.name, (0, 0.0))
        found[event.name] = count + 1, us + event.time_range.elapsed_us()
    all_of_them = [Launched(_short(name), count / steps, us / steps) for name, (count, us) in found.items()]
    return sorted(all_of_them, key=lambda each: -each.us)


def shortened(found: list[Launched], most: int) -> list[Launched]:
    """Return the first ones, and all behind them as one."""
    others = found[most:]
    if not others:
        return found
    told = f"{len(others)} others"
    return [*found[:most], Launched(told, sum(each.count for each in others), sum(each.us for each in others))]


def _is_part(event: Any) -> bool:
    """Whether a host's operation is part of another one."""
    return event.cpu_parent is not None and not _is_annotation(event.cpu_parent)


def _is_annotation(event: Any) -> bool:
    """Whether it is a range that torch or somebody has named, such as ``Optimizer.step#AdamW.step``."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(("Optimizer.", "ProfilerStep"))


def _short(name: str) -> str:
    """Return a kernel's name without templates and arguments; several of torch's are told apart by the functor."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "").partition("(")[0]
    base, _, templates = plain.partition("<")
    functor = next((part for part in templates.replace("<", ",").split(",") if "unctor" in part or "Op" in part), "")
    return f"{base.rpartition('::')[2]} {functor.strip(' >').rpartition('::')[2]}".strip() or name[:60]


def kernel_bytes(bytes_of: Mapping[str, float], step: Step, world_size: int) -> dict[str, float]:
    """Bytes per parameter and step that each op moves, of all its launches together."""
    moved: dict[str, float] = {}
    for name in step.kernels:
        op = name.partition(",")[0]
        moved[op] = moved.get(op, 0.0) + bytes_of[name]
    for name in step.served:
        found = bytes_of.get(name) or bytes_of.get(f"{name}, W={world_size}")
        if found is not None:  # one rank alone may have no server
            op = name.partition(",")[0]
            moved[op] = moved.get(op, 0.0) + found / world_size
    return moved
