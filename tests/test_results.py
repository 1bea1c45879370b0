"""Pages of tables say what was recorded, pictures show it, and what was recorded keeps what pages promise of it."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable

import pytest
from pages import ROOT, TABLES

from benchmarks import (
    frontier,
    lab_page,
    loss_bytes,
    marsit,
    overlap,
    page,
    planner,
    predictions,
    scale,
    tritons,
)
from benchmarks.gpu import page as gpu
from benchmarks.lab.plots import COLOURS as LAB
from benchmarks.lab.records import Records
from benchmarks.netlab import plots as netlab
from benchmarks.netlab import tables as network_lab
from benchmarks.netlab.__main__ import recorded as of_the_network_lab
from benchmarks.pages import tables_in
from fusedonebit.apps.pictures import METHODS, lighter, method_colour
from fusedonebit.apps.plan.plan_plot import COLOURS as PLAN
from fusedonebit.apps.train.optimizers import OPTIMIZERS

FOUND = json.loads(loss_bytes.RECORD.read_text())
RUNS = marsit.records()
RECORDS = Records(frontier.RESULTS / "runs.jsonl", lab_page.RESULTS / "runs.jsonl")

# ---------------------------------------------------------------- pages of tables


def of_marsit() -> str:
    signs, times = (json.loads((marsit.RESULTS / f"{name}.json").read_text()) for name in ("signs", "times"))
    return marsit.tables(RUNS, signs, times)


def of_predictions() -> str:
    record, measured = (json.loads(file.read_text()) for file in (predictions.RECORD, predictions.MEASURED))
    return predictions.tables(record, measured)


WRITTEN: dict[str, Callable[[], str]] = {
    "cpu": page.tables,
    "frontier": lambda: frontier.tables(RECORDS),
    "h100": gpu.tables,
    "marsit": of_marsit,
    "network-lab": lambda: network_lab.all_of(of_the_network_lab()),
    "planner": planner.tables,
    "predictions": of_predictions,
    "scale": lambda: scale.tables(json.loads(scale.RESULTS.read_text())),
    "tritons": lambda: tritons.table(json.loads(tritons.RECORD.read_text())),
}
"""What writes each page's tables from records."""
ELSEWHERE = ("ablations", "lab", "muon", "tuning")
"""Held by the lab's own tests, and by ``test_tuning``, in a process of its own."""


@pytest.mark.long(but=[name for name in WRITTEN if name != "marsit"])
@pytest.mark.parametrize("name", WRITTEN)
def test_the_page_says_what_was_recorded(name: str):
    (file,) = (file for file in TABLES if file.stem == name)
    assert tables_in(file) == WRITTEN[name]().strip(), "its first line says what writes it anew"


def test_each_page_of_tables_is_held_to_its_records():
    assert sorted([*WRITTEN, *ELSEWHERE]) == [file.stem for file in TABLES]


# ---------------------------------------------------------------- Marsit's tables and figures on our tasks

DIGITS = ("mlp", "resnet", "vgg")


def accuracy(task: str, optimizer: str, workers: int = marsit.WORKERS) -> float:
    runs = marsit.of(RUNS, task, optimizer, workers)
    assert [r["seed"] for r in runs] == [0, 1, 2]
    return marsit.mean_and_spread([r["metric"] for r in runs])[0]


@pytest.mark.parametrize(("optimizer", "most"), [("marsit-100", 1.0), ("marsit", 2.0)])
@pytest.mark.parametrize("task", DIGITS)
def test_marsit_stays_within_points_of_psgd(task: str, optimizer: str, most: float):
    ours, theirs = accuracy(task, optimizer), accuracy(task, "psgd")
    print(f"{task}, M = 8, three seeds: {optimizer} {ours:.2f} %, PSGD {theirs:.2f} % (at most {most:g} less)")
    assert ours >= theirs - most


@pytest.mark.parametrize("task", DIGITS)
def test_cascading_compression_diverges_where_marsit_trains(task: str):
    runs = marsit.of(RUNS, task, "cascading")
    assert [r["seed"] for r in runs] == [0, 1, 2]
    print(f"{task}, M = 8: cascading compression {marsit.cell(runs)}; no compression {accuracy(task, 'psgd'):.2f} %")
    assert all(r["metric"] is None or r["metric"] < accuracy(task, "psgd") - 20 for r in runs)


def test_marsit_sends_a_bit_per_element_and_hop_baselines_more():
    sent = {name: marsit.bits(marsit.of(RUNS, "vgg", name)) for name in marsit.METHODS}
    print({name: round(bits, 2) for name, bits in sent.items()})
    assert 1 <= sent["marsit"] == min(sent.values()) < 1.05  # headers and padding
    # On the way to eight workers sums take 1, 2, 2 and four times 3 bits; back come signs, or sums of 4 bits.
    assert sent["signsgd"] == pytest.approx((17 / 7 + 1) / 2, rel=0.05)
    assert sent["ef-signsgd"] == pytest.approx((17 / 7 + 4) / 2, rel=0.05)
    assert sent["psgd"] == pytest.approx(32, rel=0.05)


def test_signs_are_right_in_the_order_of_the_papers_figure_1b():
    signs = json.loads((marsit.RESULTS / "signs.json").read_text())
    for task, found in signs.items():
        print(task, found)
        assert found["majority vote"] > found["Marsit"] > found["SSDM"] > 49
        assert found["cascading"] < 51


# ---------------------------------------------------------------- what of the communication the backward pass hides


def test_most_of_what_can_be_hidden_is():
    records = overlap.recorded()
    print(overlap.table(records))
    assert [r["ratio"] for r in records] == list(overlap.RATIOS)
    for r in records:
        assert r["equal"], "both ways must end with the same parameters"
        assert r["steps"] >= 11
        assert r["megabits"] > 0
        # Where the wire is shorter than compression, which on a CPU competes with the backward pass, less is hidden.
        if r["ratio"] >= 1:
            assert overlap.hidden(r) >= overlap.TARGET
    assert overlap.table(records) in overlap.PAGE.read_text()


# ---------------------------------------------------------------- Tritons

OLDEST, NEWEST = (tritons.claimed(f"constraints{which}.txt") for which in ("-oldest", ""))


def test_the_oldest_triton_compiled_with_is_the_oldest_allowed():
    (allowed,) = re.findall(r'"triton>=([\d.]+);', (ROOT / "pyproject.toml").read_text())
    assert OLDEST.startswith(allowed)


def test_both_tritons_compile_every_launch_key():
    rows = json.loads(tritons.RECORD.read_text())["rows"]
    targets = (tritons.EVERY, *tritons.OTHERS)
    assert {(row["triton"], row["target"]) for row in rows} == {(v, t) for v in (OLDEST, NEWEST) for t in targets}
    assert all(row["compiled"] == row["keys"] and not row["wrong"] for row in rows)


# ---------------------------------------------------------------- pictures


def test_a_methods_variants_share_its_colour_strangers_have_none():
    assert method_colour("onebit-adam-living") == method_colour("onebit-adam") == METHODS["onebit-adam"]
    assert method_colour("ef-signsgd") != method_colour("signsgd")
    with pytest.raises(KeyError, match="no colour for 'onebit'"):
        method_colour("onebit")


def test_every_optimizer_of_the_train_command_has_a_colour():
    for name in OPTIMIZERS:
        method_colour(name)


def test_pictures_agree_on_colours():
    assert netlab.COLOURS["zero-one-adam"] == LAB["zero-one-adam-shared"] == PLAN["zero-one"]
    assert netlab.COLOURS["onebit-adam"] == LAB["onebit-adam-living"] == PLAN["flat"]
    assert netlab.COLOURS["marsit-owner"] == PLAN["marsit-owner"] == LAB["marsit-adam"]
    assert netlab.COLOURS["bf16"] == PLAN["bf16"]


def test_lighter_mixes_with_white():
    assert lighter("#000000", 0.5) == "#808080"
    assert lighter("#d55e00", 0.0) == "#d55e00"
    assert lighter("#d55e00", 1.0) == "#ffffff"


def test_the_picture_has_the_labs_bytes():
    """Held-out losses on the way change nothing: a run has sent what the lab has recorded of it."""
    for run in FOUND["runs"]:
        of = [r for key, r in RECORDS.of(loss_bytes.TASK, run["method"]).items() if key.workers == loss_bytes.WORKERS]
        assert any(math.isclose(r["sent"], _sent(run), rel_tol=1e-3) for r in of), run["method"]
        assert run["steps"][0] == 0
        assert list(run["sent"]) == sorted(run["sent"])


def _sent(run: dict) -> float:
    """Bytes per parameter and step, as the lab counts them: AdamW's are 8."""
    adamw = next(r for r in FOUND["runs"] if r["method"] == "adamw")
    return 8 * run["sent"][-1] / adamw["sent"][-1]


def test_every_method_has_every_seed_and_one_learning_rate():
    assert {(r["method"], r["seed"]) for r in FOUND["runs"]} == {
        (name, seed) for name in loss_bytes.METHODS for seed in loss_bytes.SEEDS
    }
    assert len({run["lr"] for run in FOUND["runs"]}) == 1


def test_the_picture_is_drawn_from_the_record_900_pixels_wide(tmp_path):
    loss_bytes.draw(FOUND, tmp_path / "drawn.png")
    for picture in (tmp_path / "drawn.png", loss_bytes.PICTURE):
        assert struct.unpack(">I", picture.read_bytes()[16:20]) == (900,)


@pytest.mark.long
def test_a_run_of_the_picture_again_sends_the_recorded_bytes():
    recorded = FOUND["runs"][-1]
    key = loss_bytes.Key(loss_bytes.TASK, recorded["method"], recorded["seed"], loss_bytes.WORKERS, recorded["lr"])
    again = loss_bytes.train(key)
    assert list(again["sent"]) == recorded["sent"]
    assert math.isclose(again["losses"][-1], recorded["losses"][-1], rel_tol=0.1)
