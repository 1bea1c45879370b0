"""The pages, their code by blocks, and what programs and commands there are given."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TABLES = sorted((ROOT / "docs/tables").glob("*.md"))
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *TABLES)
PIECE = re.compile(
    r"^<!-- test: run\n(?P<hidden>.*?)-->"
    r"|^<!-- test: (?P<marker>[^\n]*?) -->\n*(?=`{3})"
    r"|^(?P<fence>`{3,}) *(?P<language>\S*)[^\n]*\n(?P<fenced>.*?)^(?P=fence)$"
    r"|(?<=\n\n)(?P<indented>(?: {4}[^\n]*\n|\n(?= {4}))+)",
    re.MULTILINE | re.DOTALL,
)
FAST = shlex.split("--model tiny --batch-size 2 --seq-len 16 --steps 12 --eval-every 6 --save-every 6")
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


class Block(NamedTuple):
    """Code of a page; what is indented has the language "sh", a comment "python"."""

    place: str
    language: str
    text: str
    marker: str

    @property
    def is_run(self) -> bool:
        return self.language == "python" and not self.marker

    def without(self, sign: str) -> str:
        """What a diff is without the lines that it adds ("+") or takes away ("-")."""
        return "".join(f"{line[1:]}\n" for line in self.text.splitlines() if not line.startswith(sign))

    @property
    def commands(self) -> list[str]:
        """Its commands, without comments; a line that goes on is one."""
        if self.language != "sh":
            return []
        lines = (re.sub(r"(^|\s+)#.*$", "", line) for line in self.text.replace("\\\n", " ").splitlines())
        return [command.strip() for line in lines for command in re.split(r";|&&", line) if command.strip()]


def blocks_of(page: str, text: str) -> list[Block]:
    """All code of a page, in order; AssertionError for a block where nothing looks for it."""
    blocks, marker = [], ""
    for piece in PIECE.finditer(text):
        if piece["marker"]:
            marker = piece["marker"]
            continue
        place = f"{page}:{text.count(chr(10), 0, piece.start()) + 1}"
        language, code = piece["language"], piece["fenced"]
        if piece["hidden"] is not None:
            language, code = "python", piece["hidden"]
        elif code is None:
            language, code = "sh", re.sub(r"^ {4}", "", piece["indented"], flags=re.MULTILINE)
        blocks.append(Block(place, language, code, marker))
        marker = ""
    missed = re.search(r"^\s*(```|~~~).*", PIECE.sub("", text), re.MULTILINE)
    assert missed is None, f"{page}: {missed[0].strip()!r} begins a block in a list or the like"
    return blocks


BLOCKS = {path: blocks_of(str(path.relative_to(ROOT)), path.read_text()) for path in PAGES}
COMMANDS = [(block.place, line) for blocks in BLOCKS.values() for block in blocks for line in block.commands]


def put_at_hand(folder: Path) -> None:
    """Puts into a folder what the pages take for granted."""
    (folder / "my.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (folder / "ds_config.json").write_text('{"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 100}}}')
    for name in ("adam", "lamb", "mine"):
        (folder / "runs" / name).mkdir(parents=True)
        record = {"optimizer": name, "step": 1, "loss": 1.0, "phase": "warmup", "bytes_step": 8, "bytes_total": 8}
        (folder / "runs" / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")


def source_of(module: str) -> str:
    """The program that ``python -m module`` runs."""
    file = ROOT / module.replace(".", "/")
    return (file / "__main__.py" if file.is_dir() else file.with_suffix(".py")).read_text()
