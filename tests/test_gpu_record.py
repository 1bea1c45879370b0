"""``make gpu-check`` reports whatever its jobs do: jobs here hang, crash, print nonsense and are killed; no GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import backends as compare
import pytest
import torch
from gpu_records import RECORD, WRITES, job, told

from benchmarks import audit_steps, optimizers, registry
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import defaults, here, plans, profiled, runner, shares, smoke, steps
from benchmarks.gpu.runner import Job, Stage, run
from fusedonebit import Lamb
from fusedonebit.triton_kernels import backends, native

ROOT = Path(__file__).parents[1]


def failures(root: ElementTree.Element) -> set[str | None]:
    """Names of jobs that the junit log has as failed."""
    cases = root.findall("testsuite[@name='jobs']/testcase")
    return {case.get("name") for case in cases if case.find("failure") is not None}


BAD = {
    "hangs": ("deadline", lambda: job("hangs", "print('so far'); time.sleep(60)", deadline=6.0)),
    "ignores": (
        "deadline",
        lambda: job("ignores", "import signal; signal.signal(6, signal.SIG_IGN); time.sleep(60)", deadline=6.0),
    ),
    "aborts": ("crashed", lambda: job("aborts", "print('last words', flush=True); os.abort()")),
    "raises": ("failed", lambda: job("raises", "raise OSError('on purpose')")),
    "nonsense": (
        "failed",
        lambda: job("nonsense", "open(sys.argv[1], 'wb').write(b'\\xff{'); os.write(1, bytes(range(256)) * 300)"),
    ),
    "other-json": ("failed", lambda: job("other-json", record=[1, "x"])),
    "odd-tables": ("failed", lambda: job("odd-tables", record={"complete": False, "tables": [3], "tests": {"a": 1}})),
    "half": ("failed", lambda: job("half", record=RECORD | {"complete": False})),
    "missing": ("failed", lambda: Job("missing", ["/no/such/program"], 5.0)),
}


def test_jobs_that_hang_crash_or_print_nonsense_end_alone_named(tmp_path, capsys):
    plan = [Stage([job("before")]), Stage([make() for _, make in BAD.values()]), Stage([job("after")])]
    began = time.monotonic()
    assert gpu.main(["check", "--out", str(tmp_path)], plan) == 1
    assert time.monotonic() - began < 60  # each hangs for as long
    record, page, junit = told(tmp_path)
    states = {name: found["state"] for name, found in record["jobs"].items()}
    assert states == {"before": "passed", **{name: state for name, (state, _) in BAD.items()}, "after": "passed"}
    assert record["jobs"]["after"]["record"] == record["jobs"]["before"]["record"] == RECORD
    assert record["jobs"]["hangs"]["record"] == RECORD  # what it had measured
    hung = "\n".join(record["jobs"]["hangs"]["last_lines"])
    assert "so far" in hung
    assert "Fatal Python error: Aborted" in hung  # and where
    assert record["jobs"]["aborts"]["why"] == "ended by SIGABRT"
    assert "last words" in "\n".join(record["jobs"]["aborts"]["last_lines"])
    assert "OSError: on purpose" in page
    assert failures(junit) == set(BAD)
    assert all(f"**{name}**: {state}" in page for name, (state, _) in BAD.items())
    assert "last words" in (tmp_path / "gpu-check.log").read_text()
    ending = capsys.readouterr().out.splitlines()[-1]
    assert all(name in ending for name in BAD)
    assert not list(tmp_path.glob("*.new"))


def test_all_that_passes_ends_with_0(tmp_path):
    assert gpu.main(["check", "--out", str(tmp_path), "--commit", "abc"], [Stage([job("one"), job("two")])]) == 0
    record, page, junit = told(tmp_path)
    assert record["states"] == {"passed": 2}
    assert record["about"] == {"plan": "check", "commit": "abc"}
    assert failures(junit) == set()
    assert "- a note" in page


def test_a_report_grows_while_jobs_work_and_as_each_one_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "REFRESH", 0.1)
    seen = []
    stages = [Stage([job("first")]), Stage([job("second", "time.sleep(1.5)")])]

    def changed() -> None:
        seen.append({j.name: (j.state, j.record == RECORD) for stage in stages for j in stage.jobs})

    run(stages, tmp_path, 60.0, changed)
    told = [state for state, _ in groupby(seen)]  # the first may have been seen at work as well
    assert told[-3:] == [
        {"first": ("passed", True), "second": ("waiting", False)},
        {"first": ("passed", True), "second": ("running", True)},
        {"first": ("passed", True), "second": ("passed", True)},
    ]


HALF_WAY = f"""
import sys
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.runner import Job, Stage

def job(name, then=""):
    program = {WRITES.replace("{record}", repr(RECORD))!r} + then
    return Job(name, [sys.executable, "-S", "-c", program, "{{folder}}/" + name + ".json"], 30.0)

SLEEPS = f"open({{sys.argv[1] + '/pid'!r}}, 'w').write(str(os.getpid())); print('asleep'); time.sleep(20)"
assert "torch" not in sys.modules  # it may be what is broken
plan = [Stage([job("first")]), Stage([job("second", SLEEPS)]), Stage([job("third")])]
sys.exit(gpu.main(["check", "--out", sys.argv[1]], plan))
"""


def ends(pid: int) -> bool:
    """Whether a process does, within seconds."""
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or ") Z" in stat.read_text():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_half_way_keeps_all_that_had_ended(tmp_path, number):
    command = [sys.executable, "-c", HALF_WAY, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert any("asleep" in line for line in process.stdout)
    process.send_signal(number)
    code = process.wait(20)
    process.stdout.close()
    record, page, junit = told(tmp_path)
    states = {name: found["state"] for name, found in record["jobs"].items()}
    assert states["first"] == "passed"
    assert record["jobs"]["first"]["record"] == RECORD
    assert ends(int((tmp_path / "pid").read_text()))
    assert "first | passed" in page
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
        return
    assert code == 1
    assert (states["second"], states["third"]) == ("interrupted", "not run")
    assert failures(junit) == {"second"}
    assert "**second**: interrupted" in page


def test_a_failed_job_that_all_others_need_ends_the_run(tmp_path):
    plan = [Stage([job("machine", "sys.exit('no CUDA device here')", needed=True)]), Stage([job("other")])]
    assert gpu.main(["check", "--out", str(tmp_path)], plan) == 1
    record, page, junit = told(tmp_path)
    assert record["states"] == {"failed": 1, "not run": 1}
    assert record["jobs"]["other"]["why"] == "machine failed"
    assert "no CUDA device here" in page
    assert junit.find(".//testcase[@name='other']/skipped") is not None


def test_without_time_no_job_runs_patient_stages_use_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE", 0.2)
    slow, last = job("slow", "time.sleep(60)", deadline=30.0), job("last")
    run([Stage([slow]), Stage([last])], tmp_path, 0.5, lambda: None)
    assert (slow.state, last.state, last.why) == ("deadline", "not run", "no time was left")
    patient, later = job("patient", "time.sleep(1.5)", deadline=1.0), job("later", deadline=10.0)
    run([Stage([patient], patient=True), Stage([later])], tmp_path, 30.0, lambda: None)
    assert (patient.state, later.state) == ("passed", "passed")


@pytest.mark.parametrize(("cores", "gpus"), [(1, 1), (2, 1), (4, 2), (8, 1), (16, 1), (64, 2)])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(("plan", "most"), [("check", 270), ("speed", 270), ("defaults", 270), ("all", 1200)])
def test_all_deadlines_together_are_below_the_plans_limit(plan, most, device, cores, gpus, monkeypatch):
    monkeypatch.setattr(here, "cores", lambda: cores)
    monkeypatch.setattr(here, "gpus", lambda: gpus)
    stages = plans.PLANS[plan].chosen(device)
    by_plan = sum(stage.deadline for stage in stages)
    print(f"{plan} on {device}: {by_plan:g} s by plan, {plans.PLANS[plan].total:g} s at most, limit {most}")
    assert by_plan <= plans.PLANS[plan].total < most
    names = [job.name for stage in stages for job in stage.jobs]
    assert len(set(names)) == len(names)
    assert names[0] == "machine"


def test_chosen_jobs_run_with_what_all_need_unknown_are_refused(tmp_path, capsys):
    chosen = plans.PLANS["speed"].chosen("cuda", ["steps-10M", "warm"])
    names = [job.name for stage in chosen for job in stage.jobs]
    assert names == ["machine", *(f"warm-{i}" for i in range(len(steps.PEERS))), "steps-10M"]
    with pytest.raises(SystemExit):
        gpu.main(["speed", "--out", str(tmp_path), "--only", "stepss"])
    assert "there is no job 'stepss': there are machine, warm-0," in capsys.readouterr().err


def test_plans_name_every_optimizer_and_sizes_are_as_named():
    assert set(plans.SMOKE + plans.ALIKE) == set(smoke.OPTIMIZERS)
    assert {"warm": len(steps.PEERS), "warm-defaults": len(defaults.USUAL)} == plans.WARM
    assert {**plans.SPEED, **plans.REST}.keys() == {f"steps-{name}" for name in steps.MODELS}
    assert plans.DEFAULTS.keys() == {"defaults-10M", "defaults-340M"}
    for name, shapes in steps.MODELS.items():
        wanted = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
        assert steps.numel_of(shapes) == pytest.approx(wanted, rel=0.05)
    for size, peer, way in steps.GOALS:
        assert size in steps.MODELS
        assert peer in [each.name for each in steps.PEERS]
        assert way in steps.WAYS
    assert max(steps.numel_of(shapes) for shapes in steps.MODELS.values()) * steps.NEEDED < 78 << 30


def test_nobody_looks_for_a_c_compiler_for_tensors_on_a_gpu(monkeypatch):
    def refuse() -> None:
        raise AssertionError("C kernels are for CPU tensors")

    monkeypatch.setattr(native, "library", refuse)
    monkeypatch.setattr(compare, "library", refuse)
    device = torch.device("cuda", 0)
    assert backends.chosen(device.type) == "triton"
    assert backends.backend(device).startswith("Triton")
    assert optimizers.backends(device) == ["triton"]
    assert compare.compared([SimpleNamespace(device=device)]) == ["triton"]


TESTS = """
import os, pytest
from collections import Counter

ran = Counter()

@pytest.mark.parametrize("n", [1, 2_000_000, 2])
def test_a(n):
    ran["a"] += 1
    assert ran["a"] < 2, "two"

def test_b():
    pytest.skip("why not")

@pytest.mark.parametrize("n", [1, 2])
def test_c(n):
    ran["c"] += 1
    if ran["c"] == 2:
        os._exit(7)
"""


def test_a_test_that_ends_its_process_spares_the_others_results(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tmp_path), "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.shares", *options]
    command += ["--record", "{folder}/tests.json", str(tmp_path / "test_it.py")]
    tests = Job("tests", command, 60.0)
    assert gpu.main(["check", "--out", str(tmp_path)], [Stage([tests])]) == 1
    record, page, junit = told(tmp_path)
    found = {name.partition("::")[2]: test for name, test in record["jobs"]["tests"]["record"]["tests"].items()}
    # One case of each function first, in an order that chance made once; the largest last.
    assert list(found) == ["test_b", "test_c[2]", "test_a[1]", "test_a[2]", "test_c[1]", "test_a[2000000]"]
    assert [test["outcome"] for test in found.values()] == ["skipped", "passed", "passed", "failed", None, None]
    assert (found["test_b"]["message"], found["test_c[1]"]["running"]) == ("why not", True)
    assert record["jobs"]["tests"]["why"] == "exit status 7"
    cases = {case.get("name"): [e.tag for e in case] for case in junit.findall("testsuite[@name='tests']/testcase")}
    assert cases == {
        "test_a[1]": [], "test_b": ["skipped"], "test_c[2]": [], "test_a[2]": ["failure"],
        "test_c[1]": ["error"], "test_a[2000000]": ["skipped"],
    }  # fmt: skip
    assert "was running when tests ended: failed" in page
    assert "two" in page


@pytest.mark.parametrize("most", [20, 7])
def test_shares_have_each_test_once_or_as_many_as_asked(most):
    items = [SimpleNamespace(nodeid=f"f.py::t[{i}]", path=Path("f.py"), callspec=SimpleNamespace(params={"n": i}))
             for i in range(20)]  # fmt: skip
    found = []
    for share in range(3):
        options = {"--share": f"{share}/3", "--most": most}
        hook = SimpleNamespace(pytest_deselected=lambda items: None)
        config = SimpleNamespace(getoption=options.__getitem__, hook=hook)
        some = list(items)
        shares.pytest_collection_modifyitems(config, some)
        found += some
    assert len(found) == len({item.nodeid for item in found}) == most
    assert most < len(items) or sorted(found, key=items.index) == items


def event(name: str, us: float, device: str = "CUDA", **more: object) -> SimpleNamespace:
    """One of a profiler's."""
    kind, time_range = getattr(torch.autograd.DeviceType, device), SimpleNamespace(elapsed_us=lambda: us)
    return SimpleNamespace(name=name, device_type=kind, time_range=time_range, **more)


def test_a_profile_counts_kernels_copies_and_fills_alone():
    adam = (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<Meta<4>, FusedAdamMathFunctor<float, 4>>(x)"
    )
    events = [
        event("momentum_compress_kernel", 30.0), event("momentum_compress_kernel", 10.0), event(adam, 4.0),
        event("Memcpy DtoD (Device -> Device)", 2.0), event("Optimizer.step#AdamW.step", 99.0),
        event("a range", 99.0, is_user_annotation=True), event("aten::copy_", 99.0, "CPU"),
    ]  # fmt: skip
    found = profiled.summed(events, 2, cuda=True)
    assert [(each.count, each.us) for each in found] == [(1.0, 20.0), (0.5, 2.0), (0.5, 1.0)]
    assert found[0].bytes_of({"compress": 1.0, "momentum_compress": 16.0}) == 16.0
    assert found[1].name == "multi_tensor_apply_kernel FusedAdamMathFunctor"
    assert found[2].name == "Memcpy DtoD"
    assert profiled.shortened(found, 3) == found
    assert profiled.shortened(found, 1) == [found[0], ("2 others", 1.0, 3.0)]


@pytest.mark.parametrize("peer", steps.PEERS, ids=lambda peer: peer.name)
def test_bytes_of_kernels_are_those_of_the_whole_step(peer):
    step = steps.STEPS[peer.audited]
    moved = profiled.kernel_bytes(steps.audited(), step, 8)
    assert sum(moved.values()) == pytest.approx(audit_steps.step_bytes(steps.audited(), step, 8))


def test_a_check_that_fails_is_a_row_and_ends_no_other(monkeypatch):
    def breaks(name: str, device: torch.device) -> str:
        raise ValueError("on purpose")

    monkeypatch.setattr(smoke, "equals_eager", breaks)
    found = registry.Report(torch.device("cpu"))
    with pytest.raises(AssertionError, match="1 of 2 checks failed"):
        smoke.smoke("Lamb", found)
    assert [row["result"] for row in found.tables[0].rows] == ["FAILED: ValueError", "passed"]


@pytest.mark.needs_compiler
def test_a_kernel_that_computes_something_else_is_seen(monkeypatch):
    monkeypatch.setitem(smoke.OPTIMIZERS, "Lamb", Drifting)
    with pytest.raises(AssertionError, match="elements differ"):
        smoke.equals_eager("Lamb", torch.device("cpu"))


class Drifting(Lamb):
    """Moves a little further on every backend but eager torch."""

    def step(self, closure: None = None) -> None:
        super().step()
        if backends.chosen("cpu") != "plain":
            with torch.no_grad():
                self.param_groups[0]["params"][-1].add_(1e-5)
