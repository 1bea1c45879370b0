"""Tells the costs of each method, the cheapest, and whether compressing pays, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from .costs import METHODS, Network, cost

LEAST_GAIN = 0.03
"""Of a step: what saves less is not worth another algorithm."""
LARGEST = 16_384
FAMILIES = ("uncompressed", "1-bit", "Marsit")


@dataclass(frozen=True)
class Plan:
    """A question and its answer.

    Attributes:
        parameters, gpus, network: What was asked about.
        compute: Seconds of a step without messages; None: not known.
        full_precision_every: K of Marsit.
    """

    parameters: int
    gpus: int
    network: Network
    compute: float | None = None
    full_precision_every: int = 100

    def costs(self, gpus: int | None = None) -> dict[str, float]:
        """Return seconds of each method that there is, for as many GPUs as asked about or others."""
        n = self.gpus if gpus is None else gpus
        every = self.full_precision_every
        found = {name: cost(name, self.parameters, n, self.network, every) for name in METHODS}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def cheapest(self, gpus: int | None = None, families: Iterable[str] = FAMILIES) -> str:
        """Name of the cheapest method of some families."""
        found = {name: seconds for name, seconds in self.costs(gpus).items() if METHODS[name].family in families}
        return min(found, key=found.__getitem__)

    @property
    def uncompressed(self) -> float:
        """Seconds of the best method that does not compress."""
        return self.costs()[self.cheapest(families=["uncompressed"])]

    @property
    def saved(self) -> float:
        """Seconds a step that the best compression saves against that; below 0 it loses."""
        return self.uncompressed - self.costs()[self.cheapest(families=["1-bit", "Marsit"])]

    @property
    def share(self) -> float | None:
        """The same as a share of the uncompressed step; None where that is not known."""
        return None if self.compute is None else self.saved / (self.compute + self.uncompressed)

    @property
    def compresses(self) -> bool:
        """True if compressing pays, as far as is known."""
        return self.saved > 0 and (self.share is None or self.share >= LEAST_GAIN)

    def scale(self) -> list[int]:
        """Return numbers of GPUs from 2 to 16,384 that fill nodes, doubling; and the one asked about."""
        per_node, counts, n = self.network.gpus_per_node, {self.gpus} - {1}, 2
        while n < per_node:
            counts.add(n)
            n *= 2
        n = per_node if per_node > 1 else 2
        while n <= max(LARGEST, self.gpus):
            counts.add(n)
            n *= 2
        return sorted(counts)

    def advice(self) -> list[str]:
        """Return the answer in a few lines."""
        if self.gpus == 1:
            return ["do not compress here: one GPU sends nothing"]
        return [*self._names(), self._verdict()]

    def _names(self) -> list[str]:
        """Return the cheapest; and for 1-bit Adam and LAMB, as Marsit is neither."""
        named = {"cheapest": self.cheapest()}
        if METHODS[self.cheapest()].family == "Marsit":
            named["for 1-bit Adam and 1-bit LAMB"] = self.cheapest(families=["1-bit"])
        costs = self.costs()
        return [
            f"{what}: {METHODS[name].label}, {duration(costs[name])} a step ({METHODS[name].write})"
            for what, name in named.items()
        ]

    def _verdict(self) -> str:
        best = METHODS[self.cheapest(families=["uncompressed"])].label
        if self.saved <= 0:
            return f"do not compress here: {best} is the cheapest that there is"
        gain = f"{duration(self.saved)} a step against {best}"
        if self.share is None:
            enough = self.saved / LEAST_GAIN - self.uncompressed
            return (
                f"compressing saves {gain}; do not compress where a step computes for more than {duration(enough)}: "
                f"that saves under {LEAST_GAIN:.0%} (--step-ms decides)"
            )
        if not self.compresses:
            return f"do not compress here: it saves {gain}, {self.share:.1%} of the step (below {LEAST_GAIN:.0%})"
        return f"compress: saves {gain}, {self.share:.0%} of the step ({1 / (1 - self.share):.3g} times as fast)"


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * 0.9995:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def asked_table(plan: Plan) -> Table:
    """Every method for the configuration asked about."""
    table = Table()
    table.add_column("a step's messages, as", no_wrap=True)
    for heading in ("take", "of fp32", *(["whole step"] if plan.compute is not None else [])):
        table.add_column(heading, justify="right")
    table.add_column("write")
    costs, cheapest = plan.costs(), plan.cheapest()
    for name, method in METHODS.items():
        if name not in costs:
            table.add_row(method.label, "no such torus")
            continue
        cells = [duration(costs[name]), f"{costs[name] / costs['fp32']:.1%}" if costs["fp32"] else ""]
        if plan.compute is not None:
            cells.append(duration(plan.compute + costs[name]))
        style = "bold green" if name == cheapest else None
        table.add_row(method.label, *cells, method.write, style=style)
    return table


def scale_table(plan: Plan, columns: Sequence[int]) -> Table:
    """Every method for several numbers of GPUs; the cheapest is marked."""
    table = Table(title="ms a step by number of GPUs; * the cheapest", title_justify="left")
    table.add_column("", no_wrap=True)
    for gpus in columns:
        table.add_column(f"{gpus:,} ", justify="right")
    at = {gpus: (plan.costs(gpus), plan.cheapest(gpus)) for gpus in columns}
    for name, method in METHODS.items():
        cells = []
        for costs, cheapest in at.values():
            mark = "*" if name == cheapest else " "
            cells.append(_digits(1e3 * costs[name]) + mark if name in costs else "")
        table.add_row(method.label, *cells)
    return table


def bandwidth(bytes_per_second: float) -> str:
    """In bytes and bits per second."""
    return f"{bytes_per_second / 1e9:,.4g} GB/s ({bytes_per_second * 8e-9:,.4g} Gbit/s)"


def show(plan: Plan, console: Console) -> None:
    """Print the tables and the answer."""
    net = plan.network
    console.print(
        f"{plan.parameters:,} parameters on {plan.gpus:,} GPUs, {net.gpus_per_node} a node; a node sends "
        f"{bandwidth(net.between)}, a GPU within its node {bandwidth(net.inside)}",
        soft_wrap=True,
    )
    console.print(asked_table(plan))
    if plan.full_precision_every:
        console.print(f"Marsit's have one fp32 round of {plan.full_precision_every} in them (--full-precision-every)")
    counts = plan.scale()
    columns = sorted({*counts[:: -(-len(counts) // 4)], plan.gpus, counts[-1]} - {1})  # as many as 80 letters hold
    console.print("", scale_table(plan, columns), sep="\n")
    for line in plan.advice():
        console.print(line, soft_wrap=True)
