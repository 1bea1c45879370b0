"""The lab's record and tables: which runs count, what is wanted next, and how much worse an optimizer is."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lab import launch, publish, tuning
from benchmarks.lab.contenders import CONTENDERS
from benchmarks.lab.records import Records, reported, search, start
from benchmarks.lab.report import View, difference, rates, rows, views
from benchmarks.lab.run import Key, fingerprint
from benchmarks.lab.tasks import TASKS
from benchmarks.pages import markdown
from fusedonebit.apps.parsing import InputError

BOTH = ("adamw", "onebit-adam")


def record(key: Key, metric: float | None, sent: float = 8.0, **more: object) -> dict[str, object]:
    settings = fingerprint(key.task, key.optimizer, key.alike)
    base = {"metric": metric, "initial": 1e9, "sent": sent, "defaults": settings}
    return vars(key) | base | more


def searched(records: Records, task: str, optimizer: str, at: float) -> None:
    """Make up the runs of a search whose best rate is ``at`` times its start."""
    while keys := search(records, [(task, optimizer)]):
        for key in keys:
            records.add(record(key, 1 + math.log(key.lr / (at * start(task, optimizer))) ** 2))


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """Made up: on mlp and fit the rates of AdamW and 1-bit Adam are known, and three seeds of each have been run."""
    made = Records(tmp_path / "runs.jsonl")
    for task in ("mlp", "fit"):
        for optimizer in ("adamw", "onebit-adam"):
            searched(made, task, optimizer, 1.0)
    worse = {"mlp": (1.02, 1.03, 1.04), "fit": (10.0, 10.0, 1.0)}
    for key in reported(made, [(t, o) for t in ("mlp", "fit") for o in BOTH], 3, [4], [1.0], False):
        by = worse[key.task][key.seed] if key.optimizer == "onebit-adam" else 1.0
        made.add(record(key, 2.0 * by, 1.5 if key.optimizer == "onebit-adam" else 8.0))
    return made


def key_of(records: Records, optimizer: str, seed: int) -> Key:
    (key,) = (k for k in records.found if (k.task, k.optimizer, k.seed) == ("mlp", optimizer, seed))
    return key


def test_differences_are_paired_with_their_standard_error(records):
    found = difference(records, View(), "mlp", "onebit-adam")
    assert (found.seeds, found.diverged, found.unit) == (3, 0, "%")
    assert found.mean == pytest.approx(3.0)
    assert found.error == pytest.approx(1 / 3**0.5)
    assert str(found) == "+3.0 ± 0.6 %"
    assert found.misses
    found = difference(records, View(), "fit", "onebit-adam")
    assert (found.unit, found.mean) == ("dec", pytest.approx(2 / 3))
    assert difference(records, View(workers=16), "mlp", "onebit-adam") is None


def test_diverged_runs_are_reported_miss_and_leave_the_mean(records):
    records.add(record(key_of(records, "onebit-adam", 2), None))
    found = difference(records, View(), "mlp", "onebit-adam")
    assert str(found) == "+2.5 ± 0.5 %, diverged 1/3"
    assert found.misses
    assert found.certain


def test_a_seed_in_which_the_parent_diverges_says_nothing(records):
    for seed in range(3):
        records.add(record(key_of(records, "adamw", seed), None))
        records.add(record(key_of(records, "onebit-adam", seed), None if seed == 0 else 9.0))
        found = difference(records, View(), "mlp", "onebit-adam")
        print(found)
        assert found.lost == seed + 1
        assert found.diverged == 0
    assert str(found) == "parent diverged 3/3"
    assert not found.misses
    assert "1 of 1" in markdown(rows(records, View(), list(BOTH))), "of fit alone"


def test_what_diverges_at_every_rate_is_reported_at_the_smallest(tmp_path):
    made = Records(tmp_path / "runs.jsonl")
    searched(made, "mlp", "adamw", 1.0)
    while keys := search(made, [("mlp", "onebit-adam")]):
        for key in keys:
            made.add(record(key, None))
    smallest = min(made.metrics("mlp", "onebit-adam"))
    assert made.tuned("mlp", "onebit-adam") == smallest
    keys = reported(made, [("mlp", name) for name in BOTH], 2, [4], [1.0], False)
    assert {key.lr for key in keys if key.optimizer == "onebit-adam"} == {smallest}
    for key in keys:
        made.add(record(key, None if key.optimizer == "onebit-adam" else 1.0))
    table = markdown(rows(made, View(), list(BOTH)))
    assert "| diverged 2/2 |" in table
    assert "| 1 of 1 |" in table


def test_a_mean_within_two_errors_of_the_limit_is_not_certain(records):
    found = difference(records, View(), "mlp", "onebit-adam")
    assert found.certain, "3 is over 1 by more than two of 0.6"
    records.add(record(key_of(records, "onebit-adam", 0), 2.0 * 0.99))
    found = difference(records, View(), "mlp", "onebit-adam")
    assert str(found) == "+2.0 ± 1.5 %"
    assert found.misses
    assert not found.certain
    table = markdown(rows(records, View(), list(BOTH)))
    assert "| of those by two standard errors |  | 0 of 2 |" in table, "fit has 0.67 with an error of 0.33"


def test_one_seed_has_no_error_and_nothing_is_shown_as_nan(records):
    for key in [k for k in records.found if k.seed in (1, 2)]:
        del records.found[key], records.of(key.task, key.optimizer)[key]
    assert str(difference(records, View(), "mlp", "onebit-adam")) == "+2.0 %"
    assert "nan" not in markdown(rows(records, View(), list(BOTH))).lower()
    records.add(record(key_of(records, "onebit-adam", 0), None))
    assert str(difference(records, View(), "mlp", "onebit-adam")) == "diverged 1/1"
    assert "nan" not in markdown(rows(records, View(), list(BOTH))).lower()


def test_the_table_has_a_row_per_task_and_tells_misses_and_bytes(records):
    table = markdown(rows(records, View(), list(BOTH)))
    print(table)
    assert "| task | adamw | onebit-adam |\n|---|--:|--:|\n" in table
    assert f"| mlp, {TASKS['mlp'].metric} | 2 | +3.0 ± 0.6 % |" in table
    assert "| worse by more than 1 % (0.05 dec) |  | 2 of 2 |" in table
    assert "| bytes per parameter and step | 8.00 | 1.50 |" in table
    assert [view.title for view in views(records)] == ["4 workers, each optimizer at its own tuned rate"], (
        "both are one"
    )
    assert rates(records, list(BOTH))[1:] == [[task, *[f"{TASKS[task].lr:g}"] * 2] for task in ("mlp", "fit")]


def test_reported_runs_wait_for_the_rate_and_come_seed_by_seed(tmp_path):
    records = Records(tmp_path / "runs.jsonl")
    cell = [("mlp", "onebit-adam")]
    assert reported(records, cell, 2, [4], [1.0], False) == []
    assert {key.seed for key in search(records, cell)} == set(tuning.SEEDS)
    searched(records, "mlp", "onebit-adam", 1.0)
    keys = reported(records, cell, 2, [4, 16], [1.0, 2.0], False)
    assert [(k.seed, k.workers, k.lr / TASKS["mlp"].lr) for k in keys] == [
        (seed, w, by) for seed in (0, 1) for w in (4, 16) for by in (1.0, 2.0)
    ]
    assert reported(records, cell, 1, [4], [1.0], True) == [], "AdamW's rate is not known yet"


def test_stale_runs_and_half_lines_do_not_count_all_else_does(records, tmp_path):
    path = tmp_path / "runs.jsonl"
    before = len(records.found)
    stale = record(Key("mlp", "adamw", 7, 4, 0.5), 1.0) | {"defaults": "of another version"}
    path.write_text(path.read_text() + json.dumps(stale) + "\n" + '{"task": "mlp", "opti')
    torn = path.read_text()
    again = Records(path)
    assert again.found.keys() == records.found.keys()
    assert len(again.found) == before
    assert path.read_text() == torn, "whoever reads changes nothing: another may be writing"
    again.add(record(Key("mlp", "adamw", 8, 4, 0.5), 1.0))
    assert len(Records(path).found) == before + 1
    assert path.read_text().startswith(torn[: torn.rfind("\n") + 1])


DAMAGED = [("metric", value) for value in ("low", "", [], True, 0.0, -1.0, math.nan)]
DAMAGED += [("received", -5.0), ("sent", math.nan), ("sent", -5.0), ("initial", 0.0), ("lr", "high")]
DAMAGED += [("seed", 0.5), ("workers", True)]
FIELDS = [json.dumps(record(Key("mlp", "adamw", 0, 4, 0.1), 1.0) | {name: value}) for name, value in DAMAGED]


@pytest.mark.parametrize("line", ["no json", "[]", "[" * 100_000, '{"task": "mlp"}', b"\xff", *FIELDS])
def test_another_line_that_is_no_run_is_named(records, line):
    content = line if isinstance(line, bytes) else line.encode()
    lines = records.path.read_bytes().splitlines()
    records.path.write_bytes(b"\n".join([lines[0], content, *lines[1:], b""]))
    with pytest.raises(InputError, match=r"runs.jsonl, line 2, is no run of the lab: mend or remove it"):
        Records(records.path)


def test_a_record_without_received_bytes_received_what_it_sent(records):
    assert {run["received"] for run in Records(records.path).found.values()} == {1.5, 8.0}
    records.add(record(Key("mlp", "adamw", 9, 4, 0.1), 1.0, received=3.0))
    assert Records(records.path).found[Key("mlp", "adamw", 9, 4, 0.1)]["received"] == 3.0


def test_two_processes_on_one_torn_file_lose_nothing(records):
    with records.path.open("a") as file:
        file.write('{"task": "mlp", "opti')
    first, second = Records(records.path), Records(records.path)
    for seed in range(10, 18):
        first.add(record(Key("mlp", "adamw", seed, 4, 0.5), 1.0))
    second.add(record(Key("mlp", "adamw", 18, 4, 0.5), 1.0))
    assert Records(records.path).found.keys() == first.found.keys() | second.found.keys()


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    made = Records(tmp_path / "runs.jsonl")
    made.path.mkdir()
    with pytest.raises(InputError, match=r"runs.jsonl can't be written: Is a directory"):
        made.add(record(Key("mlp", "adamw", 1, 4, 0.5), 1.0))


def test_parents_alone_have_a_table(tmp_path):
    made = Records(tmp_path / "runs.jsonl")
    searched(made, "mlp", "adamw", 1.0)
    for key in reported(made, [("mlp", "adamw")], 1, [4], [1.0], False):
        made.add(record(key, 2.0))
    assert [view.workers for view in views(made)] == [4]


def test_a_failing_run_ends_no_other(tmp_path, capsys, monkeypatch):
    records = Records(tmp_path / "runs.jsonl")
    monkeypatch.setattr(launch, "ProcessPoolExecutor", in_a_thread)
    monkeypatch.setattr(launch, "run", broken)
    keys = [Key("mlp", "adamw", seed, 4, 1e-3) for seed in range(3)]
    assert launch.make(records, lambda: keys, "runs") == 1
    assert [key.seed for key in records.found] == [0, 2]
    out = capsys.readouterr().out
    assert "RuntimeError: this seed is broken" in out
    assert "seed=1" in out
    assert "runs: 3 runs\n" in out, "nothing recorded tells how long they take"


def test_time_is_that_of_as_many_workers_on_the_task_or_of_any(tmp_path):
    records = Records(tmp_path / "runs.jsonl")
    for key, seconds in ((Key("mlp", "adamw", 0, 4, 0.1), 18.0), (Key("mlp", "onebit-adam", 0, 16, 0.1), 90.0)):
        records.add(record(key, 1.0, seconds=seconds))
    of = [Key("mlp", "adamw", 1, workers, 0.1) for workers in (4, 16, 64)]
    assert [3600 * records.hours([key]) for key in of] == pytest.approx([18, 90, 54])
    assert records.hours([*of, Key("vgg", "adamw", 0, 4, 0.1)]) == pytest.approx((162 + 54) / 3600)


def in_a_thread(count: int, **how: object) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


def broken(key: Key) -> dict[str, object]:
    if key.seed == 1:
        raise RuntimeError("this seed is broken")
    return record(key, 1.0)


@pytest.mark.parametrize("kills", [1, 2])
def test_what_is_killed_begins_again_unless_no_run_ends(tmp_path, capsys, monkeypatch, kills):
    records, left = Records(tmp_path / "runs.jsonl"), [None] * kills

    def killed(key: Key) -> dict[str, object]:
        if key.seed == 1 and left:
            left.pop()
            raise BrokenProcessPool
        return record(key, 1.0)

    monkeypatch.setattr(launch, "ProcessPoolExecutor", in_a_thread)
    monkeypatch.setattr(launch, "_recorded", killed)
    keys = [Key("mlp", "adamw", seed, 4, 1e-3) for seed in range(3)]
    refused = pytest.raises(InputError, match="killed before any run ended") if kills == 2 else nullcontext()
    with refused:
        assert launch.make(records, lambda: keys, "runs") == 0
    ended = {key.seed for key in records.found}
    assert ended == {0, 1, 2} if kills == 1 else ended in ({0}, {0, 2})
    assert "a run's process was killed: what was not over begins again" in capsys.readouterr().out


def test_every_optimizer_has_a_parent_that_is_measured():
    for name, contender in CONTENDERS.items():
        assert contender.parent in CONTENDERS
        assert CONTENDERS[contender.parent].parent == contender.parent, name


def test_every_setting_of_optimizer_and_task_is_in_a_record(monkeypatch):
    assert len({fingerprint("mlp", name, 1.0) for name in CONTENDERS}) == len(CONTENDERS)
    before = fingerprint("mlp", "adam-frozen", 1.0)
    fingerprint.cache_clear()
    monkeypatch.setattr("benchmarks.lab.run.CONSTANTS", (0.15, 0.5))
    assert fingerprint("mlp", "adam-frozen", 1.0) != before
    fingerprint.cache_clear()
    monkeypatch.undo()
    monkeypatch.setitem(TASKS, "mlp", replace(TASKS["mlp"], batch_size=32))
    assert fingerprint("mlp", "adam-frozen", 1.0) != before
    fingerprint.cache_clear()


def test_a_rate_at_the_edge_of_its_search_says_so(tmp_path):
    made = Records(tmp_path / "runs.jsonl")
    searched(made, "mlp", "adamw", 1e-9)
    (_, (task, said)) = rates(made, ["adamw"])
    assert task == "mlp"
    assert said.endswith(", at the edge")


def test_a_page_that_cannot_be_written_is_named(records, tmp_path):
    (tmp_path / "table.md").mkdir()
    with pytest.raises(InputError, match=r"table.md can't be written: Is a directory"):
        publish.publish(records, tmp_path)
