"""Runs the lab: hosts for the loopback, for each rate, for runs timed as a whole, by mpirun; then simulated runs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

from .. import network
from . import equal, goals, model, whole
from .parts import Parts
from .task import FULL, QUICK, Task

HOSTS = 4
COMPARED = (
    *("alone", "adamw", "bf16", "int8", "powersgd", "compress-4", "onebit-adam", "onebit-adam-overlap"),
    *("zero-one-adam", "onebit-lamb", "marsit-ring", "marsit-owner"),
)
STAGES = ("warm-up", "renewal", "renewal-overlap", "telling")
"""Of whole runs of 1-bit Adam and 0/1 Adam: few of their steps are like these."""
CLOSE = 0.03
"""Rates that differ by a smaller share are one."""
BY_LIBRARY = ("onebit-lamb", "onebit-lamb-mpi")
MPI_SHARES = (model.PAPERS_SHARE, 0.75, 0.25)
"""The rates at which MPI is compared with gloo, and the loopback."""


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        task: What is trained.
        shares: Of AdamW's step; each gives a rate. Those of ``model.REPORTS`` come to them.
        fastest: Mbit/s; from the fastest of those rates on they double until none of ours is faster than bfloat16,
            or so far.
        rounds: Least and most rounds at a rate, and as many between as last ``seconds``.
        stage_rounds: Of ``STAGES``.
        library_rounds: Of the comparison of gloo and MPI.
        steps: Of a simulated run of length 1.
        grid: Learning rates tried.
        warmup: Share of a run's steps that warm up 1-bit Adam.
        timed_steps: Of the runs that are timed as a whole.
    """

    task: Task = FULL
    shares: Sequence[float] = model.SHARES
    fastest: float = 10_000.0
    rounds: tuple[int, int] = (7, 15)
    seconds: float = 30.0
    stage_rounds: int = 3
    library_rounds: int = 9
    steps: int = 300
    grid: Sequence[float] = (1e-3, 2e-3, 4e-3)
    warmup: float = 0.05
    timed_steps: int = 60


QUICKLY = Plan(QUICK, (model.PAPERS_SHARE, 0.5), 2000.0, (3, 3), 1.0, 2, 3, 20, (1e-3, 3e-3), 0.1, 10)


def measure(plan: Plan, parts: Parts) -> dict[str, Any]:
    """A record of everything."""
    record: dict[str, Any] = {"facts": parts.get("facts", facts), "hosts": HOSTS, "task": plan.task.as_dict()}
    record["parameters"] = plan.task.parameters
    hosts = Hosts(plan, parts)
    record["latencies"] = hosts.ask(None, what="latencies")
    nbytes = record["parameters"] // 8
    seconds = hosts.ask(model.CALIBRATION, what="all_to_all", nbytes=nbytes)["seconds"]
    record["congestion"] = model.congestion(seconds, nbytes, record["latencies"], HOSTS)
    record["loopback"] = hosts.row(None, dict.fromkeys(COMPARED, plan.rounds[1]) | _stages(plan))
    record["rates"] = []
    for megabits, what in _rates(plan, record):
        record["rates"].append(hosts.row(megabits, _rounds(plan, record, megabits)) | what)
    _upwards(plan, record, hosts)
    megabits = goals.papers(record)["megabits"]
    tell(f"{megabits:g} Mbit/s: whole runs of {plan.timed_steps} steps ...")
    given = {"steps": plan.timed_steps, "warmup": plan.warmup}
    record["run"] = {
        "megabits": megabits,
        **given,
        "methods": hosts.ask(megabits, what="run", **given),
    }
    record["mpi"] = _by_library(plan, record["rates"], hosts)
    train = equal.trainer(parts, record["task"], HOSTS, plan.warmup, tell)
    record["runs"] = {"steps": plan.steps, "warmup": plan.warmup, "grid": list(plan.grid)}
    record["runs"]["methods"] = equal.search(train, plan.steps, plan.grid, tell)
    record["facts"]["load_average_after"] = os.getloadavg()[0]
    return record


def _rates(plan: Plan, record: dict[str, Any]) -> list[tuple[float, dict[str, Any]]]:
    """Rates that are known beforehand, the slowest first, and what each of them is."""
    compute = record["loopback"]["methods"]["alone"]["whole"]
    given = (compute, record["parameters"], record["latencies"], HOSTS)
    found: dict[float, dict[str, Any]] = {goals.LITERAL: {"share": None, "case": ""}}
    for case, share in [*((f"{share:.0%}", share) for share in plan.shares), *model.REPORTS.items()]:
        megabits = model.rate_for(share, *given)
        # Two rates so close would measure the same twice.
        close = abs(megabits / goals.LITERAL - 1) < CLOSE and found[goals.LITERAL]["share"] is None
        found[goals.LITERAL if close else megabits] = {"share": share, "case": case}
    return sorted(found.items())


def _upwards(plan: Plan, record: dict[str, Any], hosts: Hosts) -> None:
    """Double the rate until bfloat16's step is as fast as all of ours."""
    while True:
        row = record["rates"][-1]
        if row["megabits"] >= plan.fastest or all(model.speedup(row, ours, "bf16") <= 1 for ours in whole.OURS):
            return
        megabits = float(f"{2 * row['megabits']:.3g}")
        made = hosts.row(megabits, _rounds(plan, record, megabits))
        record["rates"].append(made | {"share": None, "case": ""})


def _rounds(plan: Plan, record: dict[str, Any], megabits: float) -> dict[str, int]:
    """How many rounds of each method at a rate."""
    known = [name for name in COMPARED if name in model.FAMILY]
    turn = sum(model.predict(record, name, megabits) for name in known)
    rounds = min(max(plan.rounds[0], int(plan.seconds / turn)), plan.rounds[1])
    return dict.fromkeys(COMPARED, rounds) | _stages(plan)


def _stages(plan: Plan) -> dict[str, int]:
    return dict.fromkeys(STAGES, plan.stage_rounds)


def facts() -> dict[str, Any]:
    """What the numbers depend on, besides the code."""
    return {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "date": date.today().isoformat(),
    }


def lacking_for_mpi() -> str:
    """What the comparison of libraries lacks; "" if nothing."""
    if shutil.which("mpirun") is None:
        return "Open MPI's mpirun"
    return "" if importlib.util.find_spec("mpi4py") else "mpi4py"


def _by_library(plan: Plan, rates: Sequence[dict[str, Any]], hosts: Hosts) -> list[dict[str, Any]]:
    """The same optimizer over gloo and over MPI, by turns in the same processes."""
    if missing := lacking_for_mpi():
        tell(f"MPI is left out: there is no {missing}")
        return []
    chosen = [row["megabits"] for row in rates if row["share"] in MPI_SHARES]
    rounds = dict.fromkeys(BY_LIBRARY, plan.library_rounds)
    return [hosts.row(megabits, rounds, mpi=True) for megabits in [*chosen, None]]


class Hosts:
    """Starts the hosts for what is not known yet."""

    def __init__(self, plan: Plan, parts: Parts) -> None:
        self._task, self._parts = plan.task.as_dict(), parts

    def row(self, megabits: float | None, methods: dict[str, int], mpi: bool = False) -> dict[str, Any]:
        """All methods at one rate, each so many rounds."""
        where = "loopback" if megabits is None else f"{megabits:g} Mbit/s"
        rounds = max(methods.values())
        tell(f"{where}: {len(methods)} methods{', started by mpirun' if mpi else ''}, {rounds} rounds ...")
        began = time.monotonic()
        found = self.ask(megabits, mpi, what="steps", methods=methods)
        steps = ", ".join(f"{name} {1e3 * seconds['whole']:.0f}" for name, seconds in found.items())
        tell(f"    {time.monotonic() - began:.0f} s; ms a step: {steps}")
        return {"megabits": megabits, "rounds": rounds, "methods": found}

    def ask(self, megabits: float | None, mpi: bool = False, **given: Any) -> dict[str, Any]:
        """What rank 0 tells."""
        given = {"task": self._task, **given}

        def run() -> dict[str, Any]:
            printed = network.run_module(
                "benchmarks.netlab.peer", HOSTS, megabits, [json.dumps(given)], even=True, mpi=mpi
            )
            return json.loads(printed.splitlines()[-1])

        return self._parts.get({"megabits": megabits, "mpi": mpi, **given}, run)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
