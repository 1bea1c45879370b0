"""The front of quality over bytes: what is on it, who wins at a budget, and what was recorded."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from benchmarks import frontier, lab_page
from benchmarks.frontier import OURS
from benchmarks.lab.contenders import CONTENDERS, UntilEvaluated
from benchmarks.lab.records import Records
from benchmarks.lab.tasks import TASKS as ALL_TASKS
from benchmarks.pages import DOCS
from fusedonebit.optim.policies import Progress

MINE, OTHER = OURS[0], "int8"


def point(name: str, spent: float, worse: float, error: float = 0.5) -> frontier.Point:
    return frontier.Point(name, spent, worse, error)


def test_there_are_40_points_of_known_optimizers_on_noisy_tasks():
    assert len(frontier.POINTS) == len(set(frontier.POINTS)) >= 40
    assert set(frontier.POINTS) <= CONTENDERS.keys()
    assert not any(ALL_TASKS[task].noiseless for task in frontier.TASKS)


def test_a_front_has_what_beats_all_that_spends_no_more():
    found = [point("a", 0.1, 5.0), point("b", 0.2, 7.0), point("c", 0.3, 1.0), point("d", 0.4, math.inf)]
    assert [p.name for p in frontier.front(found)] == ["a", "c"]
    assert frontier.front([]) == []


def test_the_best_of_a_budget_spends_no_more_and_did_not_diverge():
    found = [point(MINE, 0.2, 3.0), point(OTHER, 0.2, 2.0), point(MINE, 0.5, 1.0), point(OTHER, 0.1, math.inf)]
    assert frontier.best(found, 0.2, ours=True) == found[0]
    assert frontier.best(found, 0.5, ours=True) == found[2]
    assert frontier.best(found, 0.1, ours=False) is None


@pytest.mark.parametrize(
    ("mine", "theirs", "told"), [(1.0, 2.0, "best"), (2.0, 2.0, "tie"), (2.7, 2.0, "tie"), (2.8, 2.0, "lost")]
)
def test_ours_wins_within_one_standard_error_of_the_difference(mine, theirs, told):
    assert frontier.verdict([point(MINE, 0.1, mine), point(OTHER, 0.1, theirs)], 0.1) == told


def test_who_alone_affords_a_budget_is_unopposed_which_is_no_win():
    assert frontier.verdict([point(MINE, 0.1, 9.0), point(OTHER, 0.2, 1.0)], 0.1) == "unopposed"
    assert frontier.verdict([point(OTHER, 0.1, 9.0)], 0.1) == "lost"
    assert frontier.verdict([point(OTHER, 0.2, 9.0)], 0.1) is None


def test_the_table_of_verdicts_tells_and_counts_them_apart(monkeypatch):
    mine = [point(OURS[0], 0.1, 5.0), point(OURS[1], 0.2, 3.0), point(OURS[2], 0.4, 2.5), point(OURS[3], 0.8, 0.0)]
    theirs = [point("int4", 0.2, 2.8), point("int8", 0.4, 1.0)]
    found = sorted([*mine, *theirs], key=lambda each: each.spent)
    monkeypatch.setattr(frontier, "TASKS", ("mlp",))
    monkeypatch.setattr(frontier, "points", lambda records, task, workers: found)
    head, row = frontier.verdicts(None, 4, [0.05, 0.1, 0.2, 0.4, 0.8])
    assert head == ["task", "0.05 B", "0.1 B", "0.2 B", "0.4 B", "0.8 B", "budgets"]
    assert row == [
        "mlp",
        "none / none",
        f"{OURS[0]} +5.0 % / none (unopposed)",
        f"**{OURS[1]} +3.0 % / int4 +2.8 %** (tie)",
        f"{OURS[2]} +2.5 % / int8 +1.0 %",
        f"**{OURS[3]} +0.0 % / int8 +1.0 %**",
        "1 best, 1 tied of 3; 1 unopposed",
    ]


def test_long_rounds_are_cut_only_where_a_run_is_evaluated():
    rounds, done, ends = UntilEvaluated(16, (40, 50)), 0, []
    while done < 64:
        done += rounds.steps(Progress(done - 3, 0, 0, 0, skipped=3) if done >= 3 else Progress(done, 0, 0, 0))
        ends.append(done)
    assert ends == [16, 32, 40, 50, 66]


def test_budgets_are_those_that_were_set_before_the_first_run():
    assert frontier.BUDGETS == (0.025, 0.1, 0.25, 0.5, 1.0, 2.0)
    assert frontier.NOMINAL == (0.27, 1.1, 2.1, 4.0)
    assert frontier.SEEDS == {4: 3, 16: 5}


def test_methods_that_synchronise_seldom_have_their_own_table(monkeypatch):
    found = [point("onebit-loco-32", 0.01, 9.0), point("zero-one-adam-own-32", 0.02, 8.0), point("diloco-64", 0.1, 7.0)]
    monkeypatch.setattr(frontier, "TASKS", ("mlp",))
    monkeypatch.setattr(frontier, "points", lambda records, task, workers: found)
    head, least, *_, most = frontier.seldom(None, 4)
    assert head == ["task", "budget", "1-bit LoCo", "0/1 Adam", "DiLoCo", "SparseLoCo"]
    assert least[2:] == ["onebit-loco-32 +9.0 ± 0.5 %", "**zero-one-adam-own-32 +8.0 ± 0.5 %**", "", ""]
    assert most[1:2] + most[4:] == ["0.1 B", "**diloco-64 +7.0 ± 0.5 %**", ""]
    assert frontier.verdict(found[:1], 0.1) is None


# ---------------------------------------------------------------- what was recorded

RECORDS = Records(frontier.RESULTS / "runs.jsonl", lab_page.RESULTS / "runs.jsonl")
WON = {4: 4, 16: 5}
"""Tasks of six on which ours is best, or within one standard error, at four of the six budgets, by workers."""
LOCO = {4: 10, 16: 15}
"""Of 18 tasks and least budgets, those in which 1-bit LoCo is the best that synchronises seldom, by workers."""


@pytest.mark.parametrize("task", frontier.TASKS)
def test_each_method_was_run_at_its_own_rate_on_each_task(task):
    found = frontier.points(RECORDS, task)
    ran = {p.name for p in found}
    print(f"{task}: {len(ran)} points between {found[0].spent:.3f} and {found[-1].spent:.2f} bytes")
    assert set(frontier.POINTS) <= ran
    assert found[0].spent <= 0.02
    assert found[-1].spent > 3.99  # bf16's


@pytest.mark.parametrize("workers", WON)
def test_ours_wins_at_four_budgets_on_as_many_tasks_as_recorded(workers):
    won = {}
    for task in frontier.TASKS:
        found = frontier.points(RECORDS, task, workers)
        told = [frontier.verdict(found, budget) for budget in frontier.BUDGETS]
        won[task] = sum(each in ("best", "tie") for each in told)
        lost = [f"{budget:g} B" for budget, each in zip(frontier.BUDGETS, told, strict=True) if each == "lost"]
        print(f"{task}: best or tied at {won[task]} budgets of {len(frontier.BUDGETS)} (4 asked), lost at {lost}")
    most = [task for task in frontier.TASKS if won[task] >= 4]
    print(f"{workers} workers: {len(most)} of {len(frontier.TASKS)} tasks (4 asked): {', '.join(most)}")
    assert len(most) >= WON[workers]
    of_4 = f"With four workers these are {', '.join(f'`{task}`' for task in most[:-1])} and `{most[-1]}`."
    assert {4: of_4, 16: "and on five with sixteen"}[workers] in (DOCS / "frontier.md").read_text()


@pytest.mark.parametrize("workers", LOCO)
def test_one_bit_loco_is_left_out_as_it_does_not_win_everywhere(workers):
    best_of: Counter[str] = Counter()
    for task in frontier.TASKS:
        found = frontier.points(RECORDS, task, workers)
        for budget in frontier.LEAST:
            each = {name: frontier.affordable(found, budget, names) for name, names in frontier.SELDOM.items()}
            there = {name: p for name, p in each.items() if p is not None}
            best_of[min(there, key=lambda name: there[name].worse)] += 1
    count = len(frontier.TASKS) * len(frontier.LEAST)
    print(f"{workers} workers, of {count} tasks and budgets of 0.1 B or less: {dict(best_of)}")
    assert best_of["1-bit LoCo"] == LOCO[workers]
    assert not any(name.startswith("onebit-loco") for name in OURS)
