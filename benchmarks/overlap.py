"""How much of the communication ``overlap=True`` hides behind the backward pass, on a slow network (root, Linux).

    hidden = (backward + communication - overlapped) / min(backward, communication)

``communication`` is all of ``step()`` after the backward pass without overlap, in as many buckets:
compression, messages and update; ``overlapped`` is backward pass and step with it. Two hosts, so that
each may have a core to itself. ``--recorded`` prints what ``benchmarks/results/overlap`` has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import network
from .pages import DOCS, RESULTS, keep, markdown, read, write_tables

RECORD = RESULTS / "overlap" / "overlap.json"
PICTURE = DOCS / "overlap.png"
PAGE = DOCS / "beyond-one-node.md"
HOSTS, WIDTH, LAYERS, BATCH, BUCKETS, ROUNDS = 2, 512, 8, 4096, 8, 15
RATIOS = (0.5, 1.0, 2.0)
"""Of communication to backward pass; the network's rate is chosen so."""
TARGET = 0.7


def hidden(record: dict[str, Any]) -> float:
    """The share that is hidden of what could be."""
    backward, communication, overlapped = (record[key] for key in ("backward", "communication", "overlapped"))
    return (backward + communication - overlapped) / min(backward, communication)


def measure() -> list[dict[str, Any]]:
    """A record for each ratio."""

    def run(megabits: float | None, steps: int) -> dict[str, Any]:
        arguments = [str(n) for n in (WIDTH, LAYERS, BATCH, BUCKETS, steps)]
        printed = network.run_module("benchmarks.overlap_steps", HOSTS, megabits, arguments)
        return json.loads(printed.splitlines()[-1]) | {"megabits": megabits, "load": os.getloadavg()[0]}

    # What takes time without a slow network takes as long with one.
    fast = run(None, 3)
    records = []
    for ratio in RATIOS:
        on_the_wire = max(ratio * fast["backward"] - fast["communication"], 0.1 * fast["backward"])
        megabits = round(8e-6 * fast["bytes"] / on_the_wire, 2)
        print(f"{ratio:g} : 1, {megabits:g} Mbit/s, {BUCKETS} buckets ...", file=sys.stderr, flush=True)
        records.append(run(megabits, ROUNDS) | {"ratio": ratio, "without_network": fast["communication"]})
        print(table(records[-1:]), file=sys.stderr, flush=True)
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """One line for each record."""
    rows = [["Mbit/s", "buckets", "backward, ms", "communication, ms", "overlapped, ms", "hidden"]]
    for r in records:
        parts = (f"{1e3 * r[key]:.0f}" for key in ("backward", "communication", "overlapped"))
        rows.append([f"{r['megabits']:g}", r["buckets"], *parts, f"**{hidden(r):.0%}**"])
    return markdown(rows, left=())


def recorded() -> list[dict[str, Any]]:
    """What was measured last."""
    return read(RECORD)


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """A bar for backward pass and communication one after the other, and one for both at once."""
    from fusedonebit.apps.pictures import PARTS, method_colour, plt, save

    figure, axis = plt.subplots(figsize=(8, 0.9 + 0.8 * len(records)), layout="constrained")
    for i, r in enumerate(records):
        axis.barh(i - 0.17, 1e3 * r["backward"], 0.3, color=PARTS["compute"], label="" if i else "backward")
        left, told = 1e3 * r["backward"], "" if i else "communication, after it"
        axis.barh(i - 0.17, 1e3 * r["communication"], 0.3, left, color=PARTS["communicate"], label=told)
        ours, told = method_colour("onebit-adam"), "" if i else "overlap=True"
        axis.barh(i + 0.17, 1e3 * r["overlapped"], 0.3, color=ours, label=told)
        axis.annotate(f"{hidden(r):.0%} hidden", (1e3 * r["overlapped"], i + 0.17), (4, -3), textcoords="offset points")
    axis.set_yticks(range(len(records)), [f"{r['megabits']:g} Mbit/s" for r in records])
    axis.invert_yaxis()
    axis.set_xlabel(f"ms per step, {HOSTS} CPU hosts, {records[0]['elements'] / 1e6:.1f}M parameters")
    axis.legend(frameon=False, fontsize=8, loc="upper right")
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="How much of the communication overlap=True hides.")
    parser.add_argument("--recorded", action="store_true", help="print what was measured last")
    recorded_alone = parser.parse_args().recorded
    if not recorded_alone and not network.can_limit():
        sys.exit("benchmarks.overlap needs root's rights and iproute2's ip and tc; --recorded prints what was measured")
    if not recorded_alone:
        keep(measure(), RECORD)
    records = recorded()
    draw(records, PICTURE)
    write_tables(PAGE, table(records), "OVERLAP")
    print(table(records))
    print(f"hidden of the communication: {', '.join(f'{hidden(r):.0%}' for r in records)} (target {TARGET:.0%})")


if __name__ == "__main__":
    main()
