"""The page's tables of what is predicted, and of what an H100 has measured beside it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from .chips import CHIPS, H100
from .gpu.steps import MODELS, PEERS
from .kernels import KERNELS
from .optimizers import numel_of
from .pages import TABLES
from .predictions import SIZES

PAGE = TABLES / "predictions.md"
GOAL = 0.1
"""Median deviation of what is measured."""
Rows = list[dict[str, Any]]


def compared(record: Mapping[str, Any], measured: Rows) -> Iterator[dict[str, Any]]:
    """Each step that was measured on an H100, captured, and the kernels of its profile, beside what was predicted."""
    rows = {(row["step"], row["size"]): row for row in record["steps"] if row["chip"] == H100.name}
    for case in measured:
        size = case["case"].removeprefix("steps-")
        for row in (row for table in case["tables"] for row in table["rows"] if row.get("way") == "captured"):
            said = rows.get((row["optimizer"], size))
            if said is None:
                continue
            told = {"step": row["optimizer"], "size": size}
            if "kernel" not in row:
                yield told | {"kernel": None, "predicted": said["us"], "measured": 1e3 * row["ms"]}
            elif (op := row["kernel"].removesuffix("_kernel")) in said["kernels"]:
                yield told | {"kernel": op, "predicted": said["kernels"][op], "measured": row["us"]}


def deviation(rows: Rows) -> float:
    """Return the median of how far what was measured is from what was predicted."""
    return statistics.median(abs(_ratio(row) - 1) for row in rows)


def _ratio(row: Mapping[str, Any]) -> float:
    return row["measured"] / row["predicted"]


# ---------------------------------------------------------------- tables


def _line(*cells: object) -> str:
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def _table(*head: str) -> list[str]:
    return [_line(*head), "|---|" + "--:|" * (len(head) - 1)]


def _instructions(rows: Rows) -> str | None:
    found = next(row["instructions"] for row in rows if row["chip"] == H100.name)
    return None if found is None else f"{found:.0f}" if found >= 1 else f"{found:.1f}"


def tables(record: Mapping[str, Any], measured: Rows) -> str:
    """Return the page's tables, of steps, of what was measured, and of kernels."""
    found = list(compared(record, measured))
    return "\n\n".join((_steps(record, found), _verdict(found), _measured_kernels(found), _kernels(record))) + "\n"


def _steps(record: Mapping[str, Any], found: Rows) -> str:
    lines = _table(
        *("a step, ms", "B/parameter", "instructions/parameter", "launches", *(chip.name for chip in CHIPS)),
        *("H100, measured", "measured / predicted"),
    )
    for size in SIZES:
        for peer in PEERS:
            rows = [row for row in record["steps"] if (row["step"], row["size"]) == (peer.name, size)]
            seen = next((r for r in found if (r["step"], r["size"], r["kernel"]) == (peer.name, size, None)), None)
            beside = (
                (f"{seen['measured'] / 1e3:.3f}", f"{seen['measured'] / seen['predicted']:.3f}") if seen else ("", "")
            )
            per = f"{rows[0]['bytes'] / numel_of(MODELS[size]):.2f}"
            head = (f"{peer.name}, {size}", per, _instructions(rows), rows[0]["launches"])
            lines.append(_line(*head, *(f"{row['us'] / 1e3:.3f}" for row in rows), *beside))
    return "\n".join(lines)


def _verdict(found: Rows) -> str:
    lines = _table(
        "measured on an H100", "number", "median deviation", f"goal: at most {GOAL:.0%}", "measured / predicted"
    )
    for size in (None, *SIZES):
        for what, rows in (
            ("whole steps", [row for row in found if row["kernel"] is None and size in (None, row["size"])]),
            ("kernels in them", [row for row in found if row["kernel"] and size in (None, row["size"])]),
        ):
            median, ratios = deviation(rows), [_ratio(row) for row in rows]
            told = "met" if median <= GOAL else "**missed**"
            span = f"{min(ratios):.2f} to {max(ratios):.2f}"
            lines.append(_line(what + (f", {size}" if size else ""), len(rows), f"{median:.1%}", told, span))
    return "\n".join(lines)


def _measured_kernels(found: Rows) -> str:
    lines = _table("launches of it in steps, H100, measured / predicted", *SIZES)
    for op in dict.fromkeys(row["kernel"] for row in found if row["kernel"]):
        cells = []
        for size in SIZES:
            ratios = [_ratio(r) for r in found if (r["kernel"], r["size"]) == (op, size)]
            cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
        lines.append(_line(op, *cells))
    return "\n".join(lines)


def _kernels(record: Mapping[str, Any]) -> str:
    lines = _table("a kernel, us", "elements", "B/element", "instructions/element", *(chip.name for chip in CHIPS))
    for kernel in KERNELS:
        rows = [row for row in record["kernels"] if row["kernel"] == kernel.name]
        elements = rows[0]["elements"]
        per = re.sub(r"\.?0+$", "", f"{rows[0]['bytes'] / elements:.4f}")
        head = (kernel.name, f"{elements:,}", per, _instructions(rows))
        lines.append(_line(*head, *(f"{row['us']:,.0f}" + _MARKS.get(row["held by"], "") for row in rows)))
    return "\n".join(lines)


_MARKS = {"issue": " i", "units": " u", "latency": " l", "begin": " b"}
"""What decides, if it is not memory."""
