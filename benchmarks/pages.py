"""Records, and the tables of them that programs write into pages of docs/, each between comments that name it."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
TABLES, PERFORMANCE = DOCS / "tables", DOCS / "performance.md"


def tables_in(page: Path, name: str = "TABLES") -> str:
    """Return what stands between ``<!-- name -->`` and ``<!-- end of name -->``."""
    return _parts(page, name)[1].strip()


def write_tables(page: Path, text: str, name: str = "TABLES") -> None:
    """Replace it."""
    before, _, after = _parts(page, name)
    page.write_text(f"{before}{text.strip()}\n{after}")


def markdown(rows: Iterable[Sequence[object]], left: Container[int] = (0,)) -> str:
    """Return a table, its head first; columns but for some stand to the right, and what is None is empty."""
    head, *body = (["" if cell is None else str(cell) for cell in row] for row in rows)
    lines = [f"| {' | '.join(row)} |" for row in (head, *body)]
    marks = ("---" if i in left else "--:" for i in range(len(head)))
    return "\n".join([lines[0], f"|{'|'.join(marks)}|", *lines[1:]]) + "\n"


def read(path: Path) -> Any:
    """Return a record."""
    return json.loads(path.read_text())


def keep(record: Any, path: Path, default: type[str] | None = None) -> None:
    """Write a record, where need be into a new folder; with ``default=str`` what JSON does not know becomes text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(record, indent=1, default=default) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file in one go: whoever ends the program leaves the last whole one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8", errors="replace")
    os.replace(beside, path)


def _parts(page: Path, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = page.read_text().split(begin)
    inside, after = rest.split(end)
    return before + begin, inside, end + after
