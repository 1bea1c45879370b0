"""Describes machines and what connects them, and computes what collectives cost: alpha-beta models.

    n = L N  GPUs, L on each of N nodes
    Bi  bytes/s that a GPU sends within its node          ai  seconds of a hop within a node
    Bn  bytes/s that a *node* sends to others             ae  seconds of a hop between nodes
                                                          ap  seconds for each peer of a point-to-point exchange

What crosses the network is shared by the L GPUs of a node: an all-to-all sends L messages where a ring sends
one. NCCL's ring and tree, their latencies and its choice between them are those of its ``tuning.cc``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

NVLINK_HOP, PCIE_HOP, NETWORK_HOP = 3.4e-6, 5.7e-6, 14e-6
"""Seconds of a hop of NCCL's ring, protocol Simple (``hwLat`` of its ``tuning.cc``)."""


@dataclass(frozen=True)
class Network:
    """Machines and what connects them; equal on all ranks.

    Attributes:
        between: Bn, bytes per second that one node sends to the others, over all its network cards, which its GPUs
            share; inf where there is one node only.
        inside: Bi, bytes per second that one GPU sends to the others of its node, all sending.
        gpus_per_node: L.
        between_latency: ae, seconds of one hop to another node.
        inside_latency: ai, those of a hop inside a node.
        peer: ap, seconds for each peer; from a published all-to-all of 128 GPUs (nccl-tests issue 78).
        base: Seconds that any NCCL ring or tree takes to start.

    Raises:
        ValueError: for a number that makes no sense.
    """

    between: float
    inside: float = 200e9
    gpus_per_node: int = 8
    between_latency: float = NETWORK_HOP
    inside_latency: float = NVLINK_HOP
    peer: float = 2.55e-6
    base: float = 8.4e-6

    def __post_init__(self) -> None:
        for name in ("between", "inside"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be bytes per second > 0, got {getattr(self, name)!r}")
        for name in ("between_latency", "inside_latency", "peer", "base"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be seconds >= 0, got {getattr(self, name)!r}")
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node must be an int >= 1, got {self.gpus_per_node!r}")

    def place(self, gpus: int) -> tuple[int, int]:
        """Return L and N for ``gpus`` GPUs: whole nodes, or a part of a single one.

        Raises:
            ValueError: if the last node would not be full.
        """
        if gpus <= self.gpus_per_node:
            return gpus, 1
        if gpus % self.gpus_per_node:
            raise ValueError(
                f"the number of GPUs must be a multiple of the {self.gpus_per_node} GPUs per node, or at most those "
                f"of one node, got {gpus}"
            )
        return self.gpus_per_node, gpus // self.gpus_per_node

    def at_rate(self, gpus: int, rate: float) -> Network:
        """Return the same with another rate of the link that ``gpus`` GPUs wait for: between nodes, or inside one."""
        return replace(self, between=rate) if gpus > self.gpus_per_node else replace(self, inside=rate)


TYPICAL = Network(between=12.5e9)
"""The network that ``choose_topology`` assumes unless it is told another: 100 Gbit/s a node, NVLink inside."""

TREE_BANDWIDTH = 0.92
"""The share of the bandwidth that NCCL expects a tree to reach (``tuning.cc``: ``busBw*.92``)."""


@dataclass(frozen=True, order=True)
class Cost:
    """What messages cost; costs add up, and can be taken several times.

    Attributes:
        seconds: Until all GPUs have them.
        sent: Bytes that the busiest node sends to others; of a single node, bytes that each GPU sends within it.
    """

    seconds: float = 0.0
    sent: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.sent + other.sent)

    def __rmul__(self, times: float) -> Cost:
        return Cost(times * self.seconds, times * self.sent)


def all_reduce(nbytes: float, gpus: int, network: Network) -> Cost:
    """Return the cost of NCCL's all-reduce of ``nbytes`` on every GPU: the faster of its ring and its double tree."""
    if gpus == 1:
        return Cost()
    ring = Cost(-network.base) + 2 * all_gather(nbytes, gpus, network)  # 2(n - 1) hops, started once
    return min(ring, _tree(nbytes, gpus, network))


def _tree(nbytes: float, gpus: int, network: Network) -> Cost:
    """Up and down two binary trees of nodes, each with half of the bytes; within a node a chain."""
    per_node, nodes = network.place(gpus)
    latency = 2 * (per_node - 1) * network.inside_latency + 2 * math.log2(nodes) * network.between_latency
    inside = 2 * nbytes if per_node > 1 else 0.0
    between = tree_share(nodes) * nbytes
    wire = max(inside / network.inside, between / network.between)
    return Cost(network.base + latency + wire / TREE_BANDWIDTH, between if nodes > 1 else inside)


def tree_share(nodes: int) -> float:
    """Return how many times the gradient the busiest node of NCCL's double tree sends over the network.

    A node with two children sends half of it up and half to each child, and as a leaf of the other tree half
    up: 2. Of two nodes one is root and one leaf, in the other tree the other way round: 1. Of three: 1.5.
    """
    return min(2.0, nodes / 2) if nodes > 1 else 0.0


def all_gather(nbytes: float, gpus: int, network: Network) -> Cost:
    """Return the cost of NCCL's ring all-gather to ``nbytes`` on every GPU: n - 1 hops, one share over each link."""
    if gpus == 1:
        return Cost()
    _, nodes = network.place(gpus)
    latency = (gpus - nodes) * network.inside_latency + (nodes - 1) * network.between_latency
    sent = nbytes * (gpus - 1) / gpus
    return Cost(network.base + latency + sent / ring_bandwidth(nodes, network), sent)


def all_to_all(nbytes: float, gpus: int, network: Network) -> Cost:
    """Return the cost of sending each of n GPUs an n-th of ``nbytes``; what stays in the node travels meanwhile."""
    per_node, nodes = network.place(gpus)
    between = per_node * nbytes * (gpus - per_node) / gpus
    inside = nbytes * (per_node - 1) / gpus
    wire = max(between / network.between, inside / network.inside)
    return Cost(wire + (gpus - 1) * network.peer, between if nodes > 1 else inside)


def ring_bandwidth(nodes: int, network: Network) -> float:
    """Return the bandwidth of a ring through all GPUs: min(Bi, Bn), as a ring leaves each node over one link."""
    return network.inside if nodes == 1 else min(network.inside, network.between)
