"""What ``make gpu-check``, ``make gpu-speed`` and ``make gpu-all`` run: jobs with deadlines, stage by stage.

A kernel's first launch compiles it, on one core, most of a second for each of its launch keys. So jobs that are first
to launch some run side by side: those of a check, and before steps are timed those that only warm Triton's cache.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .runner import Job, Stage

ONEBIT = ("OneBitAdam", "OneBitAdam-frozen", "OneBitAdam-bf16", "OneBitAdam-8bit", "OneBitLamb", "OneBitLamb-frozen")
SMOKE = (*ONEBIT, "OneBitLion", "ZeroOneAdam", "MarsitSGD", "MarsitAdam", "AdamW", "AdamW-8bit", "Lamb")
WARM = 6
"""Jobs that warm the cache, one for each of ``steps.PEERS``."""
SPEED, REST = {"340M": 90, "10M": 44}, {"50M": 60, "1.3B": 120}
"""Seconds of steps of each size."""
BOTH = ("adamw",)
"""Cases that are results on a CPU, too."""
TINY = ("--numel", "20000", "--rounds", "2")
GPU_TESTS, FAR = "tests/gpu", "tests/gpu/test_gpu_far.py"
NCCL, COMPILED = "nccl", "compiled_step"
"""What names of tests have that are a job of their own."""
SHARES, SHARES_OF_A_DRY_RUN, MOST = 15, 400, 16
"""Processes of tests; and how many cases of each function a check takes, of which there are 1,700."""


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
            Stage([j for j in stage.jobs if not only or j.needed or j.name.startswith(tuple(only))], stage.patient)
            for stage in stages
        ]
        return [stage for stage in kept if stage.jobs]


def _threads(dry: bool, at_once: int) -> dict[str, str]:
    """So many threads for the CPU's part of jobs that run side by side that all have a core."""
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(1 if dry else max(1, cores // at_once))}


def _case(name: str, device: str, deadline: float, *options: str, at_once: int = 1, needed: bool = False) -> Job:
    dry = device == "cpu"
    command = [sys.executable, "-m", "benchmarks", name, "--device", device, "--out", "{folder}"]
    record = f"{'dry-run-' if dry and name not in BOTH else ''}{name}.json"
    return Job(name, [*command, *(TINY if dry else options)], deadline, _threads(dry, at_once), needed, record)


def _tests(name: str, device: str, deadline: float, *options: str, share: int = 0, of: int = 1) -> Job:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.shares", "-p", "no:cacheprovider"]
    command += ["--share", f"{share}/{of}", "--record", f"{{folder}}/{name}.json"]
    command += ["-o", "faulthandler_timeout=40", "-o", "timeout=60", *options]
    more = _threads(device == "cpu", SHARES)
    if device == "cpu":
        more |= {"FUSEDONEBIT_DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": ""}
    return Job(name, command, deadline, more)


def _machine(device: str) -> Stage:
    return Stage([_case("machine", device, 15, needed=True)])


def _smoke(device: str) -> Stage:
    """Everything once: each optimizer, NCCL of one rank, a compiled step."""
    jobs = [_case(f"smoke-{name}", device, 80, at_once=len(SMOKE)) for name in SMOKE]
    jobs += [_tests(f"{NCCL}-{i}", device, 80, GPU_TESTS, "-k", NCCL, share=i, of=2) for i in range(2)]
    return Stage([*jobs, _tests(COMPILED, device, 80, GPU_TESTS, "-k", COMPILED)])


def _shares(device: str, deadline: float, *options: str) -> Stage:
    """The other tests; those first that differ most, so that a deadline leaves out repetitions."""
    shares, of = (2, SHARES_OF_A_DRY_RUN) if device == "cpu" else (SHARES, SHARES)
    others = ("-k", f"not {NCCL} and not {COMPILED}", f"--ignore={FAR}", *options, GPU_TESTS)
    jobs = [_tests(f"tests-{i}", device, deadline, *others, share=i, of=of) for i in range(shares)]
    return Stage(jobs, patient=True)


def _warm(device: str) -> Stage:
    jobs = [_case(f"warm-{i}", device, 36, at_once=WARM) for i in range(WARM)]
    return Stage(jobs[:1] if device == "cpu" else jobs)  # nothing is compiled there


def _timed(device: str, sizes: dict[str, int]) -> list[Stage]:
    return [Stage([_case(f"steps-{name}", device, deadline)]) for name, deadline in sizes.items()]


def _kernels(device: str) -> Stage:
    return Stage([_case("kernels", device, 48, "--rounds", "15")])


def _check(device: str) -> list[Stage]:
    return [_machine(device), _smoke(device), _shares(device, 160, "--most", str(MOST))]


def _speed(device: str) -> list[Stage]:
    alone = Stage([_case("adamw", device, 35, "--numel", "340000000", "--rounds", "9")])
    return [_machine(device), _warm(device), *_timed(device, SPEED), alone, _kernels(device)]


def _all(device: str) -> list[Stage]:
    whole = [_machine(device), _smoke(device), _shares(device, 320)]
    far = _tests("tests-far", device, 100, FAR, of=8 if device == "cpu" else 1)
    rest = [*_timed(device, REST), Stage([_case("roofline", device, 100, "--rounds", "5")])]
    return [*whole, *_speed(device)[1:], *rest, Stage([far], patient=True)]


PLANS = {
    "check": Plan("machine, every optimizer, graphs, NCCL, a compiled step, and the tests", 268, _check),
    "speed": Plan("whole steps against fused AdamW, 8-bit AdamW, and every kernel's bytes a second", 269, _speed),
    "all": Plan("both, and steps of 50M and 1.3B parameters, kernels by size, the largest tensors", 1100, _all),
}
