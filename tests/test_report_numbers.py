"""What the report makes of many steps: nothing that matters may vanish."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_pages import record, write

from fusedonebit.apps.report.downsample import (
    MOST_BANDS,
    MOST_MARKS,
    at_steps,
    bands,
    heat,
    not_finite,
    points_for,
    running_mean,
    short,
    skips,
    thin,
)
from fusedonebit.apps.report.read import Run, Series, read_runs


def series(values: list[float]) -> Series:
    made = Series()
    for i, value in enumerate(values):
        made.add(i + 1, value)
    return made


def run_of(*records: dict) -> Run:
    run = Run("one", Path())
    for told in records:
        run.take(told["step"], told)
    run.finish()
    return run


@given(
    st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=300), st.integers(4, 50)
)
def test_a_thinned_curve_keeps_its_ends_and_every_bins_extremes(values: list[float], most: int):
    xs, ys = thin(series(values), most)
    finite = [(i + 1, short(y)) for i, y in enumerate(values) if math.isfinite(y)]
    assert len(xs) == len(ys) <= most
    assert xs == sorted(set(xs))
    assert set(zip(xs, ys, strict=True)) <= set(finite)
    if finite:
        assert (xs[0], xs[-1]) == (finite[0][0], finite[-1][0])
        assert {min(y for _, y in finite), max(y for _, y in finite)} <= set(ys)


def test_a_single_spike_and_a_single_nan_in_100000_steps_are_there():
    values = [math.sin(i / 1000) for i in range(100_000)]
    values[54_321], values[70_000], values[12_345] = 99.0, math.nan, -99.0
    xs, ys = thin(series(values), 1500)
    assert ys[xs.index(54_322)] == 99
    assert ys[xs.index(12_346)] == -99
    assert not_finite(series(values)) == [70_001]
    assert len(not_finite(series([math.nan] * 10_000))) == MOST_MARKS


def test_the_running_mean_begins_with_the_curve_and_passes_over_what_is_no_number():
    mean = running_mean(series([5.0] + [3.0, math.nan, 1.0] * 2000))
    assert mean.values[0] == 5.0
    assert mean.values[-1] == pytest.approx(2.0, abs=0.2)
    assert len(mean.values) < 320
    assert list(running_mean(series([math.nan] * 3)).values) == []


def test_what_was_sent_by_a_step_is_the_last_count_up_to_there():
    assert at_steps(series([10, 20, 30]), [0, 1, 3, 9]) == [0, 10, 30, 30]


def test_phases_become_stretches_and_quick_changes_share_one():
    run = run_of(*(record(i, phase="warmup" if i < 5 else "compression") for i in range(1, 9)))
    assert bands(run) == [[1, 4, "warmup"], [5, 8, "compression"]]
    names = ["uncompressed", "local", "one-bit", "anything at all"]
    quick = bands(run_of(*(record(i, phase=names[i % 4] if i > 2000 else "begin") for i in range(1, 6001))))
    assert len(quick) <= MOST_BANDS
    assert quick[0][2] == "begin"
    assert set(quick[-1][2].split(" + ")) == set(names)
    assert (quick[0][0], quick[-1][1]) == (1, 6000)
    assert bands(run_of({"step": 1, "loss": 2.0})) == []


def test_skipped_steps_are_marked_where_their_count_rises_and_none_is_lost():
    counts = [0, 1, 1, 4, 0, 1]  # resumed before the fifth, and counted anew
    vetoes = [0, 0, 0, 2, 0, 0]
    told = (record(i + 1, skipped_steps=c, vetoed_steps=v) for i, (c, v) in enumerate(zip(counts, vetoes, strict=True)))
    assert skips(run_of(*told)) == [[2, 1, 0], [4, 3, 2], [6, 1, 0]]
    many = skips(run_of(*(record(i, skipped_steps=i) for i in range(1, 5001))))
    assert len(many) <= MOST_MARKS
    assert sum(n for _, n, _ in many) == 5000


def test_a_map_of_layers_keeps_what_says_most_and_no_more_cells_than_wanted():
    ratios = [1.0] * 100
    ratios[37], ratios[61] = 0.2, 1.5
    told = [record(i + 1, layers={"name": ["a", "b"], "ratio": [r, 1.0]}) for i, r in enumerate(ratios)]
    made = heat(run_of(*told), "ratio", 20, middle=1.0)
    assert made is not None
    assert len(made["steps"]) == 10
    assert made["layers"] == ["a", "b"]
    assert {0.2, 1.5} <= set(made["rows"][0])
    assert set(made["rows"][1]) == {1}
    assert heat(run_of(*told[:10]), "ratio", 20, middle=1.0) is None  # r never moved
    assert heat(run_of(*told), "residual_over_momentum", 20, None) is None


def test_a_map_is_empty_where_a_new_warmup_lies_between_two_records():
    phases = ["compression"] * 4 + ["warmup"] * 4 + ["compression"] * 4
    layers = {"name": ["a"], "residual_over_momentum": [0.5]}
    told = [record(i + 1, phase=p, **({"layers": layers} if i in (1, 3, 9, 11) else {})) for i, p in enumerate(phases)]
    made = heat(run_of(*told), "residual_over_momentum", 100, None)
    assert made is not None
    assert list(zip(made["steps"], made["rows"][0], strict=True)) == [
        (2, 0.5), (4, 0.5), (5, None), (10, 0.5), (12, 0.5),
    ]  # fmt: skip


def test_a_map_has_no_gaps_where_phases_alternate(tmp_path: Path):
    layers = {"name": ["a"], "residual_over_momentum": [0.5]}
    seen = [
        record(i, phase=("local", "one-bit")[i % 2], **({"layers": layers} if i % 10 == 1 else {}))
        for i in range(1, 900)
    ]
    made = heat(run_of(*seen), "residual_over_momentum", 1000, None)
    assert made is not None
    assert None not in made["rows"][0]
    told = [record(i, phase="abc"[i % 3] if i % 100 < 99 else "full", layers=layers) for i in range(1, 3001)]
    assert bands(run_of(*told)) == [[1, 3000, "b + c + a + full"]]  # as they came


def test_many_runs_get_fewer_points_each():
    assert points_for(1) == points_for(6) == 1500
    assert points_for(30) == 300


def test_steps_written_twice_or_out_of_order_count_once_the_last_one_written(tmp_path: Path):
    steps = [1, 2, 3, 2, 3, 4]
    write(tmp_path / "run", [record(step, loss=float(i)) for i, step in enumerate(steps)])
    (run,) = read_runs([str(tmp_path / "run")])
    assert list(run.get("loss").steps) == [1, 2, 3, 4]
    assert list(run.get("loss").values) == [0, 3, 4, 5]


def test_runs_are_named_apart_by_as_much_of_their_paths_as_it_takes(tmp_path: Path):
    for folder in ("a/x", "b/x", "b/y"):
        write(tmp_path / folder, [record(1, name="adam"), record(1, name="lamb")])
    one = read_runs([str(tmp_path / "a/x")])
    assert [run.label for run in one] == ["adam", "lamb"]
    two = read_runs([str(tmp_path / "b/x"), str(tmp_path / "b/y"), str(tmp_path / "b/../b/x")])
    assert [run.label for run in two] == ["x: adam", "x: lamb", "y: adam", "y: lamb"]
    same = read_runs([str(tmp_path / "a/x"), str(tmp_path / "b/x/metrics.jsonl")])
    assert [run.label for run in same] == ["a/x: adam", "a/x: lamb", "b/x: adam", "b/x: lamb"]
