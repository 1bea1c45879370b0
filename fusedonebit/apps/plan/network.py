"""Describes machines and what connects them."""

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
