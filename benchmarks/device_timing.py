"""Times calls on a device: CUDA events there, the host's clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]
HEAD_START = 10_000_000  # cycles that the device waits, so that the host's part is not in its time


@dataclass
class Timing:
    """Milliseconds: the median, and the tenth and ninetieth percentile."""

    median: float
    low: float
    high: float


def time_by_turns(peers: Mapping[str, Call], device: torch.device, rounds: int = 30, warmup: int = 5) -> dict:
    """Calls the peers by turns; returns the ``Timing`` of each."""
    samples: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(warmup + rounds):
        for name, call in peers.items():
            milliseconds = _on_cuda(call) if device.type == "cuda" else _on_host(call)
            if turn >= warmup:
                samples[name].append(milliseconds)
    return {name: _summary(values) for name, values in samples.items()}


def _on_cuda(call: Call) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _on_host(call: Call) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def _summary(values: list[float]) -> Timing:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


def copy_of(nbytes: float, device: torch.device) -> Call:
    """A device copy that reads and writes ``nbytes`` in all."""
    source = torch.randint(256, (max(1, int(nbytes) // 2),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def host_time(call: Call, device: torch.device, rounds: int = 10) -> float:
    """Median milliseconds until a call returns, the device idle before and not waited for."""
    samples = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(_on_host(call))
    return statistics.median(samples)
