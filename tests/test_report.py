"""``fusedonebit report``: one page, of whatever runs have left behind."""

from __future__ import annotations

import json
import math
import random
import re
import time
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
from launched import fusedonebit
from report_pages import data_of, in_a_browser, open_page, record, write

from fusedonebit.apps.cli import main

EVIL = "</script><img src=x onerror=alert(1)>{{data}}&amp;\u2028<!--"


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


def test_a_page_has_every_curve_mark_phase_map_and_table(tmp_path: Path):
    layers = {"name": ["embed", "head"], "residual_over_momentum": [0.5, 0.25], "ratio": [1.5, 1.0]}
    records = [record(i) for i in range(1, 9)]
    for told in records[4:]:
        told |= {
            "residual_over_momentum": 0.9,
            "layers": layers,
            "tokens_per_s": 1000,
            "lr": 0.1,
        }
    records[5] |= {"loss": math.nan, "skipped_steps": 1, "vetoed_steps": 1}
    records[6] |= {"skipped_steps": 1, "vetoed_steps": 1}
    records[7] |= {"held_out_loss": 0.3, "perplexity": 7.5, "skipped_steps": 1, "vetoed_steps": 1}
    start = {"optimizer": "one", "first_step": 1, "date": "2026-01-01T00:00:00+00:00", "world_size": 2}
    start |= {"settings": {"batch_size": 32, "steps": 9}, "options": {"freeze_step": 3}, "class": "OneBitAdam"}
    start |= {"groups": [{"lr": 0.1}, {"lr": 0.2}], "versions": {"torch": "2.11"}, "repr": "OneBitAdam (\nphase: x"}
    write(tmp_path, records, [start, start | {"first_step": 5}])
    page = report(tmp_path, out=tmp_path / "page.html")
    data = data_of(page)
    (run,) = data["runs"]
    assert {*run["curves"]} >= {"loss", "mean", "held_out_loss", "bytes_step", "bytes_total", "fp32_total", "lr"}
    assert {*run["curves"]} >= {"residual_over_momentum", "tokens_per_s", "perplexity"}
    assert run["curves"]["loss"]["x"] == [1, 2, 3, 4, 5, 7, 8]
    assert run["curves"]["loss"]["bad"] == [6]
    assert run["curves"]["held_out_loss"] == {"x": [8], "y": [0.3], "bad": [], "b": [800]}
    assert run["curves"]["fp32_total"] == {"x": [1, 8], "y": [3200, 25600]}
    assert run["skips"] == [[6, 1, 1]]
    assert run["bands"] == [[1, 3, "warmup"], [4, 8, "compression"]]
    assert data["own"] == ["perplexity"]
    assert [(m["kind"], m["layers"]) for m in data["heats"]] == [
        ("residual_over_momentum", ["embed", "head"]),
        ("ratio", ["embed", "head"]),
    ]
    for text in ("8 of 9", "32x", "run: batch_size", "option: freeze_step", "group 1: lr", "version: torch", "2.11"):
        assert text in page
    for text in ("resumed", "at step 5", "phase: x", "head", "one: 8 of 9 steps; it goes on, or was cut short"):
        assert text in page


def test_settings_that_differ_are_marked_and_others_not(tmp_path: Path):
    for name, size in (("a", 16), ("b", 32)):
        start = {"optimizer": "one", "first_step": 1, "settings": {"batch_size": size, "seed": 0}}
        write(tmp_path / name, [record(1)], [start])
    page = report(tmp_path / "a", tmp_path / "b", out=tmp_path / "page.html")
    assert "<tr class=\"differs\"><th scope=row>run: batch_size</th><td>16</td><td>32</td></tr>" in page  # fmt: skip
    assert "<tr><th scope=row>run: seed</th><td>0</td><td>0</td></tr>" in page


def test_nothing_is_loaded_from_anywhere(tmp_path: Path):
    write(tmp_path, [record(i) for i in range(1, 5)], [{"optimizer": "one", "first_step": 1, "repr": "x"}])
    page = report(tmp_path, out=tmp_path / "page.html")
    assert not re.findall(
        r"(?i)(?:https?|wss?|ftp|file):|//\w+\.\w|@import|@font-face|\bimport\(|\bfetch\(|XMLHttp", page
    )
    assert not re.findall(r"url\((?!#)", page)
    for tag, attributes in Tags(page).seen:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base", "form")
        assert not {"src", "href", "srcset", "action", "data", "background"} & attributes.keys()
    assert "default-src 'none'" in page


def test_text_from_runs_can_not_leave_its_place(tmp_path: Path):
    layers = {"name": [EVIL], "ratio": [1.5]}
    told = [record(i, name=EVIL, phase=EVIL, layers=layers, **{EVIL: 1.0 + i}) for i in (1, 2)]
    start = {"optimizer": EVIL, "first_step": 1, "settings": {EVIL: EVIL}, "repr": EVIL, "date": EVIL, "class": EVIL}
    start |= {"options": {"a": [EVIL]}, "groups": [{EVIL: EVIL}], "versions": {EVIL: EVIL}}
    folder = write(tmp_path / "<b>&'\"", told, [start, start])
    assert main(["report", str(folder), "--title", EVIL]) == 0
    page = (folder / "report.html").read_text()
    data = data_of(page)
    assert data["runs"][0]["label"] == EVIL
    assert data["phases"] == data["own"] == [EVIL]
    plain = write(tmp_path / "plain", [record(i, layers=layers | {"name": ["x"]}, y=1.0) for i in (1, 2)], [start])
    kinds = {tag for tag, _ in Tags(report(plain, out=tmp_path / "plain.html")).seen}
    assert {tag for tag, _ in Tags(page).seen} - {"details", "summary", "pre"} <= kinds
    assert not any(name.startswith("on") for _, attributes in Tags(page).seen for name in attributes)
    assert "<img" not in page


@pytest.mark.full
def test_three_runs_of_100000_steps_and_60_layers_are_a_page_below_2_mb(tmp_path: Path, capsys: pytest.CaptureFixture):
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
    data = data_of(page)
    assert [len(run["curves"]["loss"]["x"]) for run in data["runs"]] == [1500] * 3
    assert all(sum(n for _, n, _ in run["skips"]) == 2000 for run in data["runs"])
    assert {(len(m["layers"]), len(m["steps"]) >= 100) for m in data["heats"]} == {(60, True)}


def test_the_page_is_made_of_files_that_are_installed():
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '"fusedonebit.apps.report",' in project
    assert '"fusedonebit.apps.report" = ["*.html", "*.css", "*.js"]' in project
    files = resources.files("fusedonebit.apps.report")
    assert {f.name.rsplit(".")[-1] for f in files.iterdir() if f.is_file()} == {"py", "html", "css", "js"}


# ---------------------------------------------------------------- what it is made of


def test_files_of_an_older_version_have_a_page(tmp_path: Path):
    old = [
        {"optimizer": "adamw", "step": i, "loss": 1.0, "tokens_per_s": 10, "phase": "uncompressed", "bytes_step": 0}
        | {"bytes_total": 0, "bytes_fp32": 0, "skipped_steps": 0}
        for i in (1, 2)
    ]
    page = report(write(tmp_path, old), out=tmp_path / "page.html")
    assert "None were recorded" in page
    assert data_of(page)["runs"][0]["bands"] == [[1, 2, "uncompressed"]]


def test_runs_of_other_lengths_and_a_run_of_one_step_without_anything_share_a_page(tmp_path: Path):
    long = write(tmp_path / "long", [record(i) for i in range(1, 50)])
    short = write(tmp_path / "short", [{"optimizer": "two", "step": 3}])
    runs = data_of(report(long, short, out=tmp_path / "page.html"))["runs"]
    assert [(run["label"], run["last"], len(run["curves"])) for run in runs] == [
        ("long: one", 49, 6),
        ("short: two", 3, 0),
    ]


def test_damaged_lines_are_counted_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture):
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
    assert data_of(page)["runs"][0]["last"] == 2


def test_losses_that_are_all_no_numbers_still_have_a_page(tmp_path: Path):
    values = [math.nan, math.inf, -math.inf, 10**400]
    page = report(write(tmp_path, [record(i + 1, loss=v) for i, v in enumerate(values)]), out=tmp_path / "page.html")
    assert data_of(page)["runs"][0]["curves"]["loss"] == {"x": [], "y": [], "bad": [1, 2, 3, 4], "b": []}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "got 'missing': no such folder; check the path"),
        (["empty"], "got nothing in empty/metrics.jsonl; wait for the run's first step"),
        (["garbage"], "got 2 lines that are no records in garbage/metrics.jsonl"),
        (["none"], "DIR must be a folder with metrics.jsonl, as `fusedonebit train --out`"),
        (["."], "got '.' without one; did you mean empty garbage good"),
        (["note.txt"], "got 'note.txt': a file"),
        (["good", "empty"], "got nothing in empty/metrics.jsonl"),
        (["good", "--out", "none"], "--out must be a file to write, got the folder none; add /report.html"),
        (["good", "--out", "note.txt/x.html"], "--out note.txt/x.html can't be written: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture, arguments: list[str], message: str
):
    monkeypatch.chdir(tmp_path)
    write(Path("empty"), [])
    write(Path("good"), [record(1)])
    write(Path("garbage"), [])
    Path("garbage/metrics.jsonl").write_text("no\nrecords")
    Path("none").mkdir()
    Path("note.txt").write_text("x")
    assert main(["report", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1


def test_the_page_lies_with_its_run_or_here_if_there_are_several(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write(Path(name), [record(1)])
    assert main(["report", "a/metrics.jsonl"]) == 0
    assert re.fullmatch(r"wrote a/report.html: [\d.]+ kB, 1 run\n", capsys.readouterr().out)
    assert main(["report", "a", "b"]) == 0
    assert re.fullmatch(r"wrote report.html: [\d.]+ kB, 2 runs\n", capsys.readouterr().out)
    assert Path("a/report.html").exists()
    assert Path("report.html").exists()


# ---------------------------------------------------------------- real runs, and a browser


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two short runs on two ranks."""
    out = tmp_path_factory.mktemp("trained")
    (out / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    options = ["--model", "tiny", "--batch-size", "2", "--seq-len", "16", "--eval-every", "4", "--steps", "12"]
    names = ["--nproc", "2", "--compare", "adamw,onebit-lamb", "--freeze-step", "5", "--text", str(out / "text.txt")]
    result = fusedonebit("train", *options, *names, "--out", str(out))
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.long
def test_what_train_leaves_behind_becomes_a_page(trained: Path):
    result = fusedonebit("report", str(trained))
    assert result.returncode == 0, result.stderr
    data = data_of((trained / "report.html").read_text())
    adamw, lamb = data["runs"]
    assert (adamw["label"], lamb["label"]) == ("adamw", "onebit-lamb")
    assert lamb["bands"] == [[1, 5, "warmup"], [6, 12, "compression"]]
    assert lamb["curves"]["residual_over_momentum"]["x"] == list(range(6, 13))
    assert lamb["curves"]["held_out_loss"]["x"] == [4, 8, 12]
    residual, ratio = data["heats"]
    assert (residual["kind"], residual["steps"]) == ("residual_over_momentum", list(range(6, 13)))
    assert ratio["steps"] == list(range(1, 13))
    assert "embed.weight" in ratio["layers"]
    page = (trained / "report.html").read_text()
    for text in ("run: seq_len", "option: freeze_step", "version: torch", "gloo", "run: lr"):
        assert text in page


@in_a_browser
def test_a_browser_draws_it_and_hovering_hiding_and_zooming_work(trained: Path, tmp_path: Path):
    report(trained, out=tmp_path / "page.html")
    dom, console = open_page(tmp_path / "page.html")
    assert console == []
    assert 'data-drawn="yes"' in dom
    assert dom.count('class="card"') == 9  # 7 charts: loss twice, bytes twice, error, speed, rate; 2 maps
    assert ">nothing to show<" not in dom
    assert 'class="curve' in dom
    assert dom.count("data:image/png") == 2
    script = """
        const at = (svg, share) => { const b = svg.getBoundingClientRect();
          const where = { clientX: b.left + share * b.width, clientY: b.top + b.height / 2 };
          return { ...where, bubbles: true, pointerType: "mouse" }; };
        const first = document.querySelector("#charts svg"), told = (what) => document.body.append(what + "; ");
        const send = (kind, share, svg) => svg.dispatchEvent(new PointerEvent(kind, at(svg, share)));
        send("pointermove", 0.999, first);
        told("TIP " + document.getElementById("tip").textContent);
        send("pointermove", 0.9, document.querySelector("#heats svg"));
        told("HEAT " + document.getElementById("tip").textContent);
        for (const key of ["ArrowRight", "Escape"]) first.dispatchEvent(new KeyboardEvent("keydown", { key }));
        told("KEY " + document.getElementById("tip").textContent);
        document.querySelector("#legend button").click();
        told("CURVES " + document.querySelectorAll("#charts svg")[3].querySelectorAll(".curve").length);
        send("pointerdown", 0.5, first); send("pointermove", 0.8, first); send("pointerup", 0.8, first);
        told("ZOOM " + state.range.map(Math.round) + " " + document.getElementById("unzoom").hidden);
    """
    dom, console = open_page(tmp_path / "page.html", script)
    assert console == []
    assert re.search(r"TIP step 12adamw, this step[\d.]+adamw, running mean[\d.]+.*onebit-lamb, held out[\d.]+", dom)
    assert re.search(r"HEAT step \d+[a-z0-9.]+[\d.]+; ", dom)
    assert re.search(r"KEY step \d+adamw", dom)
    assert "CURVES 2; " in dom  # of two runs' bytes and what float32 would send one run's are left
    assert re.search(r"ZOOM [5-7],(9|10) false", dom)


@in_a_browser
def test_a_browser_draws_what_is_strange_without_an_error_and_runs_nothing_of_it(tmp_path: Path):
    layers = {"name": [EVIL], "ratio": [1.5], "residual_over_momentum": [0.0]}
    write(tmp_path / "a", [record(i, name=EVIL, phase=EVIL, layers=layers, loss=math.nan) for i in (1, 2, 3)])
    write(tmp_path / "b", [{"optimizer": "bare", "step": 7}])
    write(tmp_path / "c", [record(i, loss=-1.0, bytes_total=0, bytes_step=0) for i in (1, 2)])
    write(tmp_path / "d", [record(5, loss=3.0, residual_over_momentum=0, layers=layers)])
    for i, folders in enumerate((["b"], ["c"], ["a", "b", "c", "d"])):
        report(*(tmp_path / name for name in folders), out=tmp_path / f"{i}.html")
        dom, console = open_page(
            tmp_path / f"{i}.html", "for (const b of document.querySelectorAll('button')) b.click();"
        )
        assert console == []
        assert 'data-drawn="yes"' in dom
        assert "<img" not in dom
        assert "NaN" not in re.sub(r"(?s)<script.*?</script>|<td[^>]*>NaN</td>", "", dom)
