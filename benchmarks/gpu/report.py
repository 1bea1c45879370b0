"""What the jobs have left, as one JSON file, one page of Markdown, one junit log and the jobs' own output."""

from __future__ import annotations

import json
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .. import pages
from ..chips import chip_of
from .runner import Job, Stage

PREDICTIONS = pages.RESULTS / "predictions.json"

KEPT = 200_000
"""Bytes of each job's output, its end, that go into the log."""
FACTS = ("device", "memory_gib", "cpu_cores", "driver", "torch", "triton", "python", "commit", "backend", "date")
LIMIT = 60_000
"""Bytes of the page: a git host takes 65,536 characters in an issue, of which some are others."""
JOBS_TOLD, LINES_TOLD, TESTS_TOLD = 10, 15, 50
BAD = ("failed", "error")
"""Outcomes of tests."""


def failed(stages: Sequence[Stage]) -> list[str]:
    """Names of jobs that did not pass, other than those that time did not suffice for."""
    return [job.name for stage in stages for job in stage.jobs if job.state not in ("passed", "left out")]


def left_out(stages: Sequence[Stage]) -> str:
    """What time did not suffice for; "" where nothing is."""
    every = [job for stage in stages for job in stage.jobs]
    jobs = sum(job.state == "left out" for job in every)
    tests = sum(test.get("outcome") is None for job in every for test in tests_of(job).values())
    return f"; no time was left for {jobs} jobs and {tests} tests" if jobs or tests else ""


def goals(stages: Sequence[Stage]) -> list[str]:
    """A line for each goal: what was measured, what was wanted."""
    found = [goal for stage in stages for job in stage.jobs for goal in _goals(job)]
    return [" | ".join(map(_cell, goal)) for goal in found]


def predicted(stages: Sequence[Stage]) -> list[str]:
    """A line for each whole step that was predicted for this device."""
    found = _predicted([job for stage in stages for job in stage.jobs])
    return [f"{name}: {us:,.0f} us, measured over predicted {ratio:.3f}" for name, us, ratio in found]


def write(stages: Sequence[Stage], out: Path, logs: Path, about: dict[str, Any]) -> bool:
    """Replace the files, ``out`` with their endings; return whether all could be written, whatever records hold."""
    jobs = [job for stage in stages for job in stage.jobs]
    written = True
    for suffix, text in (
        (".json", lambda: json.dumps(_record(jobs, about), indent=1, default=str) + "\n"),
        (".md", lambda: markdown(jobs, about)),
        (".xml", lambda: junit(jobs)),
        (".log", lambda: _log(jobs, logs)),
    ):
        written &= _replace(out.with_name(out.name + suffix), text)
    return written


def _replace(path: Path, text: Callable[[], str]) -> bool:
    try:
        pages.replace_text(path, text())
    except Exception:  # the other files, and the run, go on
        traceback.print_exc()
        return False
    return True


def _record(jobs: Sequence[Job], about: dict[str, Any]) -> dict[str, Any]:
    found = {
        job.name: {
            "state": job.state,
            "seconds": round(job.seconds, 2),
            "deadline": job.deadline,
            "why": job.why,
            "last_lines": job.last_lines if job.state != "passed" else [],
            "record": job.record,
        }
        for job in jobs
    }
    return {"about": _facts(jobs) | about, "states": dict(Counter(job.state for job in jobs)), "jobs": found}


def _facts(jobs: Sequence[Job]) -> dict[str, Any]:
    """Those of the first job that has told any."""
    for job in jobs:
        if isinstance(job.record, dict) and isinstance(job.record.get("about"), dict):
            told = job.record["about"]
            return {name: told[name] for name in FACTS if told.get(name) is not None}
    return {}


def _tables(job: Job) -> list[dict[str, Any]]:
    tables = job.record.get("tables", []) if isinstance(job.record, dict) else []
    return [t for t in tables if isinstance(t, dict)] if isinstance(tables, list) else []


def _rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    rows = table.get("rows", [])
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def tests_of(job: Job) -> dict[str, dict[str, Any]]:
    """Of a job of tests each test that was collected: ``outcome`` (None if it was not reached) and the rest."""
    tests = job.record.get("tests") if isinstance(job.record, dict) else None
    return {str(k): v for k, v in tests.items() if isinstance(v, dict)} if isinstance(tests, dict) else {}


# ---------------------------------------------------------------- Markdown


def markdown(jobs: Sequence[Job], about: dict[str, Any]) -> str:
    """Return the page: what passed, what did not and its last lines, the goals, and every table."""
    facts = _facts(jobs) | about
    notes = facts.pop("notes", [])
    lines = ["# A run on one GPU", "", "; ".join(f"{name} {value}" for name, value in facts.items()) + ".", ""]
    lines += [*(f"- {note}." for note in notes), ""] if notes else []
    bad = [job for job in jobs if job.state not in ("passed", "waiting", "running", "left out")]
    counts = Counter(job.state for job in jobs)
    lines += [", ".join(f"**{n} {state}**" for state, n in counts.items()) + " of " + f"{len(jobs)} jobs.", ""]
    rows = [(j.name, j.state, f"{j.seconds:.1f}", f"{j.deadline:.0f}", j.why or _told(j)) for j in jobs]
    lines += _table(("job", "state", "s", "deadline, s", ""), rows)
    goals = [(job.name, *goal) for job in jobs for goal in _goals(job)]
    if goals:
        lines += ["## Goals", "", *_table(("job", "what", "measured", "goal"), goals)]
    steps = list(_predicted(jobs))
    if steps:
        lines += ["## Measured over predicted", "", *_table(("captured step", "us", "measured / predicted"), steps)]
    if bad:
        lines += ["## What did not pass", ""]
    for job in bad[:JOBS_TOLD]:
        lines += [f"**{job.name}**: {job.state}, {job.why}. Its last lines:", "", "```text"]
        lines += [line.replace("```", "'''")[:160] for line in job.last_lines[-LINES_TOLD:]] + ["```", ""]
    if len(bad) > JOBS_TOLD:
        lines += [f"And {len(bad) - JOBS_TOLD} more: {', '.join(job.name for job in bad[JOBS_TOLD:])}.", ""]
    tested = [job for job in jobs if tests_of(job)]
    if tested:
        lines += ["## Tests", "", *_tests(tested)]
    for job in jobs:
        if _tables(job):
            lines += [f"## {job.name}", "", *_measured(job)]
    return "\n".join(_shortened(lines)) + "\n"


def _shortened(lines: list[str]) -> list[str]:
    """Return the first of them that an issue has room for."""
    size = 0
    for i, line in enumerate(lines):
        size += len(line.encode(errors="replace")) + 1
        if size > LIMIT:
            fence = ["```"] if lines[:i].count("```text") > lines[:i].count("```") else []
            return [*lines[:i], *fence, "", f"And {len(lines) - i} more lines: all is in the `.json` file beside this."]
    return lines


def _told(job: Job) -> str:
    if tests := tests_of(job):
        counts = Counter(str(test.get("outcome") or "not reached") for test in tests.values())
        return ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
    return f"{sum(len(_rows(table)) for table in _tables(job))} rows"


def _goals(job: Job) -> Iterator[tuple[Any, ...]]:
    for table in _tables(job):
        for row in _rows(table):
            if str(row.get("limit")).startswith(("<=", ">=")):  # a peer that is missing says why there
                yield next(iter(row.values())), row.get("measured"), row["limit"]


def _predicted(jobs: Sequence[Job]) -> Iterator[tuple[str, float, float]]:
    """Yield whole steps in a CUDA graph, the microseconds they took, and what part these are of those predicted."""
    chip = chip_of(str(_facts(jobs).get("device")))
    if chip is None or not PREDICTIONS.is_file():
        return
    rows = pages.read(PREDICTIONS)["steps"]
    said = {(f"steps-{row['size']}", row["step"]): row["us"] for row in rows if row["chip"] == chip.name}
    for job in jobs:
        for row in (row for table in _tables(job) for row in _rows(table) if row.get("way") == "captured"):
            us, ms = said.get((job.name, row.get("optimizer"))), row.get("ms")
            if us and isinstance(ms, int | float):
                yield f"{row['optimizer']}, {job.name.removeprefix('steps-')}", 1e3 * ms, 1e3 * ms / us


def _tests(jobs: Sequence[Job]) -> list[str]:
    lines, files = [], {}
    for job in jobs:
        for name, test in tests_of(job).items():
            outcome = str(test.get("outcome") or "not reached")
            files.setdefault(name.partition("::")[0], Counter())[outcome] += 1
            if outcome in BAD or test.get("running"):
                told = test.get("message") or f"was running when {job.name} ended: {job.state}"
                lines.append((f"`{name}`", outcome, (str(told).strip().splitlines() or [""])[0][:200]))
    if len(lines) > TESTS_TOLD:
        lines[TESTS_TOLD:] = [(f"and {len(lines) - TESTS_TOLD} more", "", "")]
    outcomes = ("passed", "skipped", *BAD, "not reached")
    counted = [(file, *(counts[outcome] or "" for outcome in outcomes)) for file, counts in sorted(files.items())]
    return _table(("file", *outcomes), counted) + (_table(("test", "outcome", "why"), lines) if lines else [])


def _measured(job: Job) -> list[str]:
    lines: list[str] = []
    for table in _tables(job):
        columns = [c for c in table.get("columns", []) if isinstance(c, str)]
        rows = [tuple(row.get(column) for column in columns) for row in _rows(table)]
        lines += [f"{table.get('title')}.", "", *_table(columns, rows)]
    notes = job.record.get("notes") if isinstance(job.record, dict) else None
    return lines + ([*(f"- {note}" for note in notes), ""] if isinstance(notes, list) and notes else [])


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return [*pages.markdown([columns, *(list(map(_cell, row)) for row in rows)]).splitlines(), ""]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}" if not math.isfinite(value) or abs(value) < 100 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|").replace("\n", " ")


# ---------------------------------------------------------------- junit


def junit(jobs: Sequence[Job]) -> str:
    """Return a suite of all jobs and one of each job's tests; one that was running when its job ended is an error."""
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", name="jobs")
    for job in jobs:
        case = ElementTree.SubElement(suite, "testcase", classname="jobs", name=job.name, time=f"{job.seconds:.2f}")
        if job.state != "passed":
            tag = "skipped" if job.state in ("not run", "left out", "waiting", "running") else "failure"
            told = ElementTree.SubElement(case, tag, message=f"{job.state}: {job.why}")
            told.text = _xml("\n".join(job.last_lines))
    for job in jobs:
        if tests := tests_of(job):
            suite = ElementTree.SubElement(root, "testsuite", name=job.name)
            for name, test in tests.items():
                _test_case(suite, name, test, job)
    for suite in root:
        for key, tags in {"tests": None, "failures": "failure", "errors": "error", "skipped": "skipped"}.items():
            suite.set(key, str(len(suite) if tags is None else len(suite.findall(f"testcase/{tags}"))))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _test_case(suite: ElementTree.Element, name: str, test: dict[str, Any], job: Job) -> None:
    file, _, rest = name.partition("::")
    seconds = test.get("seconds")
    time = f"{seconds:.3f}" if isinstance(seconds, int | float) else "0"
    case = ElementTree.SubElement(suite, "testcase", classname=_xml(file), name=_xml(rest), time=time)
    outcome, message = test.get("outcome"), _xml(str(test.get("message") or ""))
    if test.get("running"):
        told = f"was running when its job ended: {job.state}"
        ElementTree.SubElement(case, "error", message=told).text = _xml("\n".join(job.last_lines))
    elif outcome is None:
        ElementTree.SubElement(case, "skipped", message="not reached")
    elif outcome != "passed":
        tag = {"failed": "failure", "skipped": "skipped"}.get(outcome, "error")
        ElementTree.SubElement(case, tag, message=message[:200]).text = message


def _xml(text: str) -> str:
    """Return it without what XML has no way to write."""
    return "".join(c if c in "\t\n" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" else "?" for c in text)


def _log(jobs: Sequence[Job], logs: Path) -> str:
    parts = []
    for job in jobs:
        path = logs / f"{job.name}.log"
        if path.exists():
            parts += [f"==== {job.name}: {job.state} {job.why}\n", path.read_bytes()[-KEPT:].decode(errors="replace")]
    return "\n".join(parts)
