"""What commands say when something is missing, odd, or asked for in vain."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusedonebit.apps import corpus
from fusedonebit.apps.cli import COMMANDS, main

SMALL = ["--model", "tiny", "--batch-size", "2", "--seq-len", "16", "--eval-every", "4", "--save-every", "4"]
PLAN = ["plan", "--params", "340M", "--gpus", "256", "--gpus-per-node", "4", "--network", "4.1Gbps"]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return str(path)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    """Makes packages missing."""

    def hide(*modules: str) -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] in modules:
                monkeypatch.delitem(sys.modules, name)
        for name in modules:
            monkeypatch.setitem(sys.modules, name, None)

    return hide


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command refuses, for a usage error."""
    try:
        status = main(arguments)
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------- train


def test_a_freeze_step_that_is_no_number_is_told_of_auto(capsys):
    told = refused(capsys, "train", "--freeze-step", "abc")
    assert told.endswith("argument --freeze-step: must be a whole number >= 1 or auto, got 'abc'")


@pytest.mark.parametrize("names", ["onebit-adam", "onebit-lamb", "adamw,onebit-lamb-frozen"])
@pytest.mark.parametrize("freeze_step", ["10", "100"])
def test_a_run_that_would_never_compress_is_refused(names, freeze_step, text, tmp_path, capsys):
    asked = ["--steps", "10", "--freeze-step", freeze_step, "--text", text, "--out", str(tmp_path / "out")]
    told = refused(capsys, "train", "--compare", names, *asked)
    name = names.rpartition(",")[2]
    assert told == (
        f"fusedonebit: --freeze-step must be below --steps 10, or {name} would never compress, got {freeze_step}"
    )
    assert not (tmp_path / "out").exists()


def test_a_run_that_has_not_frozen_by_itself_says_so(without, text, tmp_path, capsys):
    without("matplotlib")
    asked = ["--steps", "4", "--freeze-step", "auto", "--text", text, "--out", str(tmp_path)]
    assert main(["train", *SMALL, *asked]) == 0
    assert "onebit-adam still warms up after 4 steps, and so has compressed nothing yet" in capsys.readouterr().out
    assert main(["train", *SMALL, *asked, "--freeze-step", "2"]) == 0
    assert "compressed nothing" not in capsys.readouterr().out


def test_text_that_is_no_file_is_refused_at_once(text, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path)):
        told = refused(capsys, "train", "--text", text, name, "--out", str(tmp_path / "out"))
        assert told == (
            f"fusedonebit: --text {name} can't be read: it must be a file, not a folder, a pipe or a device"
        )


def test_no_more_of_a_text_is_read_than_fits(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(corpus, "LARGEST", 1000)
    told = refused(capsys, "train", "--text", text, "--out", str(tmp_path / "out"))
    assert told == f"fusedonebit: --text {text} has more than 1,000 bytes; give a part of it"


# ---------------------------------------------------------------- what commands need


def test_no_table_needs_matplotlib(without, text, tmp_path, capsys):
    without("matplotlib")
    assert main([*PLAN, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Don't compress where a step computes for more than ")
    assert out.endswith("a picture needs matplotlib: pip install matplotlib\n")
    assert main(["train", *SMALL, "--steps", "4", "--text", text, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "held-out loss" in out
    assert out.endswith(f"wrote {tmp_path / 'metrics.jsonl'}\npictures need matplotlib: pip install matplotlib\n")


def test_the_labs_list_needs_nothing_but_torch(without, capsys):
    without("matplotlib", "rich", "sklearn")
    assert main(["lab", "--list"]) == 0
    assert re.search(r"tasks:\n  vgg\n.*optimizers:\n  adamw\n", capsys.readouterr().out, re.DOTALL)


def test_what_is_missing_is_named_as_the_index_calls_it(without, tmp_path, capsys):
    without("matplotlib", "rich", "sklearn")
    rich = "fusedonebit: this command needs rich: pip install rich"
    assert refused(capsys, *PLAN, "--out", str(tmp_path)) == rich
    assert refused(capsys, "train", "--out", str(tmp_path)) == rich
    both = "fusedonebit: this command needs rich and scikit-learn: pip install rich scikit-learn"
    assert refused(capsys, "lab", "--out", str(tmp_path)) == both


# ---------------------------------------------------------------- a copy that lacks an application

WITHOUT = """
import contextlib, io, sys
import fusedonebit
from fusedonebit.apps.cli import main

def told(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = main(arguments)
        except SystemExit as exit:
            status = exit.code
    return status, out.getvalue()

absent, *others = sys.argv[1:]
for name in fusedonebit.__all__:
    getattr(fusedonebit, name)
status, text = told("--help")
assert status == 0 and all(f"    {name} " in text for name in others) and f"    {absent} " not in text, text
assert not [m for m in sys.modules if m.startswith("fusedonebit.apps.") and m.count(".") > 2], "imported for --help"
for name in others:
    status, text = told(name, "--help")
    assert status == 0 and text.startswith(f"usage: fusedonebit {name} "), text
expected = {(absent,): f"fusedonebit {absent} is not installed: fusedonebit/apps/{absent} is missing\\n"}
if absent == "lab":
    needs = "fusedonebit: --optimizer ssdm needs fusedonebit lab, which is not installed\\n"
    expected["train", "--optimizer", "ssdm"] = needs
if absent == "plan":
    needs = "fusedonebit: --topology auto needs fusedonebit plan, which is not installed\\n"
    expected["train", "--optimizer", "marsit", "--topology", "auto"] = needs
for arguments, text in expected.items():
    assert told(*arguments) == (2, text), told(*arguments)
"""


@pytest.mark.long(but="lab")
@pytest.mark.parametrize("absent", COMMANDS)
def test_the_library_and_each_command_do_without_the_other_applications(absent, tmp_path):
    package = Path(__file__).parent.parent / "fusedonebit"
    copy = Path(shutil.copytree(package, tmp_path / "fusedonebit", ignore=shutil.ignore_patterns("__pycache__")))
    shutil.rmtree(copy / "apps" / absent)
    (copy / "apps" / absent / "__pycache__").mkdir(parents=True)  # git leaves such folders behind
    others = [name for name in COMMANDS if name != absent]
    alone = {**os.environ, "PYTHONPATH": str(tmp_path)}
    program = [sys.executable, "-c", WITHOUT, absent, *others]
    result = subprocess.run(program, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
