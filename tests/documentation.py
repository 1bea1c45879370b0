"""The code in README.md and docs/*.md, and what becomes of each block in the tests.

    ```python      is run: all of a page are one program, in order, under torchrun where they make a process group
    ```py          an excerpt: its lines are those of files that tests run, which a marker names
    ```sh, or indented by four    commands: each is parsed by the program that it calls, and run where that is quick
    ```json        a DeepSpeed config, every key of which ``fusedonebit migrate`` explains
    ```text        no code: what a program prints, a drawing
    ```{literalinclude}   a file of the package, as the site shows it

Markers are comments, which no reader of a page sees:

    <!-- test: run             code that is run at this place: what a page need not show
    ... -->
    <!-- test: ranks 4 -->     how many ranks run the page; 2 otherwise
    <!-- test: lines of examples/plain.py -->              before an excerpt
    <!-- test: DeepSpeed's own -->                         before code that nobody can run here; it must compile
    <!-- test: make test-ecosystem runs OneBitTrainer -->  before a block whose libraries only that target installs
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TESTED = ("examples", "tests")
"""Folders whose files tests run."""

_PIECE = re.compile(
    r"^<!-- test: run\n(?P<hidden>.*?)-->"
    r"|^<!-- test: (?P<marker>.*?) -->"
    r"|^(?P<fence>`{3,}) *(?P<language>\S*)(?P<argument>[^\n]*)\n(?P<fenced>.*?)^(?P=fence)$"
    r"|(?<=\n\n)(?P<indented>(?: {4}[^\n]*\n|\n(?= {4}))+)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """Code of a page; ``language`` is "" where it is indented, "hidden" where it is a comment."""

    page: str
    line: int
    language: str
    text: str
    marker: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether it is part of its page's program."""
        return self.language in ("python", "hidden") and not self.marker

    @property
    def is_commands(self) -> bool:
        return self.language in ("", "sh")


class UncoveredError(AssertionError):
    """Nothing tests a block."""


def blocks_of(page: str, text: str) -> list[Block]:
    """All code of a page, in order."""
    blocks, marker, end = [], "", 0
    for piece in _PIECE.finditer(text):
        if text[end : piece.start()].strip():  # a marker belongs to what follows at once
            marker = ""
        line, end = text.count("\n", 0, piece.start()) + 1, piece.end()
        if piece["marker"]:
            marker = piece["marker"]
            continue
        language, code = piece["language"] or "", piece["fenced"]
        if piece["hidden"] is not None:
            language, code = "hidden", piece["hidden"]
        elif code is None:
            code = re.sub(r"^ {4}", "", piece["indented"], flags=re.MULTILINE)
        elif language == "{literalinclude}":
            code = piece["argument"].strip()
        elif not language:
            language = "(none)"  # unlike an indented one: it may be anything
        blocks.append(Block(page, line, language, code, "" if marker.startswith("ranks") else marker))
        marker = ""
    if hidden := re.search(r"^\s*(```|~~~).*", _PIECE.sub("", text), re.MULTILINE):
        raise UncoveredError(
            f"{page}: {hidden[0].strip()!r} begins a block in a list or the like, where nothing looks for it"
        )
    return blocks


def program(blocks: list[Block]) -> str:
    """What a page's blocks are together."""
    return "\n".join(block.text for block in blocks if block.is_run)


def ranks(text: str, code: str) -> int:
    """How many run it; 0: without torchrun."""
    asked = re.search(r"^<!-- test: ranks (\d+) -->", text, re.MULTILINE)
    return int(asked[1]) if asked else 2 * ("init_process_group" in code)


def check(block: Block) -> None:
    """Raises UncoveredError for a block that is neither run nor checked, or whose marker is not true."""
    if block.is_run or (block.is_commands and not block.marker):
        return  # the programs are run, each command is checked, by tests of their own
    if block.language == "text" and not block.marker:
        _check_text(block)
    elif block.language == "{literalinclude}" and not block.marker:
        _check_included(block)
    elif block.language == "json" and not block.marker:
        _check_config(block)
    elif block.marker == "DeepSpeed's own" and "deepspeed" in block.text:
        compile(block.text, str(block), "exec")
    elif found := re.fullmatch(r"lines of (.*)", block.marker):
        _check_lines(block, found[1].split(", "))
    elif found := re.fullmatch(r"make test-ecosystem runs (\w+)", block.marker):
        _check_ecosystem(block, found[1])
    elif block.marker:
        raise UncoveredError(f"{block}: there is no marker {block.marker!r}")
    else:
        raise UncoveredError(f"{block}: nothing tests a block of {block.language!r}; see tests/documentation.py")


def _check_text(block: Block) -> None:
    code = re.search(
        r"^\s*(>>> |import |from \S+ import|(make|fusedonebit|python|torchrun|pip|mpirun) )", block.text, re.M
    )
    if code:
        raise UncoveredError(f"{block}: says that it is no code, but {code[0].strip()!r} is")


def _check_included(block: Block) -> None:
    file = ((ROOT / block.page).parent / block.text).resolve()
    if not (file.is_file() and file.is_relative_to(ROOT / "fusedonebit")):
        raise UncoveredError(f"{block}: {block.text!r} is no file of the package")


def _check_config(block: Block) -> None:
    from fusedonebit.apps.migrate.script import translate

    from fusedonebit.apps.migrate.config import Config, Fate

    config = Config(json.loads(block.text), str(block))
    translate(config, "recommended")
    if unknown := config.count(Fate.UNKNOWN):
        raise UncoveredError(f"{block}: migrate does not know {unknown} of its keys")


def _check_lines(block: Block, files: list[str]) -> None:
    there = set()
    for file in files:
        if not file.startswith(TESTED):
            raise UncoveredError(f"{block}: no test runs {file}")
        there |= set(_lines((ROOT / file).read_text()))
    if missing := [line for line in _lines(block.text) if line not in there]:
        raise UncoveredError(f"{block}: {missing[0]!r} is no line of {', '.join(files)}")


def _lines(code: str) -> Iterator[str]:
    for line in code.splitlines():
        if stripped := re.sub(r"(^|\s+)# .*$", "", line).strip():
            yield stripped


def _check_ecosystem(block: Block, name: str) -> None:
    compile(block.text, str(block), "exec")
    if f"class {name}(" not in block.text and f"class {name}:" not in block.text:
        raise UncoveredError(f"{block}: does not define {name}")
    if f'"{name}")' not in (ROOT / "tests/ecosystem/test_ecosystem.py").read_text():
        raise UncoveredError(f"{block}: tests/ecosystem/test_ecosystem.py does not take {name} from its page")


def words(command: str) -> list[str]:
    """As a shell takes it apart; what is no command is taken apart anyhow, for an error that shows it."""
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def commands(block: Block) -> list[str]:
    """Its commands, without comments; a line that goes on is one."""
    joined = block.text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s+)#.*$", "", line).strip() for line in joined.splitlines())
    return [command.strip() for line in lines for command in re.split(r";|&&", line) if command.strip()]
