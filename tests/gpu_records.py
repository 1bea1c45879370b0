"""Shares what tests of gpu record and others set up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.runner import Job

RECORD = {"complete": True, "tables": [{"title": "rows", "columns": ["n"], "rows": [{"n": 1}]}], "notes": ["a note"]}

WRITES = "import json, os, sys, time; open(sys.argv[1], 'w').write(json.dumps({record})); "


def job(name: str, then: str = "", record: object = RECORD, deadline: float = 30.0, **more: bool) -> Job:
    """A process that leaves a record, then does something."""
    writes = WRITES.replace("{record}", repr(record))
    return Job(name, [sys.executable, "-S", "-c", writes + then, f"{{folder}}/{name}.json"], deadline, **more)


def told(folder: Path) -> tuple[dict, str, ElementTree.Element]:
    """The three reports."""
    record = json.loads((folder / "gpu-check.json").read_text())
    return record, (folder / "gpu-check.md").read_text(), ElementTree.parse(folder / "gpu-check.xml").getroot()
