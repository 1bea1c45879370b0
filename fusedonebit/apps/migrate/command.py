"""The body of ``fusedonebit migrate``."""

from __future__ import annotations

import argparse
import sys

from .config import Fate
from .reading import read

UNKNOWN_KEYS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add("config", metavar="ds_config.json", help="a DeepSpeed config, or its optimizer block; - is the standard input")
    add(
        "--numerics",
        choices=("recommended", "deepspeed"),
        default="recommended",
        help="this package's defaults, which do not diverge where DeepSpeed's do, or DeepSpeed's own formulas",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the script and what became of each key; 1 if some key is unknown.

    Raises:
        InputError: if the config can't be read or makes no sense.
    """
    from .script import translate

    config = read(arguments.config)
    sys.stdout.write(translate(config, arguments.numerics))
    return UNKNOWN_KEYS if config.count(Fate.UNKNOWN) else 0
