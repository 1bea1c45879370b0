"""Makes a plan's text: the verdict and a table of the best methods; by request all, and on other numbers of GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..units import bandwidth, digits, duration, size
from .report import BASELINE, LEAST_SPEEDUP, SLOWEST, Plan, Step

MORE = (
    "Bytes and seconds alone, and at best: docs/performance.md#planner says what is assumed, docs/choose.md what each "
    "costs in quality. --all prints every method, also on other numbers of GPUs; --out DIR draws a picture"
)
ZERO_ONE = (
    "ZeroOneAdam in rounds of one step sends what 1-bit, flat does; for rounds of two steps write "
    "ZeroOneAdam(..., sync_policy=fusedonebit.policies.FixedRounds(2))"
)


def text_of(plan: Plan, everything: bool = False) -> str:
    """Return the answer, and below it the best method of each family; or ``everything``."""
    told = [*advice(plan), "", _asked(plan)]
    if plan.gpus > 1:
        told += _methods(plan, list(plan.steps()) if everything else plan.best_of_each())
        told += [ZERO_ONE, "", *_by_gpus(plan)] if everything else [MORE]
    return "\n".join(told)


def advice(plan: Plan) -> list[str]:
    """Return the answer in a few lines, the verdict first."""
    if plan.gpus == 1:
        return ["Don't compress: one GPU sends nothing"]
    best, rate, rival = plan.best(), plan.pays_below(), plan.best(["rival"])
    baseline, ours = _named(plan, BASELINE), _named(plan, best)
    if plan.compute is None and (until := plan.pays_until()):
        lines = [
            f"Compress where a step computes for less than {duration(until)} (--step-ms tells): there {ours} pays. "
            f"Where it computes for more, {baseline} is as fast within {LEAST_SPEEDUP - 1:.0%}"
        ]
    elif plan.pays:
        lines = [f"Compress: {_told(plan, best)}"]
    else:
        slower = f"the fastest of ours, {ours}, is {plan.speedup():.2f} times as fast"
        lines = [f"Don't compress: {baseline} takes {_seconds(plan, BASELINE)}, and {slower}"]
    if plan.compute is not None and not rate:
        lines.append(f"It would pay at no rate above {bandwidth(SLOWEST)}: what is left are hops, not bytes")
    elif plan.compute is not None and not math.isinf(rate):
        turns = "stops paying above" if plan.pays else "would pay below"
        lines.append(f"It {turns} {bandwidth(rate)} a {plan.sender}")
    if plan.speedup(rival) >= LEAST_SPEEDUP * max(1.0, plan.speedup()):
        lines.append(f"Faster than all of ours: {_told(plan, rival)}")
    return lines


def _named(plan: Plan, name: str) -> str:
    return f"{plan.methods[name].label} ({plan.methods[name].write})"


def _told(plan: Plan, name: str) -> str:
    times = f"{plan.speedup(name):.3g} times as fast as {plan.methods[BASELINE].label}"
    return f"{_named(plan, name)}, {_seconds(plan, name)}, {times}"


def _seconds(plan: Plan, name: str) -> str:
    return f"{duration(plan.steps()[name].seconds)} {'a step' if plan.compute is not None else 'for messages'}"


def _asked(plan: Plan) -> str:
    net = plan.network
    gpus = "one GPU" if plan.gpus == 1 else f"{plan.gpus:,} GPUs, {net.gpus_per_node} a node"
    words = [f"{plan.parameters:,} parameters on {gpus}"]
    if plan.gpus > net.gpus_per_node:
        words.append(f"a node sends {bandwidth(net.between)}, its {net.gpus_per_node} GPUs together")
    words.append(f"a GPU sends {bandwidth(net.inside)} within its node")
    if plan.compute is not None:
        words.append(f"a step computes for {duration(plan.compute)}")
    return "; ".join(words)


def _methods(plan: Plan, names: Sequence[str]) -> Iterator[str]:
    known, steps = plan.compute is not None, plan.steps()
    rows = [[f"per {plan.sender} and step", "sends", "messages", *["exposed", "step"] * known, "vs bf16", "write"]]
    for name in names:
        method, of = plan.methods[name], steps[name]
        times = [of.messages, *[of.exposed, of.seconds] * known]
        rows.append([method.label, size(of.sent), *map(duration, times), f"{plan.speedup(name):.3g}x", method.write])
    return _aligned(rows, "<" + ">" * (len(rows[0]) - 2) + "<")


def _by_gpus(plan: Plan) -> Iterator[str]:
    """Yield what each method takes on as many numbers of GPUs as 80 letters hold; the fastest is marked."""
    counts = plan.scale()
    at = {n: plan.steps(n) for n in sorted({*counts[:: -(-len(counts) // 4)], plan.gpus, counts[-1]})}
    rows = [["ms, * fastest" if plan.compute is not None else "ms of messages", *(f"{n:,} " for n in at)]]
    for name in plan.steps():
        rows.append([plan.methods[name].label, *(_marked(steps, name) for steps in at.values())])
    return _aligned(rows, "<" + ">" * len(at))


def _marked(steps: Mapping[str, Step], name: str) -> str:
    if name not in steps:
        return "- "
    fastest = steps[name].seconds == min(of.seconds for of in steps.values())
    return digits(1e3 * steps[name].seconds) + ("*" if fastest else " ")


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Yield rows with columns aligned left or right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
        yield " ".join(cells).rstrip()
