"""Puts the page together: one file, with everything in it and no address of anything outside."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from html import escape
from importlib import resources
from typing import Any

from ... import __version__
from . import page_tables, verdicts
from .downsample import ALL_CELLS, at_steps, bands, heat, not_finite, points_for, running_mean, short, skips, thin
from .read import Run, Series

CURVES = ["loss", "held_out_loss", "bytes_step", "bytes_total", "bytes_fp32", "residual_over_momentum"]
CURVES += ["tokens_per_s", "lr"]

KNOWN = (*CURVES, "skipped_steps", "vetoed_steps", "rewarms")
"""Keys that are not a user's own numbers."""

HEATS: dict[str, tuple[str, float | None]] = {
    "residual_over_momentum": ("residual over momentum by layer", None),
    "ratio": ("LAMB's ratio r by layer", 1.0),
}
"""Maps of layers: title, and the value that says nothing."""

SCRIPTS = ("charts.js", "heat.js", "page.js")
_MARKER = re.compile(r"\{\{(\w+)\}\}")


def build(runs: Sequence[Run], title: str, progress: Callable[[], None] = lambda: None) -> str:
    """Return the whole page.

    Args:
        runs: What ``read_runs`` has found.
        title: Of the page.
        progress: Called after each run.
    """
    data, maps = _data(runs, progress)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    folders = ", ".join(dict.fromkeys(str(run.folder) for run in runs))
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    parts = {
        "title": escape(title),
        "style": _file("page.css"),
        "subtitle": escape(f"{count} from {folders}. Made {now} by fusedonebit {__version__}."),
        "notices": _notices(runs),
        "summary": page_tables.results(runs),
        "verdicts": verdicts.section(runs),
        "settings": page_tables.settings(runs),
        "layers": page_tables.layers(maps, {key: told for key, (told, _) in HEATS.items()}),
        "data": _inside_script(data),
        "script": "\n".join(_file(name) for name in SCRIPTS),
    }
    # In one pass: what a run is called may look like a marker.
    return _MARKER.sub(lambda found: parts[found.group(1)], _file("page.html"))


def _data(runs: Sequence[Run], progress: Callable[[], None]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    most, told, maps = points_for(len(runs)), [], []
    own = list(dict.fromkeys(key for run in runs for key in run.own_keys(KNOWN)))
    recorded = sum(any(key in seen for seen in run.layers.values()) for run in runs for key in HEATS)
    slots = page_tables.colours(runs)
    for index, run in enumerate(runs):
        told.append({**_run(index, run, most, own), "colour": slots[index]})
        for key, (_, middle) in HEATS.items():
            drawn = heat(run, key, ALL_CELLS // max(recorded, 3), middle)
            if drawn is not None:
                maps.append({"run": index, "kind": key, "label": run.label, **drawn})
        progress()
    phases = list(dict.fromkeys(name for run in told for _, _, name in run["bands"]))
    return {"runs": told, "phases": phases, "own": own, "heats": maps}, maps


def _run(index: int, run: Run, most: int, own: Sequence[str]) -> dict[str, Any]:
    curves: dict[str, dict[str, Any]] = {}
    for key in (*CURVES, *own):
        series = run.get(key)
        if not series.steps:
            continue
        constant = all(y == series.values[0] for y in series.values)
        x, y = thin(series, 2 if constant else most)
        curves[key] = {"x": x, "y": y, "bad": not_finite(series)}
    sent = run.get("bytes_total")
    if "loss" in curves:
        mean = running_mean(run.get("loss"))
        curves["mean"] = {"x": mean.steps.tolist(), "y": [short(y) for y in mean.values]}
    for key in ("loss", "mean", "held_out_loss"):
        if key in curves:
            curves[key]["b"] = at_steps(sent, curves[key]["x"])
    if "bytes_fp32" in curves:
        curves["fp32_total"] = _fp32_total(run.get("bytes_fp32"))
    return {
        "index": index,
        "label": run.label,
        "first": run.first_step,
        "last": run.last_step,
        "curves": curves,
        "bands": bands(run),
        "skips": skips(run),
    }


def _fp32_total(series: Series) -> dict[str, list[float]]:
    """Return what averaging float32 gradients would have sent in all, up to the first record and the last."""
    ends = (series.steps[0], series.steps[-1])
    return {"x": list(ends), "y": [short(step * series.values[-1]) for step in ends]}


def _notices(runs: Sequence[Run]) -> str:
    damaged = {run.folder: run.damaged for run in runs if run.damaged}
    texts = [f"{n} damaged line(s) of {folder} were passed over." for folder, n in damaged.items()]
    for run in runs:
        planned = page_tables.planned_steps(run)
        if planned and planned > run.last_step:
            texts.append(f"{run.label}: {run.last_step} of {planned} steps; it goes on, or was cut short.")
    return "".join(f'<p class="notice">{escape(text)}</p>' for text in texts)


def _inside_script(data: Any) -> str:
    """JSON that can't end the script that holds it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8").rstrip("\n")
