"""Constants fitted to published times, and how well they predict what they were not fitted to.

Two numbers for each cluster: h, seconds per byte of gradient that every GPU spends besides the network
(NVLink or PCIe, copies into buckets and out), and Bn, bytes per second of a node's network:

    t = h * bytes + share * bytes / Bn + latency

where share, what the busiest node sends, and the latency are those of ``collectives.all_reduce``, and not fitted. So t
is linear in h and 1/Bn: least squares of relative errors, in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import NamedTuple

from fusedonebit.apps.plan import Network
from fusedonebit.apps.plan.collectives import TREE_BANDWIDTH, all_reduce, tree_share

from .planner_readings import ETHERNET, GRADIENT_BYTES, INFINIBAND, TABLE_2, Cluster, Reading

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
    # Minimises sum((h x + y/Bn - 1)^2): the normal equations of two unknowns.
    xx = xy = yy = x1 = y1 = 0.0
    for r in readings:
        seconds = 1e-3 * r.milliseconds - all_reduce(0, r.gpus, _network(cluster, math.inf)).seconds
        x, y = GRADIENT_BYTES / seconds, share(r) * GRADIENT_BYTES / seconds
        xx, xy, yy, x1, y1 = xx + x * x, xy + x * y, yy + y * y, x1 + x, y1 + y
    determinant = xx * yy - xy * xy
    handling, per_byte = (x1 * yy - y1 * xy) / determinant, (xx * y1 - xy * x1) / determinant
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
