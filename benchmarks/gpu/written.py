"""Files that are whole whenever somebody reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Write a file in one go: whoever ends the program leaves the last whole one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8", errors="replace")
    os.replace(beside, path)


def replace_json(path: Path, record: Any) -> None:
    """Write a record as JSON; what JSON does not know becomes text."""
    replace_text(path, json.dumps(record, indent=1, default=str) + "\n")
