"""Runs the lab: hosts are started for the loopback, for each rate, for the whole runs, and by mpirun."""

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
from . import model
from .task import FULL, QUICK, Task

HOSTS = 4
COMPARED = ("alone", "adamw", "bf16", "powersgd", "onebit-adam", "onebit-lamb", "marsit-ring", "marsit-owner")
BY_LIBRARY = ("onebit-lamb", "onebit-lamb-mpi")
MPI_SHARES = (model.PAPERS_SHARE, 0.75, 0.25)
"""The rates at which MPI is compared with gloo, and the loopback."""


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        task: What is trained.
        shares: Of AdamW's step; each gives a rate.
        rounds: Least and most rounds at a rate, and as many between as last ``seconds``.
        library_rounds: Of the comparison of gloo and MPI.
        steps, freeze_step: Of the whole runs.
    """

    task: Task = FULL
    shares: Sequence[float] = model.SHARES
    rounds: tuple[int, int] = (7, 15)
    seconds: float = 30.0
    library_rounds: int = 9
    steps: int = 40
    freeze_step: int = 6


QUICKLY = Plan(QUICK, (model.PAPERS_SHARE, 0.5), (3, 3), 1.0, 3, 10, 2)


def measure(plan: Plan) -> dict[str, Any]:
    """A record of everything."""
    record: dict[str, Any] = {"facts": facts(), "hosts": HOSTS, "task": plan.task.as_dict()}
    record["parameters"] = plan.task.parameters
    record["latencies"] = _peers(plan, None, what="latencies")
    nbytes = record["parameters"] // 8
    seconds = _peers(plan, model.CALIBRATION, what="all_to_all", nbytes=nbytes)["seconds"]
    record["congestion"] = model.congestion(seconds, nbytes, record["latencies"], HOSTS)
    record["loopback"] = _row(plan, None, COMPARED, plan.rounds[1])
    compute = record["loopback"]["methods"]["alone"]["whole"]
    record["rates"] = []
    for share in plan.shares:
        megabits = model.rate_for(share, compute, record["parameters"], record["latencies"], HOSTS)
        known = [name for name in COMPARED if name in model.FAMILY]
        turn = sum(model.predict(record, name, megabits) for name in known)
        rounds = min(max(plan.rounds[0], int(plan.seconds / turn)), plan.rounds[1])
        record["rates"].append(_row(plan, megabits, COMPARED, rounds) | {"share": share})
    slowest = record["rates"][0]["megabits"]
    _tell(f"{slowest:g} Mbit/s: two whole runs of {plan.steps} steps ...")
    given = {"steps": plan.steps, "freeze_step": plan.freeze_step}
    record["run"] = {"megabits": slowest, **given, "methods": _peers(plan, slowest, what="run", **given)}
    record["mpi"] = _by_library(plan, record["rates"])
    record["facts"]["load_average_after"] = os.getloadavg()[0]
    return record


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


def _by_library(plan: Plan, rates: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same optimizer over gloo and over MPI, by turns in the same processes."""
    if missing := lacking_for_mpi():
        _tell(f"MPI is left out: there is no {missing}")
        return []
    chosen = [row["megabits"] for row in rates if row["share"] in MPI_SHARES]
    return [_row(plan, megabits, BY_LIBRARY, plan.library_rounds, mpi=True) for megabits in [*chosen, None]]


def _row(plan: Plan, megabits: float | None, methods: Sequence[str], rounds: int, mpi: bool = False) -> dict[str, Any]:
    """All methods at one rate."""
    where = "loopback" if megabits is None else f"{megabits:g} Mbit/s"
    _tell(f"{where}: {len(methods)} methods{', started by mpirun' if mpi else ''}, {rounds} rounds ...")
    began = time.monotonic()
    found = _peers(plan, megabits, mpi=mpi, what="steps", methods=list(methods), rounds=rounds)
    steps = ", ".join(f"{name} {1e3 * seconds['whole']:.0f}" for name, seconds in found.items())
    _tell(f"    {time.monotonic() - began:.0f} s; ms a step: {steps}")
    return {"megabits": megabits, "rounds": rounds, "methods": found}


def _peers(plan: Plan, megabits: float | None, mpi: bool = False, **given: Any) -> dict[str, Any]:
    arguments = [json.dumps({"task": plan.task.as_dict(), **given})]
    printed = network.run_module("benchmarks.netlab.peer", HOSTS, megabits, arguments, even=True, mpi=mpi)
    return json.loads(printed.splitlines()[-1])


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
