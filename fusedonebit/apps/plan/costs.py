"""Computes what one step's messages cost in each way to send them: ours, and those we are compared with.

    d  parameters      n = L N  GPUs, L on each of N nodes      b = d/8  bytes of one bit each

Collectives, and the network's letters, are those of ``collectives``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, get_args

from ...ring_topology import Topology, torus_rows
from .collectives import TYPICAL, Cost, Network, all_gather, all_reduce, all_to_all, ring_bandwidth
from .hidden_messages import Buckets, ddp, ours, whole

FP32, BF16, BIT = 4.0, 2.0, 1 / 8
"""Bytes of a parameter."""
INT8 = 1 + 4 / 512
"""Bytes of a parameter that torchft quantises: a float32 scale for every 512."""
SCALE = 2 / 256
"""Bytes of a parameter that ``compress`` adds to its level."""
OWNED = 1.07 * BIT
"""Bytes that 1-bit Muon sends of a matrix's parameter: scales, padding and what whitens are 7 % (340M, 8 owners)."""
REST = 0.1
"""Share of parameters that Muon leaves to AdamW, and that travels in bfloat16: BERT-Large's embeddings are 9 %."""
ASPECT = 100
"""Width over layers of the transformer that PowerSGD is taken to compress (Kaplan et al., 2020, figure 5)."""

Send = Callable[[float, int, Network], Cost]
"""What it costs to average so many bytes on so many GPUs."""


def flat(nbytes: float, gpus: int, network: Network) -> Cost:
    """Return the cost of one all-to-all and one all-gather among all GPUs: bits, or quantised bytes."""
    return all_to_all(nbytes, gpus, network) + all_gather(nbytes, gpus, network)


def hierarchical(bits: float, gpus: int, network: Network, width: float = FP32) -> Cost:
    """Reduce-scatter within the node in ``width`` bytes; bits between nodes, L lanes at a time; all-gather within."""
    per_node, nodes = network.place(gpus)
    inside = (width / BIT + 1) * bits * (per_node - 1) / per_node
    between = 2 * bits * (nodes - 1) / nodes
    latency = (nodes - 1) * (network.peer + network.between_latency) + 2 * (per_node - 1) * network.inside_latency
    seconds = inside / network.inside + between / network.between + latency
    return Cost(seconds, between if nodes > 1 else inside)


def marsit_ring(bits: float, gpus: int, network: Network) -> Cost:
    """2(n - 1) hops of b/n bytes, one after the other."""
    _, nodes = network.place(gpus)
    sent = 2 * bits * (gpus - 1) / gpus
    return Cost(sent / ring_bandwidth(nodes, network) + 2 * (gpus - 1) * _exchange(nodes > 1, network), sent)


def marsit_torus(bits: float, gpus: int, network: Network) -> Cost:
    """2(R + C - 2) hops: along rows of C neighbours, then in columns on what the row has left, b/C."""
    if gpus == 1:
        return Cost()
    per_node, nodes = network.place(gpus)
    height = torus_rows(gpus, None)
    width = gpus // height
    rows, columns = row_links(width, per_node, gpus), column_links(width, per_node, gpus)
    total = Cost()
    for size, nbytes, leaving in ((width, bits, rows), (height, bits / width, columns)):
        bandwidth = min(network.inside, network.between / leaving) if leaving else network.inside
        sent = 2 * nbytes * (size - 1) / size
        seconds = sent / bandwidth + 2 * (size - 1) * _exchange(leaving > 0, network)
        total += Cost(seconds, sent * (leaving if nodes > 1 else 1))
    return total


def row_links(width: int, per_node: int, gpus: int) -> int:
    """Count rows' links that leave a node at the same time; of rows that neither fill nodes nor share one, at most."""
    if gpus == per_node or per_node % width == 0:
        return 0
    return 1 if width % per_node == 0 else 2  # a node where one row ends and another begins has both


def column_links(width: int, per_node: int, gpus: int) -> int:
    """Count columns' links that leave a node at the same time: a column visits every ``width``-th GPU."""
    return 0 if gpus == per_node else min(width, per_node)


def _exchange(leaves: bool, network: Network) -> float:
    """Return the cost of a hop that all take together: as long as its slowest link, and one exchange with a peer."""
    return network.peer + (network.between_latency if leaves else network.inside_latency)


def powersgd_bytes(parameters: float, rank: int) -> float:
    """Return the float32 bytes of P and Q of a transformer's matrices: 2rh for each h x h, and a bias of h.

    A count says nothing of shapes: h follows from d = 12 h^2 layers and h = ``ASPECT`` layers. A matrix that
    would not shrink is sent as it is.
    """
    return FP32 * parameters * min(1.0, (2 * rank + 1) / transformer_width(parameters))


def transformer_width(parameters: float) -> float:
    """Return h of a transformer with so many parameters."""
    return (parameters * ASPECT / 12) ** (1 / 3)


def powersgd(nbytes: float, gpus: int, network: Network) -> Cost:
    """Return the cost of two all-reduces one after the other, of P and of Q."""
    return 2 * all_reduce(nbytes / 2, gpus, network)


# ---------------------------------------------------------------- by name

Family = Literal["uncompressed", "rival", "any optimizer", "1-bit", "0/1 Adam", "Muon", "Marsit"]
OURS: tuple[Family, ...] = ("any optimizer", "1-bit", "0/1 Adam", "Muon", "Marsit")


class Method(NamedTuple):
    """A way to agree on a step.

    Attributes:
        label: Its name in tables.
        family: Whom it serves.
        payload: Bytes that each GPU wants averaged, of so many parameters.
        send: What it costs to do that.
        write: What to write for it.
        buckets: How messages are cut to begin in the backward pass, where it can.
    """

    label: str
    family: Family
    payload: Callable[[float], float]
    send: Send
    write: str
    buckets: Callable[[float], Buckets] = whole

    def cost(self, parameters: float, gpus: int, network: Network, buckets: int = 1) -> Cost:
        """Return what one step's messages cost, sent in ``buckets`` of equal size one after the other.

        Raises:
            ValueError: if the GPUs don't fill the network's nodes, or make no torus.
        """
        return buckets * self.send(self.payload(parameters) / buckets, gpus, network)


def methods(full_precision_every: int = 0, powersgd_rank: int = 4, diloco_steps: int = 64) -> dict[str, Method]:
    """Return all methods by name.

    Args:
        full_precision_every: K of Marsit, one of whose K rounds averages float32; 0: none.
        powersgd_rank: r of PowerSGD.
        diloco_steps: H of DiLoCo, which averages parameters in float32 once in H steps.
    """
    share = 1 / full_precision_every if full_precision_every else 0.0

    def marsit(send: Send) -> Send:
        return lambda b, n, net: (1 - share) * send(b, n, net) + share * all_reduce(FP32 / BIT * b, n, net)

    def times(share: float, send: Send) -> Send:
        return lambda nbytes, n, net: share * send(nbytes, n, net)

    def bytes_of(each: float) -> Callable[[float], float]:
        return lambda d: each * d

    fp32, bf16, int8, bits = (bytes_of(each) for each in (FP32, BF16, INT8, BIT))
    factors, once = partial(powersgd_bytes, rank=powersgd_rank), times(1 / diloco_steps, all_reduce)
    in_bf16 = partial(hierarchical, width=BF16)
    return {
        "fp32": Method("fp32 all-reduce", "uncompressed", fp32, all_reduce, "DDP", ddp),
        "bf16": Method("bf16 all-reduce", "uncompressed", bf16, all_reduce, "bf16_compress_hook", ddp),
        "int8": Method("8-bit all-reduce", "rival", int8, flat, "torchft, quantized", ddp),
        "powersgd": Method(f"PowerSGD, rank {powersgd_rank}", "rival", factors, powersgd, "powerSGD_hook", ddp),
        "diloco": Method(f"DiLoCo, H = {diloco_steps}", "rival", fp32, once, "torchft, DiLoCo"),
        **{
            f"compress-{n}": Method(f"{n}-bit gradients", "any optimizer", levels, flat, f"compress(bits={n})", ddp)
            for n, levels in ((8, bytes_of(1 + SCALE)), (4, bytes_of(0.5 + SCALE)))
        },
        "flat": Method("1-bit, flat", "1-bit", bits, flat, "OneBitAdam"),
        "flat-overlap": Method("1-bit, overlapped", "1-bit", bits, flat, "Wire(overlap=True)", ours),
        "hierarchical": Method("1-bit, fp32 inside", "1-bit", bits, hierarchical, "Wire(hierarchy=)"),
        "hierarchical-bf16": Method("1-bit, bf16 inside", "1-bit", bits, in_bf16, "hierarchy_dtype="),
        "zero-one": Method("0/1 Adam, 2 steps", "0/1 Adam", bits, times(0.5, flat), "FixedRounds(2)"),
        "muon": Method("1-bit Muon", "Muon", bytes_of((1 - REST) * OWNED + REST * BF16), flat, "OneBitMuon"),
        "marsit-ring": Method("Marsit, ring", "Marsit", bits, marsit(marsit_ring), 'topology="ring"'),
        "marsit-torus": Method("Marsit, torus", "Marsit", bits, marsit(marsit_torus), 'topology="torus"'),
        "marsit-owner": Method("Marsit, owner", "Marsit", bits, marsit(all_gather), 'topology="owner"'),
    }


METHODS = methods()
"""All methods by name, Marsit's with rounds of one bit only. In rounds of one step ``ZeroOneAdam`` sends what ``flat``
does."""


def possible(gpus: int, among: dict[str, Method] = METHODS) -> dict[str, Method]:
    """Return the methods that there are for so many GPUs: not every number makes a torus."""
    return {name: method for name, method in among.items() if name != "marsit-torus" or gpus == 1 or has_torus(gpus)}


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
    there = [name for name in get_args(Topology) if f"marsit-{name}" in possible(world_size)]
    return min(there, key=lambda name: METHODS[f"marsit-{name}"].cost(parameters, world_size, network).seconds)
