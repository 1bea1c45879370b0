"""The planner against published times: ``python -m benchmarks.planner`` writes docs/tables/planner.md and a picture.

Nothing is measured here: what was measured is in ``planner_readings``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from fusedonebit.apps.pictures import clear, plt, save
from fusedonebit.apps.plan import METHODS, Network
from fusedonebit.apps.plan.collectives import all_reduce, all_to_all
from fusedonebit.apps.plan.plan_plot import draw
from fusedonebit.apps.plan.report import Plan
from fusedonebit.apps.units import duration

from .pages import DOCS, TABLES, markdown, write_tables
from .planner_fit import (
    CLUSTERS,
    SPLITS,
    Prediction,
    each_held_out,
    fit,
    held_out,
    ring_share,
    summarise,
    unfitted,
)
from .planner_readings import (
    ALL_REDUCE_256,
    ALL_TO_ALL_64_H800,
    ALL_TO_ALL_128,
    BERT_LARGE,
    COMPUTE_256_ETHERNET,
    ETHERNET,
    SPEEDUP_256_ETHERNET,
    TABLE_2,
    V100_64,
)

PAGE, PICTURE = TABLES / "planner.md", DOCS / "planner.png"
COLOURS = {"Ethernet": "#d1495b", "InfiniBand": "#2e6f95"}


Table = Iterator[Sequence[Any]]


def constants_table() -> Table:
    """What was fitted, to which rows."""
    yield "cluster", "fitted on", "1/h, GB/s of gradient", "Bn, Gbit/s", "Bn as the paper states it"
    for cluster in CLUSTERS:
        rows = [r for r in TABLE_2 if r.cluster is cluster]
        for name, fitted in (*SPLITS.items(), ("all its rows", lambda nodes: True)):
            found = fit([r for r in rows if fitted(r.nodes)])
            constants = f"{1e-9 / found.handling:.2f}", f"{8e-9 * found.network.between:.2f}"
            yield cluster.name, name, *constants, f"{8e-9 * cluster.stated:.3g}"


def errors_table() -> Table:
    """Every row of table 2, as predicted by fits that did not see it."""
    columns = {f"fitted on {name}": held_out(fitted) for name, fitted in SPLITS.items()}
    columns["fitted on all other node counts"] = each_held_out()
    yield "cluster, nodes, batch", "measured, ms", *columns
    for r in TABLE_2:
        found = (next((p for p in predictions if p.reading == r), None) for predictions in columns.values())
        cells = (f"{p.milliseconds:.0f} ({p.error:+.1%})" if p else "(fitted)" for p in found)
        yield f"{r.cluster.name}, {r.nodes}, {r.batch}", f"{r.milliseconds:g}", *cells


def summary_table() -> Table:
    """Median and largest errors of all splits, and of models that are worse."""
    found: dict[str, Sequence[Prediction]] = {
        f"fitted on {name}, the others predicted": held_out(fitted) for name, fitted in SPLITS.items()
    }
    found["each node count predicted from all others"] = each_held_out()
    found |= {
        f"ring only (no tree), fitted on {name}": held_out(fitted, share=ring_share) for name, fitted in SPLITS.items()
    }
    found["nothing fitted: stated bandwidths, h = 0"] = unfitted()
    yield "absolute errors", "rows", "median over rows", "median over node counts", "largest"
    for name, predictions in found.items():
        yield name, len(predictions), *(f"{value:.1%}" for value in summarise(predictions))


def bandwidth_of(seconds: float, nbytes: int, gpus: int, per_node: int) -> float:
    """The network's bandwidth with which ``all_reduce`` takes as long as was read; by bisection."""
    low, high = 1e6, 1e13
    for _ in range(80):
        middle = (low * high) ** 0.5
        slow = all_reduce(nbytes, gpus, Network(middle, gpus_per_node=per_node)).seconds > seconds
        low, high = (middle, high) if slow else (low, middle)
    return low


def others_table() -> Table:
    """Other published readings: an order of magnitude, as their machines are not known well."""
    yield "reading", "read", "model", "what the model was told"
    fast = Network(400e9, gpus_per_node=16)
    for nbytes, seconds in ALL_TO_ALL_128:
        told = "ap is this reading / 127" if nbytes == 512 else "the same ap"
        predicted = all_to_all(nbytes, 128, fast).seconds
        yield f"all-to-all, 128 GPUs, {nbytes} B", duration(seconds), duration(predicted), told
    nbytes, (least, most) = ALL_TO_ALL_64_H800
    predicted, read = all_to_all(nbytes, 64, Network(400e9, gpus_per_node=8)).seconds, f"{duration(least)} to "
    told = "assumed: 8 cards of 400 Gbit/s a node"
    yield "all-to-all, 64 H800, 8 MiB", read + duration(most), duration(predicted), told
    largest, seconds = ALL_REDUCE_256[0]
    between = bandwidth_of(seconds, largest, 256, 16)
    for nbytes, seconds in ALL_REDUCE_256:
        told = f"Bn from this reading: {between / 1e9:.0f} GB/s" if nbytes == largest else "the same Bn"
        predicted = all_reduce(nbytes, 256, Network(between, gpus_per_node=16)).seconds
        yield f"all-reduce, 256 GPUs, {nbytes >> 20} MiB", duration(seconds), duration(predicted), told
    nbytes, reduced, exchanged = V100_64
    v100 = Network(bandwidth_of(reduced, nbytes, 64, 8), gpus_per_node=8)
    told = f"Bn from its all-reduce of 122 ms: {v100.between / 1e9:.2g} GB/s"
    predicted = all_to_all(nbytes, 64, v100).seconds
    yield "all-to-all, 64 V100, 256 MiB", duration(exchanged), duration(predicted), told
    ethernet = fit([r for r in TABLE_2 if r.cluster is ETHERNET])
    uncompressed = TABLE_2[0].milliseconds + COMPUTE_256_ETHERNET
    inferred = 1e-3 * (uncompressed / SPEEDUP_256_ETHERNET - COMPUTE_256_ETHERNET)
    predicted = METHODS["flat"].cost(BERT_LARGE, 256, ethernet.network).seconds
    told = 'Bn from table 2; read is inferred from "up to 4.5x", compute as in table 2'
    what = "1-bit LAMB's messages, 256 GPUs, Ethernet"
    yield what, f"about {duration(inferred)}", duration(predicted), told


def tables() -> str:
    """Return all of them."""
    every = {summary_table: (0,), errors_table: (0,), constants_table: (0, 1), others_table: (0, 3)}
    return "\n".join(markdown(table(), left) for table, left in every.items())


def draw_page(path: Path) -> None:
    """Above: table 2 and what fits say that did not see it. Below: a plan for its Ethernet cluster."""
    figure, axes = plt.subplots(2, 1, figsize=(6.4, 8.6), layout="constrained")
    _draw_errors(axes[0])
    draw(axes[1], Plan(BERT_LARGE, 256, Network(ETHERNET.stated, 10e9, 4), 1e-3 * COMPUTE_256_ETHERNET))
    save(figure, path, dpi=140)


def _draw_errors(axis: Axes) -> None:
    fitted = SPLITS["1, 4 and 16 nodes"]
    for cluster in CLUSTERS:
        rows = [r for r in TABLE_2 if r.cluster is cluster]
        colour, model = COLOURS[cluster.name], fit([r for r in rows if fitted(r.nodes)])
        curve = {r.nodes: model.milliseconds(r) for r in rows}
        axis.plot(list(curve), list(curve.values()), color=colour, linewidth=1.5)
        for seen, face in ((True, colour), (False, "white")):
            shown = [r for r in rows if fitted(r.nodes) is seen]
            how = {"markerfacecolor": face, "color": colour, "markersize": 7}
            axis.plot([r.nodes for r in shown], [r.milliseconds for r in shown], "o", **how)
        place, below = (max(curve), curve[max(curve)]), cluster.name == "InfiniBand"  # where no points are
        told = f"{cluster.name}, {cluster.gpus_per_node} GPUs a node"
        axis.annotate(
            told, place, (0, -26 if below else 14), textcoords="offset points", color=colour, ha="right", fontsize=9
        )
    axis.plot([], [], "o", color="grey", label="measured, fitted to (1, 4, 16 nodes)")
    axis.plot([], [], "o", color="grey", markerfacecolor="white", label="measured, held out")
    axis.plot([], [], color="grey", label="model")
    axis.set(xscale="log", yscale="log", xlabel="nodes", ylabel="ms, all-reduce of BERT-Large's float16 gradients")
    nodes = sorted({r.nodes for r in TABLE_2})
    axis.set_xticks(nodes, [str(n) for n in nodes])
    axis.set_yticks([200, 500, 1000, 2000, 5000], ["200", "500", "1,000", "2,000", "5,000"])
    axis.minorticks_off()
    axis.set_ylim(140, 6000)
    clear([axis])
    axis.legend(frameon=False, fontsize=9, loc="center right", bbox_to_anchor=(1, 0.42))
    axis.set_title("1-bit LAMB's table 2, and the model", fontsize=10, loc="left")


def main() -> None:
    print(tables())
    write_tables(PAGE, tables())
    draw_page(PICTURE)
    print(f"wrote docs/tables/{PAGE.name} and docs/{PICTURE.name}")


if __name__ == "__main__":
    main()
