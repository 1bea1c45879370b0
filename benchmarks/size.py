"""Counts what the repository has to be read, and what is installed; records it, so that it only shrinks.

``python -m benchmarks.size`` prints today's numbers, each beside its goal, and exits with 1 where one is worse than
``results/size.json`` has it; ``--update`` writes today's numbers there. Lines are those of files that git tracks, blank
ones and comments included; words are those of ``wc -w``; sdist and wheel are built as a release is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .pages import RESULTS, ROOT
from .ratchet import Counted, Numbers, main

RECORD = RESULTS / "size.json"
CODE = (".py", ".c", ".h")
PAGES = (".js", ".css", ".html")
PACKAGE, APPLICATIONS = ("fusedonebit", "comm", "triton_kernels"), "fusedonebit/apps"
GENERATED = ("docs/tables", "benchmarks/results")
UNITS = dict.fromkeys(("wheel_lines", "application_lines", "test_lines", "benchmark_lines", "words"), 100)
UNITS |= {"sdist_kb": 20, "wheel_kb": 20}
COUNTED = {
    "wheel_lines": ("lines of Python and C in the wheel", 24_000),
    "application_lines": ("lines of applications, DeepSpeed's left out", 3_500),
    "test_lines": ("lines of tests, the lab's left out", 33_000),
    "long_tests": ("test files of more than 450 lines", 0),
    "long_names": ("names of tests beyond 60 characters", 0),
    "borrowing": ("test modules that import from another test module", 0),
    "benchmark_lines": ("lines of benchmarks, the lab and its tests", 12_000),
    "words": ("words of docs, generated tables left out", 32_000),
    "readme_words": ("words of README.md", 900),
    "sdist_kb": ("kB of the sdist", 2_000),
    "wheel_kb": ("kB of the wheel", None),
}
"""What is counted: how the table calls it, and its goal."""


def tracked(*folders: str) -> list[Path]:
    """Return the files below folders that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def lines(*folders: str, suffixes: tuple[str, ...] = CODE) -> int:
    return sum(len(path.read_text().splitlines()) for path in tracked(*folders) if path.suffix in suffixes)


def words(*names: str) -> int:
    """Return the words of pages, but for those that programs write: whole folders, and between markers."""
    return sum(len(" ".join(written(path)).split()) for path in tracked(*names) if path.suffix in (".md", ".rst"))


def written(path: Path) -> Iterator[str]:
    """Yield a page's lines that people have written."""
    generated = any(path.is_relative_to(ROOT / folder) for folder in GENERATED)
    for line in path.read_text().splitlines():
        if line.startswith("<!-- end of "):
            generated = False
        elif not generated:
            generated = line.startswith("<!-- ") and line.strip("<!-> ").isupper()
            yield line


def of_tests() -> Numbers:
    modules = {path: path.read_text() for path in tracked("tests", "benchmarks/lab/tests") if path.suffix == ".py"}
    named = re.findall(r"^ *(?:async )?def (test_\w+)", "\n".join(modules.values()), re.MULTILINE)
    borrowing = [path for path, text in modules.items() if re.search(r"^ *(from|import) \.?test_", text, re.MULTILINE)]
    return {
        "test_lines": lines("tests"),
        "long_tests": sum(len(text.splitlines()) > 450 for text in modules.values()),
        "long_names": sum(len(name) > 60 for name in named),
        "borrowing": len(borrowing),
    }


def of_distributions() -> Numbers:
    """Build sdist and wheel, as ``make dist`` does; return their sizes."""
    with tempfile.TemporaryDirectory() as folder:
        build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
        subprocess.run([sys.executable, "-c", build, folder], cwd=ROOT, capture_output=True, check=True)
        (sdist,) = Path(folder).glob("*.tar.gz")
        how = ("--quiet", "--no-cache-dir", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
        subprocess.run([sys.executable, "-m", "pip", "wheel", *how, sdist], capture_output=True, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        return {"sdist_kb": sdist.stat().st_size // 1000, "wheel_kb": wheel.stat().st_size // 1000}


def measure() -> Counted:
    """Count everything."""
    numbers = {
        "wheel_lines": lines(*PACKAGE),
        "application_lines": lines(APPLICATIONS, suffixes=CODE + PAGES),
        **of_tests(),
        "benchmark_lines": lines("benchmarks"),
        "words": words("*.md", "*.rst"),
        "readme_words": words("README.md"),
        **of_distributions(),
    }
    goals = {key: "" if goal is None else f" ({goal:,})" for key, (_, goal) in COUNTED.items()}
    table = [f"{text:52}{f'{numbers[key]:,}{goals[key]}':>18}" for key, (text, _) in COUNTED.items()]
    names = {key: text for key, (text, _) in COUNTED.items()}
    return Counted({"repository": numbers}, table, names, UNITS)


if __name__ == "__main__":
    main("Count what there is to read, and to install.", measure, RECORD)
