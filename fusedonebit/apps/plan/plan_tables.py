"""Prints a plan: the verdict, a table by method, and one by number of GPUs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from .costs import transformer_width
from .report import BASELINE, Plan
from .units import bandwidth, digits, duration, size

CAVEAT = (
    "Overlap is the best case: it needs SMs or copy engines that are free, computing slows down beside it, and buckets "
    "must fill in the order in which they are sent; the backward pass is taken for 2/3 of the compute (--no-overlap)"
)
ZERO_ONE = (
    "ZeroOneAdam in rounds of one step, its default, sends what 1-bit, flat does; for rounds of two steps write "
    "ZeroOneAdam(..., sync_policy=fusedonebit.policies.FixedRounds(2))"
)
QUALITY = (
    "Bytes and seconds, no more: kernels, warm-ups and renewals of a shared variance (two bytes a parameter in every "
    "50th step) are left out; what each method costs in quality says docs/choose.md"
)


MORE = "--all prints every method, also on other numbers of GPUs; --out DIR draws them"


def methods_table(plan: Plan, names: Collection[str]) -> Table:
    """Return some methods for the configuration asked about; the best of ours is marked."""
    known = plan.compute is not None
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("a step", no_wrap=True)
    numbers = [f"{plan.sender} sends", "messages", *(["exposed", "step"] if known else [])]
    for heading in (*numbers, "vs bf16"):
        table.add_column(heading, justify="right", max_width=8)
    table.add_column("write")
    steps, best = plan.steps(), plan.best()
    for name, method in plan.methods.items():
        if name not in names:
            continue
        of = steps[name]
        cells = [size(of.sent), duration(of.messages)]
        if known:
            cells += [duration(of.exposed), duration(of.seconds)]
        style = "bold green" if name == best and plan.pays else "bold" if name == BASELINE else None
        table.add_row(method.label, *cells, f"{plan.speedup(name):.3g}x", method.write, style=style)
    return table


def scale_table(plan: Plan, columns: Sequence[int]) -> Table:
    """Every method for several numbers of GPUs; the fastest is marked."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("ms", no_wrap=True)
    for gpus in columns:
        table.add_column(f"{gpus:,} ", justify="right")
    at = [plan.steps(gpus) for gpus in columns]
    for name, method in plan.methods.items():
        cells = []
        for steps in at:
            fastest = min(steps, key=lambda other: steps[other].seconds)
            mark = "*" if name == fastest else " "
            cells.append(digits(1e3 * steps[name].seconds) + mark if name in steps else "")
        if any(cells):
            table.add_row(method.label, *cells)
    return table


def show(plan: Plan, console: Console, everything: bool = False) -> None:
    """Print the answer, and below it the best method of each family; or ``everything``."""
    for line in plan.advice():
        console.print(line, soft_wrap=True)
    console.print(f"\n{_asked(plan)}", soft_wrap=True)
    if plan.gpus == 1:
        return
    shown = plan.steps().keys() if everything else plan.best_of_each()
    console.print(methods_table(plan, shown))
    if plan.overlap and plan.compute is not None:
        console.print(CAVEAT, soft_wrap=True)
    if any(name.startswith("powersgd") for name in shown):
        width = transformer_width(plan.parameters)
        console.print(
            f"PowerSGD's bytes are those of a transformer's matrices of {width:,.0f} x {width:,.0f}", soft_wrap=True
        )
    console.print(ZERO_ONE, QUALITY, sep="\n", soft_wrap=True)
    if not everything:
        console.print(MORE, soft_wrap=True)
        return
    counts = plan.scale()
    columns = sorted({*counts[:: -(-len(counts) // 4)], plan.gpus, counts[-1]})  # as many as 80 letters hold
    what = "A step" if plan.compute is not None else "A step's messages"
    console.print(f"\n{what} by number of GPUs; * the fastest", scale_table(plan, columns), sep="\n")


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
