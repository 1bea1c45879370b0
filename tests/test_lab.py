"""The convergence lab: every task and every optimizer runs; what is known to diverge does."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings

import pytest
import torch

from fusedonebit import FusedOneBitWarning
from fusedonebit.lab import run as lab
from fusedonebit.lab.contenders import CONTENDERS
from fusedonebit.lab.report import table
from fusedonebit.lab.tasks import TASKS


@pytest.fixture(autouse=True)
def _short_warmups():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        yield


def short(monkeypatch: pytest.MonkeyPatch, task: str, steps: int) -> None:
    monkeypatch.setitem(TASKS, task, dataclasses.replace(TASKS[task], steps=steps))


@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_and_its_runs_are_reproducible(monkeypatch, task):
    short(monkeypatch, task, 10)
    first, again = (lab.run(lab.Key(task, "onebit-adam-preconditioned", 0, workers=2)) for _ in range(2))
    other = lab.run(lab.Key(task, "onebit-adam-preconditioned", 1, workers=2))
    assert len(first["losses"]) == 10
    assert None not in first["losses"]
    assert (first["losses"], first["metric"]) == (again["losses"], again["metric"])
    assert first["losses"][0] != other["losses"][0]


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_optimizer_learns_before_the_freeze_and_all_start_alike(monkeypatch, name):
    short(monkeypatch, "mlp", 100)
    monkeypatch.setattr(lab, "WARM_UP", 0.9)
    record = lab.run(lab.Key("mlp", name, 0, workers=2))
    assert record["losses"][0] == pytest.approx(2.324, abs=1e-3)
    assert record["freeze_step"] == 90
    if name != "naive-onebit-adam":
        assert sum(record["losses"][80:90]) / 10 < 1.9


def test_frozen_adam_is_adam_until_then_and_64_workers_fit(monkeypatch):
    short(monkeypatch, "mlp", 20)
    adam, frozen = (lab.run(lab.Key("mlp", name, 0, workers=64))["losses"] for name in ("adam", "adam-frozen"))
    assert adam[:5] == frozen[:5]
    assert adam[10:] != frozen[10:]


def test_a_metric_is_that_of_the_model_on_held_out_data():
    torch.manual_seed(0)
    trial = TASKS["mlp"].make()
    hits = (trial.models[0](trial.held_x).argmax(1) == trial.held_y).sum()
    assert trial.metric() == pytest.approx(100 * int(hits) / len(trial.held_y))
    assert len(trial.held_y) == 360


def test_the_table_has_means_and_what_diverged():
    runs = [
        {"task": "mlp", "optimizer": "adam", "metric": metric, "diverged_at": at}
        for metric, at in ((90.0, None), (94.0, None), (10.0, 101))
    ]
    assert "| adam | 92 ± 2.8, **diverged 1/3** |" in table(runs)
    assert "| adam | **diverged 1/1** |" in table(runs[2:])


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "fusedonebit.cli", "lab", *arguments]
    return subprocess.run(run, capture_output=True, text=True, timeout=120)


def test_the_command_runs_reports_and_goes_on(tmp_path):
    choice = ("--tasks", "regression", "--optimizers", "sgd,onebit-lamb", "--workers", "2", "--out", str(tmp_path))
    first = command(*choice, "--seeds", "1")
    assert first.returncode == 0, first.stderr
    before = (tmp_path / "runs.jsonl").read_text()
    assert command(*choice, "--seeds", "2").returncode == 0
    after = (tmp_path / "runs.jsonl").read_text()
    assert after.startswith(before)
    seen = [(r["optimizer"], r["seed"]) for r in map(json.loads, after.splitlines())]
    assert sorted(seen) == [("onebit-lamb", 0), ("onebit-lamb", 1), ("sgd", 0), ("sgd", 1)]
    assert "| onebit-lamb |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_names_what_it_does_not_know():
    for arguments, text in (
        (("--tasks", "imagenet"), "--tasks must be of vgg, resnet"),
        (("--optimizers", "adagrad"), "--optimizers must be of sgd, adam"),
    ):
        result = command(*arguments)
        assert result.returncode == 2
        assert text in result.stderr


@pytest.mark.full
def test_l2_without_eps_inside_diverges_on_vgg_within_20_compressed_steps_and_preconditioned_does_not():
    diverged = lab.run(lab.Key("vgg", "onebit-adam-l2", 0))
    held = lab.run(lab.Key("vgg", "onebit-adam-preconditioned", 0))
    print(f"l2: diverged at {diverged['diverged_at']}; preconditioned: accuracy {held['metric']:.1f} %")
    assert diverged["diverged_at"] is not None
    assert diverged["diverged_at"] < diverged["freeze_step"] + 20
    assert held["diverged_at"] is None
    assert held["metric"] > 95
