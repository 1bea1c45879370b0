"""What is exported is in the reference, docs/api/*.rst, and its docstring names every argument."""

from __future__ import annotations

import importlib
import inspect
import re
from enum import EnumMeta
from pathlib import Path
from typing import Any

import pytest

from fusedonebit.triton_kernels.op import OPS

ROOT = Path(__file__).parent.parent
MODULES = ("fusedonebit", "fusedonebit.comm", "fusedonebit.deepspeed", "fusedonebit.triton_kernels")
EXPORTED = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]


MADE_ELSEWHERE = {"fusedonebit.comm.Topology": "fusedonebit.ring_topology"}
"""Types that a module hands on from one outside it."""


def directives() -> str:
    return "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.rst")))


@pytest.mark.parametrize("exported", EXPORTED)
def test_what_is_exported_is_in_the_reference(exported: str):
    module, name = exported.rsplit(".", 1)
    given = getattr(importlib.import_module(module), name)
    # Constants and types are documented where they are made: that is where their docstrings are.
    places = [rf"auto\w+:: {module}\.(?:\w+\.)?{name}", rf"py:data:: {module}\.{name}"]
    if exported in MADE_ELSEWHERE:
        places += [rf"autodata:: {MADE_ELSEWHERE[exported]}\.{name}"]
    if isinstance(given, type):  # or where else it is exported, such as errors of comm
        places += [rf"auto\w+:: {other}\.{name}" for other in MODULES if f"{other}.{name}" in EXPORTED]
    found = re.search(rf"^\.\. (?:{'|'.join(places)})$", directives(), re.MULTILINE)
    assert found, f"{exported} is in no docs/api/*.rst: add it where it belongs"


@pytest.mark.parametrize("exported", EXPORTED)
def test_what_is_exported_says_what_it_is_and_what_it_takes(exported: str):
    module, name = exported.rsplit(".", 1)
    given = getattr(importlib.import_module(module), name)
    given = inspect.unwrap(given) if callable(given) else given
    if inspect.isclass(given) or inspect.isfunction(given) or inspect.ismodule(given):
        assert inspect.getdoc(given), f"{exported} has no docstring"
        missing = undocumented(given)
        assert not missing, f"the docstring of {exported} says nothing of {', '.join(missing)}"
    elif name != "__version__":  # whose docstrings are behind them in a source
        if exported in MADE_ELSEWHERE:
            sources = Path(importlib.import_module(MADE_ELSEWHERE[exported]).__file__).read_text()
        else:
            sources = "".join(file.read_text() for file in (ROOT / module.split(".")[-1]).glob("*.py"))
        assert re.search(rf'^{name}\b[^\n]* = [^\n]*\n"""', sources, re.MULTILINE), f"{exported} has no docstring"


def undocumented(given: Any) -> list[str]:
    """Arguments that no docstring names: under Args, in double backticks, or in the op that it says "as for" of."""
    if inspect.ismodule(given) or isinstance(given, EnumMeta) or getattr(given, "_is_protocol", False):
        return []  # not called
    if inspect.isabstract(given):
        return []  # neither: its subclasses are
    if inspect.isclass(given) and issubclass(given, Exception):
        return []  # made by this package only
    text = inspect.getdoc(given) or ""
    for other in re.findall(r"as for ``(\w+)``", text):
        if other in OPS:
            text += "\n" + (inspect.getdoc(OPS[other].eager) or "")
    listed = re.findall(r"^ *\*{0,2}([\w*, ]+?)(?: \(.*?\))?: ", text, re.MULTILINE)
    said = set(re.findall(r"\w+", " ".join([*listed, *re.findall(r"``(.*?)``", text)])))
    return [name for name in taken(given) if name not in said]


def taken(given: Any) -> list[str]:
    """The arguments of a call. Up to Python 3.11.2 ``signature`` prefers a ``__new__`` that takes anything."""
    if inspect.isclass(given) and inspect.isfunction(given.__init__):
        return list(inspect.signature(given.__init__).parameters)[1:]
    return list(inspect.signature(given).parameters)


def test_an_argument_that_is_forgotten_is_named():
    def update(x: int, lr: float, rest: int) -> None:
        """Moves ``x``.

        Args:
            lr: How far.
        """

    assert undocumented(update) == ["rest"]
