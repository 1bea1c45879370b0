"""Puts the page together: one file, with everything in it, no script, and no address of anything outside."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from importlib import resources

from ... import __version__
from ..parsing import missing
from . import page_tables, verdicts
from .read import Run

MADE = " by fusedonebit "
"""Stands on every page, before the version."""
_MARKER = re.compile(r"\{\{(\w+)\}\}")


def build(runs: Sequence[Run], title: str, span: tuple[int, int] | None = None) -> str:
    """Return the whole page; its pictures show the steps of ``span``, or all."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    folders = ", ".join(dict.fromkeys(str(run.folder) for run in runs))
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    parts = {
        "title": escape(title),
        "style": _file("page.css"),
        "subtitle": escape(f"{count} from {folders}. Made {now}{MADE}{__version__}."),
        "notices": "".join(f'<p class="notice">{escape(text)}</p>' for text in _notices(runs)),
        "heads": page_tables.heads(run.label for run in runs),
        **page_tables.results(runs),
        "verdicts": verdicts.section(runs),
        "settings": page_tables.settings(runs),
        "layers": page_tables.layers(runs),
        "pictures": "" if missing("matplotlib") else _pictures(runs, span),
    }
    # In one pass: what a run is called may look like a marker.
    return _MARKER.sub(lambda found: parts[found.group(1)], _file("page.html"))


def _pictures(runs: Sequence[Run], span: tuple[int, int] | None) -> str:
    from .charts import Pictures

    parts = []
    for title, note, png in Pictures(runs, span).all():
        image = f'<img alt="{escape(title)}" src="data:image/png;base64,{b64encode(png).decode()}">'
        parts.append(f"<figure><h3>{escape(title)}</h3>{image}<figcaption>{escape(note)}</figcaption></figure>\n")
    return "".join(parts)


def _notices(runs: Sequence[Run]) -> list[str]:
    damaged = {run.folder: run.damaged for run in runs if run.damaged}
    texts = [f"{n} damaged line(s) of {folder} were passed over." for folder, n in damaged.items()]
    for run in runs:
        planned = page_tables.planned_steps(run)
        if planned and planned > run.last_step:
            texts.append(f"{run.label}: {run.last_step} of {planned} steps; it goes on, or was cut short.")
    absent = missing("matplotlib")
    return [*texts, *[f"Pictures need {absent}"] * bool(absent)]


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8").rstrip("\n")
