"""Runs jobs, each in a process of its own with a deadline, and tells a report of each change.

Imports neither torch nor anything else that can fail to load: what a job does to itself or to the device ends that
job only. Jobs of a stage run side by side, stages one after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

State = Literal["waiting", "running", "passed", "failed", "crashed", "deadline", "not run", "left out", "interrupted"]
GRACE = 2.0
"""Seconds of its deadline that a job is given to say where it hangs."""
WORTH = 20.0
"""Seconds that must be left for a job that has waited for others."""
POLL, REFRESH, SILENCE = 0.05, 3.0, 5.0
LAST_LINES, ECHO = 30, 200_000
ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


@dataclass
class Job:
    """A process and what became of it.

    Args:
        name: Of its log, too.
        command: ``{folder}`` in it is the folder into which it writes its record, ``{seconds}`` what it has.
        deadline: Seconds.
        record_name: Of the file of its record, ``<name>.json`` unless given.
        environment: Besides this process's own.
        needed: Whether all that follows makes no sense if it fails.
    """

    name: str
    command: Sequence[str]
    deadline: float
    environment: Mapping[str, str] = field(default_factory=dict)
    needed: bool = False
    record_name: str = ""
    state: State = "waiting"
    seconds: float = 0.0
    why: str = ""
    last_lines: list[str] = field(default_factory=list)
    record: Any = None


@dataclass
class Stage:
    """Jobs that run side by side.

    Args:
        jobs: Of them, the most different ones first.
        patient: Whether they may use up what earlier stages have left of their time.
        at_once: So many run at a time; all if 0. What time does not suffice for is left out.
        seconds: Of the stage, where not all run at once.
    """

    jobs: list[Job]
    patient: bool = False
    at_once: int = 0
    seconds: float = 0.0

    @property
    def deadline(self) -> float:
        """Seconds that it takes at most, unless it is patient."""
        return self.seconds or max(job.deadline for job in self.jobs)


def _tie() -> None:
    """In a job's process: a group of its own, to be ended as one, and an end with the runner, however that ends."""
    os.setpgrp()
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class _Running:
    """A job's process; its output goes to a file, which no grandchild can keep open."""

    def __init__(self, job: Job, folder: Path, deadline: float, cut: bool = False) -> None:
        self.job, self.deadline, self.began = job, deadline, time.monotonic()
        self.late: State = "left out" if cut else "deadline"
        self.record_path = folder / (job.record_name or f"{job.name}.json")
        self.log_path = folder / f"{job.name}.log"
        self._echoed, self._record_time, self._aborted = 0, 0, 0.0
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"} | dict(job.environment)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [
            part.replace("{folder}", str(folder)).replace("{seconds}", f"{deadline:.0f}") for part in job.command
        ]
        job.state = "running"
        print(f"== {job.name}: {deadline:.0f} s at most", flush=True)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
                env=environment, preexec_fn=_tie,
            )  # fmt: skip

    def poll(self) -> bool:
        """Echo what is new; at the deadline ask where it hangs, then end it. Return whether the job has ended."""
        self.job.seconds = time.monotonic() - self.began
        code = self.process.poll()
        grace = min(GRACE, self.deadline / 2)
        if code is None and not self._aborted and self.job.seconds > self.deadline - grace:
            self._aborted = time.monotonic()
            self.process.send_signal(signal.SIGABRT)  # faulthandler prints where each thread is
        # The grace is its own: this loop may have been late.
        if code is None and self._aborted and time.monotonic() - self._aborted > grace:
            self.end(self.late, f"ended after {self.deadline:.0f} s")
            return True
        self.echo()
        if code is None:
            return False
        if self._aborted:
            self.end(self.late, f"ended after {self.deadline:.0f} s")
        elif code < 0:
            self.end("crashed", f"ended by {_signal_name(-code)}")
        elif code:
            self.end("failed", f"exit status {code}")
        else:
            self.end("passed", "")
        return True

    def end(self, state: State, why: str) -> None:
        """End the process and all that it has started; read what it leaves."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)  # what hangs in a driver does not even end then
        self.echo(last=True)
        job = self.job
        job.seconds = time.monotonic() - self.began
        job.state, job.why, job.last_lines = state, why, _tail(self.log_path)
        self.read_record()
        if state == "passed" and not isinstance(job.record, dict):
            job.state, job.why = "failed", "left no readable record"
        elif state == "passed" and not job.record.get("complete"):
            job.state, job.why = "failed", "its record is not complete"
        print(f"== {job.name}: {job.state.upper()} after {job.seconds:.1f} s {job.why}", flush=True)

    def read_record(self) -> bool:
        """Take over what the job has written, if it has written since; return whether."""
        try:
            changed = self.record_path.stat().st_mtime_ns
            if changed == self._record_time:
                return False
            self._record_time = changed
            record = json.loads(self.record_path.read_bytes())
        except (OSError, ValueError):  # not yet, or never
            return False
        if not isinstance(record, dict):
            return False
        self.job.record = record
        return True

    def echo(self, last: bool = False) -> None:
        """Print the lines that the job has printed since; the last may lack its end."""
        if self._echoed > ECHO:  # it prints without end
            return
        with self.log_path.open("rb") as log:
            log.seek(self._echoed)
            new = log.read(ECHO)
        if not last:
            new = new[: new.rfind(b"\n") + 1]
        self._echoed += len(new)
        for line in new.decode(errors="replace").splitlines():
            print(f"{self.job.name} | {_printable(line)}")
        print(end="", flush=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else "?" for c in line[:2000])


def _tail(path: Path) -> list[str]:
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - 20_000))
        lines = log.read().decode(errors="replace").splitlines()
    return [_printable(line)[:500] for line in lines[-LAST_LINES:]]


def run(
    stages: Sequence[Stage],
    folder: Path,
    total: float,
    changed: Callable[[], None],
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Run all stages; whatever happens, each job ends with a state.

    Args:
        stages: Their jobs' states, records and last lines are filled in.
        folder: For records and logs of jobs.
        total: Seconds for all; what is left of them limits each job.
        changed: Called when a job has ended, and every few seconds while records grow.
        stopped: Asked all the time; if it says so, all jobs are ended.
    """
    began, gone = time.monotonic(), ""
    for i, stage in enumerate(stages):
        left = total - (time.monotonic() - began)
        if not gone and left < 2 * GRACE:
            gone = "no time was left"
        if gone:
            for job in stage.jobs:
                job.state, job.why = "not run", gone
            continue
        spared = left - sum(later.deadline for later in stages[i + 1 :])
        _Turns(stage, folder, min(left, max(stage.deadline, spared) if stage.patient else stage.deadline)).wait(
            changed, stopped
        )
        failed = [job for job in stage.jobs if job.needed and job.state in ("failed", "crashed")]
        gone = f"{failed[0].name} {failed[0].state}" if failed else "interrupted" if stopped() else ""
    changed()


class _Turns:
    """Jobs of a stage, of which each that ends lets the next one begin."""

    def __init__(self, stage: Stage, folder: Path, seconds: float) -> None:
        self._stage, self._folder, self._ends = stage, folder, time.monotonic() + seconds
        self._waiting, self._running = list(stage.jobs), list[_Running]()

    def _begin(self) -> None:
        """Begin what may; a job that has waited too long is left out."""
        at_once = self._stage.at_once or len(self._stage.jobs)
        while self._waiting and len(self._running) < at_once:
            job = self._waiting.pop(0)
            has_waited = self._stage.jobs.index(job) >= at_once
            left = self._ends - time.monotonic()
            if has_waited and left < min(WORTH, job.deadline):
                job.state, job.why = "left out", f"no time was left, with {at_once} at once"
                continue
            deadline = left if self._stage.patient else min(left, job.deadline)
            try:
                cut = has_waited and deadline < job.deadline
                self._running.append(_Running(job, self._folder, deadline, cut))
            except OSError as error:
                job.state, job.why = "failed", f"could not be started: {error}"

    def wait(self, changed: Callable[[], None], stopped: Callable[[], bool]) -> None:
        """Wait until all have ended, each at its deadline at the latest."""
        self._begin()
        told = saved = time.monotonic()
        while self._running:
            if stopped():
                self._interrupt()
                return
            before = self._running
            self._running = [process for process in before if not process.poll()]
            now = time.monotonic()
            if len(self._running) < len(before):
                changed()
                self._begin()
                told = saved = now
            if now - saved > REFRESH:
                saved = now
                grown = [process.read_record() for process in self._running]
                if any(grown):
                    changed()
            if self._running and now - told > SILENCE:
                told = now
                names = ", ".join(process.job.name for process in self._running)
                print(f"   {max(p.job.seconds for p in self._running):.0f} s: {names} still at work", flush=True)
            time.sleep(POLL)

    def _interrupt(self) -> None:
        for process in self._running:
            process.end("interrupted", "the run was ended")
        for job in self._waiting:
            job.state, job.why = "not run", "interrupted"
