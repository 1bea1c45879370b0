"""What the README promises: its length, and that its numbers are those of the records and pages that it links to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import lab_page, loss_bytes
from benchmarks.lab.records import Records
from benchmarks.lab.report import View, difference, rows
from benchmarks.netlab import whole
from fusedonebit.apps.cli import main
from fusedonebit.apps.plan import Network
from fusedonebit.apps.plan.report import FASTEST, LEAST_SPEEDUP, SLOWEST, Plan, crossing

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
WORDS = 900
NETLAB = json.loads((ROOT / "benchmarks/results/netlab/netlab.json").read_text())


def words(text: str) -> int:
    """Count what a reader reads, code blocks, tables and pictures' texts too, but for comments and links' targets."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)\s]*\)", "]", text)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_it_is_read_in_minutes():
    counted = words(README)
    print(f"README.md: {counted} words (at most {WORDS})")
    assert counted <= WORDS


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a [link](docs/of-no-word.md) here", 3),
        ("<!-- not\nread -->two words", 2),
        ("```sh\nmake demo\n```", 3),
        ("| \u2713 | - |\n|---|:-:|", 0),
        ("![a picture](of.png)", 2),
    ],
)
def test_words_are_counted_as_they_are_read(text: str, count: int):
    assert words(text) == count


def test_the_state_on_gpus_stands_on_the_first_screen():
    assert words(README[: README.index("Never run on two GPUs, never run on a cluster")]) < 200


def test_there_are_six_limits():
    section = README.split("## Limits\n")[1].split("\n## ")[0]
    assert re.findall(r"^(\d)\. ", section, re.MULTILINE) == list("123456")


def test_a_tick_leads_to_an_example_or_a_page_in_every_row():
    table = README.split("## What works with what\n")[1].split("\n## ")[0]
    found = [line for line in table.splitlines() if line.startswith("| [")]
    assert len(found) >= 9
    assert [line for line in found if not re.search(r"\[\u2713\]\((examples|docs)/", line)] == []


# ---------------------------------------------------------------- numbers


def row(begins: str) -> str:
    """The line of the table of numbers that begins so."""
    (found,) = (line for line in README.splitlines() if line.startswith(f"| {begins}"))
    return found


def numbers(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"(?<![\w-])\d+(?:\.\d+)?(?![\w-])", text)]


def at(megabits: float) -> dict:
    return min(NETLAB["rates"], key=lambda each: abs(each["megabits"] - megabits))


GAINS = "zero-one-adam", whole.ANY


def test_whole_runs_are_as_fast_as_the_network_lab_has_recorded():
    told = [numbers(row(begins).split("|")[2]) for begins in ("speed to equal held-out loss", "the same at")]
    slow, fast = ([whole.gain(NETLAB, at(rate), name, "bf16") for name in GAINS] for rate in (44, 560))
    slow[1:1] = [whole.gain(NETLAB, at(44), "zero-one-adam", rival) for rival in ("int8", "powersgd")]
    assert told == [[round(each, 2) for each in found] for found in (slow, fast)]


def test_bytes_and_losses_of_whole_runs_are_the_labs():
    records, ours = Records(lab_page.RESULTS / "runs.jsonl"), ["onebit-adam-living", "zero-one-adam-shared"]
    table = rows(records, View(parents=True), ours, lab_page.FIRST)
    last = {line[0]: line[1:] for line in table}
    assert numbers(row("bytes per parameter and step").split("fp32 8,")[1]) == numbers(
        " ".join(last["bytes per parameter and step"])
    )
    misses = [int(each.split(" of ")[0]) for each in last["worse by more than 1 % (0.05 dec)"]]
    assert numbers(row("tasks of those 14").split("|")[2]) == [14 - each for each in misses]
    (gans,) = numbers(re.search(r"Small GANs end (\d+) % worse", README)[1])
    assert gans == round(difference(records, View(parents=True), "gans", ours[0]).mean)


def test_what_memory_moves_is_what_the_pages_say():
    ours, torch = numbers(row("device memory traffic").split("|")[2])
    assert f"{ours} bytes per parameter for a whole step on 8 ranks" in (ROOT / "docs/limits.md").read_text()
    moved = json.loads((ROOT / "benchmarks/results/cpu/bytes-moved.json").read_text())["tables"][0]["rows"]
    assert torch == round(next(each["device B"] for each in moved if each["optimizer"] == "AdamW(fused=True)"), 1)


def test_steps_on_a_gpu_take_what_the_record_says():
    cases = {each["case"]: each for each in json.loads((ROOT / "benchmarks/results/h100/speed.json").read_text())}
    steps = cases["steps-340M"]["tables"][0]["rows"]
    frozen = [each["x AdamW"] for each in steps if each["optimizer"].startswith("OneBitAdam")]
    rows = cases["defaults-340M"]["tables"][0]["rows"]
    (default,) = (each["x AdamW"] for each in rows if each["optimizer"] == "OneBitAdam")
    found = [round(each, 2) for each in (default, min(frozen), max(frozen))]
    assert numbers(row("a compressed step of `OneBitAdam`").split("|")[2]) == found


def test_the_picture_is_the_one_that_is_drawn_from_the_record():
    assert f"](docs/{loss_bytes.PICTURE.name})" in README.split("## ")[0]


def test_the_planner_says_what_the_readme_says_of_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"`fusedonebit (plan [^`]+)`", README)
    assert main(command.split()) == 0
    (stops,) = re.findall(r"stops paying above .*?\((\d+)\.?\d* Gbit/s\)", capsys.readouterr().out)
    assert f"a gain below {stops} Gbit/s" in README

    def pays(rate: float) -> bool:
        return Plan(340_000_000, 64, Network(rate), 0.363).speedup("flat") >= LEAST_SPEEDUP

    assert f"below {8e-9 * crossing(pays, SLOWEST, FASTEST):.0f} for `OneBitAdam` with its defaults" in README
