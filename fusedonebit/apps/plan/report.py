"""Answers whether compressing a step's messages pays: how long a step takes with each method, and what follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .costs import METHODS, OURS, Family, Method, possible
from .hidden_messages import BACKWARD, whole
from .network import Network
from .units import bandwidth, duration

BASELINE = "bf16"
"""What compression is measured by: what DDP does with a hook of one line."""
LEAST_SPEEDUP = 1.05
"""What gains less is not worth another algorithm."""
LARGEST = 16_384
SLOWEST, FASTEST = 1e4, 1e14
"""Bytes per second between which rates are searched."""


class Step(NamedTuple):
    """What one method makes of a step.

    Attributes:
        sent: Bytes that a node sends to others, or where there is one only a GPU within it.
        messages: Seconds of all messages.
        exposed: Those of them that the backward pass does not hide.
        seconds: Of the whole step.
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

    def best_of_each(self) -> set[str]:
        """Name the fastest method of each family, and what all are measured by."""
        families = {method.family for name, method in self.methods.items() if name in self.steps()}
        return {BASELINE, *(self.best([family]) for family in families)}

    def speedup(self, name: str | None = None) -> float:
        """Return how many times as fast as bfloat16 a method's step is, or our best one's."""
        steps = self.steps()
        other = steps[name or self.best()].seconds
        return steps[BASELINE].seconds / other if other else 1.0  # one GPU, of whose compute nothing is known

    @property
    def sender(self) -> str:
        """Whose bytes ``sent`` counts, and whose rate messages wait for."""
        return "a node" if self.gpus > self.network.gpus_per_node else "a GPU"

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
        per_node, counts, n = self.network.gpus_per_node, {self.gpus} - {1}, 2
        while n < per_node:
            counts.add(n)
            n *= 2
        n = per_node if per_node > 1 else 2
        while n <= (per_node if math.isinf(self.network.between) else max(LARGEST, self.gpus)):
            counts.add(n)
            n *= 2
        return sorted(counts)

    # ------------------------------------------------------------ in words

    def advice(self) -> list[str]:
        """Return the answer in a few lines, the verdict first."""
        if self.gpus == 1:
            return ["Don't compress: one GPU sends nothing"]
        return [self._verdict(), *self._at_what_rate(), *self._others()]

    def _verdict(self) -> str:
        ours = self.best()
        if self.compute is None and (until := self.pays_until()):
            return (
                f"Don't compress where a step computes for more than {duration(until)} (--step-ms tells): there "
                f"{self._named(BASELINE)} is as fast within {LEAST_SPEEDUP - 1:.0%}. "
                f"Where it computes for less, {self._named(ours)} pays"
            )
        if self.pays:
            return f"Compress: {self._told(ours)}"
        return (
            f"Don't compress: {self._named(BASELINE)} takes {self._seconds(BASELINE)}, and the fastest of ours, "
            f"{self._named(ours)}, is {self.speedup(ours):.2f} times as fast"
        )

    def _at_what_rate(self) -> list[str]:
        rate = self.pays_below()
        if self.compute is None or math.isinf(rate):
            return []
        if not rate:
            return [f"It would pay at no rate above {bandwidth(SLOWEST)}: what is left are hops, not bytes"]
        turn = "It stops paying above" if self.pays else "It would pay below"
        return [f"{turn} {bandwidth(rate)} {self.sender}"]

    def _others(self) -> list[str]:
        """Return the best for 1-bit Adam and LAMB, and of rivals, where these are others than the best of ours."""
        lines, ours, rival = [], self.best(), self.best(["rival"])
        if self.pays and self.methods[ours].family != "1-bit":
            lines.append(f"For 1-bit Adam and 1-bit LAMB: {self._told(self.best(['1-bit']))}")
        if self.speedup(rival) >= LEAST_SPEEDUP * max(1.0, self.speedup(ours)):
            lines.append(f"Faster than all of ours: {self._told(rival)}")
        return lines

    def _named(self, name: str) -> str:
        return f"{self.methods[name].label} ({self.methods[name].write})"

    def _told(self, name: str) -> str:
        baseline = self.methods[BASELINE].label
        return f"{self._named(name)}, {self._seconds(name)}, {self.speedup(name):.3g} times as fast as {baseline}"

    def _seconds(self, name: str) -> str:
        what = "a step" if self.compute is not None else "for messages"
        return f"{duration(self.steps()[name].seconds)} {what}"


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
