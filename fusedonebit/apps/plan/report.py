"""Answers whether compressing a step's messages pays: how long a step takes with each method, and what follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .collectives import Network
from .costs import METHODS, OURS, Family, Method, possible
from .hidden_messages import BACKWARD, whole

BASELINE = "bf16"
"""What compression is measured by: what DDP does with a hook of one line."""
LEAST_SPEEDUP = 1.05
"""What gains less is not worth another algorithm."""
LARGEST = 16_384
SLOWEST, FASTEST = 1e4, 1e14
"""Bytes per second between which rates are searched."""


class Step(NamedTuple):
    """What one method makes of a step.

    ``sent`` are bytes as in ``Cost``; ``messages`` the seconds of all messages, ``exposed`` those of them that the
    backward pass does not hide, ``seconds`` those of the whole step.
    """

    sent: float
    messages: float
    exposed: float
    seconds: float


def step(
    method: Method, parameters: float, gpus: int, network: Network, compute: float = 0.0, overlap: bool = True
) -> Step:
    """Return what a method makes of a step that computes for ``compute`` seconds."""
    buckets = method.buckets(parameters) if overlap else whole(parameters)
    cost = method.cost(parameters, gpus, network, buckets.count)
    exposed = buckets.exposed(cost.seconds, BACKWARD * compute)
    return Step(cost.sent, cost.seconds, exposed, compute + exposed)


@dataclass(frozen=True)
class Plan:
    """A question and its answer.

    Attributes:
        parameters, gpus, network: What was asked about.
        compute: Seconds of a step without messages; None: not known, and taken for 0.
        overlap: Messages travel behind the backward pass, where a method can do that.
        methods: By name, as ``costs.methods`` returns them.
    """

    parameters: int
    gpus: int
    network: Network
    compute: float | None = None
    overlap: bool = True
    methods: dict[str, Method] = field(default_factory=lambda: METHODS)

    def steps(self, gpus: int | None = None) -> dict[str, Step]:
        """Return what each method that there is makes of a step, on as many GPUs as asked about or others."""
        n = self.gpus if gpus is None else gpus
        return {
            name: step(method, self.parameters, n, self.network, self.compute or 0.0, self.overlap)
            for name, method in possible(n, self.methods).items()
            if self.overlap or name != "flat-overlap"
        }

    def best(self, families: Collection[Family] = OURS) -> str:
        """Name the fastest method of some families."""
        found = {name: of for name, of in self.steps().items() if self.methods[name].family in families}
        return min(found, key=lambda name: found[name].seconds)

    def best_of_each(self) -> list[str]:
        """Name what all are measured by, and the fastest method of each other family."""
        return [BASELINE, *(self.best([family]) for family in ("rival", *OURS))]

    def speedup(self, name: str | None = None) -> float:
        """Return how many times as fast as bfloat16 a method's step is, or our best one's."""
        steps = self.steps()
        other = steps[name or self.best()].seconds
        return steps[BASELINE].seconds / other if other else 1.0  # one GPU, of whose compute nothing is known

    @property
    def sender(self) -> str:
        """Whose bytes ``sent`` counts, and whose rate messages wait for."""
        return "node" if self.gpus > self.network.gpus_per_node else "GPU"

    @property
    def pays(self) -> bool:
        """True if the best of our methods is faster by ``LEAST_SPEEDUP``."""
        return self.speedup() >= LEAST_SPEEDUP

    def pays_below(self) -> float:
        """Return the rate of the link that messages wait for below which compressing pays; 0: none, inf: any."""
        net = self.network
        return crossing(lambda rate: replace(self, network=net.at_rate(self.gpus, rate)).pays, SLOWEST, FASTEST)

    def pays_until(self) -> float:
        """Return the seconds of compute below which compressing pays; 0: none."""
        return crossing(lambda compute: replace(self, compute=compute).pays, 1e-9, 1e9)

    def scale(self) -> list[int]:
        """Return numbers of GPUs from 2 on that fill nodes, doubling, to 16,384 or one node's; and the one asked."""
        per_node = self.network.gpus_per_node
        most = per_node if math.isinf(self.network.between) else max(LARGEST, self.gpus)
        counts = {2**k for k in range(1, 20) if 2**k < per_node} | {per_node * 2**k for k in range(20)} | {self.gpus}
        return sorted(count for count in counts if 2 <= count <= most)


def crossing(true_below: Callable[[float], bool], low: float, high: float) -> float:
    """Find where a condition that is true below some number > 0 ends, by bisection; 0 or inf if not in between."""
    if not true_below(low):
        return 0.0
    if true_below(high):
        return math.inf
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if true_below(middle) else (low, middle)
    return low


def calibrate(
    one_gpu: float, steps: Mapping[str, float], parameters: int, gpus: int, network: Network, overlap: bool = True
) -> Network:
    """Return the network with which ``step`` predicts what was timed, by the rate of the link that messages wait for.

    Of two methods the errors are equal and opposite, as ratios: the sum of their logarithms is 0.

    Args:
        one_gpu: Seconds of a step of one GPU alone: what it computes.
        steps: Those of all GPUs with ``DistributedDataParallel``, by method: fp32, bf16.
        parameters, gpus, network, overlap: As of ``Plan``; the network with any rate of that link.

    Raises:
        ValueError: if no rate explains what was timed.
    """

    def too_long(rate: float) -> bool:
        there = network.at_rate(gpus, rate)
        predicted = {name: step(METHODS[name], parameters, gpus, there, one_gpu, overlap).seconds for name in steps}
        return sum(math.log(predicted[name] / seconds) for name, seconds in steps.items()) > 0

    rate = crossing(too_long, SLOWEST, FASTEST)
    if not 0 < rate < math.inf:
        told = ", ".join(f"{name} {seconds:g} s" for name, seconds in steps.items())
        raise ValueError(f"steps of {told} are {'shorter' if rate else 'longer'} than any rate explains")
    return network.at_rate(gpus, rate)
