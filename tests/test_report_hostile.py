"""``fusedonebit report`` on damaged and hostile folders: a page, or one line of error; no traceback, no waiting."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_pages import pictures, record

from fusedonebit.apps.cli import main

EVIL = "</script>$\\frac{$<script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x00\x1b[2J\u2028\ud800"
BEYOND = 10**400


@pytest.fixture(autouse=True)
def _not_for_ever() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError("still not done after 60 s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def lines(*records: Any) -> str:
    return "".join((told if isinstance(told, str) else json.dumps(told)) + "\n" for told in records)


def nested(depth: int, bracket: str = "[]") -> str:
    return bracket[0] * depth + bracket[1] * depth


def layered(step: int, **told: Any) -> dict[str, Any]:
    return record(step, layers={"name": ["a", "b"], **told})


GOOD = [record(i) for i in range(1, 6)]

PAGES: dict[str, tuple[str | bytes, str | bytes | None]] = {
    "cut in a line": (lines(*GOOD)[:-40], None),
    "cut in a character": (lines(*GOOD).encode() + '{"optimizer": "é"}'.encode()[:-3], None),
    "binary after records": (lines(*GOOD).encode() + bytes(range(256)) * 50, None),
    "not UTF-8": (lines(*GOOD).encode().replace(b"one", b"\xff\xfe\xe9"), b"\xff\xfe"),
    "one line of 20 MB": (lines(*GOOD) + "x" * 20_000_000 + "\n" + lines(record(6)), None),
    "steps beyond 64 bits": (lines(*GOOD, *({"step": step} for step in (10**30, 2**63, -1))), None),
    "steps of other types": (lines(*GOOD, *({"step": step} for step in (1.5, "7", None, [1], True))), None),
    "losses beyond float64": (lines(*GOOD, record(6, loss=BEYOND), record(7, loss=-BEYOND)), None),
    "losses at the end of float64": (lines(*(record(i, loss=(-1) ** i * 1.7976931e308) for i in range(1, 61))), None),
    "NaN in counts": (lines(*GOOD, record(6, skipped_steps=float("nan"), bytes_total=float("nan"))), None),
    "Infinity in counts": (lines(*GOOD, record(6, skipped_steps=float("inf"), bytes_fp32=float("inf"))), None),
    "counts beyond float64": (lines(*GOOD, record(6, skipped_steps=BEYOND, bytes_total=BEYOND, rewarms=BEYOND)), None),
    "bytes at the end of float64": (lines(*(record(i, bytes_total=1e308, bytes_fp32=1e308) for i in (1, 2, 3))), None),
    "values of other types": (lines(*GOOD, record(6, loss="x", phase=3, lr=[1], bytes_total={}, layers="x")), None),
    "nothing but a step": (lines({"step": 1}, {"step": 2, "optimizer": None}), None),
    "layers beyond float64": (lines(*(layered(i, ratio=[BEYOND, 1e308]) for i in range(1, 6))), None),
    "layers of other types": (lines(layered(1, ratio=["x", None]), layered(2, ratio={}), layered(3, ratio=[[]])), None),
    "layers that are too few": (lines(layered(1, ratio=[1.5]), layered(2, ratio=[2.0] * 9, name=[[1], {}])), None),
    "nested deeply": (
        lines(*GOOD, nested(100_000), '{"a":' * 100_000, f'{{"optimizer": "one", "step": 6, "x": {nested(900)}}}'),
        None,
    ),
    "starts nested deeply": (
        lines(*GOOD),
        lines(*(f'{{"optimizer": "one", "options": {{"a": {nested(n)}}}}}' for n in (100, 900, 950, 980, 5000))),
    ),
    "starts of other types": (
        lines(*GOOD),
        lines([], 3, {"optimizer": ["one"]}, {"optimizer": {}}, {"optimizer": "one", "settings": [], "groups": [1]}),
    ),
    "starts with other values": (
        lines(*GOOD),
        lines({"optimizer": "one", "world_size": BEYOND, "settings": {"steps": BEYOND, "x": float("nan")}, "repr": 3}),
    ),
    "starts are binary": (lines(*GOOD), bytes(range(256))),
    "markup everywhere": (
        lines(record(1, name=EVIL, phase=EVIL, **{EVIL: 1.0}), layered(2, ratio=[2.0]) | {"optimizer": EVIL}),
        lines({"optimizer": EVIL, "settings": {EVIL: EVIL}, "repr": EVIL, "class": EVIL, "date": EVIL}),
    ),
    "a phase for each step": (lines(*(record(i, phase=str(i)) for i in range(1, 20_001))), None),
    "a key for each step": (lines(*(record(i, **{f"key{i}": 1.0}) for i in range(1, 2001))), None),
    "years of steps": (lines(record(1), {"optimizer": "one", "step": 2**53, "loss": 1.0}), None),
}  # fmt: skip


@pytest.mark.long(but=12)
@pytest.mark.parametrize("how", PAGES)
def test_damaged_records_are_passed_over_and_the_rest_is_a_page(how, tmp_path, capsys):
    metrics, starts = PAGES[how]
    for name, content in (("metrics.jsonl", metrics), ("starts.jsonl", starts)):
        if content is not None:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["report", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert re.fullmatch(r"wrote \S+report.html: .* 1 run(, \d+ damaged lines passed over)?\n", told.out)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert len(re.findall("<img(?! alt=)", page)) == 0
    for picture in pictures(page).values():
        assert 900 <= picture.width <= 910


# ---------------------------------------------------------------- no page


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "metrics.jsonl")


def link(to: str | Path) -> Callable[[Path], None]:
    return lambda folder: (folder / "metrics.jsonl").symlink_to(to)


def text(content: str | bytes) -> Callable[[Path], None]:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / "metrics.jsonl").write_bytes(data) and None


def many(folder: Path) -> None:
    text(lines(*(record(1, name=f"run{i}") for i in range(2000))))(folder)


ERRORS: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty folder": (lambda folder: None, "got '{}' without one"),
    "empty file": (text(""), "got nothing in {}/metrics.jsonl"),
    "white space": (text(" \n\t\r\n" * 100), "got nothing in {}/metrics.jsonl"),
    "binary": (text(bytes(range(256))), "lines that are no records"),
    "zeros": (text(b"\x00" * 40_000_000), "got 1 lines that are no records"),
    "no records": (text("[]\n3\nnull\n"), "got 3 lines that are no records"),
    "a pipe": (fifo, "got '{}' without one"),
    "an endless device": (link("/dev/zero"), "got '{}' without one"),
    "a folder for a file": (lambda folder: (folder / "metrics.jsonl").mkdir(), "got '{}' without one"),
    "a link to itself": (link("metrics.jsonl"), "got '{}' without one"),
    "a link to nowhere": (link("nowhere"), "got '{}' without one"),
    "a file that can't be read": (link("/proc/self/mem"), "can't be read: Input/output error"),
    "2000 runs": (many, "more than 200 runs"),
}


@pytest.mark.parametrize("how", ERRORS)
def test_folder_without_a_run_is_one_line_and_exit_code_2(how, tmp_path, capsys):
    make, says = ERRORS[how]
    make(tmp_path)
    check_refused([str(tmp_path)], says.format(tmp_path), capsys)
    assert not (tmp_path / "report.html").exists()


def check_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert says in told.err
    assert told.err.count("\n") == 1
    assert told.err[:-1].isprintable()


def test_paths_that_lead_nowhere_are_one_line(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    for given in (tmp_path / "loop", tmp_path / "loop" / "metrics.jsonl", tmp_path / ("x" * 5000), "a\nb\x1b[2J"):
        check_refused([str(given)], "", capsys)
    (tmp_path / "good").mkdir()
    text(lines(*GOOD))(tmp_path / "good")
    for out in (tmp_path / "loop", tmp_path / ("x" * 5000), "/dev/full"):
        check_refused([str(tmp_path / "good"), "--out", str(out)], "can't be ", capsys)
    starts = tmp_path / "good" / "starts.jsonl"
    os.mkfifo(starts)
    assert main(["report", str(tmp_path / "good")]) == 0
    starts.unlink()
    starts.symlink_to("/proc/self/mem")
    capsys.readouterr()
    check_refused([str(tmp_path / "good")], "can't be read: Input/output error", capsys)


def test_folder_with_a_name_of_any_bytes_has_its_page(tmp_path, capfd):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n\x1b[2J"))
    folder.mkdir()
    text(lines(*GOOD))(folder)
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").is_file()
    told = capfd.readouterr().out
    assert told[:-1].isprintable()
