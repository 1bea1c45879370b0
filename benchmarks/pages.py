"""Tables that programs write into pages of docs/, each between two comments that name it."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
TABLES, PERFORMANCE = DOCS / "tables", DOCS / "performance.md"


def tables_in(page: Path, name: str = "TABLES") -> str:
    """Return what stands between ``<!-- name -->`` and ``<!-- end of name -->``."""
    return _parts(page, name)[1].strip()


def write_tables(page: Path, text: str, name: str = "TABLES") -> None:
    """Replace it."""
    before, _, after = _parts(page, name)
    page.write_text(f"{before}{text.strip()}\n{after}")


def _parts(page: Path, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = page.read_text().split(begin)
    inside, after = rest.split(end)
    return before + begin, inside, end + after
