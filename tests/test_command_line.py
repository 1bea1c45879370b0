"""What commands say when something is missing, odd, or asked for in vain."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab import command as lab
from fusedonebit.apps import corpus
from fusedonebit.apps.cli import COMMANDS, FOLDERS, main

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


JUNK = ("1e400", "-1e400", "nan", "inf", "-inf", "-1", "0", "", " ", "x", "1e-400", "0x10", "1e999Gbps")
JUNK += ("9" * 29, "9" * 5000)


def numeric_options() -> dict[str, argparse.Action]:
    """Those of all commands, by ``command option``."""
    found = {}
    modules = {command: f"fusedonebit.{FOLDERS[command].replace('/', '.')}.{command}_command" for command in COMMANDS}
    modules["lab"] = lab.__name__
    for command, module in modules.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        found |= {f"{command} {action.option_strings[0]}": action for action in parser._actions if action.type}
    return found


@pytest.mark.parametrize("option", numeric_options())
def test_a_number_that_makes_no_sense_is_one_clear_error(option):
    """What is taken in spite of all is 0, where that means something."""
    taken, refusals = [], []
    for text in JUNK:
        try:
            taken.append(numeric_options()[option].type(text))
        except argparse.ArgumentTypeError as error:
            refusals.append(str(error))
    assert all(re.match(r"must .*, got '", refusal) for refusal in refusals)
    print(f"{option}: {len(JUNK)} texts that are no numbers, taken: {taken}")
    assert taken == (
        [0] if option in ("train --seed", "train --full-precision-every", "plan --full-precision-every") else []
    )


@pytest.mark.parametrize("flag", ["--workers", "--rates"])
@pytest.mark.parametrize("text", [text for text in JUNK if len(text) < 100])
def test_and_so_are_lists_of_them(flag, text, tmp_path, capsys):
    assert lab.main([flag, f"1,{text}", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"fusedonebit: {flag} must be "), told


# ---------------------------------------------------------------- train


def test_a_freeze_step_that_is_no_number_is_told_of_auto(capsys):
    told = refused(capsys, "train", "--freeze-step", "abc")
    assert told.endswith("argument --freeze-step: must be a whole number of 1 to 1,000,000,000 or auto, got 'abc'")


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
    for name in (str(tmp_path / "pipe"), "/dev/zero"):
        told = refused(capsys, "train", "--text", text, name, "--out", str(tmp_path / "out"))
        assert told == (
            f"fusedonebit: --text {name} can't be read: it must be a file or a folder, not a pipe or a device"
        )


def test_no_more_of_a_text_is_read_than_fits(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(corpus, "LARGEST", 1000)
    told = refused(capsys, "train", "--text", text, "--out", str(tmp_path / "out"))
    assert told == f"fusedonebit: --text {text} has more than 1,000 bytes; give a part of it"


def test_a_folder_stands_for_the_files_of_text_in_it(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "empty").touch()
    (folder / "b" / "2.txt").write_text("two")
    (folder / "1.md").write_text("one")
    (folder / ".git" / "HEAD").write_text("hidden")
    (folder / "picture").write_bytes(b"\x89PNG\0")
    (tmp_path / "3.txt").write_text("three")
    assert bytes(corpus.load_text([str(folder), str(tmp_path / "3.txt")])) == b"one\n\ntwo\n\nthree"
    told = refused(capsys, "train", "--text", str(folder / ".git" / ".."), str(tmp_path / "none"))
    assert told.startswith(f"fusedonebit: --text {tmp_path / 'none'} can't be read: ")
    monkeypatch.setattr(corpus, "LARGEST", 5)
    assert "more than 5 bytes" in refused(capsys, "train", "--text", str(folder))
    assert "more than 5 bytes in all" in refused(
        capsys, "train", "--text", str(tmp_path / "3.txt"), str(folder / "1.md")
    )
    (tmp_path / "nothing").mkdir()
    assert "has no file of text in it" in refused(capsys, "train", "--text", str(tmp_path / "nothing"))


def test_ddp_and_devices_that_cannot_be_had_are_refused(text, tmp_path, capsys, monkeypatch):
    where = ["--text", text, "--out", str(tmp_path / "out")]
    assert "--ddp needs several processes" in refused(capsys, "train", "--ddp", *where)
    two = ["--nproc", "2", "--compare", "adamw,onebit-adam"]
    assert "--ddp is for optimizers that fusedonebit.ddp.attach() takes" in refused(
        capsys, "train", "--ddp", *two, *where
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device must be cpu or auto" in refused(capsys, "train", "--device", "cuda", *where)


# ---------------------------------------------------------------- what there is


def test_without_a_command_it_shows_what_there_is(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^ +{name} ", out, re.MULTILINE) for name in COMMANDS)
    tried = [line.split() for line in out.splitlines() if line.startswith("  fusedonebit ")]
    assert [words[1] for words in tried] == ["train", "report"]
    for words in tried:  # what it says can be done
        with pytest.raises(SystemExit) as exit:
            main([*words[1:], "--help"])
        assert exit.value.code == 0


STARTS = """
import sys
from {of} import main
class Torch:
    def find_spec(self, name, *more):
        if name == "torch":
            print("torch", file=sys.stderr)
            sys.meta_path.remove(self)
sys.meta_path.insert(0, Torch())
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("of", "asked"),
    [
        ("fusedonebit.apps.cli", ["train", "--freeze-step", "9", "--steps", "9"]),
        ("benchmarks.lab.command", ["--workers", "3"]),
    ],
)
def test_something_is_said_before_torch_is_imported(of, asked):
    """Its import takes a second or two, and each rank's another."""
    program = [sys.executable, "-c", STARTS.format(of=of), *asked]
    told = subprocess.run(program, capture_output=True, text=True, timeout=100).stderr.splitlines()
    assert told[0].startswith("starting ")
    assert told[1] == "torch"
    assert told[-1].startswith("fusedonebit: --")


@pytest.mark.parametrize("asked", [["--help"], ["migrate", "--help"]], ids=" ".join)
def test_help_is_said_without_torch(asked):
    program = [sys.executable, "-c", STARTS.format(of="fusedonebit.apps.cli"), *asked]
    said = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert said.stdout.startswith("usage: fusedonebit ")
    assert said.stderr == ""


def test_a_closed_pipe_ends_a_command_without_a_traceback():
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.lab", "--list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        running.stdout.close()  # before anything is written, as ``| head`` may
        assert (running.stderr.read(), running.wait()) == (b"", 141)


# ---------------------------------------------------------------- what commands need


def test_no_table_needs_matplotlib(without, text, tmp_path, capsys):
    without("matplotlib")
    assert main(PLAN) == 0
    assert capsys.readouterr().out.startswith("Compress where a step computes for less than ")
    drawn = "fusedonebit: this command needs matplotlib: pip install matplotlib"
    assert refused(capsys, *PLAN, "--out", str(tmp_path)) == drawn
    assert main(["train", *SMALL, "--steps", "4", "--text", text, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "held-out loss" in out
    told = [f"wrote {tmp_path / 'metrics.jsonl'}", "pictures need matplotlib: pip install matplotlib"]
    assert out.splitlines()[-3:] == [*told, f"look at it: fusedonebit report {tmp_path}"]


def test_the_labs_list_needs_nothing_but_torch(without, capsys):
    without("matplotlib", "rich", "sklearn")
    assert lab.main(["--list"]) == 0
    assert re.search(r"tasks:\n  vgg\n.*optimizers:\n  adamw\n", capsys.readouterr().out, re.DOTALL)


def test_what_is_missing_is_named_as_the_index_calls_it(without, tmp_path, capsys):
    without("matplotlib", "rich", "sklearn")
    rich = "fusedonebit: this command needs rich: pip install rich"
    assert main(PLAN) == 0  # needs nothing
    assert refused(capsys, "train", "--out", str(tmp_path)) == rich
    both = "fusedonebit: this command needs rich and scikit-learn: pip install rich scikit-learn"
    assert lab.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == both


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

absent, folder, *others = sys.argv[1:]
for name in fusedonebit.__all__:
    getattr(fusedonebit, name)
status, text = told("--help")
assert status == 0 and all(f"    {name} " in text for name in others) and f"    {absent} " not in text, text
assert not [m for m in sys.modules if m.startswith("fusedonebit.apps.") and m.count(".") > 2], "imported for --help"
for name in others:
    status, text = told(name, "--help")
    assert status == 0 and text.startswith(f"usage: fusedonebit {name} "), text
expected = {(absent,): f"fusedonebit {absent} is not installed: fusedonebit/{folder} is missing\\n"}
if absent == "plan":
    needs = "starting marsit on 1 process\\n"
    needs += "fusedonebit: --topology auto needs fusedonebit plan, which is not installed\\n"
    expected["train", "--optimizer", "marsit", "--topology", "auto"] = needs
for arguments, text in expected.items():
    assert told(*arguments) == (2, text), told(*arguments)
"""


@pytest.mark.long(but="plan")
@pytest.mark.parametrize("absent", COMMANDS)
def test_library_and_commands_do_without_other_applications(absent, tmp_path):
    package = Path(__file__).parent.parent / "fusedonebit"
    copy = Path(shutil.copytree(package, tmp_path / "fusedonebit", ignore=shutil.ignore_patterns("__pycache__")))
    if absent == "migrate":
        shutil.rmtree(copy / "deepspeed")
    else:
        shutil.rmtree(copy / "apps" / absent)
        (copy / "apps" / absent / "__pycache__").mkdir(parents=True)  # git leaves such folders behind
    others = [name for name in COMMANDS if name != absent]
    alone = {**os.environ, "PYTHONPATH": str(tmp_path)}
    program = [sys.executable, "-c", WITHOUT, absent, FOLDERS[absent], *others]
    result = subprocess.run(program, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
