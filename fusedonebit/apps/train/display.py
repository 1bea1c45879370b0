"""Live progress, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table

from ..units import size


class Display:
    """Progress bars on a terminal, about twenty plain lines a run elsewhere; silent on ranks that are not ``enabled``.

    Of several optimizers, trained one after the other on a machine that others may use, no speeds are shown.
    """

    def __init__(self, steps: int, enabled: bool, compares: bool = False) -> None:
        self._steps, self._enabled, self._compares = steps, enabled, compares
        self._console = Console(highlight=False)
        self._live = enabled and self._console.is_terminal
        self._every = max(1, steps // 20)
        done, text = "{task.completed:.0f}/{task.total:.0f}", "{task.fields[text]}"
        columns = ("{task.description:18}", BarColumn(bar_width=20), done, text, TimeRemainingColumn(compact=True))
        self.bars = Progress(*columns, console=self._console, disable=not self._live)  # to be entered

    def start(self, name: str, first_step: int) -> None:
        """Begin another run."""
        self._task = self.bars.add_task(name, total=self._steps, completed=first_step, text="")

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a step's record."""
        speed = "" if self._compares else f"{record['tokens_per_s']:,} tokens/s  "
        text = (
            f"loss {record['loss']:.3f}  {record['phase']:12}  {speed}"
            f"sent {size(record['bytes_step'])}/step, {size(record['bytes_total'])} in all"
        )
        self.bars.update(self._task, completed=record["step"], text=text)
        step = record["step"]
        if self._enabled and not self._live and (step % self._every == 0 or step == self._steps):
            self._console.print(f"{record['optimizer']:18} step {step:>6}/{self._steps}  {text}", soft_wrap=True)


def print_table(records: Iterable[Mapping[str, Any]]) -> None:
    """Print a row for each optimizer; speeds of one alone, as several were trained one after the other."""
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        runs.setdefault(record["optimizer"], []).append(record)
    held_out = {name: [r["held_out_loss"] for r in run if "held_out_loss" in r][-1:] for name, run in runs.items()}
    alone, (first, *_) = len(runs) == 1, runs
    heads = ["optimizer", "steps", "bits after", "train loss", "held-out loss", *[f"against {first}"] * (not alone)]
    heads += ["bytes/step, last", "bytes in all", "fp32 / sent", *["tokens/s"] * alone]
    told = "losses in nats per byte, train and bytes/step over the last 20 steps; bytes are those one rank sends"
    table = Table(caption=told)
    for head in heads:
        table.add_column(head, justify="left" if head == "optimizer" else "right", no_wrap=head == "optimizer")
    for name, run in runs.items():
        last, tail, bits = run[-1], run[-20:], [r["step"] - 1 for r in run if r["phase"] == "compression"]
        against = [f"{mine / theirs - 1:+.1%}" for mine, theirs in zip(held_out[name], held_out[first], strict=False)]
        losses = [f"{sum(r['loss'] for r in tail) / len(tail):.4f}", *([f"{y:.4f}" for y in held_out[name]] or "-")]
        sent, fp32 = last["bytes_total"], last["bytes_fp32"] * last["step"]
        times = f"{fp32 / sent:.1f}x" if sent else "-"
        cells = [str(last["step"]), str(bits[0]) if bits else "-", *losses, *(against or ["-"]) * (not alone)]
        cells += [size(sum(r["bytes_step"] for r in tail) / len(tail)), size(sent), times]
        table.add_row(name, *cells, *[f"{last['tokens_per_s']:,}"] * alone)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140  # a file or a pipe has no width to fit
    console.print(table)
