"""Workers whose data differ: each one's batch has its share of its own classes, parts of a text, or users."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.lab import launch, publish
from benchmarks.lab import run as lab
from benchmarks.lab.command import main
from benchmarks.lab.records import Records, reported, search
from benchmarks.lab.report import View, difference, views
from benchmarks.lab.tasks import TASKS
from fusedonebit.apps.parsing import InputError

WITH = [name for name, task in TASKS.items() if task.sources]


def picks(monkeypatch: pytest.MonkeyPatch, task: str, workers: int, alike: float, steps: int) -> list[list[Tensor]]:
    """Of each step and worker, the sources of the examples that the harness picks."""
    training = lab.Training(lab.Key(task, "adamw", 3, workers, 1e-3, alike))
    trial, seen, complete = training.trial, list[Tensor](), training.trial.complete
    monkeypatch.setattr(
        trial, "complete", lambda picked, *how: seen.append(trial.source(picked)) or complete(picked, *how)
    )
    for step in range(steps):
        training._draw(step)
    return [seen[workers * step : workers * (step + 1)] for step in range(steps)]


def of_own(sources: Tensor, task: str, worker: int, workers: int) -> int:
    groups = min(workers, TASKS[task].sources)
    return int((sources * groups // TASKS[task].sources == worker % groups).sum())


@pytest.mark.parametrize("task", WITH)
def test_each_source_is_drawn_and_no_other(task):
    trial = TASKS[task].make(0)
    picked = trial.pick(torch.Generator().manual_seed(0), 20_000)
    assert trial.source(picked).unique().tolist() == list(range(TASKS[task].sources))


@pytest.mark.parametrize("task", [name for name in TASKS if name not in (*WITH, "regression")])
def test_a_task_without_sources_says_so(task):
    trial = TASKS[task].make(0)
    with pytest.raises(NotImplementedError, match="has no sources by which workers' data could differ"):
        trial.source(trial.pick(torch.Generator(), 2))


@pytest.mark.parametrize("workers", [4, 16, 64])
@pytest.mark.parametrize("task", ["mlp", "recsys", "modadd"])
def test_all_of_a_batch_is_a_workers_own_half_or_none(monkeypatch, task, workers):
    each = TASKS[task].batch_size // workers
    for alike in (0.0, 0.5):
        by_step = picks(monkeypatch, task, workers, alike, 8)
        own = [[of_own(sources, task, w, workers) for w, sources in enumerate(step)] for step in by_step]
        assert all(len(sources) == each for step in by_step for sources in step)
        least = 8 * each * (1 - alike)
        assert all(least <= sum(of_worker) for of_worker in zip(*own, strict=True))
        if alike == 0:
            assert own == [[each] * workers] * 8
        else:  # the rest is of all sources
            assert sum(map(sum, own)) < 0.9 * 8 * each * workers


def test_workers_alike_draw_what_they_drew_before(monkeypatch):
    training = lab.Training(lab.Key("mlp", "adamw", 3, 4, 1e-3))
    training._draw(5)
    draw = torch.Generator().manual_seed((3 * 1_000_003 + 5) * 4099 + 2)
    images, classes = training.trial.batch(draw, 16, 0.01)
    assert torch.equal(training.batches[0][2], images)
    assert torch.equal(training.batches[1][2], classes)


@pytest.mark.parametrize("optimizer", ["onebit-adam-living", "zero-one-adam-own"])
def test_one_optimizer_stands_for_workers_whose_data_differ(monkeypatch, optimizer):
    monkeypatch.setitem(TASKS, "mlp", replace(TASKS["mlp"], steps=25))
    key = lab.Key("mlp", optimizer, 0, 4, 1e-2, 0.0)
    batched, ranks = (lab.run(key, ranks=each) for each in (False, True))
    assert [batched[name] for name in ("metric", "curve")] == [ranks[name] for name in ("metric", "curve")]
    assert batched["curve"] != lab.run(replace(key, alike=1.0))["curve"]


def record(key: lab.Key, metric: float) -> dict[str, object]:
    of_settings = lab.fingerprint(key.task, key.optimizer, key.alike)
    return vars(key) | {"metric": metric, "initial": 1e9, "sent": 8.0, "defaults": of_settings}


def test_tables_tell_data_apart_rates_are_of_data_alike(tmp_path):
    records = Records(tmp_path / "runs.jsonl")
    cells = [("mlp", "adamw"), ("mlp", "onebit-adam-living")]
    while keys := search(records, cells[:1]):
        assert {key.alike for key in keys} == {1.0}
        for key in keys:
            records.add(record(key, 1 + abs(key.lr - TASKS["mlp"].lr)))
            records.add(record(replace(key, alike=0.0), 1e-3))
    assert records.tuned("mlp", "adamw") == TASKS["mlp"].lr
    for key in reported(records, cells, 3, [4], [1.0], True, [1.0, 0.5, 0.0]):
        worse = 2 - key.alike if key.optimizer == "onebit-adam-living" else 1.0
        records.add(record(key, worse))
    apart = View(parents=True, alike=0.0)
    assert "4 workers, 100 % of each one's data its own, each optimizer at its parent's" in apart.title
    told = [difference(records, replace(apart, alike=a), *cells[1]).mean for a in (1.0, 0.5, 0.0)]
    assert told == pytest.approx([0, 50, 100])
    assert [view.alike for view in views(records)] == [1.0, 0.5, 0.0]


def test_older_runs_are_of_data_alike_others_say_a_share(tmp_path):
    path, key = tmp_path / "runs.jsonl", lab.Key("mlp", "adamw", 0, 4, 0.1)
    older = {name: value for name, value in record(key, 1.0).items() if name != "alike"}
    path.write_text(json.dumps(older) + "\n")
    assert list(Records(path).found) == [key]
    for alike in (-0.1, 1.1, "half", float("nan")):
        path.write_text(json.dumps(record(replace(key, alike=0.5), 1.0) | {"alike": alike}) + "\n")
        with pytest.raises(InputError, match="line 1, is no run of the lab"):
            Records(path)


def test_only_where_data_differ_is_the_number_of_sources_hashed(monkeypatch):
    monkeypatch.setitem(TASKS, "other", replace(TASKS["mlp"], sources=5))
    same = [lab.fingerprint("mlp", "adamw", a) == lab.fingerprint("other", "adamw", a) for a in (1.0, 0.5)]
    assert same == [True, False]


def test_the_command_takes_shares_and_tasks_that_have_sources(capsys, monkeypatch, tmp_path):
    for arguments, text in (
        (("--alike", "2"), "--alike must be numbers from 0 to 1, such as 0,0.5,1; got '2'"),
        (("--alike", "nan"), "--alike must be numbers from 0 to 1"),
        (("--alike", "0", "--tasks", "mlp,fit"), "--alike below 1 needs tasks with classes, texts or users (vgg, "),
        (("--report", "--alike", "0"), "--report prints all that is there: leave --alike out"),
    ):
        assert main(arguments) == 2
        assert text in capsys.readouterr().err
    planned: list[str] = []
    monkeypatch.setattr(launch, "make", lambda _, plan, __: planned.extend(key.task for key in plan()) or 0)
    monkeypatch.setattr(publish, "publish", lambda *_: None)
    assert main(("--alike", "0", "--out", str(tmp_path))) == 0
    assert set(planned) == set(WITH)
