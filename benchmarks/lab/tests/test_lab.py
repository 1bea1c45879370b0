"""The convergence lab: every task and every optimizer runs, batched workers are ranks bit for bit, toys show faults."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks

from benchmarks.lab import launch, publish, toys
from benchmarks.lab import run as lab
from benchmarks.lab.command import main
from benchmarks.lab.contenders import CONTENDERS, HEADLINE, MUONS
from benchmarks.lab.rivals import RIVALS
from benchmarks.lab.tasks import TASKS
from fusedonebit import FusedOneBitWarning
from fusedonebit.comm import SimulatedGroup, make_transport


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        yield


def short(monkeypatch: pytest.MonkeyPatch, task: str, steps: int) -> None:
    monkeypatch.setitem(TASKS, task, dataclasses.replace(TASKS[task], steps=steps))


def key(task: str, optimizer: str, seed: int = 0, workers: int = 4, by: float = 1.0) -> lab.Key:
    return lab.Key(task, optimizer, seed, workers, TASKS[task].lr * by)


SAID = ("metric", "initial", "steps", "curve", "sent", "received", "vetoed_steps", "rewarms")


@pytest.mark.long(but=["modadd"], full=True)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_and_its_runs_are_reproducible(monkeypatch, task):
    short(monkeypatch, task, 25)
    first, again = (lab.run(key(task, "onebit-adam")) for _ in range(2))
    other = lab.run(key(task, "onebit-adam", seed=1))
    assert len(first["curve"]) == 25
    assert None not in first["curve"]
    assert [first[name] for name in SAID] == [again[name] for name in SAID]
    assert first["curve"][0] != other["curve"][0]


BATCHED = ("adam-living", *(f"onebit-muon-{name}" for name in MUONS))
"""Made for one optimizer that stands for all: its momentum is made of all workers' gradients."""
ALIKE = [name for name, contender in CONTENDERS.items() if contender.batched and name not in (*RIVALS, *BATCHED)]


@pytest.mark.long(but=["mlp-onebit-adam-4", "recsys-onebit-lamb-living-4", "late-adamw-4"], full=True)
@pytest.mark.parametrize("workers", [4, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("optimizer", HEADLINE)
@pytest.mark.parametrize("task", ["mlp", "vgg", "gan", "recsys", "late"])
def test_one_optimizer_for_all_workers_has_ranks_bits_and_bytes(monkeypatch, task, optimizer, workers):
    """On vgg the guard refuses a step: the residuals of all ranks go back into the momentum, too."""
    short(monkeypatch, task, 40)
    batched, ranks = (lab.run(key(task, optimizer, workers=workers), ranks=r) for r in (False, True))
    print(f"{task}, {optimizer}, {workers} workers: {batched['seconds']} s, {ranks['seconds']} s with ranks")
    assert [batched[name] for name in SAID] == [ranks[name] for name in SAID]


@pytest.mark.long
def test_so_it_does_where_the_rate_is_0_for_some_steps(monkeypatch):
    short(monkeypatch, "mlp", 20)
    pauses = SimpleNamespace(**vars(math) | {"cos": lambda x: -1.0 if 1.0 < x < 2.0 else math.cos(x)})
    monkeypatch.setattr(lab, "math", pauses)
    monkeypatch.setattr(lab, "FINAL_LR", 0.0)
    batched, ranks = (lab.run(key("mlp", "zero-one-adam-own"), ranks=r) for r in (False, True))
    assert [batched[name] for name in SAID] == [ranks[name] for name in SAID]


@pytest.mark.long(but=["onebit-adam", "adam-frozen", "muon-compress-4", "onebit-muon"], full=True)
@pytest.mark.parametrize("optimizer", ALIKE)
def test_every_optimizer_for_all_workers_has_the_bits_of_ranks(monkeypatch, optimizer):
    short(monkeypatch, "mlp", 25)
    batched, ranks = (lab.run(key("mlp", optimizer, workers=2, by=0.3), ranks=r) for r in (False, True))
    assert [batched[name] for name in SAID] == [ranks[name] for name in SAID]


@pytest.mark.long(but=3, full=True)
@pytest.mark.parametrize("name", [name for name in CONTENDERS if name not in RIVALS])
def test_every_optimizer_runs_and_all_start_alike(monkeypatch, name):
    short(monkeypatch, "mlp", 60)
    record = lab.run(key("mlp", name, by=0.1))
    assert record["initial"] == pytest.approx(2.3131, abs=1e-4)
    assert record["defaults"] == lab.fingerprint("mlp", name, 1.0)
    assert record["sent"] > 0
    if CONTENDERS[name].parent == "adamw" and name not in ("onebit-adam-l2", "onebit-adam-contractive"):
        assert record["curve"][-1] < 2.25


def test_muon_is_torchs_where_nothing_is_compressed(monkeypatch):
    short(monkeypatch, "mlp", 10)
    muon, *others = (lab.run(key("mlp", name)) for name in ("muon", "onebit-muon-exact", "onebit-muon-feedback"))
    exact, feedback = (abs(other["metric"] / muon["metric"] - 1) for other in others)
    print(f"beside torch's Muon, {exact:.2%} apart; with a bit each way {feedback:.2%}")
    assert exact < 0.001 < feedback
    assert others[0]["sent"] == pytest.approx(muon["sent"], rel=1e-4)
    assert others[1]["sent"] < 0.6 * muon["sent"]


def test_a_float_all_reduce_is_eight_bytes_at_any_worker_count(monkeypatch):
    short(monkeypatch, "mlp", 2)
    sent = {w: lab.run(key("mlp", "adamw", workers=w))["sent"] for w in (2, 4, 16)}
    print(f"bytes per parameter and step of float32: {sent}")
    assert all(nbytes == pytest.approx(8, rel=1e-4) for nbytes in sent.values())


def test_bytes_are_those_the_transport_counts_warmup_included(monkeypatch):
    short(monkeypatch, "mlp", 40)
    transports = []
    real = SimulatedGroup.transport
    monkeypatch.setattr(SimulatedGroup, "transport", lambda *a: transports.append(real(*a)) or transports[-1])
    record = lab.run(key("mlp", "onebit-adam", by=0.1), ranks=True)
    (rank0,) = (t for t in transports if t.rank == 0)
    numel = sum(p.numel() for p in TASKS["mlp"].make(0).models[0].parameters())
    assert record["sent"] == pytest.approx(rank0.traffic.bytes_total * 4 / 3 / numel / 40)
    warm_up = 6 / 40 * 8
    assert warm_up + 0.25 * 34 / 40 < record["sent"] < warm_up + 0.5


@pytest.mark.full
def test_frozen_adam_is_adam_until_then_and_64_workers_fit(monkeypatch):
    short(monkeypatch, "mlp", 20)
    adam, frozen = (lab.run(key("mlp", name, workers=64))["curve"] for name in ("adamw", "adam-frozen"))
    assert adam[:3] == pytest.approx(frozen[:3], rel=1e-4)
    assert adam[10:] != frozen[10:]


def command(*arguments: str) -> subprocess.CompletedProcess:
    program = [sys.executable, "-m", "benchmarks.lab", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=600)


@pytest.mark.full
def test_the_command_runs_reports_and_goes_on(tmp_path):
    choice = ("--tasks", "regression", "--optimizers", "onebit-adam", "--workers", "2", "--out", str(tmp_path))
    first = command(*choice, "--seeds", "1")
    assert first.returncode == 0, first.stderr
    before = (tmp_path / "runs.jsonl").read_text()
    assert command(*choice, "--seeds", "2").returncode == 0
    after = (tmp_path / "runs.jsonl").read_text()
    assert after.startswith(before)
    told = [(r["optimizer"], r["seed"]) for r in map(json.loads, after.splitlines()) if r["seed"] < 1000]
    assert sorted(told) == [("adamw", 0), ("adamw", 1), ("onebit-adam", 0), ("onebit-adam", 1)]
    assert "| task | adamw | onebit-adam |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "worse.png").read_bytes().startswith(b"\x89PNG")
    assert command("--report", "--out", str(tmp_path)).returncode == 0
    assert (tmp_path / "runs.jsonl").read_text() == after


def test_at_its_parents_rate_no_other_rate_is_searched(monkeypatch, tmp_path):
    planned: list[list[str]] = []
    monkeypatch.setattr(launch, "make", lambda _, plan, __: planned.append([run.optimizer for run in plan()]) or 0)
    monkeypatch.setattr(publish, "publish", lambda *_: None)
    for chosen in ([], ["--parents"]):
        arguments = ["--tasks", "mlp", "--optimizers", "adam-frozen", "--out", str(tmp_path), *chosen]
        assert main(arguments) == 0
    of_both, of_parent = planned[::2]
    assert set(of_both) == {"adamw", "adam-frozen"}
    assert of_parent == ["adamw"] * (len(of_both) // 2), "each once, though the parent is asked for, too"


@pytest.mark.full
def test_a_lab_that_is_killed_leaves_no_process_behind(tmp_path):
    program = [sys.executable, "-m", "benchmarks.lab", "--tasks", "vgg", "--out", str(tmp_path)]
    lab_process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{lab_process.pid}/task/{lab_process.pid}/children")
    wait_for(lambda: len(children.read_text().split()) > 1)
    pids = children.read_text().split()
    lab_process.kill()
    lab_process.wait()
    wait_for(lambda: not any(running(pid) for pid in pids))


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_command_names_what_it_does_not_know(capsys):
    for arguments, text in (
        (("--tasks", "imagenet"), "--tasks must be of vgg, resnet"),
        (("--optimizers", "adagrad"), "--optimizers must be of adamw, onebit-adam"),
        (("--workers", "3"), "--workers must be of 2, 4, 8, 16, 32, 64, got 3"),
        (("--workers", "4.7"), "--workers must be of 2, 4, 8, 16, 32, 64, got 4.7"),
        (("--workers", "many"), "--workers must be numbers > 0, such as 1,2; got 'many'"),
        (("--workers", "inf"), "--workers must be numbers > 0"),
        (("--rates", "-1"), "--rates must be numbers > 0"),
        (("--rates", "3"), "--rates must be of 1, 0.5, 2, got 3"),
        (("--tasks", ""), "--tasks must not be empty, got ''; or leave it out"),
        (("--out", ""), "--out must not be empty"),
        (("--rates", "nan"), "--rates must be numbers > 0"),
        (("--out", "/dev/null"), "--out must be a folder that can be written, got '/dev/null'"),
        (("--report", "--out", "/nowhere"), "--report needs runs, and /nowhere/runs.jsonl has none"),
        (("--report", "--tasks", "mlp"), "--report prints all that is there: leave --tasks out"),
    ):
        assert main(arguments) == 2
        assert text in capsys.readouterr().err


class OnThisRank(lab.Training):
    """A run's gradients as one process of several computes them: all, of which it takes its own."""

    rank = 0

    def compute(self, step: int, player: int) -> None:
        super().compute(step, player)
        self.rows[0] = self.rows[self.rank]


def told_on_a_real_rank(rank: int, world_size: int) -> list[object]:
    torch.set_num_threads(1)
    TASKS["mlp"] = dataclasses.replace(TASKS["mlp"], steps=40)
    training = OnThisRank(key("mlp", "onebit-adam", workers=world_size), SimpleNamespace(meet=lambda what: None))
    training.rank = rank
    record = lab.Worker(training, 0, make_transport(None, torch.device("cpu"))).train()
    return [record[name] for name in ("metric", "curve", "sent")]


@pytest.mark.long
def test_real_gloo_ranks_give_what_simulated_ones_do(monkeypatch):
    short(monkeypatch, "mlp", 40)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        simulated = lab.run(key("mlp", "onebit-adam", workers=2))
    finally:
        torch.set_num_threads(threads)
    for real in run_ranks(told_on_a_real_rank, 2):
        assert real == [simulated[name] for name in ("metric", "curve", "sent")]


@pytest.mark.long
def test_one_scale_throws_out_a_bowls_small_coordinate_not_ours():
    adam, l2, _, ours = (toys.bowl(numerics) for numerics in toys.BOWL.values())
    at = toys.BOWL_WARM_UP
    assert adam[:at] == l2[:at] == ours[:at]
    print(
        f"largest value after the freeze: Adam {max(adam[at:]):.2f}, l2 {max(l2[at:]):.2f}, ours {max(ours[at:]):.2f}"
    )
    assert max(l2[at:]) > 10 * l2[at - 1]
    assert max(ours[at:]) < ours[at - 1]
    assert ours[-1] < 1.5 * adam[-1]


@pytest.mark.long
def test_signs_alone_stay_at_the_start_error_feedback_converges():
    signs, feedback = (toys.narrow(error_feedback) for error_feedback in (False, True))
    print(f"from {signs[0]:.3f}: signs alone {min(signs):.3f}, with error feedback {min(feedback):.3f}")
    assert min(signs) > 0.9 * signs[0]
    assert min(feedback[900:]) < 0.1 * feedback[0]


@pytest.mark.full
def test_l2_diverges_on_vgg_but_not_with_eps_inside_or_the_guard():
    for name in ("onebit-adam-l2", "onebit-adam-eps-inside", "onebit-adam-deepspeed-guarded"):
        for seed in range(3 if name == "onebit-adam-l2" else 1):
            record = lab.run(key("vgg", name, seed=seed, by=0.1))
            print(f"{name}, seed {seed}: {record['metric']} nats, {record['vetoed_steps']} updates refused")
            assert lab.diverged(record) == (name == "onebit-adam-l2")
            assert (record["vetoed_steps"] > 0) == (name == "onebit-adam-deepspeed-guarded")
