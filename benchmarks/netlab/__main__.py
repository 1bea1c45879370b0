"""``make netlab``: measures, records, and writes docs/tables/network-lab.md and its picture (root, Linux)."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from .. import network
from ..pages import DOCS, PERFORMANCE, TABLES, write_tables
from . import goals, labels, plots, tables
from .parts import Parts
from .sweep import QUICKLY, Hosts, Plan, measure

RESULTS = Path(__file__).parent.parent / "results" / "netlab" / "netlab.json"
PAGE, PICTURE = TABLES / "network-lab.md", DOCS / "network-lab.png"
OVERLAP_AT = (5780.0, 560.0, 114.0, 53.3)  # Mbit/s
OVERLAP_ROUNDS = 25


def recorded() -> dict[str, Any]:
    """What was measured last."""
    return json.loads(RESULTS.read_text())


def write_page(record: dict[str, Any]) -> None:
    """Write the tables, the headline of docs/performance.md, and the picture."""
    write_tables(PAGE, tables.all_of(record))
    write_tables(PERFORMANCE, tables.headline(record), "NETWORK LAB")
    plots.draw(record, PICTURE)


def overlap_alone() -> None:
    """Print what a step takes with ``overlap=True`` beside one without; minutes, and nothing is recorded."""
    hosts = Hosts(Plan(), Parts(None))
    for megabits in (None, *OVERLAP_AT):
        row = hosts.row(megabits, dict.fromkeys(("alone", "onebit-adam", "onebit-adam-overlap"), OVERLAP_ROUNDS))
        print(f"{labels.rate(megabits)}: {goals.overlap_gain(row):.2f} times as fast with overlap=True", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.netlab", description="The network lab.")
    parser.add_argument("--recorded", action="store_true", help="write the page again from what was measured last")
    parser.add_argument("--quick", action="store_true", help="a small model, few rates and rounds; records nothing")
    parser.add_argument("--afresh", action="store_true", help="forget what an interrupted lab has measured")
    parser.add_argument("--overlap", action="store_true", help="only what overlap=True gains, at a few rates")
    parser.add_argument("--try", dest="trying", action="store_true", help="record nothing")
    given = parser.parse_args()
    if not given.recorded and (missing := network.lacking()):
        sys.exit(f"make netlab lacks {' and '.join(missing)}; `python -m benchmarks.netlab --recorded` needs neither")
    # Namespaces are removed also where somebody ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if given.overlap:
        overlap_alone()
        return
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
    print(f"wrote docs/tables/{PAGE.name}, docs/{PICTURE.name} and {RESULTS.name}")


if __name__ == "__main__":
    main()
