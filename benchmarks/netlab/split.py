"""Where a step's time goes: from the moments that all ranks have noted to compute, compress and communicate.

The hosts are one machine's, and their clocks one clock. So time is what the slowest rank of each phase leaves:
a collective lasts from when the last rank has come to it until the last has left it, and waiting for a rank that
computes is computing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

PARTS = ("compute", "compress", "communicate")
WARM_UP = 3
"""Rounds before the first that counts: PowerSGD's hook compresses from its third step on, all others earlier."""


class Turn(NamedTuple):
    """One rank's moments in one step, in seconds of the machine's clock, and its loss."""

    began: float
    computed: float
    ended: float
    spans: list[tuple[float, float]]
    loss: float


def whole(turns: Sequence[Turn]) -> float:
    """Seconds of a step: from when all ranks had begun until all have ended."""
    return max(t.ended for t in turns) - max(t.began for t in turns)


def parts(turns: Sequence[Turn]) -> tuple[float, float, float]:
    """Seconds of compute, compress and communicate of a step whose ``spans`` are collectives; their sum is the whole.

    Args:
        turns: Of each rank; all have called the same collectives.
    """
    computed = max(t.computed for t in turns)
    communicate = sum(
        max(end for _, end in calls) - max(begin for begin, _ in calls)
        for calls in zip(*(t.spans for t in turns), strict=True)
    )
    compute = computed - max(t.began for t in turns)
    return compute, whole(turns) - compute - communicate, communicate


def summarise(steps: dict[str, list[list[Turn]]], overlapped: Sequence[str]) -> dict[str, dict[str, float]]:
    """Medians over rounds, in seconds; one part is what the others leave of the whole step.

    Args:
        steps: Of each method, rounds of ranks' turns.
        overlapped: Methods that send in the backward pass: what they compute is what ``alone`` takes meanwhile.
    """
    told = {}
    for name, rounds in steps.items():
        seconds = [whole(turns) for turns in rounds]
        found = {"whole": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
        if name in overlapped:
            found["compute"] = statistics.median(map(whole, steps["alone"]))
            found["compress"] = statistics.median(map(_in_hooks, rounds))
            found["communicate"] = found["whole"] - found["compute"] - found["compress"]
        else:
            split = [parts(turns) for turns in rounds] if name != "alone" else [(0.0, 0.0, 0.0)]
            _, found["compress"], found["communicate"] = (statistics.median(part) for part in zip(*split, strict=True))
            found["compute"] = found["whole"] - found["compress"] - found["communicate"]
        told[name] = found
    return told


def _in_hooks(turns: Sequence[Turn]) -> float:
    """Of DDP's hooks, spans are what they compress."""
    return max(sum(end - begin for begin, end in t.spans) for t in turns)
