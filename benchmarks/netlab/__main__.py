"""``make netlab``: measures, records, and writes docs/tables/network-lab.md and its picture (root, Linux)."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from .. import network, pages
from ..pages import DOCS, PERFORMANCE, TABLES, write_tables
from . import muon, plots, tables
from .parts import FOLDER, Parts
from .sweep import QUICKLY, Plan, measure

RESULTS = pages.RESULTS / "netlab" / "netlab.json"
OF_MUON = RESULTS.with_name("muon.json")
PAGE, PICTURE = TABLES / "network-lab.md", DOCS / "network-lab.png"


def recorded() -> dict[str, Any]:
    """What was measured last."""
    return pages.read(RESULTS)


def write_page(record: dict[str, Any]) -> None:
    """Write the tables, the headline of docs/performance.md, and the picture."""
    write_tables(PAGE, tables.all_of(record))
    write_tables(PERFORMANCE, tables.headline(record), "NETWORK LAB")
    plots.draw(record, PICTURE)


def measure_all(quick: bool, afresh: bool) -> None:
    """Measure, keep and print all but 1-bit Muon's part; a quick lab is only printed."""
    parts = Parts(None) if quick else Parts(afresh=afresh)
    record = measure(QUICKLY if quick else Plan(), parts)
    print(tables.all_of(record))
    if quick:
        with tempfile.TemporaryDirectory() as folder:
            plots.draw(record, Path(folder) / "network-lab.png")
        return
    pages.keep(record, RESULTS)
    write_page(record)
    parts.forget()
    print(f"wrote docs/tables/{PAGE.name}, docs/{PICTURE.name} and {RESULTS.name}")


def measure_muon(quick: bool, afresh: bool) -> None:
    """Do the same for that part."""
    adams, parts = recorded(), Parts(None) if quick else Parts(FOLDER / "muon.json", afresh)
    plan, rates = muon.quick() if quick else (muon.PLAN, muon.RATES)
    record = muon.measure(plan, None if quick else adams, rates, parts=parts)
    print(muon.tables(record, adams))
    if quick:
        return
    pages.keep(record, OF_MUON)
    write_tables(PAGE, muon.tables(record, adams), "MUON")
    parts.forget()
    print(f"wrote docs/tables/{PAGE.name} and {OF_MUON.name}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.netlab", description="The network lab.")
    parser.add_argument("--recorded", action="store_true", help="write the page again from what was measured last")
    parser.add_argument("--quick", action="store_true", help="a small model, few rates and rounds; records nothing")
    parser.add_argument("--muon", action="store_true", help="1-bit Muon's part alone, which is the last")
    parser.add_argument("--afresh", action="store_true", help="forget what an interrupted lab has measured")
    given = parser.parse_args()
    if not given.recorded and (missing := network.lacking()):
        sys.exit(f"make netlab lacks {' and '.join(missing)}; `python -m benchmarks.netlab --recorded` needs neither")
    # Namespaces are removed also where somebody ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if given.recorded:
        write_page(recorded())
        write_tables(PAGE, muon.tables(pages.read(OF_MUON), recorded()), "MUON")
        return
    if not given.muon:
        measure_all(given.quick, given.afresh)
    measure_muon(given.quick, given.afresh)


if __name__ == "__main__":
    main()
