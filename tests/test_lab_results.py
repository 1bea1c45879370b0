"""The lab's recorded runs: their cost, their bytes, and that they can be made again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fusedonebit.apps.lab import launch, tuning
from fusedonebit.apps.lab.records import TUNED_AT, Records
from fusedonebit.apps.lab.run import Key, run

RECORDS = Records(Path(__file__).parents[1] / "benchmarks" / "results" / "lab" / "runs.jsonl")
SECONDS = 30.0


def test_no_run_takes_half_a_minute():
    longest, key = max((record["seconds"], str(key)) for key, record in RECORDS.found.items())
    print(f"longest of {len(RECORDS.found)} runs: {longest:.1f} s of processor time (at most {SECONDS:g}), {key}")
    assert longest <= SECONDS


def test_an_uncompressed_run_sends_eight_bytes_and_ours_what_the_warm_up_and_the_messages_take():
    for key, record in RECORDS.found.items():
        if key.optimizer == "adamw":
            assert record["sent"] == pytest.approx(8.0, rel=2e-3)
        if key.optimizer == "onebit-adam" and not record["rewarms"] and not record["diverged"]:
            assert 0.15 * 8 < record["sent"] < 0.15 * 8 + 1.5


@pytest.mark.parametrize(("optimizer", "parent"), [("zero-one-adam", "adamw"), ("onebit-lamb", "lamb")])
def test_on_rows_that_are_seen_late_it_diverges_at_its_parents_best_rate_and_at_half_of_it(optimizer, parent):
    best = RECORDS.tuned("recsys", parent)
    assert best is not None
    runs = {
        key.lr: r["diverged"] for key, r in RECORDS.found.items() if (key.task, key.optimizer) == ("recsys", optimizer)
    }
    print(f"recsys: {parent}'s best rate is {best:g}; {optimizer} diverged at {sorted(lr for lr in runs if runs[lr])}")
    large = [diverged for lr, diverged in runs.items() if lr >= best / 2]
    assert len(large) >= 2
    assert all(large)


AGAIN = [("mlp", "adamw"), ("mlp", "onebit-adam"), ("resnet", "onebit-lamb")]


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("task", "optimizer"), AGAIN)
def test_a_run_made_again_has_the_recorded_bits(task, optimizer):
    """On another kind of processor, or with another torch, sums round otherwise: there the run must end near."""
    key = next(k for k in RECORDS.found if is_of(k, task, optimizer))
    record, again = RECORDS.found[key], run(key)
    same = {name: record[name] for name in launch.machine()} == launch.machine()
    print(f"{key}: {again['metric']!r}, recorded {record['metric']!r} on {'the same' if same else 'another'} machine")
    if same:
        assert (again["metric"], again["curve"]) == (record["metric"], record["curve"])
    assert again["sent"] == record["sent"]
    assert math.isclose(again["metric"], record["metric"], rel_tol=0.1)


def is_of(key: Key, task: str, optimizer: str) -> bool:
    return (key.task, key.optimizer, key.workers, key.seed) == (task, optimizer, TUNED_AT, tuning.SEEDS[0])
