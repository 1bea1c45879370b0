"""Makes the page's tables: results, settings, each layer's figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from ..units import size
from .read import Run, plain_float

ABSENT = "–"
TAIL = 20
"""Records whose mean is the train loss of the results."""
DATES = ("started", "resumed")
MOST_GROUPS = 4
"""Of the parameter groups at most so many are compared."""
LAYERS = {"residual_over_momentum": (0.0, "residual over momentum by layer"), "ratio": (1.0, "LAMB's ratio r by layer")}
"""What is told of layers: the value that says nothing, and a title."""


def number(value: float, digits: int = 4) -> str:
    """Return a number for people."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}".replace("nan", "NaN")


def results(runs: Sequence[Run]) -> dict[str, str]:
    """Return cells by what they tell, one for each run; page.html says what each means."""
    told = [_results_of(run) for run in runs]
    return {name: "".join(f"<td>{escape(of[name])}</td>" for of in told) for name in told[0]}


def _results_of(run: Run) -> dict[str, str]:
    def last(key: str, tell: Callable[[float], str] = number) -> str:
        return ABSENT if (value := run.last(key)) is None else tell(value)

    losses, held_out = run.get("loss").values, [y for _, y in run.get("held_out_loss").finite()]
    tail = [y for y in losses[-TAIL:] if math.isfinite(y)] or losses[-1:]
    planned, fewer = planned_steps(run), saving(run)
    return {
        "steps": f"{run.last_step:,}" + (f" of {planned:,}" if planned and planned > run.last_step else ""),
        "phase": last("phase", lambda place: [*run.phases][int(place)]),
        "train_loss": number(sum(tail) / len(tail)) if tail else ABSENT,
        "held_out_loss": last("held_out_loss"),
        "best_held_out": number(min(held_out)) if held_out else ABSENT,
        "bytes_step": last("bytes_step", size),
        "bytes_total": last("bytes_total", size),
        "saving": ABSENT if fewer is None else f"{fewer:.3g}x",
        "skipped_steps": last("skipped_steps"),
        "vetoed_steps": last("vetoed_steps"),
        "tokens_per_s": last("tokens_per_s"),
    }


def heads(texts: Iterable[str]) -> str:
    """Make a table's first row, above columns of what ``texts`` name."""
    return f"<thead><tr><td></td>{''.join(f'<th scope=col>{escape(text)}</th>' for text in texts)}</tr></thead>"


def row(head: str, cells: Iterable[str], kind: str = "") -> str:
    """Make a row of texts."""
    return f"<tr{kind}><th scope=row>{escape(head)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def planned_steps(run: Run) -> int | None:
    """Return how many steps the run was to take, if it said so."""
    steps = _dict(run.header, "settings").get("steps")
    return steps if isinstance(steps, int) and not isinstance(steps, bool) else None


def saving(run: Run) -> float | None:
    """Return how many times more bytes float32 gradients would have taken; None where that is not recorded."""
    sent, fp32 = run.last("bytes_total"), run.last("bytes_fp32")
    return fp32 * run.last_step / sent if sent and fp32 else None


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
        rows.append(row(key, map(_text, values), " class=differs" * differs))
    table = f"<div class=scroll><table>{heads(run.label for run in runs)}<tbody>{''.join(rows)}</tbody></table></div>"
    told = [(run.label, run.header["repr"]) for run in runs if isinstance(run.header.get("repr"), str)]
    return table + "".join(
        _details(f"{label}, as it says itself", f"<pre>{escape(text)}</pre>") for label, text in told
    )


def _kind(key: str) -> int:
    places = {"run: ": 0, "option: ": 2, "group": 3, "version: ": 4}
    return 5 if key in DATES else next((place for start, place in places.items() if key.startswith(start)), 1)


def facts_of(run: Run) -> dict[str, Any]:
    """Return what was recorded of a run's start, flat, by names for people; None is left out."""
    header = run.header
    facts = {f"run: {key}": value for key, value in _dict(header, "settings").items()}
    for key in ("class", "parameters", "world_size", "device", "backend", "transport"):
        facts[key.replace("class", "optimizer").replace("_", " ")] = header.get(key)
    facts |= {f"option: {key}": value for key, value in _dict(header, "options").items()}
    groups = header.get("groups")
    groups = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    for i, group in enumerate(groups[:MOST_GROUPS]):
        own = {key: value for key, value in group.items() if i == 0 or groups[0].get(key) != value}
        facts |= {f"group {i}: {key}" if i else f"group: {key}": value for key, value in own.items()}
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
    return ABSENT if value is None else value if isinstance(value, str) else _json(value)


def _json(value: Any, sort_keys: bool = False) -> str:
    try:
        return json.dumps(value, sort_keys=sort_keys, default=str)
    except RecursionError:
        return "(nested too deeply to be shown)"


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def layers(runs: Sequence[Run]) -> str:
    """Make a table of each run's layers, that of the greatest value first."""
    parts = []
    for run in runs:
        for key, (nothing, title) in LAYERS.items():
            found = layer_values(run, key)
            if any(value != nothing for values in found.values() for value, _ in values):
                ordered = sorted(found.items(), key=lambda each: -max(each[1])[0])
                body = "".join(row(name, _figures(values)) for name, values in ordered)
                columns = heads(("first", "median", "greatest", "last"))
                table = f"<div class=scroll><table>{columns}<tbody>{body}</tbody></table></div>"
                parts.append(_details(f"{run.label}: {title}", table))
    return "".join(parts) or "<p>None were recorded.</p>"


def layer_values(run: Run, key: str) -> dict[str, list[tuple[float, int]]]:
    """Return what was told of each layer, with the step."""
    found: dict[str, list[tuple[float, int]]] = {}
    for step, told in run.layers.items():
        values = told[key] if isinstance(told.get(key), list) else ()
        for name, value in zip(told["name"], values, strict=False):
            if (plain := plain_float(value)) is not None and math.isfinite(plain):
                found.setdefault(str(name), []).append((plain, step))
    return found


def _figures(values: Sequence[tuple[float, int]]) -> list[str]:
    (most, step), middle = max(values), sorted(values)[len(values) // 2][0]
    return [number(values[0][0]), number(middle), f"{number(most)}, step {step:,}", number(values[-1][0])]
