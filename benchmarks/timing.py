"""Times peers by turns in one process, so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Call = Callable[[], object]
Clock = Callable[[Call], float]
"""Milliseconds that a call takes."""
CPU = torch.device("cpu")
HEAD_START = 10_000_000  # cycles that the device waits, so that the host's part is not in its time


@dataclass
class Timing:
    """Milliseconds: the median, and the tenth and ninetieth percentile."""

    median: float
    low: float
    high: float


def samples_by_turns(
    peers: Mapping[str, Call], clock: Clock, rounds: int = 15, warmup: int = 3
) -> dict[str, list[float]]:
    """Calls the peers by turns; returns the milliseconds of each call behind the warm-up."""
    samples: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(warmup + rounds):
        for name, call in peers.items():
            milliseconds = clock(call)
            if turn >= warmup:
                samples[name].append(milliseconds)
    return samples


def time_by_turns(
    peers: Mapping[str, Call], device: torch.device = CPU, rounds: int = 30, warmup: int = 5, clock: Clock | None = None
) -> dict[str, Timing]:
    """Calls the peers by turns; the clock is the device's own: CUDA events there, the host's on a CPU."""
    clock = clock or (on_cuda if device.type == "cuda" else on_host)
    return {name: summary(values) for name, values in samples_by_turns(peers, clock, rounds, warmup).items()}


def alternate(peers: Mapping[str, Call], rounds: int = 15, warmup: int = 3) -> dict[str, float]:
    """Returns each peer's median seconds per call, by the host's clock."""
    return {name: timing.median / 1e3 for name, timing in time_by_turns(peers, CPU, rounds, warmup).items()}


def on_cuda(call: Call) -> float:
    """What the device takes, by events; its launches are under way before it begins."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def on_host(call: Call) -> float:
    """What passes until the call returns."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def until_idle(device: torch.device, calls: int) -> Clock:
    """What passes per call until the device has nothing left to do: what a launch-bound loop pays."""

    def clock(call: Call) -> float:
        synchronise(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        synchronise(device)
        return (time.perf_counter() - began) * 1e3 / calls

    return clock


def synchronise(device: torch.device) -> None:
    """Waits for the device; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(values: list[float]) -> Timing:
    """Median and percentiles of milliseconds."""
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
        synchronise(device)
        samples.append(on_host(call))
    return statistics.median(samples)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread per process: what a rank has that shares its host with others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
