"""The body of ``fusedonebit plan``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..arguments import InputError, missing, need, positive, whole
from .costs import TYPICAL, Network
from .units import parse_bandwidth, parse_count

if TYPE_CHECKING:
    from .report import Plan


DESCRIPTION = (
    "Estimate what the messages of one optimizer step cost, uncompressed and compressed, on 2 to 16,384 GPUs; name the "
    "cheapest, and say where compressing does not pay."
)
MOST = 10**6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--params", type=parse_count, required=True, metavar="N", help="parameters of the model: 340M, 1.3B")
    add("--gpus", type=whole(1, MOST), required=True, metavar="N", help="in all")
    add("--gpus-per-node", type=whole(1, MOST), default=TYPICAL.gpus_per_node, metavar="N", help="in each node")
    add(
        "--network",
        type=parse_bandwidth,
        required=True,
        metavar="RATE",
        help="what one NODE sends to others, all cards together, best as measured: 4.1Gbps, 12.5GB/s, 8x400Gbps",
    )
    add("--nvlink", type=parse_bandwidth, default="200GB/s", metavar="RATE", help="what one GPU sends within its node")
    add("--step-ms", type=positive("milliseconds"), metavar="MS", help="what a step takes without messages")
    add(
        "--latency-us",
        type=positive("microseconds"),
        default=TYPICAL.between_latency * 1e6,
        metavar="US",
        help="of a hop between nodes",
    )
    add(
        "--full-precision-every",
        type=whole(0, MOST),
        default=100,
        metavar="K",
        help="rounds of marsit of which one is of full precision; 0: none",
    )
    add("--out", default="runs/plan", metavar="DIR", help="for plan.png")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables; draw the picture where matplotlib is.

    Raises:
        InputError: if what was asked makes no sense together.
    """
    need("rich")
    from rich.console import Console

    from .report import Plan, show

    gpus, per_node = arguments.gpus, arguments.gpus_per_node
    if gpus > per_node and gpus % per_node:
        raise InputError(f"--gpus must be a multiple of --gpus-per-node {per_node}, or at most that, got {gpus}")
    network = Network(arguments.network, arguments.nvlink, per_node, between_latency=arguments.latency_us * 1e-6)
    compute = None if arguments.step_ms is None else arguments.step_ms * 1e-3
    plan = Plan(arguments.params, gpus, network, compute, arguments.full_precision_every)
    absent = missing("matplotlib")
    picture = f"a picture needs {absent}" if absent else f"picture: {_draw(plan, Path(arguments.out))}"
    console = Console(highlight=False)
    show(plan, console)
    console.print(picture, soft_wrap=True)
    return 0


def _draw(plan: Plan, out: Path) -> Path:
    from .plot import plot_plan

    try:
        out.mkdir(parents=True, exist_ok=True)
        plot_plan(plan, out / "plan.png")
    except OSError as error:
        raise InputError(f"--out {out} can't be written: {error.strerror or error}") from error
    return out / "plan.png"
