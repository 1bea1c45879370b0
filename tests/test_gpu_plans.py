"""What a lent GPU's minutes are planned for: each plan runs here, dry; what its jobs compile is counted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from launch_keys import recording

from benchmarks import optimizers
from benchmarks.adamw import DTYPES, ours
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import defaults, here, page, plans, smoke, steps
from benchmarks.kernels import KERNELS
from benchmarks.pages import PERFORMANCE, tables_in
from benchmarks.workload import Workload
from fusedonebit import AdamW, Wire

CPU = torch.device("cpu")
KEY = 0.8
"""Seconds of one core that a launch key takes to compile, with Triton 3.6.0 on the machine that had an H100."""
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "h100"
SHAPES = [(3000,), (64, 32), (7,)]


@pytest.fixture
def the_machine_of_the_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "cores", lambda: 16)
    monkeypatch.setattr(here, "gpus", lambda: 1)


def keys_of_smoke(name: str) -> int:
    with recording() as keys:
        for wire in [Wire(), *[Wire(capturable=True)] * (name in smoke.CAPTURABLE)]:
            smoke.Run(name, CPU, wire=wire).train(0, smoke.CAPTURES_AT + smoke.REPLAYS)
    return len(keys)


def keys_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each peer, both ways, and of all together."""
    monkeypatch.setattr(optimizers, "backends", lambda device: ["triton"])
    every, counted = set(), []
    for peer in steps.PEERS:
        with recording() as keys:
            for way in steps.WAYS:
                peer.step(optimizers.of_shapes(SHAPES), way)()
        every |= keys
        counted.append(len(keys))
    return [*counted, len(every)]


def keys_of_defaults() -> list[int]:
    """Of each optimizer, and of all together."""
    every, counted = set(), []
    for usual in defaults.USUAL:
        params = optimizers.of_shapes(SHAPES, CPU, usual.dtype)
        with recording() as keys:
            optimizer = usual.make(params, lr=1e-3, process_group=smoke.Alike(defaults.WORLD_SIZE))
            for _ in range(8):
                optimizer.step()
        every |= keys
        counted.append(len(keys))
    return [*counted, len(every)]


def keys_of_adamw() -> int:
    with recording() as keys:
        for dtype in DTYPES:
            for kind in ours(dtype).values():
                AdamW(optimizers.of_shapes(SHAPES, CPU, dtype), numerics=kind.numerics).step()
    return len(keys)


def keys_of_kernels() -> int:
    with recording() as keys:
        for kernel in KERNELS:
            preconditioned = "preconditioned" in kernel.name
            Workload((5000,), CPU, kernel.world_size, kernel.dtype, preconditioned).call(kernel.op)()
    return len(keys)


@pytest.mark.long
@pytest.mark.usefixtures("the_machine_of_the_h100")
def test_what_a_job_compiles_takes_half_of_its_deadline_at_most(monkeypatch):
    keys = {f"smoke-{name}": keys_of_smoke(name) for name in smoke.OPTIMIZERS}
    *warm, every = keys_of_steps(monkeypatch)
    keys |= {f"warm-{i}": count for i, count in enumerate(warm)}
    # What warms the cache has the smallest size's layout; of another one no key may be the same.
    keys |= {name: 0 if name == f"steps-{steps.SMALLEST}" else every for name in plans.SPEED}
    keys |= {"adamw": keys_of_adamw(), "kernels": keys_of_kernels()}
    *warm, every = keys_of_defaults()
    keys |= {f"warm-defaults-{i}": count for i, count in enumerate(warm)} | {"defaults-340M": every}
    for plan in ("check", "speed", "defaults", "all"):
        for stage in plans.PLANS[plan].chosen("cuda"):
            for job in stage.jobs:
                if (count := keys.pop(job.name, 0)) or "tests" not in job.name:
                    print(f"{plan:6} {job.name:24} {count:3} launch keys, {KEY * count:5.1f} s of {job.deadline:g} s")
                    assert KEY * count <= job.deadline / 2
    assert not keys


@pytest.mark.usefixtures("the_machine_of_the_h100")
def test_a_deadline_is_twice_what_a_job_has_taken_on_an_h100():
    check = (RESULTS / "check.md").read_text()
    taken = {name: float(s) for name, s in re.findall(r"^\| ([\w-]+) \| passed \| ([\d.]+) \|", check, re.MULTILINE)}
    taken |= {each["case"]: each["seconds"] for each in json.loads((RESULTS / "speed.json").read_text())}
    # These were of twice the parameters' layouts, and of all 1,700 tests, when they were measured.
    changed = ("adamw", "tests-")
    jobs = [
        job
        for plan in ("check", "speed", "defaults")
        for stage in plans.PLANS[plan].chosen("cuda")
        for job in stage.jobs
    ]
    judged = {job.name: job.deadline for job in jobs if job.name in taken and not job.name.startswith(changed)}
    assert {
        "machine",
        "smoke-OneBitAdam",
        "nccl-0",
        "compiled_step",
        "steps-340M",
        "steps-10M",
        "defaults-340M",
    } <= judged.keys()
    for name, deadline in judged.items():
        took = taken[name]
        print(f"{name:24} took {took:5.1f} s, deadline {deadline:g} s")
        assert deadline >= 2 * took


def test_the_pages_have_what_an_h100_has_measured():
    assert tables_in(page.PAGE) == page.tables().strip()
    text, cases = PERFORMANCE.read_text(), {case["case"]: case for case in json.loads(page.RECORD.read_text())}
    rows = (cases[case]["tables"][0]["rows"] for case in ("defaults-340M", "steps-340M"))
    default, frozen = ({r["optimizer"]: r["x AdamW"] for r in each if r.get("way") != "captured"} for each in rows)
    for name in ("OneBitAdam", "OneBitLamb"):
        assert f"| `{name}` | {default[name]:.2f} | {frozen[f'{name}, W=8']:.2f} |" in text
    for name in ("OneBitLion", "MarsitAdam"):
        assert f"| `{name}` | {default[name]:.2f} | |" in text
    one, four = (default[f"ZeroOneAdam, rounds of {length}"] for length in (1, 4))
    assert f"| `ZeroOneAdam`, rounds of one; of four | {one:.2f}; {four:.2f} | |" in text
    assert f"bfloat16 parameters | {default['OneBitAdam, 8-bit state']:.2f} | |" in text


@pytest.mark.long(full=True)
@pytest.mark.parametrize("plan", ["check", "speed", "defaults"])
def test_a_plan_passes_dry(plan, tmp_path):
    assert gpu.main([plan, "--device", "cpu", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / f"gpu-{plan}.json").read_text())
    assert record["about"]["dry run"] == "no result"
    took = {name: job["seconds"] for name, job in record["jobs"].items()}
    print(f"gpu-{plan}, dry: {len(took)} jobs, {sum(took.values()):.0f} s of processes")
