"""What ``make docs`` gives to Sphinx: the pages of the repository, with links that lead somewhere on a site too.

On a git host the pages link to each other, to the README and to files anywhere in the repository. Here

- the README is the first page, each of ``docs/*.md`` is a topic, each of ``docs/tables/*.md`` a page of tables, and
  ``PATH`` is the way through them;
- a file outside of ``docs/`` to which a page links (an example, a record) gets a page of its own, a picture is copied,
  and so is a file that a page includes;
- links follow: one that leads nowhere ends the build, one to a heading that is not there is Sphinx's warning.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
FOLDERS = {DOCS: "topics", DOCS / "tables": "tables"}
"""Where on the site a page of a folder lies."""

ALWAYS = (ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").rglob("*.py")))
"""Get a page also where nobody links to them."""

PATH = {
    "Start": ("topics/start", "topics/loops", "topics/compress", "topics/ecosystem", "examples"),
    "Choose": ("topics/choose", "topics/frontier", "topics/limits"),
    "Tune": ("topics/numerics", "topics/when", "topics/run-report", "topics/command-line"),
    "Scale": ("topics/beyond-one-node", "topics/checkpoints", "topics/faults", "topics/performance"),
    "Migrate": ("topics/migrating-from-deepspeed",),
    "Understand": (
        "topics/reference",
        "topics/design",
        "topics/tried",
        "topics/glossary",
        "topics/zero-one-adam",
        "topics/marsit",
        "topics/benchmarks",
    ),
    "Look up": (
        "api/optimizers",
        "api/adapters",
        "api/comm",
        "api/triton_kernels",
        "api/plan",
        "api/baselines",
        "tables",
    ),
    "Contribute": ("files/CONTRIBUTING", "files/tests/README", "files/CHANGELOG"),
}
"""The way through the site: a caption, and its pages in order; a test says that all are among them."""

EXAMPLES = """# Examples

Whole programs of less than 60 lines, each of which a test runs.

```{toctree}
:glob:

files/examples/*
files/examples/ecosystem/*
```
"""

TABLES = """# Tables

What was measured, counted or predicted; the pages before say what follows from it.

```{toctree}
:glob:

tables/*
```
"""

LANGUAGES = {".cff": "yaml"}
"""What highlights a file whose name does not end with its language."""

_PIECES = re.compile(r"(^ *```.*?^ *```$|<!--.*?-->|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_INCLUDED = re.compile(r"(?<=^```{literalinclude} )(\S+)$", re.MULTILINE)
_NAMED_BY_PATH = re.compile(r"\[docs/([\w-]+)\.md\]")  # on the site it is just that page


class LinkError(Exception):
    """A link leads to a file that is not there."""


class Stage:
    """Writes the pages into a folder, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: set[Path] = set()

    def fill(self) -> None:
        """Writes everything, and removes what earlier builds wrote and this one did not."""
        self._page("index", README, README.read_text() + contents())
        for page in sorted((*DOCS.glob("*.md"), *DOCS.glob("tables/*.md"))):
            self._target(page)
        for file in ALWAYS:
            self._target(file)
        self._write(Path("examples.md"), EXAMPLES)
        self._write(Path("tables.md"), TABLES)
        for page in sorted((DOCS / "api").glob("*.rst")):
            self._write(Path("api", page.name), page.read_text())
        for old in self.folder.rglob("*"):
            if old.is_file() and old not in self.written:
                old.unlink()

    def _page(self, name: str, source: Path, text: str) -> None:
        """Writes a Markdown page without comments, and with its links rewritten, but for those in code."""
        pieces = []
        for piece in _PIECES.split(text):
            if piece.startswith("<!--"):
                continue
            if not piece.lstrip(" ").startswith("`"):
                piece = _NAMED_BY_PATH.sub(r"[\1]", _LINK.sub(lambda m: self._link(m[1], source, name), piece))
            pieces.append(_INCLUDED.sub(lambda m: self._included(m[1], source), piece))
        self._write(Path(f"{name}.md"), "".join(pieces))

    def _included(self, path: str, source: Path) -> str:
        file = (source.parent / path).resolve()
        if not file.is_file():
            raise LinkError(f"{source.relative_to(ROOT)} includes {path}, which is not there")
        copy = Path("files", file.relative_to(ROOT))
        self._write(copy, file.read_bytes())
        return f"/{copy}"

    def _link(self, link: str, source: Path, page: str) -> str:
        if re.match(r"[a-z]+:", link):
            return link
        path, _, anchor = link.partition("#")
        target = (source.parent / path).resolve() if path else source
        if not target.is_file():
            raise LinkError(f"{source.relative_to(ROOT)} links to {link}, which is not there")
        where = "index.md" if target == README else self._target(target)
        return os.path.relpath(where, Path(page).parent) + (f"#{anchor}" if anchor else "")

    def _target(self, file: Path) -> str:
        """The staged path of a file of the repository, which it writes if that was not done yet."""
        inside = file.relative_to(ROOT)
        if file.suffix == ".png":
            self._write(Path("files", inside), file.read_bytes())
            return f"files/{inside}"
        folder = FOLDERS.get(file.parent) if file.suffix == ".md" else None
        name = f"{folder}/{file.stem}" if folder else f"files/{inside.with_suffix('')}"
        if self.folder / f"{name}.md" not in self.written:
            self.written.add(self.folder / f"{name}.md")  # pages link to each other
            text = file.read_text()
            if file.suffix != ".md":
                orphan = "" if inside.parts[0] == "examples" else "---\norphan: true\n---\n\n"
                text = f"{orphan}# {inside}\n\n```{LANGUAGES.get(file.suffix, file.suffix[1:])}\n{text}```\n"
            elif not text.startswith("# "):  # a table alone
                text = f"---\norphan: true\n---\n\n# {inside}\n\n{text}"
            self._page(name, file, text)
        return f"{name}.md"

    def _write(self, path: Path, content: str | bytes) -> None:
        file = self.folder / path
        self.written.add(file)
        data = content.encode() if isinstance(content, str) else content
        if not file.is_file() or file.read_bytes() != data:  # Sphinx reads again what has changed
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)


def contents() -> str:
    """Return the tables of contents that follow the README's text."""
    trees = (f"```{{toctree}}\n:hidden:\n:caption: {name}\n\n" + "\n".join(PATH[name]) for name in PATH)
    return "\n" + "\n```\n\n".join(trees) + "\n```\n"


def stage(folder: Path) -> None:
    """Fills ``folder`` with the site's sources."""
    Stage(folder).fill()
