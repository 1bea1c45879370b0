"""Names of methods and rates, and Markdown tables of them."""

from __future__ import annotations

from collections.abc import Sequence

from .hooks import POWER_SGD_RANK

LABELS = {
    "adamw": "AdamW, fp32 all-reduce (DDP)",
    "bf16": "AdamW, bf16 hook, overlapped (DDP)",
    "int8": "AdamW, int8 hook, overlapped (DDP)",
    "powersgd": f"AdamW, PowerSGD hook, rank {POWER_SGD_RANK} (DDP)",
    "onebit-adam": "1-bit Adam",
    "onebit-adam-overlap": "1-bit Adam, `overlap=True`",
    "zero-one-adam": "0/1 Adam",
    "onebit-lamb": "1-bit LAMB",
    "marsit-ring": "Marsit (Adam), ring",
    "marsit-owner": "Marsit (Adam), owner",
}
STAGES = {
    "warm-up": "1-bit Adam, a step of the warm-up",
    "renewal": "1-bit Adam, a step that renews",
    "renewal-overlap": "1-bit Adam, `overlap=True`, a step that renews",
    "telling": "0/1 Adam, a step in which workers tell of their level",
}
LIBRARIES = {"onebit-lamb": "gloo", "onebit-lamb-mpi": "Open MPI"}


def mbit(megabits: float) -> str:
    return f"{megabits:,.0f}" if megabits >= 100 else f"{megabits:g}"


def rate(megabits: float | None) -> str:
    return "loopback" if megabits is None else f"{mbit(megabits)} Mbit/s"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    mark = f"|---|{'--:|' * (len(head) - 1)}"
    head, *rows = [f"| {' | '.join(row)} |" for row in (head, *lines)]
    return "\n".join([head, mark, *rows]) + "\n"
