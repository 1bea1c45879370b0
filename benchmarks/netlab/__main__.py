"""``make netlab``: measures, records, and writes docs/performance.md's tables and picture (root, Linux)."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from .. import network
from ..pages import DOCS, PERFORMANCE, write_tables
from . import plots, tables
from .parts import Parts
from .sweep import QUICKLY, Plan, measure

RESULTS = Path(__file__).parent.parent / "results" / "netlab" / "netlab.json"
PICTURE = DOCS / "network-lab.png"


def recorded() -> dict[str, Any]:
    """What was measured last."""
    return json.loads(RESULTS.read_text())


def write_page(record: dict[str, Any]) -> None:
    """The tables between the page's marks, and the picture beside it."""
    write_tables(PERFORMANCE, tables.all_of(record), "NETWORK LAB")
    plots.draw(record, PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.netlab", description="The network lab.")
    parser.add_argument("--recorded", action="store_true", help="write the page again from what was measured last")
    parser.add_argument("--quick", action="store_true", help="a small model, few rates and rounds; records nothing")
    parser.add_argument("--afresh", action="store_true", help="forget what an interrupted lab has measured")
    parser.add_argument("--try", dest="trying", action="store_true", help="record nothing")
    given = parser.parse_args()
    if not given.recorded and (missing := network.lacking()):
        sys.exit(f"make netlab lacks {' and '.join(missing)}; `python -m benchmarks.netlab --recorded` needs neither")
    # Namespaces are removed also where somebody ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parts = Parts(None) if given.quick else Parts(afresh=given.afresh)
    record = recorded() if given.recorded else measure(QUICKLY if given.quick else Plan(), parts)
    print(tables.all_of(record))
    if given.trying or given.quick:
        with tempfile.TemporaryDirectory() as folder:
            plots.draw(record, Path(folder) / "network-lab.png")
        return
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    write_page(record)
    if not given.recorded:
        parts.forget()
    print(f"wrote docs/{PERFORMANCE.name}, docs/{PICTURE.name} and {RESULTS.name}")


if __name__ == "__main__":
    main()
