"""Times peers alternately, so that what disturbs the machine disturbs both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def alternate(peers: Mapping[str, Callable[[], object]], rounds: int = 15, warmup: int = 3) -> dict[str, float]:
    """Returns each peer's median seconds per call."""
    times: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(warmup + rounds):
        for name, call in peers.items():
            began = time.perf_counter()
            call()
            if turn >= warmup:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}
