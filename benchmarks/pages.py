"""Tables that programs write into pages of docs/, each between two comments that name it."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PERFORMANCE = DOCS / "performance.md"


def write_tables(page: Path, text: str, name: str = "TABLES") -> None:
    """Replaces what stands between ``<!-- name -->`` and ``<!-- end of name -->``."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = page.read_text().split(begin)
    page.write_text(before + begin + text + end + rest.split(end)[1])
