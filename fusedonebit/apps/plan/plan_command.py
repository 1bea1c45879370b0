"""The body of ``fusedonebit plan``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ..parsing import InputError, need, positive, whole
from ..units import parse_bandwidth, parse_count
from .collectives import NETWORK_HOP, NVLINK_HOP, PCIE_HOP, TYPICAL, Network
from .costs import methods
from .plan_tables import text_of
from .report import Plan, calibrate

DESCRIPTION = (
    "Estimate what one optimizer step takes on 2 to 16,384 GPUs, uncompressed, compressed by this library and by "
    "others; say whether compressing pays, and on what network it would."
)
MOST = 10**6

ONE_NODE = (
    "--network is not what decides here: {} GPUs are taken for one node (--gpus-per-node {}), whose links --nvlink or "
    "--pcie tells; if they are in several nodes, pass --gpus-per-node 1, or as many as one has\n"
)
CALIBRATE = (
    "find the rate of the network, or of one node's links, and the compute, from measured seconds of a step: "
    "one_gpu=1.4,step_fp32=6.4 (alone; DDP on all GPUs, or with its bf16 hook: step_bf16=3.6)"
)


def parse_timed(text: str) -> tuple[float, dict[str, float]]:
    """Parse ``one_gpu=1.4,step_fp32=6.4,step_bf16=3.6`` to seconds of the first and, by method, of the others.

    Raises:
        ArgumentTypeError: for anything else, and for steps no longer than that of one GPU.
    """
    try:
        steps = {name.strip(): float(seconds) for name, _, seconds in (part.partition("=") for part in text.split(","))}
    except ValueError:
        steps = {}
    known = {"one_gpu"} < steps.keys() <= {"one_gpu", "step_fp32", "step_bf16"}
    if not known or not all(0 < seconds < math.inf for seconds in steps.values()):
        wanted = "seconds as one_gpu=1.4,step_fp32=6.4 (or step_bf16=3.6, or both)"
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    one_gpu = steps.pop("one_gpu")
    if min(steps.values()) <= one_gpu:
        hidden = "messages that are hidden tell no bandwidth"
        raise argparse.ArgumentTypeError(f"must have steps longer than one_gpu={one_gpu:g}, got {text!r}: {hidden}")
    return one_gpu, {name.removeprefix("step_"): seconds for name, seconds in steps.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add, inside, count = parser.add_argument, parser.add_mutually_exclusive_group(), whole(1, MOST)
    add("--params", type=parse_count, required=True, metavar="N", help="parameters of the model: 340M, 1.3B")
    add("--gpus", type=count, required=True, metavar="N", help="in all")
    add("--gpus-per-node", type=count, default=TYPICAL.gpus_per_node, metavar="N", help="in each node")
    network = "what one NODE sends to others, all cards together, best as measured: 4.1Gbps, 12.5GB/s, 8x400Gbps"
    add("--network", type=parse_bandwidth, metavar="RATE", help=network)
    nvlink = f"what one GPU sends within its node over NVLink (default: {TYPICAL.inside / 1e9:g}GB/s)"
    inside.add_argument("--nvlink", type=parse_bandwidth, metavar="RATE", help=nvlink)
    pcie = "what one GPU sends within its node over PCIe, all sending"
    inside.add_argument("--pcie", type=parse_bandwidth, metavar="RATE", help=pcie)
    add("--step-ms", type=positive("milliseconds"), metavar="MS", help="what a step takes without messages")
    add("--calibrate", type=parse_timed, metavar="TIMES", help=CALIBRATE)
    overlap = "messages begin when the backward pass is over, with every method"
    add("--no-overlap", dest="overlap", action="store_false", help=overlap)
    hop, us = NETWORK_HOP * 1e6, positive("microseconds")
    add("--latency-us", type=us, default=hop, metavar="US", help="of a hop between nodes")
    add("--powersgd-rank", type=count, default=4, metavar="R", help="of PowerSGD")
    add("--diloco-steps", type=count, default=64, metavar="H", help="of DiLoCo between two averages")
    rounds = "rounds of marsit of which one is of full precision; 0: none"
    add("--full-precision-every", type=whole(0, MOST), default=100, metavar="K", help=rounds)
    everything = "print every method, and what each takes on other numbers of GPUs"
    add("--all", action="store_true", help=everything)
    add("--out", metavar="DIR", help="draw a picture as well: DIR/plan.png; without this nothing is written")


def run(arguments: argparse.Namespace) -> int:
    """Print the answer; draw the picture where one is asked for.

    Raises:
        InputError: if what was asked makes no sense together.
    """
    need(*["matplotlib"] * (arguments.out is not None))
    plan, told_links = _plan(arguments), arguments.nvlink or arguments.pcie
    if arguments.network and not told_links and 1 < arguments.gpus <= arguments.gpus_per_node:
        print(ONE_NODE.format(arguments.gpus, arguments.gpus_per_node))
    print(text_of(plan, arguments.all), flush=True)  # before the picture, which takes seconds
    if arguments.out is not None:
        from .plan_plot import plot_plan

        picture = Path(arguments.out) / "plan.png"
        try:
            picture.parent.mkdir(parents=True, exist_ok=True)
            plot_plan(plan, picture)
        except OSError as error:
            raise InputError(f"--out {arguments.out} can't be written: {error.strerror or error}") from error
        print(f"picture: {picture}")
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    network, compute = _network(arguments), arguments.step_ms and arguments.step_ms * 1e-3
    if arguments.calibrate:
        compute, steps = arguments.calibrate
        try:
            network = calibrate(compute, steps, arguments.params, arguments.gpus, network, arguments.overlap)
        except ValueError as error:
            raise InputError(f"--calibrate: {error}") from error
    known = methods(arguments.full_precision_every, arguments.powersgd_rank, arguments.diloco_steps)
    return Plan(arguments.params, arguments.gpus, network, compute, arguments.overlap, known)


def _network(arguments: argparse.Namespace) -> Network:
    """Return the network as told; where ``--calibrate`` is to find a rate, with any."""
    gpus, per_node, timed = arguments.gpus, arguments.gpus_per_node, arguments.calibrate
    several = gpus > per_node
    if several and gpus % per_node:
        raise InputError(f"--gpus must be a multiple of --gpus-per-node {per_node}, or at most that, got {gpus}")
    if timed and gpus == 1:
        raise InputError("--calibrate needs --gpus of 2 or more, got 1")
    if several and not timed and arguments.network is None:
        raise InputError(
            f"--network is needed for --gpus {gpus} of --gpus-per-node {per_node}: a node's rate, as 25Gbps"
        )
    finds = (arguments.network,) if several else (arguments.nvlink, arguments.pcie)
    if timed and any(rate is not None for rate in (arguments.step_ms, *finds)):
        found = "--network" if several else "--nvlink and --pcie"
        raise InputError(f"--calibrate finds what --step-ms, {found} tell: leave them out")
    hop = PCIE_HOP if arguments.pcie else NVLINK_HOP
    inside = arguments.pcie or arguments.nvlink or TYPICAL.inside
    return Network(arguments.network or math.inf, inside, per_node, arguments.latency_us * 1e-6, hop)
