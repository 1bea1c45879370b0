"""Pictures show a method in the same colour everywhere, and README's shows what was recorded."""

from __future__ import annotations

import json
import math
import struct

import pytest

from benchmarks import frontier, lab_page, loss_bytes
from benchmarks.lab.plots import COLOURS as LAB
from benchmarks.lab.records import Records
from benchmarks.netlab import plots as netlab
from fusedonebit.apps.pictures import METHODS, lighter, method_colour
from fusedonebit.apps.plan.plan_plot import COLOURS as PLAN
from fusedonebit.apps.train.optimizers import OPTIMIZERS

FOUND = json.loads(loss_bytes.RECORD.read_text())


def test_a_methods_variants_share_its_colour_strangers_have_none():
    assert method_colour("onebit-adam-living") == method_colour("onebit-adam") == METHODS["onebit-adam"]
    assert method_colour("ef-signsgd") != method_colour("signsgd")
    with pytest.raises(KeyError, match="no colour for 'onebit'"):
        method_colour("onebit")


def test_every_optimizer_of_the_train_command_has_a_colour():
    for name in OPTIMIZERS:
        method_colour(name)


def test_pictures_agree_on_colours():
    assert netlab.COLOURS["zero-one-adam"] == LAB["zero-one-adam-own"] == PLAN["zero-one"]
    assert netlab.COLOURS["onebit-adam"] == LAB["onebit-adam-living"] == PLAN["flat"]
    assert netlab.COLOURS["marsit-owner"] == PLAN["marsit-owner"] == LAB["marsit-adam"]
    assert netlab.COLOURS["bf16"] == PLAN["bf16"]


def test_lighter_mixes_with_white():
    assert lighter("#000000", 0.5) == "#808080"
    assert lighter("#d55e00", 0.0) == "#d55e00"
    assert lighter("#d55e00", 1.0) == "#ffffff"


def test_the_picture_has_the_labs_bytes():
    """Held-out losses on the way change nothing: a run has sent what the lab has recorded of it."""
    records = Records(frontier.RESULTS / "runs.jsonl", lab_page.RESULTS / "runs.jsonl")
    for run in FOUND["runs"]:
        of = [r for key, r in records.of(loss_bytes.TASK, run["method"]).items() if key.workers == loss_bytes.WORKERS]
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
