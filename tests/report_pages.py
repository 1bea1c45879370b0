"""Files of runs for tests of the report, and what a browser makes of its pages."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

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


def data_of(page: str) -> dict[str, Any]:
    """What the page's script is given."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def open_page(page: Path, script: str = "") -> tuple[str, list[str]]:
    """The page as a browser has drawn it, after ``script``, and what the browser's console says."""
    asked = page.with_suffix(".asked.html")
    asked.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    told = subprocess.run(
        [str(BROWSER), *flags, "--window-size=1400,2000", asked.as_uri()], capture_output=True, text=True, timeout=120
    )
    return told.stdout, [line for line in told.stderr.splitlines() if "CONSOLE" in line]
