"""The code in README.md, CONTRIBUTING.md and docs/ runs, and the programs called there understand the commands.

    ```python      is run: all of a page are one program, in order, under torchrun where they make a process group
    ```py          an excerpt: its lines are those of files that tests run, which a marker names
    ```sh, or indented by four    commands: each is parsed by the program that it calls, and run where that is quick
    ```json        a DeepSpeed config, every key of which ``fusedonebit migrate`` explains
    ```diff        two programs, before and after, both of which are run on two ranks
    ```text        no code: what a program prints, a drawing
    ```{literalinclude}   a file, as the site shows it: `make docs` fails where it is not there

Markers are comments, which no reader of a page sees:

    <!-- test: run             code that is run at this place: what a page need not show
    ... -->
    <!-- test: ranks 4 -->     how many ranks run the page; 2 otherwise
    <!-- test: lines of examples/plain.py -->              before an excerpt
    <!-- test: DeepSpeed's own -->                         before code that nobody can run here; it must compile
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fresh import Server
from launched import TORCHRUN, check_bytes, ran
from pages import BLOCKS, COMMANDS, FAST, PAGES, PARSE, ROOT, TABLES, Block, blocks_of, put_at_hand, source_of

from fusedonebit.apps import cli
from fusedonebit.apps.train import launch
from fusedonebit.deepspeed.migrate.deepspeed_config import Config, Fate
from fusedonebit.deepspeed.migrate.translate import translate

CLONE = "fusedonebit"
"""The folder that the pages clone into."""


# ---------------------------------------------------------------- blocks that are not run


def lines_of(code: str) -> list[str]:
    lines = (re.sub(r"(^|\s+)# .*$", "", line).strip() for line in code.splitlines())
    return [line for line in lines if line]


def check(block: Block) -> None:
    """Fails for a block that is neither run nor checked, or whose marker is not true."""
    if found := re.fullmatch(r"lines of (.*)", block.marker):
        files = found[1].split(", ")
        assert all(file.startswith(("examples", "tests")) for file in files), f"{block.place}: no test runs {files}"
        there = {line for file in files for line in lines_of((ROOT / file).read_text())}
        assert [line for line in lines_of(block.text) if line not in there] == [], f"{block.place}: are in no {files}"
    elif block.marker:
        assert block.marker == "DeepSpeed's own", f"{block.place}: there is no marker {block.marker!r}"
        compile(block.text, block.place, "exec")
    elif block.language == "json":
        config = Config(json.loads(block.text), block.place)
        translate(config)
        assert config.count(Fate.UNKNOWN) == 0, block.place
    else:
        known = ("python", "sh", "text", "diff", "{literalinclude}")
        assert block.language in known, f"{block.place}: nothing tests {block.language!r}"


def test_every_block_is_run_or_checked():
    for blocks in BLOCKS.values():
        for block in blocks:
            check(block)
    assert sum(block.is_run for blocks in BLOCKS.values() for block in blocks) >= 8


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```\nx = 1\n```\n", "nothing tests ''"),
        ("- a list\n\n  ```python\n  x = 1\n  ```\n", "begins a block in a list"),
        ("<!-- test: never mind -->\n```python\nx = 1\n```\n", "there is no marker 'never mind'"),
        ("<!-- test: lines of examples/plain.py -->\n\n```py\nx = 1\n```\n", r"are in no \['examples/plain.py'\]"),
        ("<!-- test: lines of examples/plain.py -->\nWords.\n```py\nx = 1\n```\n", "nothing tests 'py'"),
    ],
)
def test_a_block_that_nothing_covers_is_named(text: str, why: str):
    with pytest.raises(AssertionError, match=why):
        check(blocks_of("page.md", f"# Page\n\n{text}")[0])


# ---------------------------------------------------------------- links, and what errors say


def anchors(page: Path) -> set[str]:
    """Those that a git host gives to a page's headings, and MyST as well."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_link_leads_somewhere(page: Path):
    text = re.sub(r"^```.*?^```$|`[^`\n]+`|<!--.*?-->", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}, but {target.name} has no such heading"


def test_the_site_leads_through_every_page(tmp_path: Path):
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import staging
    finally:
        sys.path.remove(str(ROOT / "docs"))
    named = [name for names in staging.PATH.values() for name in names]
    assert len(named) == len(set(named))
    staging.stage(tmp_path)  # a page to which another links is there too
    pages = [page for page in tmp_path.rglob("*.[mr][ds]*") if "orphan: true" not in page.read_text()]
    places = {str(page.relative_to(tmp_path).with_suffix("")) for page in pages}
    listed = {place for place in places if place.startswith(("tables/", "files/examples/"))}
    assert places - listed == {"index", *named}, "give them a place in staging.PATH"
    assert staging.PATH["Understand"][0] == "topics/reference"


def test_messages_that_a_page_quotes_are_those_that_users_see():
    """docs/when.md is looked up by what an error or a warning says."""
    folders = (ROOT / "fusedonebit", ROOT / "comm", ROOT / "triton_kernels")
    sources = "".join(file.read_text() for folder in folders for file in folder.rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    text = re.sub(r"`[^`\n]+`", "", (ROOT / "docs/when.md").read_text())
    quoted = [each.removesuffix(" ...") for each in re.findall(r'"([^"\n]+)"', text) if len(each.split()) > 2]
    assert len(quoted) >= 8
    assert [each for each in quoted if each.lower() not in sources.lower()] == []


def test_the_papers_are_cited_in_full():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["license"] in (ROOT / "README.md").read_text()
    papers = {(paper["authors"][0]["family-names"], paper["year"]) for paper in cited["references"]}
    sources = (ROOT / "docs/reference.md").read_text().split("## Sources")[1]
    named = re.findall(r"\((\w+) (?:et al\.|& \w+), (?:\w+ )?(\d{4})\)", sources)
    assert len(named) == 7
    assert {(name, int(year)) for name, year in named} == papers


# ---------------------------------------------------------------- programs


@pytest.mark.long(but=["start"])
@pytest.mark.parametrize(
    "page", [path for path, blocks in BLOCKS.items() if any(b.is_run for b in blocks)], ids=lambda path: path.stem
)
def test_the_programs_of_a_page_run_one_after_the_other(page: Path, torch_alone: Server, tmp_path: Path):
    code = "\n".join(block.text for block in BLOCKS[page] if block.is_run)
    if not torch.cuda.is_available():
        code = code.replace('"cuda"', '"cpu"')
    asked = re.search(r"^<!-- test: ranks (\d+) -->", page.read_text(), re.MULTILINE)
    ranks = int(asked[1]) if asked else 2 * ("init_process_group" in code)
    printed = torch_alone.run(code, tmp_path, ranks, seconds=180)
    if page.name == "start.md":
        check_bytes(printed, messages=2)


@pytest.mark.long(but=["MarsitSGD"])
@pytest.mark.parametrize("optimizer", ["OneBitLamb", "MarsitSGD"])
def test_quick_start_runs_with_another_optimizer(torch_alone: Server, tmp_path: Path, optimizer: str):
    program, *others = (block.text for block in BLOCKS[ROOT / "docs/start.md"] if block.is_run)
    (instead,) = (block for block in others if optimizer in block)
    program, replaced = re.subn(r"optimizer = OneBitAdam\(.*\n", instead, program)
    assert replaced == 1
    assert f"optimizer = {optimizer}(" in program
    check_bytes(torch_alone.run(program, tmp_path, 2), messages=1 if optimizer == "MarsitSGD" else 2)


DIFFS = [block for blocks in BLOCKS.values() for block in blocks if block.language == "diff"]
TELL = """
if torch.distributed.get_rank() == 0:
    print(optimizer.stats()["bytes_step"], "bytes sent")
"""


@pytest.mark.long(but=1)
@pytest.mark.parametrize("block", DIFFS, ids=lambda block: block.place)
def test_both_sides_of_a_diff_run_and_the_new_one_sends_bits(block: Block, torch_alone: Server, tmp_path: Path):
    changed = [line for line in block.text.splitlines() if line.startswith(("+", "-"))]
    assert len(changed) == 5, f"{block.place} promises five lines"
    torch_alone.run(block.without("+"), tmp_path, 2)
    (sent,) = [int(n) for n in re.findall(r"(\d+) bytes sent", torch_alone.run(block.without("-") + TELL, tmp_path, 2))]
    assert 0 < sent < 2 * 4 * 650 / 2 / 10, "a tenth of what a ring of two sends of 650 floats"


# ---------------------------------------------------------------- commands


class _ParsedError(Exception):
    """A program has understood its arguments: it need not go on."""


@pytest.fixture
def at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages take for granted."""
    put_at_hand(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(program: Callable[[], Any], patch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Calls a program up to where it has parsed its arguments."""
    real = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: Any) -> Any:
        raise _ParsedError(real(self, *given))

    with patch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        with pytest.raises(_ParsedError) as stopped:
            program()
    return stopped.value.args[0]


def check_fusedonebit(arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    """All but the work itself: of a training also names and files are checked, a plan and a report are made."""
    given = parsed(lambda: cli.main(arguments), patch)
    started: list[Any] = []
    patch.setattr(launch, "run", lambda job, nproc: started.append(job) or 0)
    assert cli.main(arguments) == 0
    assert len(started) == (given.command == "train")


def check_module(module: str, arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec(module) is not None
    source = source_of(module)
    if module == "benchmarks.lab":
        from benchmarks.lab import command, contenders, tasks

        given = parsed(lambda: command.main(arguments), patch)
        for names, known in ((given.tasks, tasks.TASKS), (given.optimizers, contenders.CONTENDERS)):
            assert set(names.split(",") if names else ()) <= set(known)
    elif "argparse" not in source:
        assert not arguments
    elif re.search(r"TRITON_INTERPRET|import [^\n]*\baudit\b", source):  # switches it off for its whole process
        subprocess.run([sys.executable, "-c", PARSE, module, *arguments], check=True, cwd=ROOT)
    else:
        patch.setattr(sys, "argv", [module, *arguments])
        given = parsed(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True), patch)
        if module == "benchmarks":
            from benchmarks.registry import CASES

            assert set(given.cases) <= set(CASES)


@pytest.mark.long(but=4)
@pytest.mark.parametrize(("place", "command"), COMMANDS, ids=str)
def test_a_command_is_understood_by_what_it_calls(
    place: str, command: str, at_hand: Path, monkeypatch: pytest.MonkeyPatch
):
    name, *arguments = shlex.split(command)
    if name == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(arguments)
        if given.module:
            assert given.training_script == "fusedonebit"
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as torchrun's
            monkeypatch.setenv("WORLD_SIZE", given.nproc_per_node)
            check_fusedonebit(given.training_script_args, monkeypatch)
        elif given.training_script != "train.py":  # which is what the page has the reader write
            script = given.training_script.removeprefix(f"{CLONE}/")
            assert (ROOT / script).is_file()
            assert script.startswith("examples/")  # which have tests of their own
    elif name == "python":
        assert arguments[0] == "-m", command
        check_module(arguments[1], arguments[2:], monkeypatch)
    elif name == "fusedonebit":
        check_fusedonebit(arguments, monkeypatch)
    elif name == "make":
        if arguments[0] == "-C":
            assert arguments[1] == CLONE, command
            arguments = arguments[2:]
        makefile = (ROOT / "Makefile").read_text()
        targets = " ".join(re.findall(r"^([\w -]+):", makefile, re.MULTILINE)).split()
        known = {*targets, *re.findall(r"\$\((\w+)\)", makefile)}
        assert {argument.partition("=")[0] for argument in arguments} <= known, command
    elif name == "pip":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        found = re.fullmatch(rf"install (?:\.|\./{CLONE})(?:\[([\w,]+)\])?", " ".join(arguments))
        assert found, command
        assert set((found[1] or "dev").split(",")) <= set(extras)
    else:  # how to get what these pages are about
        known = ("git clone <this repository>", f"git clone <this repository> {CLONE}", f"cd {CLONE}")
        assert command in known, f"{place}: nothing checks {command!r}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_a_page_begins_with_whom_it_is_for(page: Path):
    first = next(text for text in page.read_text().split("\n\n")[1:] if not text.startswith("<!--"))
    assert re.match(r"For (whoever|users|readers|jobs|your|a loop|a run) ", first), first


@pytest.mark.parametrize("name", ["performance", "numerics", "frontier"])
def test_a_page_of_conclusions_is_read_in_minutes(name: str):
    text = (ROOT / f"docs/{name}.md").read_text()
    print(f"{name}: {len(text.split())} words (at most 1,500)")
    assert len(text.split()) <= 1500


@pytest.mark.parametrize("page", TABLES, ids=lambda path: path.stem)
def test_a_page_of_tables_says_which_command_writes_it(page: Path, monkeypatch: pytest.MonkeyPatch):
    told = re.match(r"# .+\n\n`python -m ([\w.]+)((?: --\w+)?)` writes these tables: ", page.read_text())
    assert told, page.name
    check_module(told[1], told[2].split(), monkeypatch)


TRAININGS = [line for _, line in COMMANDS if re.match(r"fusedonebit train|torchrun .*-m fusedonebit", line)]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", TRAININGS)
def test_a_training_command_runs(command: str, at_hand: Path):
    name, *arguments = shlex.split(command)
    launcher = TORCHRUN if name == "torchrun" else [sys.executable, "-m", "fusedonebit"]
    fast = FAST
    if "--freeze-step" in arguments:
        fast = [*fast, "--freeze-step", "6"]
    ran([*launcher, *arguments, *fast])


def test_the_list_of_promises_names_every_file_of_tests():
    tests = ROOT / "tests"
    there = [path.relative_to(tests).with_suffix("").as_posix() for path in tests.rglob("test_*.py")]
    listed = re.findall(r"`((?:\w+/)?test_[\w*]+|\w+/)`", (tests / "README.md").read_text())
    patterns = [f"{name}*" if name.endswith("/") else name for name in listed]
    assert [name for name in there if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in there)] == []
