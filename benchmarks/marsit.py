"""Marsit's tables and figures on our tasks, from recorded runs and measured times, for ``docs/tables/marsit.md``.

``python -m benchmarks.marsit`` prints and draws what ``benchmarks/results/marsit`` has: ``runs.jsonl``, made by the lab
of commit 5b66f63, whose networks were larger and whose metric the accuracy; ``signs.json`` and ``times.json``.
``--measure`` makes the last two anew (minutes); with root's rights over hosts with 100 Mbit/s between them, else over
the loopback interface.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from torch import Tensor

from fusedonebit.apps.pictures import PARTS, lighter, method_colour, plt, save
from fusedonebit.apps.train.baseline_reducers import Cascading, ErrorFeedback, MajorityVote, StochasticSign
from fusedonebit.comm import MarsitAllReduce, SimulatedGroup, Transport
from fusedonebit.comm.rounds import RoundAllReduce

from . import network, pages
from .lab.run import Key, Training, Worker
from .lab.tasks import TASKS as LAB_TASKS
from .pages import DOCS, TABLES, keep, markdown, read, write_tables

RESULTS = pages.RESULTS / "marsit"
PAGE, PICTURE = TABLES / "marsit.md", DOCS / "marsit.png"
MEGABITS, HOSTS = 100.0, 4
SHADES = ("#222222", "#8a8a8a", "#c4c4c4")
"""Of tasks: colours are for methods."""
WORKERS = 8

METHODS = {
    "psgd": "PSGD",
    "signsgd": "signSGD, majority vote",
    "ef-signsgd": "EF-signSGD",
    "ssdm": "SSDM",
    "marsit-100": "Marsit-100",
    "marsit": "Marsit",
}
"""Table 2's, by the lab's names."""
TABLE_1 = {"no compression": "psgd", "cascading compression": "cascading"}
TABLE_1 |= {f"cascading, lr / {by}": f"cascading-lr/{by}" for by in (10, 100, 1000, 10000)}
EVERY = {"psgd": "1", "marsit-50": "50", "marsit-100": "100", "marsit-200": "200", "marsit": "∞"}
"""Figure 3's K."""
Record = Mapping[str, Any]
Table = Iterator[Sequence[Any]]


SIGN_WORKERS, SIGN_EVERY = 3, 10
"""Figure 1b's workers; and updates of which one is looked at."""

SIGN_PEERS: dict[str, Callable[..., RoundAllReduce]] = {
    "majority vote": MajorityVote,
    "EF-signSGD": ErrorFeedback,
    "Marsit": lambda *where: MarsitAllReduce(*where, full_precision_every=0),
    "SSDM": StochasticSign,
    "cascading": Cascading,
}


class Task(NamedTuple):
    """Describes a task of the recorded runs."""

    metric: str
    higher: bool
    elements: int


TASKS = {
    "vgg": Task("accuracy, %", True, 99_178),
    "resnet": Task("accuracy, %", True, 37_802),
    "mlp": Task("accuracy, %", True, 8_970),
    "masked": Task("nats per hidden byte", False, 118_528),
}
"""As the runs were made on; parameters of each model."""


def records() -> list[dict[str, Any]]:
    """The recorded runs."""
    return [json.loads(line) for line in (RESULTS / "runs.jsonl").read_text().splitlines()]


def of(runs: Iterable[Record], task: str, optimizer: str, workers: int = WORKERS) -> list[Record]:
    """One optimizer's runs of one task, by seed."""
    found = [r for r in runs if (r["task"], r["optimizer"], r["workers"]) == (task, optimizer, workers)]
    return sorted(found, key=lambda r: r["seed"])


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def cell(runs: Sequence[Record]) -> str:
    """The metric over the seeds; or after how many steps the loss was no number any more."""
    fine = [r["metric"] for r in runs if r["metric"] is not None]
    if not runs:
        return ""
    if not fine:
        ends = sorted({r["steps"] for r in runs})
        return f"diverged after {ends[0]}{f' to {ends[-1]}' if len(ends) > 1 else ''} steps"
    mean, spread = mean_and_spread(fine)
    told = f"{mean:.2f} ± {spread:.2f}" if len(fine) > 1 else f"{mean:.2f} (one seed)"
    return told + (f", diverged {len(runs) - len(fine)}" if len(fine) < len(runs) else "")


def bits(runs: Sequence[Record]) -> float:
    """Bits per element and hop: a whole run's, over what one bit on each of a ring's hops would have been."""
    r = runs[0]
    hops = 2 * (r["workers"] - 1) / r["workers"]
    return 8 * r["bytes"] / (r["steps"] * hops * TASKS[r["task"]].elements)


def table_1(runs: Sequence[Record]) -> Table:
    """Cascading compression against none, 3 and 8 workers."""
    tasks = [t for t in TASKS if of(runs, t, "cascading")]
    yield "table 1", *tasks
    for name, optimizer in TABLE_1.items():
        for workers in (3, WORKERS):
            cells = [cell(of(runs, task, optimizer, workers)) for task in tasks]
            if any(cells):
                yield f"{name}, M = {workers}", *cells


def table_2(runs: Sequence[Record]) -> Table:
    """All methods on all tasks, and what they send."""
    tasks = [t for t in TASKS if of(runs, t, "psgd")]
    heads = [f"{t}: {TASKS[t].metric} ({'higher' if TASKS[t].higher else 'lower'})" for t in tasks]
    yield f"table 2, M = {WORKERS}", *heads, "bits per element and hop (vgg)", "Elias-coded, times (mlp)"
    for optimizer, name in METHODS.items():
        coded = of(runs, "mlp", f"{optimizer}-elias")
        elias = f"{bits(coded) / bits(of(runs, 'mlp', optimizer)):.2f}" if coded else None
        cells = (cell(of(runs, task, optimizer)) for task in tasks)
        yield name, *cells, f"{bits(of(runs, 'vgg', optimizer)):.2f}", elias


def table_3(runs: Sequence[Record], times: Sequence[Record]) -> Table:
    """Figure 3's table: what K costs and brings; times are figure 5's, for as many rounds as a run has."""
    tasks = [t for t in TASKS if of(runs, t, "marsit-200")]
    yield "K", *tasks, "bits per element and hop (vgg)", "500 rounds at figure 5's times, s"
    for optimizer, every in EVERY.items():
        cells = (cell(of(runs, task, optimizer)) for task in tasks)
        sent, seconds = bits(of(runs, "vgg", optimizer)), 500 * time_of_a_round(times, every)
        yield every, *cells, f"{sent:.2f}", f"{seconds:.0f}"


def time_of_a_round(times: Sequence[Record], every: str) -> float:
    """Seconds on a ring, one round of K being one of PSGD's."""

    def whole(method: str) -> float:
        (found,) = (t for t in times if (t["method"], t["topology"]) == (method, "ring"))
        return found["compute"] + found["compress"] + found["communicate"]

    share = 0.0 if every == "∞" else 1 / int(every)
    return share * whole("psgd") + (1 - share) * whole("marsit")


def measured_on(times: Sequence[Record]) -> str:
    """The network between the hosts."""
    return f"{times[0]['megabits']:g} Mbit/s" if times[0]["megabits"] else "loopback"


def table_5(times: Sequence[Record]) -> Table:
    """Figure 5's times."""
    head = f"M = {times[0]['workers']}, {times[0]['elements']:,} parameters, {measured_on(times)}"
    yield f"figure 5: {head}", "compute, ms", "compress, ms", "communicate, ms", "bits per element and hop"
    for t in times:
        hops = 2 * (t["workers"] - 1) / t["workers"]
        parts = (f"{1e3 * t[part]:.1f}" for part in PARTS)
        yield f"{t['topology']}: {t['method']}", *parts, f"{8 * t['bytes'] / (hops * t['elements']):.2f}"


def table_signs(signs: Mapping[str, Mapping[str, float]]) -> Table:
    """Figure 1b's percentages."""
    yield f"figure 1b, M = {SIGN_WORKERS}: % of signs right", *signs
    for method in next(iter(signs.values())):
        yield method, *(f"{found[method]:.1f}" for found in signs.values())


def tables(runs: Sequence[Record], signs: Mapping[str, Mapping[str, float]], times: Sequence[Record]) -> str:
    """Return all of them."""
    every = (table_1(runs), table_2(runs), table_signs(signs), table_3(runs, times), table_5(times))
    return "\n".join(map(markdown, every))


# ---------------------------------------------------------------- what is measured


def matching(task: str, steps: int) -> dict[str, float]:
    """Percent of the coordinates, over a run of PSGD on ``SIGN_WORKERS`` workers; every tenth update is looked at."""
    group = SimulatedGroup(SIGN_WORKERS)
    training = Training(Key(task, "psgd", 0, SIGN_WORKERS, LAB_TASKS[task].lr / 10), group)

    def rank(number: int, transport: Transport) -> dict[str, float]:
        worker = Worker(training, number, transport)
        group.meet("start of a run")
        return _watch(worker, steps)

    return group.run(rank)[0]


def _watch(worker: Worker, steps: int) -> dict[str, float]:
    (optimizer,) = worker.optimizers
    rights = {name: [0, 0] for name in SIGN_PEERS}
    made = {name: make(optimizer.frame.layout, worker.transport) for name, make in SIGN_PEERS.items()}  # type: ignore[attr-defined]
    for step in range(steps):
        worker.step(step)
        if step % SIGN_EVERY == 0:
            updates = [optimizer.momentum(p) for p in optimizer.param_groups[0]["params"]]  # type: ignore[attr-defined]
            true = _sum(updates, worker.transport)
            for name, reduce in made.items():
                right, counted = _agreement(reduce, updates, true)
                rights[name][0] += right
                rights[name][1] += counted
    return {name: 100 * right / counted for name, (right, counted) in rights.items()}


def _sum(updates: list[Tensor], transport: Transport) -> list[Tensor]:
    total = [u.clone() for u in updates]
    for u in total:
        transport.all_reduce(u)
    return total


def _agreement(reduce: RoundAllReduce, updates: list[Tensor], true: list[Tensor]) -> tuple[int, int]:
    """How many coordinates that are not zero have the right sign, and how many there are; nothing is kept."""
    result = reduce(updates, 1.0)
    reduce.compensation.whole.zero_()
    reduce.compensation.formed()
    right = counted = 0
    for i, want in enumerate(true):
        at = reduce.layout.offset(i)
        found = result[at : at + want.numel()].view_as(want)
        right += int(((found >= 0) == (want > 0))[want != 0].sum())
        counted += int((want != 0).sum())
    return right, counted


def measure() -> None:
    """Makes ``signs.json`` and ``times.json`` anew."""
    keep({task: matching(task, 200) for task in ("mlp", "resnet", "vgg")}, RESULTS / "signs.json")
    megabits = MEGABITS if network.can_limit() else None
    times = []
    for topology in ("ring", "torus"):
        print(f"measuring rounds on a {topology} of {HOSTS} hosts ...", flush=True)
        printed = network.run_module("benchmarks.round_times", HOSTS, megabits, [topology])
        times += [json.loads(line) | {"megabits": megabits} for line in printed.splitlines()]
    keep(times, RESULTS / "times.json")


def draw(runs: Sequence[Record], signs: Mapping[str, Any], times: Sequence[Record], path: Path) -> None:
    """The page: table 2 and figures 1b, 3 and 5."""
    figure, axes = plt.subplots(4, 1, figsize=(6.4, 15), layout="constrained")
    _draw_accuracies(axes[0], runs)
    _draw_signs(axes[1], signs)
    _draw_every(axes[2], runs)
    _draw_times(axes[3], times)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, axis="x" if axis is axes[3] else "y")
        axis.set_axisbelow(True)
    save(figure, path, dpi=120)


def _draw_accuracies(axis: Axes, runs: Sequence[Record]) -> None:
    tasks = [t for t in TASKS if of(runs, t, "psgd") and TASKS[t].higher]
    width = 0.8 / len(METHODS)
    for i, (optimizer, name) in enumerate(METHODS.items()):
        values = [mean_and_spread([r["metric"] for r in of(runs, task, optimizer)]) for task in tasks]
        places = [k - 0.4 + width * (i + 0.5) for k in range(len(tasks))]
        errors = [spread for _, spread in values]
        means, thin = [mean for mean, _ in values], {"linewidth": 0.8}
        colour = lighter(method_colour(optimizer), 0.45 * (optimizer == "marsit-100"))
        axis.bar(places, means, width * 0.9, yerr=errors, label=name, color=colour, error_kw=thin)
    axis.set(xticks=range(len(tasks)), xticklabels=tasks, ylim=(65, 100.5), ylabel="held-out accuracy, %")
    axis.set_title(f"Table 2: {WORKERS} workers, three seeds", fontsize=10)
    axis.legend(frameon=False, fontsize=9, ncol=3, loc="upper center", bbox_to_anchor=(0.5, -0.06))


def _draw_signs(axis: Axes, signs: Mapping[str, Mapping[str, float]]) -> None:
    width = 0.8 / len(signs)
    for i, (task, found) in enumerate(signs.items()):
        places = [k - 0.4 + width * (i + 0.5) for k in range(len(found))]
        axis.bar(places, list(found.values()), width * 0.9, label=task, color=SHADES[i])
    methods = list(next(iter(signs.values())))
    axis.axhline(50, color="black", linestyle="--", linewidth=0.8)
    axis.annotate("a coin", (len(methods) - 0.55, 50.5), fontsize=8, ha="right")
    axis.set(xticks=range(len(methods)), ylim=(40, 100), ylabel="% of signs as without compression")
    axis.set_xticks(range(len(methods)), methods, fontsize=8)
    axis.set_title(f"Figure 1b: {SIGN_WORKERS} workers", fontsize=10)
    axis.legend(frameon=False, fontsize=8)


def _draw_every(axis: Axes, runs: Sequence[Record]) -> None:
    tasks = [t for t in TASKS if of(runs, t, "marsit-200")]
    for shift, task in enumerate(tasks):
        values = [mean_and_spread([r["metric"] for r in of(runs, task, optimizer)]) for optimizer in EVERY]
        places = [k + 0.12 * (shift - 0.5) for k in range(len(EVERY))]
        means, spreads = zip(*values, strict=True)
        axis.errorbar(places, means, spreads, fmt="o", capsize=3, label=task, color=SHADES[shift])
    labels = [f"K = {k}\n{bits(of(runs, 'vgg', optimizer)):.2f} bits" for optimizer, k in EVERY.items()]
    axis.set_xticks(range(len(EVERY)), labels, fontsize=8)
    axis.set(ylabel="held-out accuracy, %")
    axis.set_title("Figure 3: one round of K in full precision", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _draw_times(axis: Axes, times: Sequence[Record]) -> None:
    shown = [t for t in times if "Elias" not in t["method"]][::-1]
    left = [0.0] * len(shown)
    labels = [f"{t['topology']}: {t['method']}" for t in shown]
    for part, colour in PARTS.items():
        widths = [1e3 * t[part] for t in shown]
        axis.barh(labels, widths, left=left, color=colour, label=part, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_xlabel("ms per round")
    axis.tick_params(axis="y", labelsize=8)
    told = f"{times[0]['workers']} CPU hosts, {measured_on(times)}, {times[0]['elements'] / 1e6:.1f}M parameters"
    axis.set_title(f"Figure 5: {told}", fontsize=10)
    axis.legend(frameon=False, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description="Marsit's tables and figures on our tasks.")
    parser.add_argument("--measure", action="store_true", help="measure signs and times anew")
    if parser.parse_args().measure:
        measure()
    runs, signs, times = records(), *(read(RESULTS / f"{name}.json") for name in ("signs", "times"))
    text = tables(runs, signs, times)
    print(text)
    write_tables(PAGE, text)
    draw(runs, signs, times, PICTURE)
    print(f"wrote docs/tables/{PAGE.name} and docs/{PICTURE.name}")


if __name__ == "__main__":
    main()
