"""The convergence lab: every task and every optimizer runs; what is known to diverge does."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import torch
from launched import Ended, fusedonebit
from ranks import run_ranks

from fusedonebit import FusedOneBitWarning
from fusedonebit.apps.lab import run as lab
from fusedonebit.apps.lab import toys
from fusedonebit.apps.lab.baselines import AGGREGATIONS
from fusedonebit.apps.lab.contenders import CONTENDERS
from fusedonebit.apps.lab.report import comparison, table
from fusedonebit.apps.lab.tasks import TASKS
from fusedonebit.comm import make_transport


@pytest.fixture(autouse=True)
def _short_warmups():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        yield


def short(monkeypatch: pytest.MonkeyPatch, task: str, steps: int) -> None:
    monkeypatch.setitem(TASKS, task, dataclasses.replace(TASKS[task], steps=steps))


@pytest.mark.long(but=1)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_and_its_runs_are_reproducible(monkeypatch, task):
    short(monkeypatch, task, 10)
    first, again = (lab.run(lab.Key(task, "onebit-adam", 0, workers=2)) for _ in range(2))
    other = lab.run(lab.Key(task, "onebit-adam", 1, workers=2))
    assert len(first["losses"]) == 10
    assert None not in first["losses"]
    assert (first["losses"], first["metric"]) == (again["losses"], again["metric"])
    assert first["losses"][0] != other["losses"][0]


IN_ROUNDS = [name for name in CONTENDERS if name.split("-lr")[0].removesuffix("-elias") in AGGREGATIONS]
IN_ROUNDS += [name for name in CONTENDERS if name.startswith("marsit")]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", [name for name in IN_ROUNDS if "-lr" not in name])
def test_every_optimizer_that_works_in_rounds_starts_alike_and_ends(monkeypatch, name):
    short(monkeypatch, "mlp", 25)
    record = lab.run(lab.Key("mlp", name, 0, workers=4 if name == "marsit-torus" else 2))
    assert record["losses"][0] == pytest.approx(2.3, abs=0.03)
    assert record["bytes"] > 0
    if name == "cascading":
        assert record["metric"] is None
    elif not name.startswith("ssdm") and "unlimited" not in name:  # those take longer, or need not learn
        assert record["losses"][-1] < 2.2


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", [name for name in CONTENDERS if name not in IN_ROUNDS])
def test_every_optimizer_learns_and_all_start_alike(monkeypatch, name):
    short(monkeypatch, "mlp", 100)
    monkeypatch.setattr(lab, "WARM_UP", 0.9)
    record = lab.run(lab.Key("mlp", name, 0, workers=2))
    assert record["losses"][0] == pytest.approx(2.295, abs=1e-3)
    assert record["freeze_step"] == 90
    assert sum(record["losses"][80:90]) / 10 < (2.2 if name.startswith("naive") else 1.9)


@pytest.mark.full
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


def command(*arguments: str) -> Ended:
    return fusedonebit("lab", *arguments)


@pytest.mark.full
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
        (("--optimizers", "adagrad"), "--optimizers must be of adam, adam-frozen"),
    ):
        result = command(*arguments)
        assert result.returncode == 2
        assert text in result.stderr


def losses_on_a_real_rank(rank: int, world_size: int) -> list[float]:
    torch.set_num_threads(1)
    key = lab.Key("mlp", "onebit-adam", 0, workers=world_size)
    TASKS["mlp"] = dataclasses.replace(TASKS["mlp"], steps=60)
    return lab.Worker(key, lab.begin(key), rank, make_transport(None, torch.device("cpu"))).train()["losses"]


@pytest.mark.long
def test_real_gloo_ranks_give_what_simulated_ones_do(monkeypatch):
    short(monkeypatch, "mlp", 60)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        simulated = lab.run(lab.Key("mlp", "onebit-adam", 0, workers=2))["losses"]
    finally:
        torch.set_num_threads(threads)
    for real in run_ranks(losses_on_a_real_rank, 2):
        assert real == simulated


def test_diverged_is_ten_times_the_loss_at_the_freeze_over_ten_steps_or_not_finite():
    steady = [1.0] * 40
    assert lab.diverged_at(steady, 20) is None
    assert lab.diverged_at([*steady, 80.0, *steady], 20) is None, "one bad batch is not divergence"
    assert lab.diverged_at([*steady, *[20.0] * 10], 20) == 40 + 4
    assert lab.diverged_at([*steady, float("nan")], 20) == 40
    assert lab.diverged_at([1.0] * 10 + [50.0] * 5 + steady, 20) is None, "before the freeze"


def recorded(optimizer: str, metrics: list[float | None], task: str = "mlp") -> list[dict[str, object]]:
    base = {"task": task, "optimizer": optimizer, "freeze_step": 1, "losses": []}
    return [base | {"seed": i, "metric": m, "diverged_at": None if m else 3} for i, m in enumerate(metrics)]


def test_a_comparison_is_paired_and_one_sided():
    runs = recorded("a", [90.0, 80.0, 70.0]) + recorded("b", [91.0, 81.5, 70.5, 99.0])
    found = comparison(runs, "a", "b", "mlp")
    assert found["seeds"] == 3
    assert found["percent"] == pytest.approx(100 * 1.0 / 81)
    assert found["error"] == pytest.approx(100 * (0.5 / 3**0.5) / 81)
    assert not found["holds"], "1.0 is 3.5 standard errors of 0.29"
    assert comparison(runs, "b", "a", "mlp")["holds"], "better is no difference to hold against"
    lower = recorded("a", [2.0, 2.2], "causal") + recorded("b", [1.0, 1.1], "causal")
    assert comparison(lower, "a", "b", "causal")["percent"] == pytest.approx(100)
    lost = comparison(recorded("a", [90.0, None]) + recorded("b", [90.0, 90.0]), "a", "b", "mlp")
    assert (lost["diverged"], lost["holds"]) == (1, False)
    assert comparison(runs, "a", "c", "mlp") is None


@pytest.mark.long
def test_one_scale_throws_the_small_coordinate_of_a_bowl_out_and_ours_does_not():
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
def test_signs_alone_never_leave_where_they_started_and_error_feedback_converges():
    signs, feedback = (toys.narrow(error_feedback) for error_feedback in (False, True))
    print(f"from {signs[0]:.3f}: signs alone {min(signs):.3f}, with error feedback {min(feedback):.3f}")
    assert min(signs) > 0.9 * signs[0]
    assert min(feedback[900:]) < 0.1 * feedback[0]


@pytest.mark.full
def test_l2_diverges_on_vgg_within_20_compressed_steps_on_every_seed():
    for seed in range(5):
        record = lab.run(lab.Key("vgg", "onebit-adam-l2", seed))
        print(f"seed {seed}: diverged {record['diverged_at'] - record['freeze_step']} steps after the freeze")
        assert record["diverged_at"] < record["freeze_step"] + 20


@pytest.mark.full
@pytest.mark.parametrize("name", ["onebit-adam", "onebit-adam-eps-inside", "onebit-adam-deepspeed-guarded"])
def test_ours_the_fixing_papers_and_the_guard_do_not_diverge_on_vgg(name):
    record = lab.run(lab.Key("vgg", name, 0))
    print(f"{name}: accuracy {record['metric']:.1f} %, {record['vetoed']} updates refused")
    assert record["diverged_at"] is None
    assert record["metric"] > 95
    assert (record["vetoed"] > 0) == (name == "onebit-adam-deepspeed-guarded")
