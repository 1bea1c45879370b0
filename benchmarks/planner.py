"""The planner against published times: ``python -m benchmarks.planner`` writes docs/tables/planner.md and a picture.

Nothing is measured here. Two numbers for each cluster are fitted: h, seconds per byte of gradient that every GPU spends
besides the network (NVLink or PCIe, copies into buckets and out), and Bn, bytes per second of a node's network:

    t = h * bytes + share * bytes / Bn + latency

where share, what the busiest node sends, and the latency are those of ``collectives.all_reduce``, and not fitted. So t
is linear in h and 1/Bn: least squares of relative errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from fusedonebit.apps.pictures import clear, plt, save
from fusedonebit.apps.plan import METHODS, Network
from fusedonebit.apps.plan.collectives import TREE_BANDWIDTH, all_reduce, all_to_all, tree_share
from fusedonebit.apps.plan.plan_plot import draw
from fusedonebit.apps.plan.report import Plan
from fusedonebit.apps.units import duration

from .pages import DOCS, TABLES, markdown, write_tables

PAGE, PICTURE = TABLES / "planner.md", DOCS / "planner.png"
COLOURS = {"Ethernet": "#d1495b", "InfiniBand": "#2e6f95"}


# ---------------------------------------------------------------- published times


BERT_LARGE = 340_000_000
"""Parameters (1-bit LAMB, section 6.1.1)."""
GRADIENT_BYTES = 2 * BERT_LARGE
"""Trained in float16 (section 6.3)."""


class Cluster(NamedTuple):
    """A cluster of section 3.2; ``stated``: its network's bandwidth as printed there, bytes per second and node."""

    name: str
    gpus_per_node: int
    stated: float


ETHERNET = Cluster("Ethernet", 4, 4.1e9 / 8)  # "4.1 Gbps effective bandwidth based on iperf benchmark"
INFINIBAND = Cluster("InfiniBand", 8, 100e9 / 8)  # "close to theoretical peak effective bandwidth"


class Reading(NamedTuple):
    """A row of table 2: nodes, and milliseconds of "Backward allreduce"."""

    cluster: Cluster
    nodes: int
    batch: str
    milliseconds: float

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.cluster.gpus_per_node


# Conglong Li, Ammar Ahmad Awan, Hanlin Tang, Samyam Rajbhandari, Yuxiong He: 1-bit LAMB: Communication Efficient
# Large-Scale Large-Batch Training with LAMB's Convergence Speed, 2021, arXiv:2104.06069, table 2: BERT-Large
# pre-training, sequence length 128. All of its rows.
TABLE_2 = (
    Reading(ETHERNET, 64, "8K", 3579),
    Reading(ETHERNET, 64, "16K", 3533),
    Reading(ETHERNET, 64, "32K", 3599),
    Reading(ETHERNET, 64, "64K", 3674),
    Reading(ETHERNET, 32, "8K", 3759),
    Reading(ETHERNET, 16, "8K", 3433),
    Reading(ETHERNET, 8, "8K", 3528),
    Reading(ETHERNET, 4, "8K", 3436),
    Reading(ETHERNET, 2, "8K", 2087),
    Reading(ETHERNET, 1, "8K", 234),
    Reading(INFINIBAND, 16, "8K", 335),
    Reading(INFINIBAND, 16, "16K", 346),
    Reading(INFINIBAND, 16, "32K", 377),
    Reading(INFINIBAND, 16, "64K", 422),
    Reading(INFINIBAND, 8, "8K", 332),
    Reading(INFINIBAND, 4, "8K", 339),
    Reading(INFINIBAND, 2, "8K", 270),
    Reading(INFINIBAND, 1, "8K", 167),
)

COMPUTE_256_ETHERNET = 55 + 117 + 191
"""Milliseconds of table 2's first row that are no all-reduce: forward, the rest of backward, step."""
SPEEDUP_256_ETHERNET = 4.5
"""Section 6.3 and figure 5(a): the compression stage is "up to 4.5x" faster, read as that row's."""

MIB = 2**20
ALL_TO_ALL_128 = ((512, 323.9e-6), (1024, 350.7e-6))
"""Bytes and seconds of an all-to-all of 128 GPUs, 16 a node (nccl-tests issue 78)."""
ALL_TO_ALL_64_H800 = (8 * MIB, (296e-6, 338e-6))
"""Of 64 H800, lowest and highest (nccl issue 1531)."""
ALL_REDUCE_256 = ((1024 * MIB, 29896e-6), (256 * MIB, 7947e-6), (32 * MIB, 1464e-6))
"""Bytes and seconds of all-reduces of 256 GPUs, 16 a node (nccl-tests issue 78)."""
V100_64 = (256 * MIB, 122e-3, 521e-3)
"""Bytes, seconds of an all-reduce and of an all-to-all; 8 nodes of 8 V100, 100 Gbit/s (nccl-tests issue 78)."""


# ---------------------------------------------------------------- what is fitted to them


CLUSTERS = (ETHERNET, INFINIBAND)


Share = Callable[[Reading], float]
"""Bytes that the busiest node sends, per byte of gradient."""


def least_share(reading: Reading) -> float:
    """Of NCCL's ring or tree, whichever sends less, as in ``collectives.all_reduce``."""
    return min(ring_share(reading), tree_share(reading.nodes) / TREE_BANDWIDTH)


def ring_share(reading: Reading) -> float:
    """Of the ring alone."""
    return 2 * (reading.gpus - 1) / reading.gpus if reading.nodes > 1 else 0.0


@dataclass(frozen=True)
class Fit:
    """What was found for one cluster: ``handling`` is h; ``network`` has Bn and what was not fitted."""

    handling: float
    network: Network
    share: Share = least_share

    def milliseconds(self, reading: Reading) -> float:
        """Predicted for a row of table 2."""
        per_byte = self.handling + self.share(reading) / self.network.between
        return 1e3 * (GRADIENT_BYTES * per_byte + all_reduce(0, reading.gpus, self.network).seconds)


class Prediction(NamedTuple):
    """One row, and what a fit that did not see it says."""

    reading: Reading
    milliseconds: float

    @property
    def error(self) -> float:
        """Relative: 0.1 is predicted 10 % too long."""
        return self.milliseconds / self.reading.milliseconds - 1


def fit(readings: Sequence[Reading], share: Share = least_share) -> Fit:
    """Fits h and Bn to rows of one cluster.

    Raises:
        ValueError: if the rows are of one node count only, or of several clusters, or call for a negative constant.
    """
    clusters = {r.cluster for r in readings}
    if len(clusters) != 1 or len({r.nodes for r in readings}) < 2:
        raise ValueError("readings must be of one cluster and of two node counts at least")
    (cluster,) = clusters
    sizes = []  # minimises sum((h x + y/Bn - 1)^2)
    for r in readings:
        seconds = 1e-3 * r.milliseconds - all_reduce(0, r.gpus, _network(cluster, math.inf)).seconds
        sizes.append((GRADIENT_BYTES / seconds, share(r) * GRADIENT_BYTES / seconds))
    handling, per_byte = np.linalg.lstsq(np.array(sizes), np.ones(len(sizes)), rcond=None)[0].tolist()
    if handling < 0 or per_byte <= 0:
        raise ValueError(f"these readings call for h = {handling:.3g} s and 1/Bn = {per_byte:.3g} s per byte")
    return Fit(handling, _network(cluster, 1 / per_byte), share)


def _network(cluster: Cluster, between: float) -> Network:
    return Network(between, inside=math.inf, gpus_per_node=cluster.gpus_per_node)  # what inside costs is in h


# ---------------------------------------------------------------- rows that were held out

SPLITS: dict[str, Callable[[int], bool]] = {
    "1, 4 and 16 nodes": lambda nodes: nodes in (1, 4, 16),
    "1, 2 and 4 nodes": lambda nodes: nodes <= 4,
}
"""Node counts that are fitted; the others are predicted. The first leaves 2 and 8 to interpolate and 32 and 64 to
extrapolate, and halves table 2; the second only extrapolates."""


def held_out(
    fitted: Callable[[int], bool], readings: Sequence[Reading] = TABLE_2, share: Share = least_share
) -> list[Prediction]:
    """Fits each cluster on some node counts; predicts the rows of all others."""
    found = []
    for cluster in CLUSTERS:
        rows = [r for r in readings if r.cluster is cluster]
        model = fit([r for r in rows if fitted(r.nodes)], share)
        found += [Prediction(r, model.milliseconds(r)) for r in rows if not fitted(r.nodes)]
    return found


def each_held_out(readings: Sequence[Reading] = TABLE_2) -> list[Prediction]:
    """Predicts the rows of each node count from those of all others of the same cluster."""
    found = []
    for cluster in CLUSTERS:
        rows = [r for r in readings if r.cluster is cluster]
        for nodes in sorted({r.nodes for r in rows}, reverse=True):
            model = fit([r for r in rows if r.nodes != nodes])
            found += [Prediction(r, model.milliseconds(r)) for r in rows if r.nodes == nodes]
    return found


def unfitted(readings: Sequence[Reading] = TABLE_2) -> list[Prediction]:
    """Nothing fitted, rows of several nodes: the bandwidths that the paper states, and h = 0. What to improve upon."""
    models = {cluster: Fit(0.0, _network(cluster, cluster.stated)) for cluster in CLUSTERS}
    return [Prediction(r, models[r.cluster].milliseconds(r)) for r in readings if r.nodes > 1]


class Summary(NamedTuple):
    """Absolute relative errors: medians over rows and over node counts (of their rows' mean), and the largest."""

    by_row: float
    by_node_count: float
    largest: float


def summarise(predictions: Iterable[Prediction]) -> Summary:
    """What is told of some predictions."""
    groups: dict[tuple[str, int], list[float]] = {}
    for p in predictions:
        groups.setdefault((p.reading.cluster.name, p.reading.nodes), []).append(abs(p.error))
    rows = [error for errors in groups.values() for error in errors]
    return Summary(median(rows), median(map(mean, groups.values())), max(rows))


# ---------------------------------------------------------------- tables


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
