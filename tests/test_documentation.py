"""Every block of code in README.md and docs/*.md runs, or is checked in another way; see ``documentation``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documentation
import pytest
import test_readme
import torch
from documentation import PAGES, ROOT, Block, UncoveredError, blocks_of, commands, words
from launched import launched

from fusedonebit.apps import cli
from fusedonebit.apps.train import launch

BLOCKS = {path: blocks_of(str(path.relative_to(ROOT)), path.read_text()) for path in PAGES}
COMMANDS = [
    (block, line) for blocks in BLOCKS.values() for block in blocks if block.is_commands for line in commands(block)
]
FAST = [
    "--model",
    "tiny",
    "--batch-size",
    "2",
    "--seq-len",
    "16",
    "--steps",
    "12",
    "--eval-every",
    "6",
    "--save-every",
    "6",
]
"""Appended to a training command, where the last one counts."""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ENVIRONMENT = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def how(command: str) -> str:
    """What the tests do with a command."""
    name, *arguments = words(command)
    if name == "fusedonebit" and arguments:
        return {"plan": "run", "train": "run in full", "lab": "run in full"}.get(arguments[0], "parsed")
    if name == "torchrun" and "train" in arguments:
        return "run in full"
    return "the reader's" if name in ("git", "cd") else "parsed"


# ---------------------------------------------------------------- all blocks


def test_no_block_is_left_out():
    """Prints which page has what; `pytest -s` shows it."""
    print(f"\n{'page':28} {'blocks':>6}   executed                          checked otherwise")
    for path, blocks in BLOCKS.items():
        for block in blocks:
            documentation.check(block)
        visible = [block for block in blocks if block.language != "hidden"]
        lines = Counter(how(line) for block in visible if block.is_commands for line in commands(block))
        executed = {"python": sum(block.is_run for block in visible), "commands": lines["run"]}
        executed["commands in full"] = lines["run in full"]
        checked = {"commands": lines["parsed"], "the reader's": lines["the reader's"]}
        checked["excerpts"] = sum(block.marker.startswith("lines of") for block in visible)
        checked["make test-ecosystem"] = sum(block.marker.startswith("make") for block in visible)
        checked["text"] = sum(block.language == "text" for block in visible)
        told = [", ".join(f"{count} {name}" for name, count in of.items() if count) for of in (executed, checked)]
        print(f"{path.name:28} {len(visible):6}   {told[0]:33} {told[1]}")
    assert sum(block.is_run for blocks in BLOCKS.values() for block in blocks) >= 8


def check_page(text: str) -> None:
    for block in blocks_of("page.md", text):
        documentation.check(block)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```py\nx = 1\n```\n", "nothing tests a block of 'py'"),
        ("```\nx = 1\n```\n", "nothing tests a block of '(none)'"),
        ("```{literalinclude} fusedonebit/none.py\n```\n", "'fusedonebit/none.py' is no file of the package"),
        ("```{literalinclude} tests/conftest.py\n```\n", "'tests/conftest.py' is no file of the package"),
        ("```bash\nmake demo\n```\n", "nothing tests a block of 'bash'"),
        ("- a list\n\n  ```python\n  x = 1\n  ```\n", "begins a block in a list"),
        ("```text\nfrom fusedonebit import OneBitAdam\n```\n", "says that it is no code"),
        ("<!-- test: never mind -->\n```python\nx = 1\n```\n", "there is no marker 'never mind'"),
        ("<!-- test: lines of examples/plain.py -->\n\n```py\nx = 1\n```\n", "is no line of examples/plain.py"),
        ("<!-- test: lines of docs/conf.py -->\n```py\nimport re\n```\n", "no test runs docs/conf.py"),
        (
            "<!-- test: lines of examples/plain.py -->\nWords.\n```py\nimport torch\n```\n",
            "nothing tests a block of 'py'",
        ),
        (
            "<!-- test: make test-ecosystem runs Other -->\n```python\nclass Other:\n    pass\n```\n",
            "does not take Other",
        ),
    ],
)
def test_a_block_that_nothing_covers_is_named(text: str, why: str):
    with pytest.raises(UncoveredError, match=re.escape(why)):
        check_page(f"# Page\n\n{text}")


# ---------------------------------------------------------------- programs


@pytest.mark.long(but=["README"])
@pytest.mark.parametrize(
    "page", [path for path, blocks in BLOCKS.items() if any(b.is_run for b in blocks)], ids=lambda path: path.stem
)
def test_the_programs_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path):
    code = documentation.program(BLOCKS[page])
    if not torch.cuda.is_available():
        code = code.replace('"cuda"', '"cpu"')
    (tmp_path / "page.py").write_text(code)
    printed = launched(tmp_path / "page.py", documentation.ranks(page.read_text(), code), timeout=180)
    if page.name == "README.md":
        test_readme.check_bytes(printed, messages=2)


# ---------------------------------------------------------------- commands


class _ParsedError(Exception):
    """A program has understood its arguments: it need not go on."""


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., argparse.Namespace]:
    """Calls a program up to where it has parsed its arguments."""
    real = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: Any) -> Any:
        raise _ParsedError(real(self, *given))

    def run(program: Callable[..., Any], *given: Any) -> argparse.Namespace:
        with monkeypatch.context() as patched:
            patched.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
            with pytest.raises(_ParsedError) as stopped:
                program(*given)
        return stopped.value.args[0]

    return run


@pytest.fixture
def at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages take for granted."""
    (tmp_path / "my.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "ds_config.json").write_text('{"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 100}}}')
    for name in ("adam", "lamb", "mine"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        record = {"optimizer": name, "step": 1, "loss": 1.0, "phase": "warmup", "bytes_step": 8, "bytes_total": 8}
        (tmp_path / "runs" / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _check_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in arguments:
        assert target in targets or re.fullmatch(r"(OUT|PYTHON)=\S+", target), target


def _check_pip(arguments: list[str]) -> None:
    install, what = arguments
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    found = re.fullmatch(r"\.(?:\[([\w,]+)\])?", what)
    assert install == "install", arguments
    assert found, arguments
    assert set((found[1] or "dev").split(",")) <= set(extras)


def _check_fusedonebit(arguments: list[str], parse: Callable[..., argparse.Namespace], patch: Any) -> None:
    """All but the work itself: of a training also names and files are checked, a plan is made."""
    if ">" in arguments:
        arguments = arguments[: arguments.index(">")]
    given = parse(cli.main, arguments)
    if given.command == "lab":
        from fusedonebit.apps.lab import contenders, tasks

        for names, known in ((given.tasks, tasks.TASKS), (given.optimizers, contenders.CONTENDERS)):
            assert set(names.split(",") if names else ()) <= set(known)
        return
    started: list[Any] = []
    patch.setattr(launch, "run", lambda job, nproc: started.append(job) or 0)
    assert cli.main(arguments) == 0
    assert len(started) == (given.command == "train")


PARSE = """
import argparse, runpy, sys
real = argparse.ArgumentParser.parse_args
def parse_and_stop(self, *given):
    real(self, *given)
    sys.exit()
argparse.ArgumentParser.parse_args = parse_and_stop
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
sys.exit("it parses nothing")
"""


def _check_module(module: str, arguments: list[str], parse: Callable[..., argparse.Namespace], patch: Any) -> None:
    assert importlib.util.find_spec(module) is not None
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    source = ROOT / (module.replace(".", "/") + ("/__main__.py" if is_package else ".py"))
    if "argparse" not in source.read_text():
        assert not arguments
        return
    if re.search(
        r"TRITON_INTERPRET|import [^\n]*\baudit\b", source.read_text()
    ):  # switches Triton's interpreter off for its whole process
        subprocess.run([sys.executable, "-c", PARSE, module, *arguments], check=True, cwd=ROOT)
        return
    patch.setattr(sys, "argv", [module, *arguments])
    given = parse(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))
    if module == "benchmarks":
        from benchmarks.registry import CASES

        assert set(given.cases) <= set(CASES)


@pytest.mark.long(but=4)
@pytest.mark.parametrize(("block", "command"), COMMANDS, ids=str)
def test_a_command_is_understood_by_what_it_calls(
    block: Block, command: str, at_hand: Path, parse: Callable[..., argparse.Namespace], monkeypatch: pytest.MonkeyPatch
):
    name, *arguments = words(command)
    if name == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(arguments)
        if given.module:
            assert given.training_script == "fusedonebit"
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as torchrun's
            monkeypatch.setenv("WORLD_SIZE", given.nproc_per_node)
            _check_fusedonebit(given.training_script_args, parse, monkeypatch)
        else:
            assert (ROOT / given.training_script).is_file()
            assert given.training_script.startswith("examples/")  # which have tests of their own
    elif name == "python":
        assert arguments[0] == "-m", command
        _check_module(arguments[1], arguments[2:], parse, monkeypatch)
    elif name == "fusedonebit":
        _check_fusedonebit(arguments, parse, monkeypatch)
    elif name == "make":
        _check_make(arguments)
    elif name == "pip":
        _check_pip(arguments)
    else:  # how to get what these pages are about
        assert command in ("git clone <this repository>", "cd fusedonebit"), f"{block}: nothing checks {command!r}"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [line for _, line in COMMANDS if how(line) == "run in full"])
def test_a_training_command_runs(command: str, at_hand: Path):
    name, *arguments = words(command)
    launcher = [*TORCHRUN] if name == "torchrun" else [sys.executable, "-m", "fusedonebit"]
    fast = FAST if "train" in arguments else []
    result = subprocess.run([*launcher, *arguments, *fast], capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
