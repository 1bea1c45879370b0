"""``python -m benchmarks.gpu.page``: docs/tables/h100.md, what an H100 has measured before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..pages import RESULTS, TABLES, markdown, read, write_tables

RECORD = RESULTS / "h100" / "speed.json"
PAGE = TABLES / "h100.md"
KERNELS_OF = ("OneBitAdam, W=8, bf16 variance", "OneBitLamb, W=8")
LEAST = 10.0
"""Microseconds: kernels that take less are left out."""


def _steps(cases: dict[str, Any]) -> Iterator[Sequence[Any]]:
    for size in ("340M", "10M"):
        for row in cases[f"steps-{size}"]["tables"][0]["rows"]:
            ratio, ms = f"{row['x AdamW']:.2f}", f"{row['ms']:.3f}"
            yield size, row["optimizer"], row["way"], ms, f"{row['AdamW ms']:.3f}", ratio, f"{row['host ms']:.2f}"


def _kernels(cases: dict[str, Any]) -> Iterator[Sequence[Any]]:
    tables = cases["steps-340M"]["tables"]
    for row in next(table["rows"] for table in tables if "kernel" in table["columns"]):
        if row["optimizer"] not in KERNELS_OF or row["way"] != "eager" or row["us"] < LEAST or not row["GB/s"]:
            continue
        share = f"{row['of a copy']:.2f}"
        yield row["optimizer"], row["kernel"], f"{row['us']:.0f}", f"{row['B/param']:.2f}", f"{row['GB/s']:,.0f}", share


def _defaults(cases: dict[str, Any]) -> Iterator[Sequence[Any]]:
    for row in cases["defaults-340M"]["tables"][0]["rows"]:
        times = f"{row['ms']:.2f}", f"{row['AdamW ms']:.2f}", f"{row['x AdamW']:.2f}"
        yield row["optimizer"], row["parameters"], *times, f"{row['B/param']:.1f}", f"{row['of a copy']:.2f}"


def _alone(cases: dict[str, Any]) -> Iterator[Sequence[Any]]:
    for table in cases["adamw"]["tables"]:
        for row in table["rows"]:
            if row.get("ms"):
                what, ratio = table["title"].partition(" ")[2], f"{row['x AdamW(fused)']:.2f}"
                yield what, row["optimizer"], f"{row['ms']:.2f}", ratio, f"{row['state B']:.1f}", row["moved B"] or ""


def tables() -> str:
    """Returns them as Markdown."""
    cases = {case["case"]: case for case in read(RECORD)}
    about = cases["steps-340M"]["about"]
    (copy,) = cases["machine"]["tables"][0]["rows"]
    versions = f"driver {about['driver']}, torch {about['torch']}, Triton {about['triton']}, {about['date']}"
    steps = ("parameters", "optimizer", "way", "ms", "AdamW's ms", "x AdamW", "host ms")
    defaults = ("340M, by default, W = 8", "parameters", "ms", "AdamW's ms", "x AdamW", "B/param", "of a copy")
    kernels = ("340M, in", "kernel", "us", "B/param", "GB/s", "of a copy")
    alone = ("340M", "alone", "ms", "x AdamW(fused)", "state B", "moved B")
    made = {steps: _steps, defaults: _defaults, kernels: _kernels, alone: _alone}
    told = f"{about['device']}, {versions}; a device copy reads and writes {copy['GB/s']:,.0f} GB/s.\n"
    return "\n".join([told, *(markdown([head, *rows(cases)]) for head, rows in made.items())])


if __name__ == "__main__":
    write_tables(PAGE, tables())
    print(PAGE)
