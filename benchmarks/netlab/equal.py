"""How many steps each method needs for the same held-out loss: runs at rates of one grid, then of other lengths.

A run of another length has a learning rate that falls over that length: nothing is read off the middle of a longer run.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from .parts import Parts

TRAINED = ("bf16", "int8", "powersgd", "compress-4", "onebit-adam", "zero-one-adam")
OURS = ("compress-4", "onebit-adam", "zero-one-adam")
BASE, AT_ITS_OWN = "bf16", "powersgd"
"""Whose final loss all must reach; and who is compared at its own, which ours must reach."""
LENGTHS = (0.3, 0.5, 0.75, 1.0, 1.1, 1.25, 1.5)
"""Of runs, in units of the plan's steps."""
Tell = Callable[[str], None]


class Compared(NamedTuple):
    """Which methods are trained, the loss of which of them all must reach, and whose ours must reach besides."""

    trained: Sequence[str]
    ours: Sequence[str]
    base: str
    at_its_own: str | None = None


ADAMS = Compared(TRAINED, OURS, BASE, AT_ITS_OWN)


class Run(NamedTuple):
    """One simulated run: all that its losses follow from."""

    method: str
    lr: float
    steps: int


def needed(losses: Mapping[float, float], target: float) -> float | None:
    """Return the length at which a loss is reached, linear in its logarithm between two runs; None: none reaches it."""
    before = None
    for length in sorted(losses):
        if losses[length] <= target:
            if before is None:
                return length
            share = (losses[before] - target) / (losses[before] - losses[length])
            return math.exp(math.log(before) + share * math.log(length / before)) if math.isfinite(share) else length
        before = length
    return None


def next_length(losses: Mapping[float, float], target: float, shorter: bool = False) -> float | None:
    """Return the length to be run next, None where enough is known.

    Args:
        losses: By length.
        target: The loss to be reached.
        shorter: Whether to find out how much shorter than 1 a run may be.
    """
    if 1.0 not in losses:
        return 1.0
    shortest, longest = min(losses), max(losses)
    if needed(losses, target) is None:
        return min((length for length in LENGTHS if length > longest), default=None)
    if shorter and losses[shortest] <= target:
        return max((length for length in LENGTHS if length < shortest), default=None)
    return None


def search(
    train: Callable[[Sequence[Run]], list[dict[str, Any]]],
    steps: int,
    grid: Sequence[float],
    tell: Tell,
    among: Compared = ADAMS,
) -> dict[str, Any]:
    """Find each method's rate, and runs of the lengths that say when it has reached the loss of the base.

    Args:
        train: Makes runs.
        steps: Of a run of length 1.
        grid: Learning rates, the same for all methods.
        tell: Is told of progress.
        among: Which methods.

    Returns:
        By method: lr; tuning, pairs of rate and loss; and lengths, what is known of each run at that rate.
    """
    tuning = [Run(method, lr, steps) for method in among.trained for lr in grid]
    tell(f"{len(tuning)} runs of {steps} steps, {len(grid)} learning rates each ...")
    found = dict(zip(tuning, train(tuning), strict=True))
    told: dict[str, Any] = {}
    for method in among.trained:
        by_rate = [(lr, found[Run(method, lr, steps)]) for lr in grid]
        lr, best = min(by_rate, key=lambda pair: loss_of(pair[1]))
        tried = [[lr, run["loss"]] for lr, run in by_rate]
        told[method] = {"lr": lr, "tuning": tried, "lengths": [{"length": 1.0, "steps": steps, **best}]}
    while wanted := list(_wanted(told, among)):
        runs = [Run(method, told[method]["lr"], round(length * steps)) for method, length in wanted]
        tell("runs of other lengths: " + ", ".join(f"{run.method} {run.steps}" for run in runs) + " ...")
        for (method, length), run, made in zip(wanted, runs, train(runs), strict=True):
            told[method]["lengths"].append({"length": length, "steps": run.steps, **made})
    return told


def _wanted(told: Mapping[str, Any], among: Compared) -> Iterable[tuple[str, float]]:
    """Of each method one run more, where it needs one."""
    for method in among.trained:
        losses = losses_of(told[method])
        targets = [] if method in (among.base, among.at_its_own) else [(loss_at_one(told[among.base]), False)]
        if method in among.ours and among.at_its_own is not None:
            targets.append((loss_at_one(told[among.at_its_own]), True))
        lengths = (next_length(losses, target, shorter) for target, shorter in targets)
        if (length := next((each for each in lengths if each is not None), None)) is not None:
            yield method, length


def loss_of(run: Mapping[str, Any]) -> float:
    """A run's final held-out loss; infinite where it has diverged."""
    return math.inf if run["loss"] is None else run["loss"]


def losses_of(told: Mapping[str, Any]) -> dict[float, float]:
    """A method's final losses by length."""
    return {run["length"]: loss_of(run) for run in told["lengths"]}


def loss_at_one(told: Mapping[str, Any]) -> float:
    """A method's final loss after as many steps as ``BASE``."""
    return losses_of(told)[1.0]


def trainer(
    parts: Parts, task: Mapping[str, Any], hosts: int, warmup: float, tell: Tell
) -> Callable[[Sequence[Run]], list[dict[str, Any]]]:
    """Return what makes runs: each in a process of one thread, as many at once as there are cores."""

    def one(run: Run) -> dict[str, Any]:
        asked = {"task": dict(task), "hosts": hosts, "warmup": warmup, **run._asdict()}
        if parts.has(asked):
            return parts.get(asked, dict)
        began = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.netlab.curves", json.dumps(asked)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"{run} failed:\n{ended.stderr}")
        found = json.loads(ended.stdout.splitlines()[-1])
        tell(f"    {run.method}, {run.lr:g}, {run.steps} steps: {found['loss']}, {time.monotonic() - began:.0f} s")
        parts.put(asked, found)
        return found

    def train(runs: Sequence[Run]) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(one, runs))

    return train
