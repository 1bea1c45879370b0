"""What a GPU's minutes are planned for: each plan runs here, dry; on whatever somebody has; a page for an issue."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from gpu_records import RECORD, job, told
from launch_keys import recording

from benchmarks import optimizers
from benchmarks.adamw import DTYPES, ours
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import defaults, here, page, plans, report, runner, smoke, steps
from benchmarks.gpu.runner import Job, Stage, run
from benchmarks.kernels import KERNELS
from benchmarks.pages import PERFORMANCE
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
            for each in stage.jobs:
                if (count := keys.pop(each.name, 0)) or "tests" not in each.name:
                    print(f"{plan:6} {each.name:24} {count:3} launch keys, {KEY * count:5.1f} s of {each.deadline:g} s")
                    assert KEY * count <= each.deadline / 2
    assert not keys


@pytest.mark.usefixtures("the_machine_of_the_h100")
def test_a_deadline_is_twice_what_a_job_has_taken_on_an_h100():
    check = (RESULTS / "check.md").read_text()
    taken = {name: float(s) for name, s in re.findall(r"^\| ([\w-]+) \| passed \| ([\d.]+) \|", check, re.MULTILINE)}
    taken |= {each["case"]: each["seconds"] for each in json.loads((RESULTS / "speed.json").read_text())}
    # These were of twice the parameters' layouts, and of all 1,700 tests, when they were measured.
    changed = ("adamw", "tests-")
    stages = [stage for plan in ("check", "speed", "defaults") for stage in plans.PLANS[plan].chosen("cuda")]
    jobs = [each for stage in stages for each in stage.jobs]
    judged = {each.name: each.deadline for each in jobs if each.name in taken and not each.name.startswith(changed)}
    known = {"machine", "smoke-OneBitAdam", "nccl-0", "compiled_step", "steps-340M", "steps-10M", "defaults-340M"}
    assert known <= judged.keys()
    for name, deadline in judged.items():
        took = taken[name]
        print(f"{name:24} took {took:5.1f} s, deadline {deadline:g} s")
        assert deadline >= 2 * took


def test_the_page_of_performance_has_what_an_h100_has_measured():
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
    took = {name: done["seconds"] for name, done in record["jobs"].items()}
    print(f"gpu-{plan}, dry: {len(took)} jobs, {sum(took.values()):.0f} s of processes")


# ---------------------------------------------------------------- on whatever somebody has


ROOT = Path(__file__).parents[1]
GITHUB = 65_536
"""Characters of an issue."""


@pytest.fixture
def machine(monkeypatch):
    """Pretends so many cores and GPUs."""

    def pretend(cores: int, gpus: int) -> list[Stage]:
        monkeypatch.setattr(here, "cores", lambda: cores)
        monkeypatch.setattr(here, "gpus", lambda: gpus)
        return plans.PLANS["check"].chosen("cuda")

    return pretend


def names(stages: list[Stage]) -> list[str]:
    return [each.name for stage in stages for each in stage.jobs]


def test_many_cores_run_all_jobs_at_once_and_few_take_turns(machine):
    many = machine(16, 1)
    assert [(stage.at_once, stage.deadline) for stage in many] == [(0, 15), (0, 82), (0, 160)]
    assert len(many[2].jobs) == plans.SHARES
    few = machine(2, 1)
    assert [stage.at_once for stage in few] == [0, 2, 0]
    assert names(few[1:2])[:4] == ["smoke-OneBitAdam", "smoke-OneBitLamb", "smoke-ZeroOneAdam", "nccl-0"]
    assert set(names(many[1:2])) == set(names(few[1:2]))  # left out is only what time does not suffice for
    assert names(few[2:]) == ["tests-0", "tests-1"]
    assert few[1].jobs[0].environment["OMP_NUM_THREADS"] == "1"


def test_two_ranks_run_on_two_gpus_or_the_report_says_none_did(machine):
    for cores in (2, 16):
        two = machine(cores, 2)
        assert names(two).index("two-ranks") == len(names(two)) - len(two[-1].jobs) - 1
        assert not any("two ranks" in note for note in plans.notes(two))
        assert plans.notes(machine(cores, 1))[0] == "one GPU: no two ranks"
    assert plans.notes(plans.PLANS["speed"].chosen("cuda")) == []
    assert "two-ranks" in names(plans.PLANS["check"].chosen("cpu"))
    page = report.markdown([job("machine")], {"plan": "check", "notes": plans.notes(machine(2, 1))})
    assert "- one GPU: no two ranks." in page
    assert "- 2 cores: jobs take turns" in page


TWO = "GPU 0: Tesla T4 (UUID: GPU-1)\nGPU 1: Tesla T4 (UUID: GPU-2)\n"
PART = "GPU 0: A100 (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-1)\n  MIG 1g.5gb Device 1: (UUID: MIG-2)\n"


@pytest.mark.parametrize(
    ("listed", "visible", "count"),
    [
        (TWO, None, 2), (TWO, "0", 1), (TWO, "1,0", 2), (TWO, "", 0), (TWO, "-1", 0), (TWO, "0,7,1", 1),
        (TWO, "GPU-1, GPU-2", 2), (PART, None, 1), ("", None, 0), (None, None, 1), (None, "0,1", 2), (None, "", 0),
    ],
)  # fmt: skip
def test_gpus_are_counted_without_torch(listed, visible, count, tmp_path, monkeypatch):
    if listed is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n[ $1 = -L ] && printf '%s' '{listed}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert here.gpus.__wrapped__() == count


@pytest.mark.long
def test_jobs_take_turns_and_those_without_time_are_no_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "WORTH", 2.0)
    monkeypatch.setattr(runner, "GRACE", 0.2)
    jobs = [job("first"), job("second"), job("slow", "time.sleep(60)"), job("last")]
    stage = Stage(jobs, at_once=1, seconds=25.0)  # so long that two processes begin and end in it on a busy machine
    assert gpu.main(["check", "--out", str(tmp_path)], [stage]) == 0
    printed = capsys.readouterr().out
    assert printed.index("== first: PASSED") < printed.index("== second:") < printed.index("== second: PASSED")
    assert "all that ran passed; no time was left for 2 jobs and 0 tests" in printed
    assert [each.state for each in jobs] == ["passed", "passed", "left out", "left out"]
    record, page, junit = told(tmp_path)
    assert record["jobs"]["slow"]["record"] == RECORD  # what it had measured
    assert "**2 passed**, **2 left out** of 4 jobs." in page
    assert junit.find(".//testcase[@name='last']/skipped") is not None


def test_the_first_to_run_have_their_deadline_and_miss_it(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE", 0.2)
    hangs, later = job("hangs", "time.sleep(60)"), job("later")
    run([Stage([hangs, later], at_once=1, seconds=2.0)], tmp_path, 60.0, lambda: None)
    assert (hangs.state, later.state) == ("deadline", "left out")


def test_a_page_of_hundreds_of_failures_fits_into_an_issue(tmp_path):
    jobs = [job(f"job-{i}") for i in range(40)]
    for i, each in enumerate(jobs):
        each.state, each.why, each.last_lines = "failed", "exit status 1", ["e" * 500] * runner.LAST_LINES
        tests = {f"tests/gpu/test_{i}.py::test_a[{n}-{'x' * 60}]": {"outcome": "failed", "message": "why " * 200}
                 for n in range(50)}  # fmt: skip
        each.record = {"complete": True, "tests": tests}
    page = report.markdown(jobs, {"plan": "check"})
    assert len(page.encode()) < GITHUB - 4_000
    assert "And 30 more: job-10, job-11" in page
    assert "| and 1950 more |" in page
    assert page.count("```") % 2 == 0


@pytest.mark.parametrize("lines", [3_000, 20])
def test_a_page_that_is_cut_says_so_and_leaves_no_fence_open(lines):
    whole = ["```text", *["x" * 100] * lines, "```", *["y" * 100] * lines]
    cut = report._shortened(whole)
    if lines == 20:
        assert cut == whole
        return
    assert len("\n".join(cut)) < GITHUB - 4_000
    assert cut[-3:-1] == ["```", ""]
    assert re.fullmatch(r"And \d+ more lines: all is in the `.json` file beside this.", cut[-1])


def test_tests_without_time_are_not_reached_and_no_failure(tmp_path, capsys):
    (tmp_path / "test_it.py").write_text("def test_a():\n    raise OSError\n")
    options = ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", os.devnull, str(tmp_path / "test_it.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.shares", "--record", "{folder}/tests.json"]
    tests = Job("tests", [*command, "--seconds", "{seconds}", *options], 25.0)
    assert gpu.main(["check", "--out", str(tmp_path)], [Stage([tests])]) == 0
    assert [test["outcome"] for test in tests.record["tests"].values()] == [None]
    assert "1 not reached" in told(tmp_path)[1]
    assert "all that ran passed; no time was left for 0 jobs and 1 tests" in capsys.readouterr().out


@pytest.mark.long
def test_tests_need_nothing_but_torch_triton_and_plain_pytest(tmp_path, monkeypatch):
    for name in ("hypothesis", "pytest_timeout", "xdist", "matplotlib", "rich", "sklearn"):
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError('not here')\n")
    monkeypatch.setattr(plans.importlib.util, "find_spec", lambda name: None)
    (tests,) = plans._shares("cpu", 100.0).jobs[:1]
    assert "pytest_timeout" not in tests.command
    given = [part.replace("{folder}", str(tmp_path)).replace("{seconds}", "100") for part in tests.command]
    environment = os.environ | tests.environment | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    found = subprocess.run(given, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"\d passed", found.stdout)


def test_the_issue_asks_for_what_the_documented_command_writes():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/gpu-report.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    asked = {field["id"]: field for field in form["body"] if "id" in field}
    assert asked["report"]["validations"] == {"required": True}
    command = "git clone <this repository> fusedonebit && make -C fusedonebit gpu-check OUT=.."
    told = " ".join(str(field["attributes"]) for field in form["body"])
    assert command in told
    assert "gpu-check.md" in told
    assert command in (ROOT / "docs/benchmarks.md").read_text()
    assert "gpu-check.md" in (ROOT / "docs/benchmarks.md").read_text()
