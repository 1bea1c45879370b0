"""Live progress, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class Display:
    """Progress bars on a terminal, about twenty plain lines a run elsewhere; silent on other ranks.

    Args:
        steps: How many a run has.
        enabled: Whether this rank shows anything.
        compares: Whether several optimizers are trained. One after the other, on a machine that others may use: no
            speeds are shown then.
    """

    def __init__(self, steps: int, enabled: bool, compares: bool = False) -> None:
        self._steps, self._enabled, self._compares = steps, enabled, compares
        self._console = Console(highlight=False)
        self._live = enabled and self._console.is_terminal
        self._every = max(1, steps // 20)
        self._bars = Progress(
            TextColumn("{task.description:18}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self._live,
        )

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def start(self, name: str, first_step: int) -> None:
        """Begin another run."""
        self._task = self._bars.add_task(name, total=self._steps, completed=first_step, text="")

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a step's record."""
        speed = "" if self._compares else f"{_count(record['tokens_per_s'])} tokens/s  "
        text = (
            f"loss {record['loss']:.3f}  {record['phase']:12}  {speed}"
            f"sent {_bytes(record['bytes_step'])}/step, {_bytes(record['bytes_total'])} in all"
        )
        self._bars.update(self._task, completed=record["step"], text=text)
        step = record["step"]
        if self._enabled and not self._live and (step % self._every == 0 or step == self._steps):
            self._console.print(f"{record['optimizer']:18} step {step:>6}/{self._steps}  {text}", soft_wrap=True)


def summarise(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make one row for each optimizer: the last step's losses and bytes, and the ratio to fp32.

    ``against_first`` is the held-out loss relative to that of the first optimizer, None if that is
    the only one.

    ``ratio`` is how many times fewer bytes were sent in all than if every step had averaged float32
    gradients; None at world size 1.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_name.setdefault(record["optimizer"], []).append(record)
    rows = []
    for name, runs in by_name.items():
        last = runs[-1]
        tail = [r["loss"] for r in runs[-20:]]
        compressed = [r["step"] for r in runs if r["phase"] == "compression"]
        rows.append(
            {
                "optimizer": name,
                "steps": last["step"],
                "freeze_step": compressed[0] - 1 if compressed else None,
                "train_loss": sum(tail) / len(tail),
                "held_out_loss": next((r["held_out_loss"] for r in reversed(runs) if "held_out_loss" in r), None),
                "bytes_step": sum(r["bytes_step"] for r in runs[-20:]) / len(runs[-20:]),
                "bytes_total": last["bytes_total"],
                "ratio": last["bytes_fp32"] * last["step"] / last["bytes_total"] if last["bytes_total"] else None,
                "tokens_per_s": last["tokens_per_s"],
            }
        )
    baseline = rows[0]["held_out_loss"] if len(rows) > 1 else None
    for row in rows:
        known = baseline is not None and row["held_out_loss"] is not None
        row["against_first"] = row["held_out_loss"] / baseline - 1 if known else None
    return rows


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the summary; speeds of one run alone: several were made one after the other."""
    table = Table(
        caption="losses in nats per byte, train and bytes/step over the last 20 steps; bytes are those one rank sends"
    )
    alone = len(rows) == 1
    for column in ("optimizer", "steps", "bits after", "train loss", "held-out loss"):
        table.add_column(column, justify="left" if column == "optimizer" else "right", no_wrap=column == "optimizer")
    against = [] if alone else [f"against {rows[0]['optimizer']}"]
    for column in (*against, "bytes/step, last", "bytes in all", "fp32 / sent", *["tokens/s"] * alone):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["optimizer"],
            str(row["steps"]),
            "-" if row["freeze_step"] is None else str(row["freeze_step"]),
            f"{row['train_loss']:.4f}",
            "-" if row["held_out_loss"] is None else f"{row['held_out_loss']:.4f}",
            *["-" if row["against_first"] is None else f"{row['against_first']:+.1%}"] * (not alone),
            _bytes(row["bytes_step"]),
            _bytes(row["bytes_total"]),
            "-" if row["ratio"] is None else f"{row['ratio']:.1f}x",
            *[_count(row["tokens_per_s"])] * alone,
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140  # a file or a pipe has no width to fit
    console.print(table)


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def _count(n: float) -> str:
    return f"{n:.0f}" if n < 10_000 else f"{n / 1000:.0f}k"
