"""Computes what it costs to send one step's messages: alpha-beta models, in seconds.

    d  parameters      n = L N  GPUs, L on each of N nodes      b = d/8  bytes of one bit each
    Bi  bytes/s that a GPU sends within its node          ai  seconds of a hop within a node
    Bn  bytes/s that a *node* sends to others             ae  seconds of a hop between nodes
                                                          ap  seconds for each peer of a point-to-point exchange

What crosses the network is shared by the L GPUs of a node: an all-to-all sends L messages where a ring sends
one. NCCL's ring and tree, their latencies and its choice between them are those of its ``tuning.cc``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from ...comm import Topology, torus_rows

FP32, BF16 = 4, 2
TREE_BANDWIDTH = 0.92
"""The share of the bandwidth that NCCL expects a tree to reach (``tuning.cc``: ``busBw*.92``)."""


@dataclass(frozen=True)
class Network:
    """Machines and what connects them; equal on all ranks.

    Attributes:
        between: Bn, bytes per second that one node sends to the others, over all its network cards.
        inside: Bi, bytes per second that one GPU sends to the others of its node.
        gpus_per_node: L.
        between_latency: ae, seconds of one hop to another node (NCCL's ring, protocol Simple).
        inside_latency: ai, those of a hop inside a node.
        peer: ap, seconds for each peer; from a published all-to-all of 128 GPUs (nccl-tests issue 78).
        base: Seconds that any NCCL ring or tree takes to start.

    Raises:
        ValueError: for a number that makes no sense.
    """

    between: float
    inside: float = 200e9
    gpus_per_node: int = 8
    between_latency: float = 14e-6
    inside_latency: float = 3.4e-6
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
        """L and N for ``gpus`` GPUs: whole nodes, or a part of a single one.

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


TYPICAL = Network(between=12.5e9)
"""The network that ``choose_topology`` assumes unless it is told another: 100 Gbit/s a node, NVLink inside."""


# ---------------------------------------------------------------- full precision


def all_reduce(nbytes: float, gpus: int, network: Network) -> float:
    """Return the cost of NCCL's all-reduce of ``nbytes`` on every GPU: the faster of its ring and its double tree."""
    if gpus == 1:
        return 0.0
    return min(_ring(nbytes, gpus, network), _tree(nbytes, gpus, network))


def _ring(nbytes: float, gpus: int, network: Network) -> float:
    """2(n - 1) hops; two of n - 1 shares leave each GPU, and over the one link that leaves it, each node."""
    _, nodes = network.place(gpus)
    latency = 2 * (gpus - nodes) * network.inside_latency + 2 * (nodes - 1) * network.between_latency
    return network.base + latency + 2 * nbytes * (gpus - 1) / gpus / _narrowest(nodes, network)


def _tree(nbytes: float, gpus: int, network: Network) -> float:
    """Up and down two binary trees of nodes, each with half of the bytes; within a node a chain."""
    per_node, nodes = network.place(gpus)
    latency = 2 * (per_node - 1) * network.inside_latency + 2 * math.log2(nodes) * network.between_latency
    inside = 2 * nbytes / network.inside if per_node > 1 else 0.0
    wire = max(inside, tree_share(nodes) * nbytes / network.between)
    return network.base + latency + wire / TREE_BANDWIDTH


def tree_share(nodes: int) -> float:
    """Return how many times the gradient the busiest node of NCCL's double tree sends over the network.

    A node with two children sends half of it up and half to each child, and as a leaf of the other tree half
    up: 2. Of two nodes one is root and one leaf, in the other tree the other way round: 1. Of three: 1.5.
    """
    return min(2.0, nodes / 2) if nodes > 1 else 0.0


def _narrowest(nodes: int, network: Network) -> float:
    """Bandwidth of a ring through all GPUs: min(Bi, Bn), as a ring leaves each node over one link."""
    return network.inside if nodes == 1 else min(network.inside, network.between)


# ---------------------------------------------------------------- one bit, as 1-bit Adam and 1-bit LAMB send it


def all_gather(nbytes: float, gpus: int, network: Network) -> float:
    """Return the cost of NCCL's ring all-gather to ``nbytes`` on every GPU: n - 1 hops."""
    if gpus == 1:
        return 0.0
    _, nodes = network.place(gpus)
    latency = (gpus - nodes) * network.inside_latency + (nodes - 1) * network.between_latency
    return network.base + latency + nbytes * (gpus - 1) / gpus / _narrowest(nodes, network)


def all_to_all(nbytes: float, gpus: int, network: Network) -> float:
    """Every GPU sends each of n an n-th of ``nbytes``; what stays in the node travels meanwhile."""
    if gpus == 1:
        return 0.0
    per_node, _ = network.place(gpus)
    outside = per_node * nbytes * (gpus - per_node) / gpus / network.between
    inside = nbytes * (per_node - 1) / gpus / network.inside
    return max(outside, inside) + (gpus - 1) * network.peer


def flat(parameters: float, gpus: int, network: Network) -> float:
    """Return the cost of one all-to-all and one all-gather of bits among all GPUs."""
    return all_to_all(parameters / 8, gpus, network) + all_gather(parameters / 8, gpus, network)


def hierarchical(parameters: float, gpus: int, network: Network, width: int = FP32) -> float:
    """Reduce-scatter within the node in ``width`` bytes; bits between nodes, L lanes at a time; all-gather within."""
    if gpus == 1:
        return 0.0
    per_node, nodes = network.place(gpus)
    bits = parameters / 8
    inside = (width * parameters + bits) * (per_node - 1) / per_node / network.inside
    between = 2 * bits * (nodes - 1) / nodes / network.between
    latency = (nodes - 1) * (network.peer + network.between_latency) + 2 * (per_node - 1) * network.inside_latency
    return inside + between + latency


# ---------------------------------------------------------------- Marsit


def marsit_ring(parameters: float, gpus: int, network: Network) -> float:
    """2(n - 1) hops of b/n bytes, one after the other."""
    if gpus == 1:
        return 0.0
    _, nodes = network.place(gpus)
    wire = 2 * parameters / 8 * (gpus - 1) / gpus / _narrowest(nodes, network)
    return wire + 2 * (gpus - 1) * _exchange(nodes > 1, network)


def marsit_torus(parameters: float, gpus: int, network: Network, rows: int | None = None) -> float:
    """2(R + C - 2) hops: along rows of C neighbours, then in columns on what the row has left, b/C."""
    if gpus == 1:
        return 0.0
    per_node, _ = network.place(gpus)
    height = torus_rows(gpus, rows)
    width = gpus // height
    seconds = 0.0
    for size, nbytes, leaving in (
        (width, parameters / 8, row_links(width, per_node, gpus)),
        (height, parameters / 8 / width, column_links(width, per_node, gpus)),
    ):
        bandwidth = min(network.inside, network.between / leaving) if leaving else network.inside
        seconds += 2 * nbytes * (size - 1) / size / bandwidth + 2 * (size - 1) * _exchange(leaving > 0, network)
    return seconds


def row_links(width: int, per_node: int, gpus: int) -> int:
    """Rows' links that leave a node at the same time; of rows that neither fill nodes nor share one, at most."""
    if gpus == per_node or per_node % width == 0:
        return 0
    return 1 if width % per_node == 0 else 2  # a node where one row ends and another begins has both


def column_links(width: int, per_node: int, gpus: int) -> int:
    """Columns' links that leave a node at the same time: a column visits every ``width``-th GPU."""
    return 0 if gpus == per_node else min(width, per_node)


def marsit_owner(parameters: float, gpus: int, network: Network) -> float:
    """Return the cost of one all-gather in which each GPU sends the b/n bytes that it owns."""
    return all_gather(parameters / 8, gpus, network)


def _exchange(leaves: bool, network: Network) -> float:
    """Return the cost of a hop that all take together: as long as its slowest link, and one exchange with a peer."""
    return network.peer + (network.between_latency if leaves else network.inside_latency)


# ---------------------------------------------------------------- by name

Family = Literal["uncompressed", "1-bit", "Marsit"]


class Method(NamedTuple):
    """A way to agree on a step: its label, whom it serves, its cost, and what to write."""

    label: str
    family: Family
    seconds: Callable[[float, int, Network], float]
    write: str


METHODS: dict[str, Method] = {
    "fp32": Method("fp32 all-reduce", "uncompressed", lambda d, n, net: all_reduce(FP32 * d, n, net), "DDP"),
    "bf16": Method("bf16 all-reduce", "uncompressed", lambda d, n, net: all_reduce(BF16 * d, n, net), "DDP, bf16 hook"),
    "flat": Method("1-bit, flat", "1-bit", flat, "OneBitAdam"),
    "hierarchical": Method("1-bit, fp32 in node", "1-bit", hierarchical, "hierarchy=mesh"),
    "hierarchical-bf16": Method(
        "1-bit, bf16 in node", "1-bit", lambda d, n, net: hierarchical(d, n, net, BF16), "hierarchy=mesh, bf16"
    ),
    "marsit-ring": Method("Marsit, ring", "Marsit", marsit_ring, 'topology="ring"'),
    "marsit-torus": Method("Marsit, torus", "Marsit", marsit_torus, 'topology="torus"'),
    "marsit-owner": Method("Marsit, owner", "Marsit", marsit_owner, 'topology="owner"'),
}
"""By the name that ``cost`` takes."""


def cost(method: str, parameters: float, gpus: int, network: Network, full_precision_every: int = 0) -> float | None:
    """Return seconds of one step's messages; None where there is no such torus.

    Args:
        method: A key of ``METHODS``.
        parameters: d.
        gpus: n.
        network: What connects them.
        full_precision_every: K of Marsit, one of whose K rounds averages float32; 0: none.
    """
    chosen = METHODS[method]
    if method == "marsit-torus" and gpus > 1 and not has_torus(gpus):
        return None
    seconds = chosen.seconds(parameters, gpus, network)
    if chosen.family == "Marsit" and full_precision_every:
        share = 1 / full_precision_every
        seconds = (1 - share) * seconds + share * METHODS["fp32"].seconds(parameters, gpus, network)
    return seconds


def has_torus(gpus: int) -> bool:
    """Tell whether a number of GPUs is a product of two numbers >= 2."""
    return any(gpus % rows == 0 for rows in range(2, math.isqrt(gpus) + 1))


def choose_topology(parameters: int, world_size: int, network: Network | None = None) -> Topology:
    """Choose the topology whose 1-bit rounds cost Marsit the least; of equals the first of ring, torus, owner.

    A pure function: ranks that agree on its arguments agree on the topology.

    Args:
        parameters: Of the model.
        world_size: M. With ``hierarchy=`` workers are nodes: how many of them there are.
        network: None: ``TYPICAL``, with as many GPUs per node as 8 and M have in common. With ``hierarchy=`` of L
            ranks a node ``Network(between=rate / L, gpus_per_node=1)``, as they share what the node sends.

    Raises:
        ValueError: if the workers don't fill the network's nodes.

    Example::

        topology = plan.choose_topology(sum(p.numel() for p in model.parameters()), dist.get_world_size())
        optimizer = MarsitSGD(model.parameters(), lr=0.1, topology=topology)
    """
    if network is None:
        network = replace(TYPICAL, gpus_per_node=math.gcd(world_size, TYPICAL.gpus_per_node))
    network.place(world_size)
    possible = [name for name in get_args(Topology) if name != "torus" or has_torus(world_size)]
    return min(possible, key=lambda name: METHODS[f"marsit-{name}"].seconds(parameters, world_size, network))
