"""What some commands need besides torch: what is missing, and how to get it."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = {"sklearn": "scikit-learn"}
"""Names on the package index, where modules are called otherwise."""


def missing(*modules: str) -> str:
    """Which of these can't be imported, and what installs them: packages by name, as this one is on no index.

    Returns:
        "" if all are there.
    """
    absent = [PACKAGES.get(module, module) for module in modules if find_spec(module) is None]
    return f"{' and '.join(absent)}: pip install {' '.join(absent)}" if absent else ""
