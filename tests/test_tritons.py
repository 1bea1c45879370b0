"""The Tritons that are claimed, and what docs say of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.pages import tables_in
from benchmarks.tritons import EVERY, OTHERS, PAGE, RECORD, claimed, table

ROOT = Path(__file__).parent.parent
OLDEST, NEWEST = claimed("constraints-oldest.txt"), claimed("constraints.txt")


def test_the_oldest_triton_compiled_with_is_the_oldest_allowed():
    (allowed,) = re.findall(r'"triton>=([\d.]+);', (ROOT / "pyproject.toml").read_text())
    assert OLDEST.startswith(allowed)


@pytest.mark.skipif(not RECORD.is_file(), reason="nothing is recorded: python -m benchmarks.tritons --update")
def test_the_page_says_what_was_recorded():
    record = json.loads(RECORD.read_text())
    assert {(row["triton"], row["target"]) for row in record["rows"]} == {
        (version, target) for version in (OLDEST, NEWEST) for target in (EVERY, *OTHERS)
    }
    assert all(row["compiled"] == row["keys"] and not row["wrong"] for row in record["rows"])
    assert tables_in(PAGE) == table(record).strip()
