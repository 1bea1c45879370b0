"""Sphinx's settings; ``make docs`` builds the site from what ``staging`` makes of README.md and docs/."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import sphinx.ext.napoleon.docstring as napoleon
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
import staging

import fusedonebit

project = "fusedonebit"
author = "the fusedonebit authors"
copyright = "the fusedonebit authors, Apache-2.0"
version = release = fusedonebit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
nitpicky = True
nitpick_ignore_regex = [  # other projects' names: their pages are not asked, so that nothing is read from a network
    (r"py:.*", r"(torch|nn|dist|os|MPI|collections|contextlib|enum|pathlib|typing)\..*"),
    (r"py:.*", r"Tensor|DeviceMesh|RemovableHandle|Feedback|TypeError, ValueError"),
    # Kinds of tensors that ops take: of which dtype and shape, stands beside each.
    (
        r"py:class",
        r"(Any)?Floats|Doubles|(Double)?Per(Block|Element|Tensor)|(Coef)?Table|Layers|Factors|Partials|Bits|Packed|OfTensors"
        r"|Headers|Counters?|Starts|Indices|Flag|Moment|Sizes|GroupRows|Pieces|PieceSums|.*Annotated.*",
    ),
    # Behind TYPE_CHECKING, or a type variable.
    (r"py:.*", r"Aggregation|Coding|Options|Family|Spec|.*\.simulated\.T|.*\._Optimizer"),
    # What no user names.
    (r"py:.*", r"fusedonebit\.(core|optim|apps\.train)\..*|.*\.partition\.Section|fusedonebit\..*Options"),
    (
        r"py:.*",
        r".*\.(Deferred|Backup|OnePart|ErrorFeedback|SideOfParts|Bucket|OfRank|Scaled|Verdict|Looks|OwnVariance|Unit|Rows)",
    ),
]
smartquotes_action = "D"  # quotes stay straight
highlight_language = "sh"  # what is indented in the pages; api/*.rst say python

myst_heading_anchors = 4

napoleon_use_ivar = True  # attributes in a list, not each with a heading

autodoc_mock_imports = ["mpi4py"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"fusedonebit {version}"
html_copy_source = False
html_show_sphinx = False
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]


def _inline_math(translator: Any, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block_math(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def _as_written(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are written to be read as they are: |c| is a norm, and what is indented is a formula."""
    text, is_math = [], False
    for before, line in zip(["", *lines], lines, strict=False):
        indent, last = len(line) - len(line.lstrip()), next((t for t in reversed(text) if t.strip()), "")
        if line.strip() and not before.strip() and indent > len(last) - len(last.lstrip()):
            is_math = last.lstrip().startswith("..")
            if not (is_math or last.endswith("::")):
                text += [" " * (indent - 4) + ".. code-block:: text", ""]
        text.append(line)
    text = [re.sub(r"(: |^ *)([A-Za-z]\.)$", r"\1\\\2", line) for line in text]  # "gpus: n." begins no list
    lines[:] = _bars_escaped("\n".join(text)).split("\n")


def _bars_escaped(text: str) -> str:
    """``|c|`` is no substitution; in literals and in indented blocks bars stay what they are."""
    pieces = re.split(r"(``.*?``|:math:`.*?`|^\.\. .*\n\n(?: .*\n|\n)*)", text, flags=re.MULTILINE)
    return "".join(re.sub(r"(?<!\\)\|", r"\\|", piece) if k % 2 == 0 else piece for k, piece in enumerate(pieces))


def _without_links_back(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """A source's links back to the reference miss what is documented under two modules' names."""
    if page.startswith("_modules/") and "body" in context:
        context["body"] = re.sub(r'<a class="viewcode-back".*?</a>', "", context["body"])


def setup(app: Sphinx) -> None:
    """Fills the source folder; formulas become MathML, which browsers show by themselves, also offline."""
    staging.stage(Path(app.srcdir))
    app.connect("autodoc-process-docstring", _as_written, priority=400)  # before napoleon
    app.connect("html-page-context", _without_links_back)
    # "Bytes, headers included: ..." of a property is a sentence, not a type.
    napoleon.GoogleDocstring._parse_attribute_docstring = lambda self: self._consume_to_end()
    app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))


html_math_renderer = "mathml"
