"""``make gpu``: smoke, whole steps, kernels and tests on one CUDA GPU, in under nine minutes, whatever happens.

Each job is a process with a deadline; what hangs or crashes ends alone, and is reported. ``gpu.json``, ``gpu.md``,
``gpu.xml`` (junit) and ``gpu.log`` are replaced as each ends. ``--device cpu`` is a dry run of all of it on tiny sizes.
Goals that are missed are told, and no failure.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import report
from .runner import ROOT, Job, Stage, run

TOTAL = 532
"""Seconds, of everything."""
ONEBIT = ("OneBitAdam", "OneBitAdam-frozen", "OneBitAdam-bf16", "OneBitAdam-8bit", "OneBitLamb", "OneBitLamb-frozen")
SMOKE = (*ONEBIT, "OneBitLion", "ZeroOneAdam", "MarsitSGD", "MarsitAdam", "AdamW", "AdamW-8bit", "Lamb")
STEPS = {"10M": 45, "50M": 30, "340M": 55, "1.3B": 60}
TINY = ("--numel", "20000", "--rounds", "2")
FAR = "tests/gpu/test_gpu_far.py"
SHARES, SHARES_OF_A_DRY_RUN = 8, 400


def _case(name: str, device: str, deadline: float, *options: str, at_once: int = 1, needed: bool = False) -> Job:
    dry = device == "cpu"
    command = [sys.executable, "-m", "benchmarks", name, "--device", device, "--out", "{folder}"]
    record = f"{'dry-run-' if dry else ''}{name}.json"
    return Job(name, [*command, *(TINY if dry else options)], deadline, _threads(dry, at_once), needed, record)


def _tests(name: str, device: str, deadline: float, where: str, share: int, of: int, *options: str) -> Job:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.shares", "-p", "no:cacheprovider"]
    command += ["--share", f"{share}/{of}", "--record", f"{{folder}}/{name}.json"]
    command += ["-o", "faulthandler_timeout=40", "-o", "timeout=60", *options, where]
    more = _threads(device == "cpu", SHARES)
    if device == "cpu":
        more |= {"FUSEDONEBIT_DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": ""}
    return Job(name, command, deadline, more)


def _threads(dry: bool, at_once: int) -> dict[str, str]:
    """So many threads for the CPU's part of jobs that run side by side that all have a core."""
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(1 if dry else max(1, cores // at_once))}


def stages(device: str) -> list[Stage]:
    """All that is run, in this order; the deadlines add up to less than ``TOTAL``."""
    dry = device == "cpu"
    smoke = [_case(f"smoke-{name}", device, 60, at_once=len(SMOKE)) for name in SMOKE]
    steps = [_case(f"steps-{name}", device, deadline) for name, deadline in STEPS.items()]
    kernels = [_case("kernels", device, 40, "--rounds", "15"), _case("roofline", device, 50, "--rounds", "5")]
    shares, of = (2, SHARES_OF_A_DRY_RUN) if dry else (SHARES, SHARES)
    small = [_tests(f"tests-{i}", device, 100, "tests/gpu", i, of, f"--ignore={FAR}") for i in range(shares)]
    far = _tests("tests-far", device, 50, FAR, 0, 8 if dry else 1)
    first = [Stage([_case("machine", device, 40, needed=True)]), Stage(smoke)]
    if dry:  # nothing is measured, and most of it is the import of torch
        return [*first, Stage(steps), Stage([*kernels, *small, far])]
    timed = [Stage([job]) for job in (*steps, *kernels)]
    return [*first, *timed, Stage(small, patient=True), Stage([far], patient=True)]


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


def main(arguments: Sequence[str] | None = None, plan: Sequence[Stage] | None = None) -> int:
    """Run the stages; return 1 if a job did not pass or a file could not be written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json, gpu.md, gpu.xml and gpu.log")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, no result")
    parser.add_argument("--commit", default="", help="what is measured, where git can't say it")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    about = {"commit": given.commit or _commit() or "unknown"}
    if given.device == "cpu":
        about["dry run"] = "no result"
    chosen = list(stages(given.device) if plan is None else plan)
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # jobs are aborted at their deadlines
    stops: list[int] = []
    written = True
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder, _signals(stops):

        def changed() -> None:
            nonlocal written
            written = report.write(chosen, given.out, Path(folder), about)

        run(chosen, Path(folder), TOTAL, changed, lambda: bool(stops))
    failed = report.failed(chosen)
    for stage in chosen:
        for job in stage.jobs:
            print(f"{job.name:20} {job.state:11} {job.seconds:6.1f} s  {job.why}")
    for line in report.goals(chosen):
        print(line)
    told = f"{len(failed)} did not pass: {', '.join(failed)}" if failed else "all passed"
    print(f"{given.out / 'gpu.md'}: {told}")
    return int(bool(failed) or not written)


if __name__ == "__main__":
    sys.exit(main())
