"""The page's tables, which are there without JavaScript: results, settings, each layer's figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from itertools import chain, count
from typing import Any

from .read import Run

ABSENT = "–"
TAIL = 20
"""Records whose mean is the train loss of the results."""

DATES = ("started", "resumed")
SLOTS = 8
"""Colours of the page; further runs have them again, with dashes."""
METHODS = {
    "zero-one-adam": 0,
    "ZeroOneAdam": 0,
    "onebit-adam": 1,
    "OneBitAdam": 1,
    "onebit-lion": 3,
    "OneBitLion": 3,
    "onebit-lamb": 4,
    "OneBitLamb": 4,
    "marsit": 5,
    "MarsitSGD": 5,
    "MarsitAdam": 5,
    "adamw": 6,
    "AdamW": 6,
    "AveragedAdamW": 6,
}
"""Places in page.css's palette that are those of ``pictures.METHODS``, by what runs and their classes are called."""
OTHERS = (2, 7)
"""Places that belong to none of them."""
MOST_GROUPS = 4
"""Of the parameter groups at most so many are compared."""


def number(value: float | None, digits: int = 4) -> str:
    """Return a number for people."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def in_bytes(value: float | None) -> str:
    """Return bytes with a unit."""
    if value is None:
        return ABSENT
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} PB"


def results(runs: Sequence[Run]) -> str:
    """Make one row per run: how far it came, losses, bytes, skipped steps, speed."""
    heads = ["run", "steps", "phase at the end", "train loss", "held-out loss", "best held out", "bytes/step"]
    heads += ["bytes in all", "fp32 / sent", "skipped", "by the guard", "tokens/s"]
    rows = "".join(_result(run, slot, heads) for run, slot in zip(runs, colours(runs), strict=True))
    return (
        f"<table class=results><caption>Train loss: mean of the last {TAIL} records that are numbers. Bytes are those "
        "one rank sends; fp32 / sent: how many times more averaging float32 gradients would have sent.</caption>"
        f"<thead><tr>{_cells(heads, 'th scope=col')}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _result(run: Run, slot: int, heads: Sequence[str]) -> str:
    held = [y for y in run.get("held_out_loss").values if math.isfinite(y)]
    losses = run.get("loss").values
    tail = [y for y in losses[-TAIL:] if math.isfinite(y)]
    train = sum(tail) / len(tail) if tail else (losses[-1] if losses else None)
    phases = run.get("phase").values
    fewer = saving(run)
    planned = planned_steps(run)
    far = f"{run.last_step:,}" + (f" of {planned:,}" if planned and planned > run.last_step else "")
    cells = [
        far,
        run.phases[int(phases[-1])] if phases else ABSENT,
        number(train),
        number(run.get("held_out_loss").values[-1] if run.get("held_out_loss").values else None),
        number(min(held) if held else None),
        in_bytes(last(run, "bytes_step")),
        in_bytes(last(run, "bytes_total")),
        ABSENT if fewer is None else f"{fewer:.3g}x",
        number(last(run, "skipped_steps")),
        number(last(run, "vetoed_steps")),
        number(last(run, "tokens_per_s")),
    ]
    swatch = f'<span class="swatch" style="background:var(--run-{slot % SLOTS})"></span>'
    # On a narrow screen each cell is a line of its own, with its head.
    told = "".join(
        f'<td data-head="{escape(head)}">{escape(cell)}</td>' for head, cell in zip(heads[1:], cells, strict=True)
    )
    return f"<tr><th scope=row>{swatch}{escape(run.label)}</th>{told}</tr>"


def colours(runs: Sequence[Run]) -> list[int]:
    """Return each run's place in the palette: the first run of a known method has its own, others what is free."""
    found: dict[int, int] = {}
    for i, run in enumerate(runs):
        own = next((METHODS[name] for name in (run.name, run.header.get("class")) if name in METHODS), None)
        if own is not None and own not in found.values():
            found[i] = own
    for i in range(len(runs)):
        if i not in found:
            found[i] = next(slot for slot in chain(OTHERS, count()) if slot not in found.values())
    return [found[i] for i in range(len(runs))]


def planned_steps(run: Run) -> int | None:
    """Return how many steps the run was to take, if it said so."""
    settings = run.header.get("settings")
    steps = settings.get("steps") if isinstance(settings, dict) else None
    return steps if isinstance(steps, int) and not isinstance(steps, bool) else None


def saving(run: Run) -> float | None:
    """Return how many times more bytes float32 gradients would have taken; None where that is not recorded."""
    sent, fp32 = last(run, "bytes_total"), last(run, "bytes_fp32")
    return fp32 * run.last_step / sent if sent and fp32 else None


def last(run: Run, key: str) -> float | None:
    """Return the last number recorded of a key."""
    values = run.get(key).values
    return values[-1] if values else None


def settings(runs: Sequence[Run]) -> str:
    """Return one row per setting and version, those that differ marked; and what each optimizer says of itself."""
    facts = [facts_of(run) for run in runs]
    keys = sorted(dict.fromkeys(key for told in facts for key in told), key=_kind)  # stable: else as they were told
    if not keys:
        return "<p>None were recorded: these files are of an older version.</p>"
    rows = []
    for key in keys:
        values = [told.get(key) for told in facts]
        known = {_json(value, sort_keys=True) for value in values if value is not None}
        differs = len(known) > 1 and key not in DATES  # what only one kind of optimizer has is no difference
        cells = "".join(f"<td>{ABSENT if value is None else escape(_text(value))}</td>" for value in values)
        mark = ' class="differs"' if differs else ""
        rows.append(f"<tr{mark}><th scope=row>{escape(key)}</th>{cells}</tr>")
    heads = _cells(["", *(run.label for run in runs)], "th scope=col")
    caption = "Marked: what differs between the runs that have it." if len(runs) > 1 else "As the run was last started."
    table = f"<table class=settings><caption>{caption}</caption><thead><tr>{heads}</tr></thead>"
    told = "".join(_details(run) for run in runs if isinstance(run.header.get("repr"), str))
    return f'<div class="scroll">{table}<tbody>{"".join(rows)}</tbody></table></div>{told}'


def _kind(key: str) -> int:
    places = {"run: ": 0, "option: ": 2, "group": 3, "version: ": 4}
    return 5 if key in DATES else next((place for start, place in places.items() if key.startswith(start)), 1)


def facts_of(run: Run) -> dict[str, Any]:
    """Return what was recorded of a run's start, flat, by names for people; None is left out."""
    header = run.header
    plain = ("class", "parameters", "world_size", "device", "backend", "transport")
    facts = {f"run: {key}": value for key, value in _dict(header, "settings").items()}
    facts |= {("optimizer" if key == "class" else key).replace("_", " "): header.get(key) for key in plain}
    facts |= {f"option: {key}": value for key, value in _dict(header, "options").items()}
    groups = header.get("groups")
    groups = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    for i, group in enumerate(groups[:MOST_GROUPS]):
        first = groups[0]
        facts |= {
            (f"group {i}: {key}" if i else f"group: {key}"): value
            for key, value in group.items()
            if i == 0 or first.get(key) != value
        }
    facts |= {f"version: {key}": value for key, value in _dict(header, "versions").items()}
    if run.starts:
        facts["started"] = run.starts[0].get("date")
    if len(run.starts) > 1:
        facts["resumed"] = ", ".join(f"{s.get('date')} at step {s.get('first_step')}" for s in run.starts[1:])
    return {key: value for key, value in facts.items() if value is not None}


def _dict(header: dict[str, Any], key: str) -> dict[str, Any]:
    value = header.get(key)
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else _json(value)


def _json(value: Any, sort_keys: bool = False) -> str:
    try:
        return json.dumps(value, sort_keys=sort_keys, default=str)
    except RecursionError:
        return "(nested too deeply to be shown)"


def _details(run: Run) -> str:
    told = escape(run.header["repr"])
    return f"<details><summary>{escape(run.label)}, as it says itself</summary><pre>{told}</pre></details>"


def layers(maps: Sequence[dict[str, Any]], titles: dict[str, str]) -> str:
    """Make a table of each map: first, median, greatest and last value by layer."""
    parts = []
    for told in maps:
        rows = "".join(_layer(name, row) for name, row in zip(told["layers"], told["rows"], strict=True))
        heads = _cells(("layer", "first", "median", "greatest", "last"), "th scope=col")
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        title = escape(f"{told['label']}: {titles[told['kind']]}, as a table")
        parts.append(f'<details><summary>{title}</summary><div class="scroll">{table}</div></details>')
    return "".join(parts)


def _layer(name: str, row: Sequence[float | None]) -> str:
    known = [x for x in row if x is not None]
    told = [known[0], sorted(known)[len(known) // 2], max(known), known[-1]] if known else [None] * 4
    return f"<tr><th scope=row>{escape(name)}</th>{_cells([number(x) for x in told])}</tr>"


def _cells(texts: Sequence[str], tag: str = "td") -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag.split()[0]}>" for text in texts)
