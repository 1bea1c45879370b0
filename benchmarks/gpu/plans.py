"""What ``make gpu-check``, ``gpu-speed``, ``gpu-defaults`` and ``gpu-all`` run: jobs with deadlines, stage by stage.

A kernel's first launch compiles it, on one core, most of a second for each of its launch keys. So jobs that are first
to launch some run side by side: those of a check, and before steps are timed those that only warm Triton's cache.
Where there are few cores, a check's jobs take turns, the most different ones first; the last may be left out.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from . import here
from .runner import Job, Stage

SMOKE = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MarsitAdam", "OneBitLion", "OneBitMuon", "AdamW-8bit", "Lamb")
ALIKE = ("OneBitAdam-8bit", "OneBitAdam-frozen", "OneBitLamb-frozen", "MarsitSGD", "OneBitAdam-bf16", "AdamW")
"""Optimizers that share most of their kernels with one of ``SMOKE``."""
WARM = {"warm": 6, "warm-defaults": 7}
"""Jobs that warm the cache: one for each of ``steps.PEERS``, and of ``defaults.USUAL``."""
SPEED, REST = {"steps-340M": 118, "steps-10M": 52}, {"steps-50M": 60, "steps-1.3B": 120}
DEFAULTS = {"defaults-340M": 156, "defaults-10M": 40}
"""Seconds of steps of each size."""
BOTH = ("adamw",)
"""Cases that are results on a CPU, too."""
TINY = ("--numel", "20000", "--rounds", "2")
GPU_TESTS, FAR = "tests/gpu", "tests/gpu/test_gpu_far.py"
RANKS, NCCL, COMPILED = "two-ranks", "nccl", "compiled_step"
"""A job; and what names of tests have that are one of their own."""
SHARES, SHARES_OF_A_DRY_RUN, MOST = 15, 400, 16
"""Processes of tests (with fewer cores, jobs take turns); how many cases of each function and name a check takes."""


class Times(NamedTuple):
    """Seconds of a check's stages, and of one smoke job."""

    machine: float
    smoke: float
    job: float
    ranks: float
    tests: float


TIMES = {
    "one GPU": Times(15, 82, 82, 0, 160), "two GPUs": Times(15, 82, 82, 50, 110),
    "one GPU, few cores": Times(40, 165, 110, 0, 60), "two GPUs, few cores": Times(40, 115, 110, 60, 50),
}  # fmt: skip


class Plan(NamedTuple):
    """Jobs in stages; ``total`` is seconds of everything, ``stages`` makes them for a device."""

    about: str
    total: float
    stages: Callable[[str], list[Stage]]

    def chosen(self, device: str, only: Sequence[str] = ()) -> list[Stage]:
        """Return the stages, of the jobs whose names begin with one of ``only`` and those that all others need.

        Raises:
            ValueError: No job's name begins with one of them.
        """
        stages = self.stages(device)
        names = [job.name for stage in stages for job in stage.jobs]
        for wanted in only:
            if not any(name.startswith(wanted) for name in names):
                raise ValueError(f"there is no job {wanted!r}: there are {', '.join(names)}")
        kept = [
            replace(stage, jobs=[j for j in stage.jobs if not only or j.needed or j.name.startswith(tuple(only))])
            for stage in stages
        ]
        return [stage for stage in kept if stage.jobs]


def _threads(dry: bool, at_once: int) -> dict[str, str]:
    """So many threads for the CPU's part of jobs that run side by side that all have a core."""
    return {"OMP_NUM_THREADS": str(1 if dry else max(1, here.cores() // at_once))}


def _case(name: str, device: str, deadline: float, *options: str, at_once: int = 1, needed: bool = False) -> Job:
    dry = device == "cpu"
    command = [sys.executable, "-m", "benchmarks", name, "--device", device, "--out", "{folder}"]
    record = f"{'dry-run-' if dry and name not in BOTH else ''}{name}.json"
    return Job(name, [*command, *(TINY if dry else options)], deadline, _threads(dry, at_once), needed, record)


def _tests(name: str, device: str, deadline: float, *options: str, share: int = 0, of: int = 1) -> Job:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.shares", "-p", "no:cacheprovider"]
    command += ["--share", f"{share}/{of}", "--seconds", "{seconds}", "--record", f"{{folder}}/{name}.json"]
    command += ["-o", "faulthandler_timeout=40", *_timeout(), *options]
    more = _threads(device == "cpu", SHARES) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # of what else is installed
    if device == "cpu":
        more |= {"FUSEDONEBIT_DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": ""}
    return Job(name, command, deadline, more)


def _timeout() -> list[str]:
    """A limit for each test, if there is the plugin that has it; else the job's deadline is what ends one."""
    return ["-p", "pytest_timeout", "-o", "timeout=60"] if importlib.util.find_spec("pytest_timeout") else []


def _machine(device: str, deadline: float = 15) -> Stage:
    return Stage([_case("machine", device, deadline, needed=True)])


def _few() -> bool:
    return here.cores() < SHARES


def _turns(jobs: list[Job], seconds: float) -> Stage:
    """All at once, or of few cores each one job."""
    return Stage(jobs, at_once=here.cores(), seconds=seconds) if _few() else Stage(jobs)


def _smoke(device: str, times: Times) -> Stage:
    """Everything once: each optimizer, NCCL of one rank, a compiled step."""
    at_once = min(here.cores(), len(SMOKE + ALIKE))
    first, then = ([_case(f"smoke-{n}", device, times.job, at_once=at_once) for n in names] for names in (SMOKE, ALIKE))
    nccl = [_tests(f"{NCCL}-{i}", device, times.job, GPU_TESTS, "-k", NCCL, share=i, of=2) for i in range(2)]
    compiled = _tests(COMPILED, device, times.job, GPU_TESTS, "-k", COMPILED)
    return _turns([*first[:3], nccl[0], *first[3:], compiled, *then, nccl[1]], times.smoke)


def _ranks(device: str, deadline: float) -> list[Stage]:
    """Two ranks, of a GPU each, when most of what they launch is compiled."""
    return [Stage([_case(RANKS, device, deadline)], patient=True)] if deadline else []


def _shares(device: str, deadline: float, *options: str) -> Stage:
    """The other tests; those first that differ most, so that a deadline leaves out repetitions."""
    of = min(SHARES, here.cores())
    shares, of = (2, SHARES_OF_A_DRY_RUN) if device == "cpu" else (of, of)
    others = ("-k", f"not {NCCL} and not {COMPILED}", f"--ignore={FAR}", *options, GPU_TESTS)
    jobs = [_tests(f"tests-{i}", device, deadline, *others, share=i, of=of) for i in range(shares)]
    return Stage(jobs, patient=True)


def _warm(device: str, name: str = "warm", deadline: float = 44) -> Stage:
    count = WARM[name]
    jobs = [_case(f"{name}-{i}", device, deadline, at_once=count) for i in range(count)]
    return Stage(jobs[:1] if device == "cpu" else jobs)  # nothing is compiled there


def _timed(device: str, sizes: dict[str, int]) -> list[Stage]:
    return [Stage([_case(name, device, deadline)]) for name, deadline in sizes.items()]


def _kernels(device: str) -> Stage:
    return Stage([_case("kernels", device, 48, "--rounds", "15")])


def _times(device: str) -> Times:
    two = device == "cpu" or here.gpus() > 1
    return TIMES[f"{'two GPUs' if two else 'one GPU'}{', few cores' if _few() else ''}"]


def _check(device: str) -> list[Stage]:
    times = _times(device)
    tests = _shares(device, times.tests, "--most", str(MOST))
    return [_machine(device, times.machine), _smoke(device, times), *_ranks(device, times.ranks), tests]


def _speed(device: str) -> list[Stage]:
    alone = Stage([_case("adamw", device, 35, "--numel", "340000000", "--rounds", "9")])
    return [_machine(device), _warm(device), *_timed(device, SPEED), alone]


def _defaults(device: str) -> list[Stage]:
    return [_machine(device), _warm(device, "warm-defaults"), *_timed(device, DEFAULTS)]


def _all(device: str) -> list[Stage]:
    times = _times(device)
    whole = [_machine(device, times.machine), _smoke(device, times), *_ranks(device, times.ranks), _shares(device, 300)]
    far = _tests("tests-far", device, 80, FAR, of=8 if device == "cpu" else 1)
    rest = [*_timed(device, REST), Stage([_case("roofline", device, 60, "--rounds", "5")])]
    return [*whole, *_speed(device)[1:], _kernels(device), *rest, Stage([far], patient=True)]


PLANS = {
    "check": Plan("machine, every optimizer, graphs, NCCL, a compiled step, and the tests", 268, _check),
    "speed": Plan("whole steps against fused AdamW, with a frozen variance, and 8-bit AdamW", 269, _speed),
    "defaults": Plan("50 steps in a row of every optimizer's defaults against fused AdamW", 269, _defaults),
    "all": Plan("check and speed, every kernel, steps of 50M and 1.3B, the largest tensors", 1199, _all),
}


def notes(stages: Sequence[Stage]) -> list[str]:
    """Return what a check on this machine does not show."""
    names = [job.name for stage in stages for job in stage.jobs]
    if not any(name.startswith("smoke") for name in names):
        return []
    found = [] if RANKS in names else [f"{'one GPU' if here.gpus() == 1 else 'no GPU was found'}: no two ranks"]
    few = f"{here.cores()} cores: jobs take turns, and what no time is left for is left out"
    return [*found, few] if _few() else found
