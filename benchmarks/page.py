"""``python -m benchmarks.page``: docs/tables/cpu.md and pictures, from what was recorded last.

Nothing is measured here: ``make bench OUT=benchmarks/results/cpu`` records.
"""

from __future__ import annotations

from typing import Any

from . import bytes_plot, step
from .pages import DOCS, RESULTS, TABLES, markdown, read, write_tables
from .registry import Record

PAGE = TABLES / "cpu.md"
PICTURES = {
    "step-time": (step.draw, DOCS / "step-time.png"),
    "bytes-moved": (bytes_plot.draw, DOCS / "bytes.png"),
}
"""Of each case that has one: how it is drawn, and where it lies."""
SHOWN = {
    "bytes-moved": ("algorithm", "optimizer", "device B", "DDP's copies B", "sent B", "x fewer sent"),
    "ranks": ("optimizer", "ms", "10-90 %", "x AdamW(fused)", "limit"),
    "demo": ("part", "ms", "10-90 %", "share"),
    "step": ("optimizer", "ms", "10-90 %", "x AdamW(fused)"),
    "averaging": ("averaging", "ms", "of it averaging", "bytes sent", "x fewer"),
    "compiled": ("optimizer", "eager ms", "compiled ms", "ratio"),
}
"""Columns of each case's table."""


def records() -> dict[str, Record]:
    """What was recorded last, by case."""
    return {path.stem: read(path) for path in sorted((RESULTS / "cpu").glob("*.json"))}


def tables() -> str:
    """As Markdown."""
    found, lines = records(), []
    for name, columns in SHOWN.items():
        about, table = found[name]["about"], found[name]["tables"][0]
        where = f"{about['device']}, {about['cpu_cores']} cores, load {about['load']:.1f} at its end"
        lines += [f"**{name}**: {table['title']}.", ""]
        lines += [markdown([columns, *([_cell(row.get(column)) for column in columns] for row in table["rows"])])]
        lines += [f"*{where}; torch {about['torch']}, commit {about['commit']}, {about['date']}.*", ""]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> Any:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if isinstance(value, float) else value


def main() -> None:
    write_tables(PAGE, tables())
    print(PAGE)
    found = records()
    for name, (draw, path) in PICTURES.items():
        draw(found[name], path)


if __name__ == "__main__":
    main()
