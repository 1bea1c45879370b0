"""Files of runs for tests of the report, what is on its pages, and what a browser says of one."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.needs_browser


def record(step: int, name: str = "one", **more: Any) -> dict[str, Any]:
    told = {"optimizer": name, "step": step, "loss": 1.0 / step, "phase": "warmup" if step < 4 else "compression"}
    told |= {"bytes_step": 100, "bytes_total": 100 * step, "bytes_fp32": 3200, "skipped_steps": 0}
    return told | more


def write(folder: Path, records: Iterable[dict[str, Any]], starts: Iterable[dict[str, Any]] = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("metrics.jsonl", records), ("starts.jsonl", starts)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if text or name == "metrics.jsonl":
            (folder / name).write_text(text)
    return folder


def cells(page: str, name: str) -> list[str]:
    """What the results' row of this name says, by run."""
    (row,) = re.findall(rf"<th scope=row>{re.escape(name)}<small>.*?</tr>", page)
    return [unescape(cell) for cell in re.findall("<td>(.*?)</td>", row)]


def pictures(page: str) -> dict[str, Image.Image]:
    """The page's pictures by title; each has a caption."""
    found = re.findall(r'<figure><h3>(.*?)</h3><img alt=".*?" src="data:image/png;base64,(.*?)"><figcaption>.+?<', page)
    assert len(found) == page.count("<figure")
    return {unescape(title): Image.open(io.BytesIO(base64.b64decode(data))) for title, data in found}


def console_of(page: Path) -> list[str]:
    """What a browser's console says when it opens a page."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    told = subprocess.run([str(BROWSER), *flags, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert "</html>" in told.stdout
    return [line for line in told.stderr.splitlines() if "CONSOLE" in line]
