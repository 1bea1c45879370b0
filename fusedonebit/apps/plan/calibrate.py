"""Finds the bandwidth from steps that somebody has timed: ``--calibrate step_fp32=6.4,one_gpu=1.4``."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from typing import NamedTuple

from .costs import METHODS
from .network import Network
from .report import FASTEST, SLOWEST, crossing, step

WANTED = "must be seconds as one_gpu=1.4,step_fp32=6.4 (or step_bf16=3.6, or both)"


class Timed(NamedTuple):
    """Steps that were timed, in seconds.

    Attributes:
        one_gpu: Of one GPU alone: what a step computes.
        steps: Of all GPUs with ``DistributedDataParallel``, by method: fp32, bf16.
    """

    one_gpu: float
    steps: dict[str, float]


def parse_timed(text: str) -> Timed:
    """Parse ``one_gpu=1.4,step_fp32=6.4,step_bf16=3.6``.

    Raises:
        ArgumentTypeError: for anything else, and for steps no longer than that of one GPU.
    """
    seconds: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        try:
            seconds[name] = float(number)
        except ValueError:
            raise ArgumentTypeError(f"{WANTED}, got {text!r}") from None
    steps = {name: seconds[f"step_{name}"] for name in ("fp32", "bf16") if f"step_{name}" in seconds}
    one_gpu = seconds.get("one_gpu", 0.0)
    if not steps or len(steps) + 1 != len(seconds) or not all(0 < value < math.inf for value in seconds.values()):
        raise ArgumentTypeError(f"{WANTED}, got {text!r}")
    if min(steps.values()) <= one_gpu:
        raise ArgumentTypeError(
            f"must have steps longer than one_gpu={one_gpu:g}, got {text!r}: messages that are hidden tell no bandwidth"
        )
    return Timed(one_gpu, steps)


def calibrate(timed: Timed, parameters: int, gpus: int, network: Network, overlap: bool = True) -> Network:
    """Return the network with which ``step`` predicts what was timed, by the rate of the link that messages wait for.

    Of two methods the errors are equal and opposite, as ratios: the sum of their logarithms is 0.

    Raises:
        ValueError: if no rate explains what was timed.
    """

    def too_long(rate: float) -> bool:
        there = network.at_rate(gpus, rate)
        predicted = {name: step(METHODS[name], parameters, gpus, there, timed.one_gpu, overlap) for name in timed.steps}
        return sum(math.log(predicted[name].seconds / seconds) for name, seconds in timed.steps.items()) > 0

    rate = crossing(too_long, SLOWEST, FASTEST)
    if not 0 < rate < math.inf:
        told = ", ".join(f"{name} {seconds:g} s" for name, seconds in timed.steps.items())
        raise ValueError(f"steps of {told} are {'shorter' if rate else 'longer'} than any rate explains")
    return network.at_rate(gpus, rate)
