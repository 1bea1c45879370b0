"""What the report makes of many steps: nothing that matters may vanish, and what is good and what is bad is said."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image
from report_pages import record, write

from fusedonebit.apps.pictures import METHODS, plt
from fusedonebit.apps.report.charts import Pictures, rises, sent, styles
from fusedonebit.apps.report.page import build
from fusedonebit.apps.report.page_tables import layer_values, layers
from fusedonebit.apps.report.read import Run, Series, read_runs
from fusedonebit.apps.report.verdicts import baseline, judge, section


def run_of(*records: dict, name: str = "one", label: str = "one") -> Run:
    run = Run(name, Path(), label)
    for told in records:
        run.take(told["step"], told)
    run.finish()
    return run


@pytest.fixture
def axis() -> Iterator[Axes]:
    figure, axis = plt.subplots()
    yield axis
    plt.close(figure)


def curve(axis: Axes, label: str) -> tuple[np.ndarray, np.ndarray]:
    (line,) = (line for line in axis.get_lines() if line.get_label() == label)
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def marks(axis: Axes, sign: str) -> list[int]:
    return [int(x) for line in axis.get_lines() if line.get_marker() == sign for x in line.get_xdata()]


def test_one_spike_and_one_nan_in_100000_steps_are_drawn(axis):
    values = [math.sin(i / 1000) for i in range(100_000)]
    values[54_321], values[70_000] = 99.0, math.nan
    spiked = run_of(*({"step": i + 1, "loss": y} for i, y in enumerate(values)))
    Pictures([spiked]).losses(axis)
    raw = axis.get_lines()[0]
    assert raw.get_ydata()[54_321] == 99
    assert np.isnan(raw.get_ydata()).nonzero()[0].tolist() == [70_000]
    assert marks(axis, "x") == [70_001]
    assert axis.get_ylim()[1] > 99
    picture = np.asarray(Image.open(io.BytesIO(next(Pictures([spiked]).all()).png)).convert("HSV"))
    height = picture.shape[0]
    columns = np.unique((picture[height * 2 // 5 : height // 2, :, 1] > 30).nonzero()[1])
    share = columns.mean() / picture.shape[1]
    print(f"the spike at 54.3 % of the steps is seen in {len(columns)} of {picture.shape[1]} columns, at {share:.1%}")
    assert 1 <= len(columns) <= 5
    assert 0.5 < share < 0.65


def test_the_running_mean_passes_over_what_is_no_number(axis):
    losses = [5.0] + [3.0, math.nan, 1.0] * 2000
    Pictures([run_of(*({"step": i + 1, "loss": y} for i, y in enumerate(losses)))]).losses(axis)
    x, y = curve(axis, "one")
    assert (x[0], y[0], len(y)) == (1, 5.0, 4001)
    assert y[-1] == pytest.approx(2.0, abs=0.2)


def test_losses_over_bytes_are_at_bytes_sent_up_to_their_step(axis):
    told = [{"step": 1, "loss": 3.0}, {"step": 2, "bytes_total": 10}, {"step": 3, "loss": 2.0, "bytes_total": 20}]
    told += [{"step": 5, "bytes_total": 70}, {"step": 9, "loss": 1.0, "held_out_loss": 1.5}]
    Pictures([run_of(*told)]).losses(axis, by_bytes=True)
    assert curve(axis, "one")[0].tolist() == [0, 20, 70]
    assert axis.get_xscale() == "log"
    (held_out,) = (line for line in axis.get_lines() if line.get_marker() == "o")
    assert (list(held_out.get_xdata()), list(held_out.get_ydata())) == ([70], [1.5])


def test_phases_are_told_apart_and_a_line_is_where_bits_begin(axis):
    phases = ["warmup"] * 3 + ["compression"] * 3 + ["warmup", "local", "one-bit", "local"]
    run = run_of(*(record(i + 1, phase=name) for i, name in enumerate(phases)))
    assert sent(run)[1].tolist() == [0, 0, 0, 2, 2, 2, 0, 1, 2, 1]
    Pictures([run]).numbers(axis, "bytes_step")
    assert [line.get_xdata()[0] for line in axis.get_lines() if line.get_linestyle() == "--"] == [4]
    axis.clear()
    Pictures([run, run]).phases(axis)
    assert len(axis.collections) == 6  # of each run what is pale, full, and in between
    assert [text.get_text() for text in axis.get_yticklabels()] == ["one\nwarmup, compression, local, one-bit"] * 2


def test_skipped_steps_are_marked_where_their_count_rises(axis):
    counts = [0, 1, 1, 4, 0, 1]  # resumed before the fifth, and counted anew
    vetoes = [0, 0, 0, 2, 0, 0]
    told = (record(i + 1, skipped_steps=c, vetoed_steps=v) for i, (c, v) in enumerate(zip(counts, vetoes, strict=True)))
    Pictures([run_of(*told)]).losses(axis)
    assert (marks(axis, "^"), marks(axis, "D")) == ([2, 6], [4])
    many = run_of(*(record(i, skipped_steps=i) for i in range(1, 5001)))
    assert len(rises(many.get("skipped_steps"))) == 5000
    assert len(rises(Series())) == 0


@pytest.mark.parametrize(
    ("values", "scale", "least"),
    [([1, 31], "log", None), ([1, 30], "linear", 0), ([0, 50], "linear", 0), ([-1, 5], "linear", -1.3)],
)
def test_an_axis_is_logarithmic_where_values_differ_much(axis, values, scale, least):
    Pictures([run_of(*({"step": i, "x": y} for i, y in enumerate(values)))]).numbers(axis, "x")
    assert axis.get_yscale() == scale
    assert least is None or axis.get_ylim()[0] == pytest.approx(least)


def test_pictures_of_some_steps_have_no_others(axis):
    run = run_of(*(record(i, loss=100.0 if i < 5 else 1.0) for i in range(1, 20)))
    Pictures([run], (5, 9)).losses(axis)
    assert curve(axis, "one")[0].tolist() == [5, 6, 7, 8, 9]
    assert axis.get_xlim() == (5, 9)
    assert axis.get_ylim()[1] < 2


def test_of_many_runs_ten_are_named_and_the_others_counted(monkeypatch):
    legends = []
    monkeypatch.setattr("matplotlib.figure.Figure.legend", lambda *a, **more: legends.append(a[1:]))
    bare = run_of({"step": 1, "x": 1.0}, label="no curve, no name")
    for count in (10, 14):
        next(Pictures([bare, *(run_of(record(1), label=f"run{i}") for i in range(count))]).all())
    named = [f"run{i}" for i in range(10)]
    assert [(len(handles), names) for handles, names in legends] == [(10, named), (11, [*named, "and 4 more runs"])]


@pytest.mark.parametrize("name", ["$\\frac{$", "_one", "\ud800\x1b[2J", "\u65e5" * 99])
def test_names_that_are_no_plain_text_are_drawn_as_such(name, monkeypatch):
    legends = []
    monkeypatch.setattr("matplotlib.figure.Figure.legend", lambda figure, handles, names, **more: legends.append(names))
    run = run_of(record(1, phase=name) | {name: 2.0}, label=name)
    assert [picture.title for picture in Pictures([run]).all()][-2:] == [name, "Phases"]
    ((told,), *_) = legends
    assert told.isprintable()
    assert not told.startswith("_")
    assert len(told) <= 45


def test_a_method_has_its_colour_and_no_two_runs_look_alike():
    names = ("zero-one-adam", "mine", "onebit-adam", "adamw", "OneBitLamb", "MarsitSGD")
    found = styles([run_of(record(1), name=name) for name in names])
    known = ("zero-one-adam", None, "onebit-adam", "adamw", "onebit-lamb", "marsit")
    assert [style["color"] for style in found] == [METHODS[name] if name else METHODS["int8"] for name in known]
    again = styles([run_of(record(1), name=name) for name in names * 3])
    assert len({tuple(style.values()) for style in again}) == 18


# ---------------------------------------------------------------- layers


def test_layers_have_their_greatest_value_the_greatest_first():
    ratios = [1.0] * 100
    ratios[37], ratios[61] = 0.2, 1.5
    told = [record(i + 1, layers={"name": ["a", "b", "c"], "ratio": [1.0, r, math.nan]}) for i, r in enumerate(ratios)]
    assert layer_values(run_of(*told), "ratio")["b"][37] == (0.2, 38)
    table = layers([run_of(*told)])
    assert table.count("<details>") == 1
    assert "<th scope=row>b</th><td>1</td><td>1</td><td>1.5, step 62</td><td>1</td></tr><tr><th scope=row>a" in table
    assert layers([run_of(*told[:10])]) == "<p>None were recorded.</p>"  # r never moved


# ---------------------------------------------------------------- files


def test_steps_written_twice_count_once_the_last_one_written(tmp_path: Path):
    steps = [1, 2, 3, 2, 3, 4]
    write(tmp_path / "run", [record(step, loss=float(i)) for i, step in enumerate(steps)])
    (run,) = read_runs([str(tmp_path / "run")])
    assert list(run.get("loss").steps) == [1, 2, 3, 4]
    assert list(run.get("loss").values) == [0, 3, 4, 5]


def test_runs_are_named_apart_by_as_much_path_as_it_takes(tmp_path: Path):
    for folder in ("a/x", "b/x", "b/y"):
        write(tmp_path / folder, [record(1, name="adam"), record(1, name="lamb")])
    one = read_runs([str(tmp_path / "a/x")])
    assert [run.label for run in one] == ["adam", "lamb"]
    two = read_runs([str(tmp_path / "b/x"), str(tmp_path / "b/y"), str(tmp_path / "b/../b/x")])
    assert [run.label for run in two] == ["x: adam", "x: lamb", "y: adam", "y: lamb"]
    same = read_runs([str(tmp_path / "a/x"), str(tmp_path / "b/x/metrics.jsonl")])
    assert [run.label for run in same] == ["a/x: adam", "a/x: lamb", "b/x: adam", "b/x: lamb"]


# ---------------------------------------------------------------- good and bad


def runs_of(folder: Path, *records: dict) -> list[Run]:
    return read_runs([str(write(folder, records))])


def texts(run: Run, base: Run | None = None) -> list[tuple[str, str]]:
    return [(each.kind, each.text) for each in judge(run, base)]


SAVED = ("good", "sent 1 kB, 32 times less than float32 gradients would have taken.")
RISEN = "has a held-out loss 6.0% above its best, which was at step 4."
GUARDED = "had 3 updates refused by the guard: they would have diverged."
BEST = {"step": 4, "held_out_loss": 1.0}


@pytest.mark.parametrize(
    ("first", "last", "told"),
    [
        ({}, {}, [SAVED]),
        (
            {"phase": "compression"},
            {"bytes_total": 32000},
            [("bad", "sent 32 kB, no fewer bytes than float32 gradients would have taken.")],
        ),
        (
            {"phase": "warmup"},
            {"phase": "warmup", "bytes_total": 32000},
            [("bad", "has not compressed yet: all its 10 steps were warm-up.")],
        ),
        ({}, {"skipped_steps": 3}, [SAVED, ("bad", "skipped 3 of 10 steps: a gradient was no number.")]),
        ({}, {"skipped_steps": 3, "vetoed_steps": 3}, [SAVED, ("bad", GUARDED)]),
        ({}, {"loss": math.nan}, [("bad", "ended with a loss that is no number, at step 10."), SAVED]),
        (BEST, {"held_out_loss": 1.049}, [SAVED]),
        (BEST, {"held_out_loss": 1.06}, [SAVED, ("bad", RISEN)]),
    ],
    ids=str,
)
def test_a_run_is_judged_by_what_was_recorded(tmp_path: Path, first: dict, last: dict, told: list[tuple[str, str]]):
    (run,) = runs_of(tmp_path, record(1) | first, record(10, **last))
    assert texts(run) == told


@pytest.mark.parametrize(
    ("held_out", "kind", "where"),
    [(2.018, "good", "0.9% above"), (2.04, "bad", "2.0% above"), (1.9, "good", "5.0% below")],
)
def test_runs_are_compared_at_the_last_step_of_both(tmp_path: Path, held_out: float, kind: str, where: str):
    adamw, ours = runs_of(
        tmp_path,
        record(4, "adamw", phase="uncompressed", held_out_loss=2.0),
        record(10, "adamw", phase="uncompressed", held_out_loss=1.0),
        record(4, "ours", held_out_loss=held_out),
    )
    assert baseline(ours, [adamw, ours]) is adamw
    assert (kind, f"has a held-out loss {where} that of adamw, at step 4.") in texts(ours, adamw)
    assert texts(adamw, adamw) == []


def test_a_baseline_is_the_only_uncompressed_run(tmp_path: Path):
    here = runs_of(tmp_path / "here", record(1, "adamw", phase="uncompressed"), record(1, "ours"))
    there = runs_of(tmp_path / "there", record(1, "lamb", phase="uncompressed"), record(1, "ours"))
    (alone,) = runs_of(tmp_path / "alone", record(1, "ours"))
    assert baseline(there[1], [*here, *there]) is there[0]
    assert baseline(alone, [*here, alone]) is here[0]
    assert baseline(alone, [*here, *there, alone]) is None
    assert baseline(alone, [alone]) is None


def test_names_of_runs_are_text_on_the_page(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pages in milliseconds
    runs = runs_of(tmp_path, record(1, "<script>"), record(10, "<script>"))
    page = build(runs, "title")
    assert section(runs) in page
    assert "<b>&lt;script&gt;</b> sent 1 kB" in section(runs)
    assert section(runs_of(tmp_path / "nothing", {"optimizer": "x", "step": 1})) == (
        "<p>Nothing was recorded that can be judged.</p>"
    )
