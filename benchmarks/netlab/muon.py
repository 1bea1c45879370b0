"""1-bit Muon on the lab's links, against Muon whose gradients DDP averages in bfloat16 during the backward pass.

Both are trained in simulation, each at its best rate of one grid; seconds are steps to equal held-out loss, times what
a step of each kind was measured to take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusedonebit.optim.whitening import due

from ..pages import markdown
from . import equal, goals, model
from .parts import Parts
from .sweep import HOSTS, QUICKLY, Hosts, Plan, facts, tell

Record = Mapping[str, Any]
OURS, RIVAL, STAGE = "onebit-muon", "muon-bf16", "whitening"
INSTEAD_OF = {RIVAL: equal.BASE, OURS: "onebit-adam"}
MUONS = equal.Compared((RIVAL, OURS), (OURS,), RIVAL)
PLAN = Plan(grid=(2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2))
RATES = (53.0, 100.0, 230.0, goals.LITERAL, 2330.0)
"""Mbit/s: those that goals name, and between and beyond them."""
WANTED = {53.0: 4.0, goals.LITERAL: 1.3}
"""How many times as fast whole runs are to be, by rate."""
LABELS = {
    RIVAL: "Muon, bf16 hook, overlapped (DDP)",
    OURS: "1-bit Muon",
    STAGE: "1-bit Muon, a step that whitens anew",
}


def measure(plan: Plan, adams: Record | None = None, rates: Sequence[float] = RATES, *, parts: Parts) -> dict[str, Any]:
    """Return a record of steps at each rate, and of runs; of shorter ones, too, where those of ``adams`` are known."""
    record: dict[str, Any] = {"facts": parts.get("facts of Muon", facts), "hosts": HOSTS, "task": plan.task.as_dict()}
    record["parameters"] = plan.task.parameters
    hosts = Hosts(plan, parts)
    rounds = dict.fromkeys(("alone", "bf16", RIVAL, OURS), plan.rounds[0]) | {STAGE: plan.stage_rounds}
    record["rates"] = [hosts.row(megabits, rounds) for megabits in rates]
    record["loopback"] = hosts.row(None, rounds)
    train = equal.trainer(parts, record["task"], HOSTS, plan.warmup, tell)
    record["runs"] = {"steps": plan.steps, "grid": list(plan.grid)}
    record["runs"]["methods"] = equal.search(train, plan.steps, plan.grid, tell, MUONS)
    for name, target in ({} if adams is None else targets(adams)).items():
        shorten(record, name, target, train)
    return record


def targets(adams: Record) -> dict[str, float]:
    """Return what Muon and 1-bit Muon are to reach in fewer steps: the losses of AdamW and of 1-bit Adam."""
    told = adams["runs"]["methods"]
    return {name: equal.loss_at_one(told[other]) for name, other in INSTEAD_OF.items()}


def shorten(record: Record, name: str, target: float, train: Callable[[Sequence[equal.Run]], list[Any]]) -> None:
    """Make a method's runs shorter until one does not reach a loss."""
    told, steps = record["runs"]["methods"][name], record["runs"]["steps"]
    while (length := equal.next_length(equal.losses_of(told), target, shorter=True)) is not None:
        (made,) = train([equal.Run(name, told["lr"], round(length * steps))])
        told["lengths"].append({"length": length, "steps": round(length * steps), **made})


def instead(record: Record, adams: Record) -> dict[str, float]:
    """Return how many of the steps of AdamW and of 1-bit Adam Muon and 1-bit Muon need for the same held-out loss."""
    told, found = record["runs"]["methods"], dict[str, float]()
    for name, target in targets(adams).items():
        needed = equal.needed(equal.losses_of(told[name]), target)
        found[name] = math.inf if needed is None else needed
    return found


def length(record: Record) -> float:
    """Return how long ours must be trained for Muon's held-out loss, whose own run is 1: at least as long."""
    told = record["runs"]["methods"]
    found = equal.needed(equal.losses_of(told[OURS]), equal.loss_at_one(told[RIVAL]))
    return math.inf if found is None else max(1.0, found)


def seconds(record: Record, row: Record, name: str) -> float:
    """Return what a whole run takes at a row's rate, to equal loss."""
    times = length(record) if name == OURS else 1.0
    if math.isinf(times):
        return math.inf
    steps = round(times * record["runs"]["steps"])
    of, whitening = row["methods"], sum(map(due, range(steps))) if name == OURS else 0
    return (steps - whitening) * of[name]["whole"] + whitening * of[STAGE]["whole"]


def gain(record: Record, row: Record) -> float:
    """Return how many times as fast ours has Muon's loss; 0: it has not."""
    return seconds(record, row, RIVAL) / seconds(record, row, OURS)


def found(record: Record) -> list[goals.Goal]:
    """Return the numbers to meet."""
    text = "whole runs at {:g} Mbit/s, 1-bit Muon over Muon on overlapped bf16"
    return [
        goals.Goal(f"muon-at-{rate:g}", text.format(rate), least, gain(record, goals.at(record, rate)))
        for rate, least in WANTED.items()
    ]


def tables(record: Record, adams: Record) -> str:
    """Return the numbers to meet, steps and whole runs by rate, and losses."""
    rows = model.rows(record)
    rates = ["loopback" if row["megabits"] is None else f"{row['megabits']:g} Mbit/s" for row in rows]
    met = [
        [goal.text, f"{goal.wanted:.2f}x", f"{goal.found:.2f}x", "met" if goal.met else "**missed**"]
        for goal in found(record)
    ]
    steps = [
        [f"ms a step: {label}", f"{rows[0]['methods'][name]['bytes'] / 1e6:.3f}"]
        + [f"{1e3 * row['methods'][name]['whole']:.0f}" for row in rows]
        for name, label in LABELS.items()
    ]
    whole = [
        [f"s: {LABELS[name]}", None, *(f"{seconds(record, row, name):.0f}" for row in rows)] for name in (RIVAL, OURS)
    ]
    gains = ["whole runs at equal held-out loss", None, *(f"{gain(record, row):.2f}x" for row in rows)]
    told = record["runs"]["methods"]
    tried = [
        [LABELS[name], *(_loss(loss) for _, loss in told[name]["tuning"]), _lengths(told[name])]
        for name in MUONS.trained
    ]
    head = [f"held-out loss after {record['runs']['steps']} steps", *(f"lr {lr:g}" for lr in record["runs"]["grid"])]
    shares = instead(record, adams)
    last = (
        f"1-bit Muon has Muon's loss after {length(record):.3f} of its steps. Muon has AdamW's loss after "
        f"{shares[RIVAL]:.3f} of AdamW's steps, and 1-bit Muon 1-bit Adam's after {shares[OURS]:.3f} of those.\n"
    )
    parts = [
        markdown([["goal", "at least", "found", ""], *met]),
        markdown([["", "MB sent", *rates], *steps, *whole, gains]),
        markdown([[*head, "runs of other lengths"], *tried]),
    ]
    return "\n".join([*parts, last])


def _loss(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.4f}"


def _lengths(told: Mapping[str, Any]) -> str:
    others = sorted((run["length"], run["loss"]) for run in told["lengths"] if run["length"] != 1)
    return ", ".join(f"x{at:g}: {_loss(loss)}" for at, loss in others)


def quick() -> tuple[Plan, Sequence[float]]:
    """Return a small plan, and the rates that goals name."""
    return replace(QUICKLY, grid=(1e-2, 2e-2)), tuple(WANTED)
