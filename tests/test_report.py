"""``fusedonebit report``: one page, of whatever runs have left behind."""

from __future__ import annotations

import json
import math
import random
import re
import sys
import time
from html import unescape
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
from report_pages import cells, console_of, in_a_browser, pictures, record, write

from fusedonebit.apps.cli import main

EVIL = "</script>$\\frac{$_<img src=x onerror=alert(1)>{{data}}&amp;\u2028<!--"


def report(*arguments: Path | str, out: Path) -> str:
    assert main(["report", *map(str, arguments), "--out", str(out)]) == 0
    return out.read_text()


class Tags(HTMLParser):
    """All tags of a page, with their attributes, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


# ---------------------------------------------------------------- what is on the page


def test_a_page_has_every_number_picture_and_table(tmp_path: Path):
    layers = {"name": ["embed", "head"], "residual_over_momentum": [0.25, 0.5], "ratio": [1.5, 1.0]}
    records = [record(i) for i in range(1, 9)]
    for told in records[4:]:
        told |= {"residual_over_momentum": 0.9, "layers": layers, "tokens_per_s": 1000, "lr": 0.1}
    records[5] |= {"loss": math.nan, "skipped_steps": 1, "vetoed_steps": 1, "held_out_loss": 0.2}
    records[6] |= {"skipped_steps": 1, "vetoed_steps": 1}
    records[7] |= {"held_out_loss": 0.3, "perplexity": 7.5, "skipped_steps": 1, "vetoed_steps": 1}
    start = {"optimizer": "one", "first_step": 1, "date": "2026-01-01T00:00:00+00:00", "world_size": 2}
    start |= {"settings": {"batch_size": 32, "steps": 9}, "options": {"freeze_step": 3}, "class": "OneBitAdam"}
    start |= {"groups": [{"lr": 0.1}, {"lr": 0.2}], "versions": {"torch": "2.11"}, "repr": "OneBitAdam (\nphase: x"}
    write(tmp_path, records, [start, start | {"first_step": 5}])
    page = report(tmp_path, out=tmp_path / "page.html")
    told = {name: cells(page, name)[0] for name in re.findall(r"<th scope=row>([^<]*)<small>", page)}
    assert told == {
        "steps": "8 of 9",
        "phase": "compression",
        "train loss": "0.3645",
        "held-out loss": "0.3",
        "best held out": "0.2",
        "bytes, last step": "100 B",
        "bytes in all": "800 B",
        "fp32 / sent": "32x",
        "skipped": "1",
        "by the guard": "1",
        "tokens/s": "1,000",
    }
    curves = ["Loss", "Loss against bytes sent", "Bytes per step", "Compression error", "Tokens per second"]
    assert list(pictures(page)) == [*curves, "Learning rate", "perplexity", "Phases"]
    for text in ("run: batch_size", "option: freeze_step", "group 1: lr", "version: torch", "2.11", "resumed"):
        assert text in page
    for text in ("at step 5", "phase: x", "one: 8 of 9 steps; it goes on, or was cut short"):
        assert text in page
    assert re.search(r"one: residual over momentum by layer.*>head<.*>embed<.*one: LAMB's ratio", unescape(page))


def test_settings_that_differ_are_marked_and_others_not(no_pictures, tmp_path: Path):
    for name, size in (("a", 16), ("b", 32)):
        start = {"optimizer": "one", "first_step": 1, "settings": {"batch_size": size, "seed": 0}}
        write(tmp_path / name, [record(1)], [start])
    page = report(tmp_path / "a", tmp_path / "b", out=tmp_path / "page.html")
    assert "<tr class=differs><th scope=row>run: batch_size</th><td>16</td><td>32</td></tr>" in page
    assert "<tr><th scope=row>run: seed</th><td>0</td><td>0</td></tr>" in page


def test_nothing_is_loaded_from_anywhere_and_nothing_runs(tmp_path: Path):
    write(tmp_path, [record(i) for i in range(1, 5)], [{"optimizer": "one", "first_step": 1, "repr": "x"}])
    page = report(tmp_path, out=tmp_path / "page.html")
    assert not re.findall(r"(?i)(?:https?|wss?|ftp|file|javascript):|@import|@font-face|url\(", page)
    for tag, attributes in Tags(page).seen:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base", "form")
        assert not {"href", "srcset", "action", "data", "background"} & attributes.keys()
        assert tag != "img" or attributes["src"].startswith("data:image/png;base64,")
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page


def test_text_from_runs_can_not_leave_its_place(tmp_path: Path):
    layers = {"name": [EVIL], "ratio": [1.5]}
    told = [record(i, name=EVIL, phase=EVIL, layers=layers, **{EVIL: 1.0 + i}) for i in (1, 2)]
    start = {"optimizer": EVIL, "first_step": 1, "settings": {EVIL: EVIL}, "repr": EVIL, "date": EVIL, "class": EVIL}
    start |= {"options": {"a": [EVIL]}, "groups": [{EVIL: EVIL}], "versions": {EVIL: EVIL}}
    folder = write(tmp_path / "<b>&'\"", told, [start, start])
    assert main(["report", str(folder), "--title", EVIL]) == 0
    page = (folder / "report.html").read_text()
    assert EVIL in pictures(page)
    assert cells(page, "phase") == [EVIL]
    plain = write(tmp_path / "plain", [record(i, layers=layers | {"name": ["x"]}, y=1.0) for i in (1, 2)], [start])
    kinds = {tag for tag, _ in Tags(report(plain, out=tmp_path / "plain.html")).seen}
    assert {tag for tag, _ in Tags(page).seen} - {"details", "summary", "pre"} <= kinds
    assert not any(name.startswith("on") for _, attributes in Tags(page).seen for name in attributes)


@pytest.fixture
def no_pictures(monkeypatch):
    """Makes pages in milliseconds."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_without_matplotlib_the_page_has_its_tables(tmp_path: Path, no_pictures):
    page = report(write(tmp_path, [record(1)]), out=tmp_path / "page.html")
    assert "Pictures need matplotlib: pip install matplotlib" in page
    assert pictures(page) == {}
    assert cells(page, "steps") == ["1"]


@pytest.mark.full
def test_three_runs_of_100000_steps_are_a_page_below_2_mb(tmp_path: Path, capsys: pytest.CaptureFixture):
    chance, names = random.Random(0), [f"transformer.blocks.{i // 6}.attention.part{i % 6}.weight" for i in range(60)]
    for run in range(3):
        with (write(tmp_path / f"run{run}", []) / "metrics.jsonl").open("w") as file:
            for i in range(1, 100_001):
                told = record(i, loss=3 / i**0.2 + chance.gauss(0, 0.1), lr=1e-3 * chance.random())
                told |= {"tokens_per_s": chance.gauss(1e5, 1e3), "bytes_step": chance.randrange(10**6)}
                told |= {"residual_over_momentum": chance.random()}
                told |= {"phase": ("local", "one-bit")[i % 2], "skipped_steps": i // 50}
                if i % 500 == 0:
                    rows = ([chance.lognormvariate(0, 1) for _ in names] for _ in range(2))
                    told["layers"] = {
                        "name": names,
                        **dict(zip(("residual_over_momentum", "ratio"), rows, strict=True)),
                    }
                file.write(json.dumps(told) + "\n")
    began = time.monotonic()
    page = report(*sorted(tmp_path.glob("run?")), out=tmp_path / "page.html")
    took = time.monotonic() - began
    with capsys.disabled():
        print(f"\n3 runs of 100,000 steps, 60 layers: {len(page.encode()) / 1e6:.2f} MB in {took:.1f} s")
    assert len(page.encode()) < 2e6
    assert cells(page, "skipped") == ["2,000"] * 3
    assert len(pictures(page)) == 7


def test_the_page_is_made_of_files_that_are_installed():
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '"fusedonebit.apps.report",' in project
    assert '"fusedonebit.apps.report" = ["*.html", "*.css"]' in project
    files = resources.files("fusedonebit.apps.report")
    assert {f.name.rsplit(".")[-1] for f in files.iterdir() if f.is_file()} == {"py", "html", "css"}


# ---------------------------------------------------------------- what it is made of


def test_files_of_an_older_version_have_a_page(no_pictures, tmp_path: Path):
    old = [
        {"optimizer": "adamw", "step": i, "loss": 1.0, "tokens_per_s": 10, "phase": "uncompressed", "bytes_step": 0}
        | {"bytes_total": 0, "bytes_fp32": 0, "skipped_steps": 0}
        for i in (1, 2)
    ]
    page = report(write(tmp_path, old), out=tmp_path / "page.html")
    assert "None were recorded" in page
    assert cells(page, "phase") == ["uncompressed"]


def test_runs_of_any_length_share_a_page(tmp_path: Path):
    long = write(tmp_path / "long", [record(i) for i in range(1, 50)])
    short = write(tmp_path / "short", [{"optimizer": "two", "step": 3}])
    page = report(long, short, out=tmp_path / "page.html")
    assert re.findall("<th scope=col>(.*?)</th>", page)[:2] == ["long: one", "short: two"]
    assert (cells(page, "steps"), cells(page, "train loss")[1]) == (["49", "3"], "–")
    assert len(pictures(page)) == 4
    alone = report(short, out=tmp_path / "alone.html")
    assert pictures(alone) == {}


def test_damaged_lines_are_counted_and_passed_over(no_pictures, tmp_path: Path, capsys: pytest.CaptureFixture):
    write(tmp_path, [record(1), record(2)])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(
            b'\xff\xfe nonsense\n[1, 2]\n{"optimizer": "one"}\n{"step": true}\n{"optimizer": "one", "step": 3, "lo'
        )
    (tmp_path / "starts.jsonl").write_text(
        'nonsense\n{"optimizer": "somebody else"}\n{"optimizer": "one", "groups": 3}'
    )
    page = report(tmp_path, out=tmp_path / "page.html")
    assert "5 damaged lines passed over" in capsys.readouterr().out
    assert "5 damaged line(s)" in page
    assert cells(page, "steps") == ["2"]


def test_losses_that_are_all_no_numbers_still_have_a_page(tmp_path: Path):
    values = [math.nan, math.inf, -math.inf, 10**400]
    page = report(write(tmp_path, [record(i + 1, loss=v) for i, v in enumerate(values)]), out=tmp_path / "page.html")
    assert cells(page, "train loss") == ["inf"]
    assert "Loss" in pictures(page)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "got 'missing': no such folder; check the path"),
        (["none"], "DIR must be a folder with metrics.jsonl, as `fusedonebit train --out`"),
        (["."], "got '.' without one; did you mean empty good"),
        (["note.txt"], "got 'note.txt': a file"),
        (["good", "empty"], "got nothing in empty/metrics.jsonl; wait for the run's first step"),
        (["good", "--out", "none"], "--out must be a file to write, got the folder none; add /report.html"),
        (["good", "--out", "note.txt/x.html"], "note.txt can't be used: "),
        (["good", "--out", "note.txt"], "--out note.txt is there already, and no page of this command; choose another"),
        (["good", "--out", "good/metrics.jsonl"], "--out good/metrics.jsonl is there already, and no page of this"),
        (["good", "--runs", "one,two"], "--runs must be of one, got 'two'"),
        (["good", "--steps", "5"], "--steps: must be a first and a last step, as 100:200, got '5'"),
        (["good", "--steps", "7:7"], "--steps: must be a first and a last step, as 100:200, got '7:7'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture, arguments: list[str], message: str
):
    monkeypatch.chdir(tmp_path)
    write(Path("empty"), [])
    write(Path("good"), [record(1)])
    Path("none").mkdir()
    Path("note.txt").write_text("x")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    try:
        status = main(["report", *arguments])
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    told = capsys.readouterr().err.splitlines()
    assert message in told[-1]
    assert len(told) == 1 or told[0].startswith("usage: ")
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_the_page_lies_with_its_run_or_here_if_several(no_pictures, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write(Path(name), [record(1)])
    for _ in range(2):
        assert main(["report", "a/metrics.jsonl"]) == 0
        assert re.fullmatch(r"wrote a/report.html: [\d.]+ kB, 1 run\n", capsys.readouterr().out)
    assert main(["report", "a", "b"]) == 0
    assert re.fullmatch(r"wrote report.html: [\d.]+ kB, 2 runs\n", capsys.readouterr().out)
    Path("b/report.html").write_text("<!DOCTYPE html> somebody's notes")
    assert main(["report", "b"]) == 2
    assert "--out b/report.html is there already" in capsys.readouterr().err
    assert Path("b/report.html").read_text() == "<!DOCTYPE html> somebody's notes"


def test_some_of_the_runs_are_shown_where_they_are_named(no_pictures, tmp_path: Path):
    for folder in ("x", "y"):
        write(tmp_path / folder, [record(1, name) for name in ("adam", "lamb")])
    for names, labels in (("adam", ["x: adam", "y: adam"]), ("lamb,x: adam", ["x: adam", "x: lamb", "y: lamb"])):
        page = report(tmp_path / "x", tmp_path / "y", "--runs", names, out=tmp_path / "page.html")
        assert re.findall("<th scope=col>(.*?)</th>", page)[: len(labels)] == labels
        assert len(cells(page, "steps")) == len(labels)


@in_a_browser
def test_a_browser_opens_it_without_a_complaint(tmp_path: Path):
    layers = {"name": [EVIL], "ratio": [1.5], "residual_over_momentum": [0.0]}
    write(tmp_path, [record(i, name=EVIL, phase=EVIL, layers=layers, loss=math.nan) for i in (1, 2, 3)])
    report(tmp_path, out=tmp_path / "page.html")
    assert console_of(tmp_path / "page.html") == []
