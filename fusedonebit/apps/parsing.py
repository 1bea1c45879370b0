"""Holds what the applications' command lines share: one-line errors, numbers, packages that may be missing."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
PACKAGES = {"sklearn": "scikit-learn"}
"""Names on the package index, where modules are called otherwise."""

LARGEST = 10**9
"""Number that an argument may be, where nothing else is said."""


class InputError(Exception):
    """Something the user gave can't be used; the text says it in one line."""


def need(*modules: str) -> None:
    """Raise InputError if one of these can't be imported."""
    if absent := missing(*modules):
        raise InputError(f"this command needs {absent}")


def installed(folder: str) -> bool:
    """Tell whether this folder of the package is there, with its files: an application may be missing."""
    return (Path(__file__).parents[1] / folder / "__init__.py").is_file()


def missing(*modules: str) -> str:
    """Say which of these can't be imported, and what installs them: packages by name, as this one is on no index.

    Returns:
        "" if all are there.
    """
    absent = [PACKAGES.get(module, module) for module in modules if find_spec(module) is None]
    return f"{' and '.join(absent)}: pip install {' '.join(absent)}" if absent else ""


def printable(text: str) -> str:
    """Put a text into one line, with nothing in it that a terminal obeys."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def listed(names: str | None) -> list[str]:
    """Take ``A,B`` apart, each name once."""
    return list(dict.fromkeys(name.strip() for name in names.split(","))) if names else []


def whole(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """Make the type of an argument that is a whole number."""

    def read(text: str) -> int | None:
        # Longer ones are too large anyhow, and Python refuses to read very long ones in words of its own.
        return int(text) if text.removeprefix("-").isdecimal() and len(text) < 30 else None

    return _number(f"a whole number of {least} to {most:,}", read, lambda value: least <= value <= most)


def positive(unit: str = "") -> Callable[[str], float]:
    """Make the type of an argument that is a number > 0, of a unit."""
    told = f"a number{f' of {unit}' * bool(unit)} > 0 and at most {LARGEST:,}"
    return _number(told, float, lambda value: 0 < value <= LARGEST)


def _number(told: str, read: Callable[[str], _T | None], fits: Callable[[_T], bool]) -> Callable[[str], _T]:
    def parse(text: str) -> _T:
        with suppress(ValueError):
            value = read(text.strip())
            if value is not None and fits(value):
                return value
        raise argparse.ArgumentTypeError(f"must be {told}, got {text!r}")

    return parse
