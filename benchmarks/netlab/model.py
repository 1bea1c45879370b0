"""What the lab predicts: what a step computes and compresses, and the planner's messages.

Nothing here is fitted to what is predicted. What a step computes is measured by turns with what is predicted, in
steps that send nothing; what it compresses, on the loopback. The bandwidth follows from the link's rate by what TCP
and Ethernet add; latencies are gloo's for next to no bytes, on the loopback; how long its all-to-all takes was
measured alone, at another rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from fusedonebit.apps.plan import METHODS, Network
from fusedonebit.apps.plan.collectives import all_reduce, all_to_all
from fusedonebit.apps.plan.costs import FP32
from fusedonebit.apps.plan.hidden_messages import BACKWARD, MIB, Buckets

from .hooks import MEDIUM_BUCKETS, SMALL_BUCKETS

SEGMENT, FRAME, ACKNOWLEDGEMENT = 1448, 1514, 66
"""Bytes: a TCP segment's payload with timestamps, its Ethernet frame, and a frame that only acknowledges."""
PAYLOAD = SEGMENT / (FRAME + ACKNOWLEDGEMENT / 2)
"""Of a link's rate, where as much comes in as goes out: every second segment that comes in is acknowledged."""

FAMILY = {
    "adamw": "fp32",
    "bf16": "bf16",
    "int8": "int8",
    "compress-4": "compress-4",
    "onebit-adam": "flat",
    "zero-one-adam": "flat",
    "onebit-lamb": "flat",
    "marsit-ring": "marsit-ring",
    "marsit-owner": "marsit-owner",
}
"""What the planner calls a method's messages; it does not know PowerSGD."""
BETWEEN = {"bf16": SMALL_BUCKETS, "int8": SMALL_BUCKETS, "compress-4": MEDIUM_BUCKETS}
"""Methods whose buckets travel in the backward pass, as far as a CPU that computes lets them: the planner is held
to lie between all and nothing hidden."""
UNTIMED = ("compress-4",)  # its threads: what a step on the loopback adds is taken for its compression

PAPERS_SHARE = 0.94
"""Of AdamW's step, that its messages take on the papers' Ethernet."""
SHARES = (PAPERS_SHARE, 0.88, 0.75, 0.5, 0.25)
"""The links' rates are those at which an fp32 all-reduce would take these; the planner is held to them."""
REPORTS = {"336 : 557": 557 / 893, "1.4 : 5.0": 5.0 / 6.4}
"""Shares of messages in steps that others have reported, by compute : communication: 336 ms of compute and 557 ms of
messages in one, 1.4 s and 5.0 s in another."""
LARGEST_ERROR = 0.15
CALIBRATION = 100.0
"""Mbit/s, none of the rates that are predicted: there gloo's all-to-all is timed alone."""


def network(megabits: float, latencies: Mapping[str, float], hosts: int) -> Network:
    """The planner's network for links of a rate, hosts of one rank each."""
    hop, peer = latencies["all_gather"] / (hosts - 1), latencies["all_to_all"] / (hosts - 1)
    return Network(
        between=1e6 * megabits / 8 * PAYLOAD,
        gpus_per_node=1,
        between_latency=hop,
        inside_latency=hop,
        peer=peer,
        base=max(0.0, latencies["all_reduce"] - 2 * (hosts - 1) * hop),
    )


def messages(method: str, parameters: int, hosts: int, net: Network, congestion: float = 1.0) -> float:
    """The planner's seconds, its all-to-all ``congestion`` times as long."""
    family = METHODS[FAMILY[method]]
    seconds = family.cost(parameters, hosts, net).seconds
    if FAMILY[method] in ("flat", "int8", "compress-4"):
        seconds += (congestion - 1) * all_to_all(family.payload(parameters), hosts, net).seconds
    return seconds


def congestion(seconds: float, nbytes: float, latencies: Mapping[str, float], hosts: int) -> float:
    """How many times the planner's time gloo's all-to-all takes, whose connections compete for a link; at least 1."""
    return max(1.0, seconds / all_to_all(nbytes, hosts, network(CALIBRATION, latencies, hosts)).seconds)


def rate_for(share: float, compute: float, parameters: int, latencies: Mapping[str, float], hosts: int) -> float:
    """Mbit/s, three digits, at which an fp32 all-reduce takes ``share`` of a step that computes for ``compute``."""
    wanted = compute * share / (1 - share)
    low, high = 1e-2, 1e7
    for _ in range(100):
        middle = math.sqrt(low * high)
        slow = all_reduce(FP32 * parameters, hosts, network(middle, latencies, hosts)).seconds > wanted
        low, high = (middle, high) if slow else (low, middle)
    return float(f"{low:.3g}")


def predict(
    record: Mapping[str, Any],
    method: str,
    megabits: float,
    row: Mapping[str, Any] | None = None,
    *,
    overlap: bool = False,
) -> float:
    """Seconds of a step at a rate: what it computes without messages, what it compresses, the planner's messages.

    ``row`` says what a step computed meanwhile; None: as on the loopback. With ``overlap`` the backward pass hides of
    DDP's messages what the planner says; here a CPU computes and sends with the same cores.
    """
    compute = (row or record["loopback"])["methods"]["alone"]["whole"]
    net = network(megabits, record["latencies"], record["hosts"])
    sent = messages(method, record["parameters"], record["hosts"], net, record["congestion"])
    if overlap:
        cut = partial(buckets, **BETWEEN[method]) if method in BETWEEN else METHODS[FAMILY[method]].buckets
        sent = cut(record["parameters"]).exposed(sent, BACKWARD * compute)
    part = "communicate" if method in UNTIMED else "compress"
    return compute + record["loopback"]["methods"][method][part] + sent


def buckets(parameters: float, bucket_cap_mb: float) -> Buckets:
    """Cut as ``DistributedDataParallel`` does."""
    count = math.ceil(FP32 * parameters / (bucket_cap_mb * MIB))
    return Buckets(count, 1 / count, 1 / count)


def held_to(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows whose steps are predicted."""
    return [row for row in record["rates"] if row["share"] in SHARES]


def error(record: Mapping[str, Any], method: str, row: Mapping[str, Any], *, overlap: bool = False) -> float:
    """Of the prediction, as a share of what was measured."""
    return predict(record, method, row["megabits"], row, overlap=overlap) / row["methods"][method]["whole"] - 1


def split(record: Mapping[str, Any], method: str, row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Compute, compress and communicate of a measured step, in seconds.

    PowerSGD's hook does both in turns: what it adds on the loopback is taken for compression.
    """
    seconds = row["methods"][method]
    compute, compress = seconds["compute"], seconds["compress"]
    if method == "powersgd":
        fast = record["loopback"]["methods"][method]
        compress = fast["whole"] - fast["compute"]
    return compute, compress, seconds["whole"] - compute - compress


def samples_per_second(record: Mapping[str, Any], method: str, row: Mapping[str, Any]) -> float:
    return record["hosts"] * record["task"]["batch"] / row["methods"][method]["whole"]


def speedup(row: Mapping[str, Any], method: str, other: str = "adamw") -> float:
    """How many times as fast a method's step is as another's."""
    return row["methods"][other]["whole"] / row["methods"][method]["whole"]


def fp32_share(row: Mapping[str, Any]) -> float:
    """Of AdamW's step, that its messages take."""
    seconds = row["methods"]["adamw"]
    return seconds["communicate"] / seconds["whole"]


def rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of all rates, the slowest first, and of the loopback."""
    return [*record["rates"], record["loopback"]]
