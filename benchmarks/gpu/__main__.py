"""``make gpu-check``, ``gpu-speed``, ``gpu-defaults`` and ``gpu-all``: what can be said of one CUDA GPU in minutes.

Each job is a process with a deadline; what hangs or crashes ends alone, and is reported. Of plan ``check``,
``gpu-check.json``, ``.md``, ``.xml`` (junit) and ``.log`` are replaced as each ends. ``--device cpu`` is a dry run of
all of it on tiny sizes. Goals that are missed are told, and no failure.
"""

from __future__ import annotations

import argparse
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import report
from .plans import PLANS, notes
from .runner import ROOT, Stage, run


def _commit() -> str:
    try:
        told = ("git", "describe", "--always", "--dirty", "--abbrev=12")
        return subprocess.run(told, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@contextmanager
def _signals(received: list[int]) -> Iterator[None]:
    """Note what would end this program: it has to end its jobs, which are sessions of their own, and to report."""
    before = {n: signal.signal(n, lambda n, _: received.append(n)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    told = "; ".join(f"{name}: {plan.about} ({plan.total:g} s at most)" for name, plan in PLANS.items())
    parser.add_argument("plan", choices=PLANS, help=told)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu-PLAN.json, .md, .xml and .log")
    parser.add_argument("--only", nargs="+", default=(), metavar="JOB", help="jobs whose names begin so")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, no result")
    parser.add_argument("--commit", default="", help="what is measured, where git can't say it")
    given = parser.parse_args(arguments)
    try:
        given.stages = PLANS[given.plan].chosen(given.device, given.only)
    except ValueError as error:
        parser.error(str(error))
    return given


def main(arguments: Sequence[str] | None = None, stages: Sequence[Stage] | None = None) -> int:
    """Run the stages; return 1 if a job did not pass or a file could not be written."""
    given = _arguments(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"plan": given.plan, "commit": given.commit or _commit() or "unknown"}
    if given.device == "cpu":
        about["dry run"] = "no result"
    chosen = list(given.stages if stages is None else stages)
    if told := notes(chosen):
        about["notes"] = told
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # jobs are aborted at their deadlines
    name = f"gpu-{given.plan}"
    stops: list[int] = []
    written = True
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder, _signals(stops):

        def changed() -> None:
            nonlocal written
            written = report.write(chosen, given.out / name, Path(folder), about)

        run(chosen, Path(folder), PLANS[given.plan].total, changed, lambda: bool(stops))
    failed = report.failed(chosen)
    for stage in chosen:
        for job in stage.jobs:
            print(f"{job.name:20} {job.state:11} {job.seconds:6.1f} s  {job.why}")
    for line in (*report.goals(chosen), *report.predicted(chosen)):
        print(line)
    told = f"{len(failed)} did not pass: {', '.join(failed)}" if failed else "all that ran passed"
    print(f"{given.out / name}.md: {told}{report.left_out(chosen)}")
    return int(bool(failed) or not written)


if __name__ == "__main__":
    sys.exit(main())
