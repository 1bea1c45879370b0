"""What the lab's recorded runs say: the tables of README.md and docs/numerics.md, their cost, and what is claimed."""

from __future__ import annotations

import math
from itertools import product

import pytest

from benchmarks import lab_page
from benchmarks.pages import DOCS
from fusedonebit.apps.lab import launch, publish, tuning
from fusedonebit.apps.lab.contenders import HEADLINE
from fusedonebit.apps.lab.records import TUNED_AT, Records, reported
from fusedonebit.apps.lab.report import View, difference
from fusedonebit.apps.lab.run import diverged, run
from fusedonebit.apps.lab.tasks import TASKS

RECORDS = Records(lab_page.RESULTS / "runs.jsonl")
SEEDS = {4: 5, 16: 5}
"""Paired seeds that are recorded, by the number of workers."""

SECONDS, HOURS = 30.0, 4.0


@pytest.mark.parametrize("workers", SEEDS)
def test_every_task_and_optimizer_of_the_headline_has_its_seeds(workers):
    for task, optimizer in product(TASKS, HEADLINE):
        assert len(View(workers).runs(RECORDS, task, optimizer)) >= SEEDS[workers], (task, optimizer)


@pytest.mark.parametrize("optimizer", lab_page.VOTES)
def test_every_task_has_its_seeds_of_what_votes_with_4_workers(optimizer):
    for task in TASKS:
        assert len(View().runs(RECORDS, task, optimizer)) >= SEEDS[4], (task, optimizer)


def test_every_rate_is_the_best_of_a_search_and_not_at_its_edge():
    for task, optimizer in product(TASKS, (*HEADLINE, *lab_page.VOTES)):
        tried, best = RECORDS.metrics(task, optimizer), RECORDS.tuned(task, optimizer)
        if (task, optimizer) == ("modadd", "onebit-lion"):
            assert set(tried.values()) == {math.inf}, "there it learns at no rate, and runs at the smallest"
            continue
        assert best is not None
        assert min(tried) < best < max(tried), (task, optimizer, tried)


def test_the_headline_takes_at_most_four_core_hours_and_none_of_its_runs_half_a_minute():
    """Of processor time, search included."""
    cells = list(product(TASKS, HEADLINE))
    keys = [k for k in RECORDS.found if k.optimizer in HEADLINE and k.seed in tuning.SEEDS]
    keys += reported(RECORDS, cells, max(SEEDS.values()), list(SEEDS), [1.0], parents=False)
    seconds = {key: RECORDS.found[key]["seconds"] for key in keys}
    hours = sum(seconds.values()) / 3600
    print(f"{len(seconds)} runs, search included: {hours:.2f} core-hours (at most {HOURS:g})")
    for workers in SEEDS:
        longest = max((k for k in keys if k.workers == workers), key=seconds.__getitem__)
        print(f"longest: {seconds[longest]:.1f} s (at most {SECONDS:g}), {longest}")
        assert seconds[longest] <= SECONDS
    assert hours <= HOURS


@pytest.mark.parametrize("workers", SEEDS)
def test_the_lab_tells_what_a_frozen_variance_costs(workers):
    found = {task: difference(RECORDS, View(workers), task, "onebit-adam") for task in TASKS}
    missed = [task for task, d in found.items() if d is not None and d.misses]
    certain = [task for task in missed if found[task].certain]
    print(f"OneBitAdam, {workers} workers: misses {len(missed)} of {len(found)} (at least 6): {missed}")
    print(f"of those beyond two standard errors: {len(certain)}: {certain}")
    assert len(missed) >= 6


@pytest.mark.parametrize("optimizer", ["zero-one-adam", "onebit-lamb"])
def test_on_rows_that_are_seen_late_it_diverges_on_every_seed_where_its_parent_is_at_its_best(optimizer):
    found = difference(RECORDS, View(parents=True), "recsys", optimizer)
    print(f"recsys, {optimizer} at its parent's tuned rate: {found}")
    assert found is not None
    assert (found.seeds, found.diverged, found.lost) == (3, 3, 0)


def test_an_uncompressed_run_sends_eight_bytes_and_ours_what_the_warm_up_and_the_messages_take():
    for key, record in RECORDS.found.items():
        if key.optimizer == "adamw":
            assert record["sent"] == pytest.approx(8.0, rel=2e-3)
        if key.optimizer == "onebit-adam" and key.workers == 4 and not record["rewarms"] and not diverged(record):
            assert 0.15 * 8 < record["sent"] < 0.15 * 8 + 1.5


def test_the_pages_show_the_tables_of_the_runs():
    assert lab_page.readme_table(RECORDS) in (DOCS.parent / "README.md").read_text()
    page = (DOCS / "numerics.md").read_text()
    assert lab_page.page_tables(RECORDS) in page
    assert lab_page.ablations(RECORDS) in page
    shown = (lab_page.RESULTS / "table.md").read_text()
    assert shown == publish.page(publish.every_table(RECORDS))
    assert "nan" not in shown.lower()


AGAIN = [
    ("mlp", "adamw", TUNED_AT, tuning.SEEDS[0]),
    ("mlp", "onebit-adam", TUNED_AT, tuning.SEEDS[0]),
    ("mlp", "zero-one-adam", TUNED_AT, 4),
    ("resnet", "onebit-lamb", TUNED_AT, tuning.SEEDS[0]),
    ("recsys", "zero-one-adam", 16, 1),
]
"""Task, optimizer, workers, seed."""


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("task", "optimizer", "workers", "seed"), AGAIN)
def test_a_run_made_again_has_the_recorded_bits(task, optimizer, workers, seed):
    """On another kind of processor, or with another torch, sums round otherwise: there the run must end near."""
    wanted = (task, optimizer, workers, seed)
    key = next(k for k in RECORDS.found if (k.task, k.optimizer, k.workers, k.seed) == wanted)
    record, again = RECORDS.found[key], run(key)
    same = {name: record[name] for name in launch.machine()} == launch.machine()
    print(f"{key}: {again['metric']!r}, recorded {record['metric']!r} on {'the same' if same else 'another'} machine")
    if same:
        assert (again["metric"], again["curve"]) == (record["metric"], record["curve"])
    assert again["sent"] == record["sent"]
    assert math.isclose(again["metric"], record["metric"], rel_tol=0.1)
