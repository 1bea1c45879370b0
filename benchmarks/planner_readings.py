"""Published times that the models are fitted to and compared with."""

from __future__ import annotations

from typing import NamedTuple

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
