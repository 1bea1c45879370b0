"""The documentation site: its links lead somewhere, and its reference names all that is exported.

`make docs` builds it, and needs Sphinx for that; what is tested here needs none.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from enum import EnumMeta
from pathlib import Path
from typing import Any

import pytest

from fusedonebit.triton_kernels.op import OPS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
staging = importlib.import_module("staging")

MODULES = ("fusedonebit", "fusedonebit.comm", "fusedonebit.triton_kernels")
EXPORTED = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]


# ---------------------------------------------------------------- pages and links


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    staging.stage(folder)  # raises for a link to a file that is not there
    return folder


def test_every_page_of_the_docs_and_every_example_is_on_the_site(site: Path):
    pages = {str(path.relative_to(site)) for path in site.rglob("*.md")}
    assert {f"topics/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= pages
    assert {f"files/{e.relative_to(ROOT).with_suffix('.md')}" for e in (ROOT / "examples").rglob("*.py")} <= pages
    named = re.findall(r"^(?:topics|api)/[\w-]+$", (site / "index.md").read_text(), re.MULTILINE)
    for name in named:
        assert list(site.glob(f"{name}.*")), f"the table of contents has {name}"
    assert {f"api/{page.stem}" for page in (ROOT / "docs" / "api").glob("*.rst")} <= set(named)


def test_links_lead_to_files_and_to_headings(site: Path):
    count = 0
    for page in site.rglob("*.md"):
        text = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", path):
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.is_relative_to(site), f"{page.relative_to(site)} links to {link}"
            assert target.is_file(), f"{page.relative_to(site)} links to {link}"
            if anchor:
                assert anchor in map(staging.slug, staging.headings(target.read_text())), f"{page.name}: {link}"
            count += 1
    assert count > 40


def test_the_whole_readme_is_on_the_site_but_for_its_list_of_pages(site: Path):
    parts = "\n".join((site / f"{name}.md").read_text() for name, _, _ in staging.PARTS if name)
    headings = set(staging.headings(staging.README.read_text()))
    assert headings - set(staging.headings(parts)) == {"More"}


def test_the_algorithms_as_printed_are_the_first_topic_and_show_the_file(site: Path):
    topics = re.findall(r"^topics/([\w-]+)$", (site / "index.md").read_text(), re.MULTILINE)
    assert topics[0] == "reference"
    (path,) = re.findall(r"^```{literalinclude} /(\S+)$", (site / "topics" / "reference.md").read_text(), re.MULTILINE)
    assert (site / path).read_text() == (ROOT / "fusedonebit" / "reference.py").read_text()


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path):
    with pytest.raises(staging.LinkError, match=r"README.md links to docs/nothing.md, which is not there"):
        staging.Stage(tmp_path)._page("page", staging.README, "[a page](docs/nothing.md)")
    with pytest.raises(staging.LinkError, match=r"README.md includes nothing.py, which is not there"):
        staging.Stage(tmp_path)._page("page", staging.README, "```{literalinclude} nothing.py\n```\n")


# ---------------------------------------------------------------- the reference


def directives() -> str:
    return "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.rst")))


@pytest.mark.parametrize("exported", EXPORTED)
def test_what_is_exported_is_in_the_reference(exported: str):
    module, name = exported.rsplit(".", 1)
    given = getattr(importlib.import_module(module), name)
    # Constants and types are documented where they are made: that is where their docstrings are.
    places = [rf"auto\w+:: {module}\.(?:\w+\.)?{name}", rf"py:data:: {module}\.{name}"]
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
        sources = "".join(file.read_text() for file in (ROOT / module.split(".")[-1]).glob("*.py"))
        assert re.search(rf'^{name}\b[^\n]* = [^\n]*\n"""', sources, re.MULTILINE), f"{exported} has no docstring"


def undocumented(given: Any) -> list[str]:
    """Arguments that no docstring names: under Args, in double backticks, or in the op that it says "as for" of."""
    if inspect.ismodule(given) or isinstance(given, EnumMeta) or getattr(given, "_is_protocol", False):
        return []  # not called
    if inspect.isclass(given) and issubclass(given, Exception):
        return []  # made by this package only
    text = inspect.getdoc(given) or ""
    for other in re.findall(r"as for ``(\w+)``", text):
        if other in OPS:
            text += "\n" + (inspect.getdoc(OPS[other].eager) or "")
    listed = re.findall(r"^ *\*{0,2}([\w*, ]+?)(?: \(.*?\))?: ", text, re.MULTILINE)
    said = set(re.findall(r"\w+", " ".join([*listed, *re.findall(r"``(.*?)``", text)])))
    return [name for name in inspect.signature(given).parameters if name not in said]


def test_an_argument_that_is_forgotten_is_named():
    def update(x: int, lr: float, rest: int) -> None:
        """Moves ``x``.

        Args:
            lr: How far.
        """

    assert undocumented(update) == ["rest"]
