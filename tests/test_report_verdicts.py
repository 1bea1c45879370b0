"""The report says what is good and what is bad about a run, from what was recorded and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from report_pages import record, write

from fusedonebit.apps.report.page import build
from fusedonebit.apps.report.read import Run, read_runs
from fusedonebit.apps.report.verdicts import baseline, judge, section


def runs_of(folder: Path, *records: dict) -> list[Run]:
    return read_runs([str(write(folder, records))])


def texts(run: Run, base: Run | None = None) -> list[tuple[str, str]]:
    return [(each.kind, each.text) for each in judge(run, base)]


def test_bytes_saved_are_good(tmp_path: Path):
    (run,) = runs_of(tmp_path, record(1), record(10))
    assert texts(run) == [("good", "sent 1 kB, 32 times less than float32 gradients would have taken.")]


def test_bytes_not_saved_are_bad(tmp_path: Path):
    (run,) = runs_of(tmp_path, record(1, phase="compression"), record(10, bytes_total=32000))
    assert texts(run) == [("bad", "sent 32 kB, no fewer bytes than float32 gradients would have taken.")]


def test_a_run_that_is_all_warm_up_has_not_compressed(tmp_path: Path):
    (run,) = runs_of(tmp_path, record(1, phase="warmup"), record(10, phase="warmup", bytes_total=32000))
    assert texts(run) == [("bad", "has not compressed yet: all its 10 steps were warm-up.")]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"skipped_steps": 3, "vetoed_steps": 0}, "skipped 3 of 10 steps: a gradient was no number."),
        ({"skipped_steps": 3, "vetoed_steps": 3}, "had 3 updates refused by the guard: they would have diverged."),
        ({"loss": float("nan")}, "ended with a loss that is no number, at step 10."),
    ],
)
def test_what_went_wrong_is_bad(tmp_path: Path, more: dict, says: str):
    (run,) = runs_of(tmp_path, record(1), record(10, **more))
    assert [text for kind, text in texts(run) if kind == "bad"] == [says]


@pytest.mark.parametrize(("held_out", "says"), [(1.049, None), (1.06, "has a held-out loss 6.0% above its best")])
def test_a_held_out_loss_that_has_risen_is_bad(tmp_path: Path, held_out: float, says: str | None):
    (run,) = runs_of(tmp_path, record(4, held_out_loss=1.0), record(10, held_out_loss=held_out))
    bad = [text for kind, text in texts(run) if kind == "bad"]
    assert bad == ([] if says is None else [f"{says}, which was at step 4."])


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
