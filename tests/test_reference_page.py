"""The page of the reference says where each of its lines is in the code."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
from zero_one_in_float64 import Reference as ZeroOneReference

from fusedonebit import reference

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/reference.md").read_text().partition("## The same lines in the code")[2]


@cache
def defined(file: str) -> set[str]:
    """Functions, classes and their methods of a file."""
    scopes = [("", ast.parse((ROOT / file).read_text()).body)]
    scopes += [(f"{node.name}.", node.body) for node in scopes[0][1] if isinstance(node, ast.ClassDef)]
    return {f"{within}{node.name}" for within, body in scopes for node in body if hasattr(node, "name")}


def test_each_function_that_the_page_names_exists():
    named = [(file, name) for file, names in re.findall(r"`([^`]+\.py): ([^`]+)`", PAGE) for name in names.split(", ")]
    rows = [row for row in re.findall(r"^\| (\d[^|]*)\|(.*)$", PAGE, re.M) if "as 1-bit Adam's" not in row[1]]
    print(f"{len(named)} names in {len(rows)} rows")
    lines = {"1, 2", "3", "14, 15, 16, 17, 18, 19, 20, 21", "4, 5, 6", "8, 11", "10, 12, 14", "5, 6"}
    assert lines <= {lines.strip() for lines, _ in rows}
    assert [lines for lines, where in rows if not re.search(r"`[^`]+\.py: [^`]+`", where)] == []
    assert [f"{file}: {name}" for file, name in named if name not in defined(file)] == []


@pytest.mark.parametrize(
    ("heading", "functions"),
    [
        ("1-bit Adam", [reference.State, reference.adam, reference.onebit_adam, reference.exchange]),
        ("1-bit LAMB", [reference.LambState, reference.lamb, reference.freeze, reference.onebit_lamb]),
        ("0/1 Adam, Algorithm 1", [ZeroOneReference]),
        ("Marsit, Algorithm 1", [reference.marsit]),
        ("Marsit, Algorithm 2", [reference.marsit_sgd]),
    ],
)
def test_the_page_has_each_numbered_line_of_the_reference(heading, functions):
    comments = "".join(map(inspect.getsource, functions))
    printed = {n for pair in re.findall(r"#.*?lines? (\d+)(?: and (\d+))?", comments) for n in pair if n}
    printed |= set(re.findall(r"; line (\d+)", comments))
    tables = dict(re.findall(r"^([^|\n]+):\n\n((?:\|.*\n)+)", PAGE, re.MULTILINE))
    rows = {
        n for row in re.findall(r"^\| ([\d, to]+) \|", tables[heading], re.MULTILINE) for n in re.findall(r"\d+", row)
    }
    print(f"{heading}: lines {sorted(printed, key=int)}")
    assert printed
    assert printed <= rows
