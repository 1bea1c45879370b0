"""The body of ``fusedonebit migrate``."""

from __future__ import annotations

import argparse

from ...apps.parsing import printable
from .deepspeed_config import Fate

UNKNOWN_KEYS = 1
DESCRIPTION = (
    "Print the call of OneBitAdam, OneBitLamb or ZeroOneAdam that stands for a DeepSpeed config, and say of every key "
    "what becomes of it. Exit status 1: some key is unknown; 2: a bad file."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    text = "a DeepSpeed config, or its optimizer block; - is the standard input"
    parser.add_argument("config", metavar="ds_config.json", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Print what each key becomes; return 1 if some key is unknown.

    Raises:
        InputError: if the config can't be read or makes no sense.
    """
    from .reading import read
    from .translate import translate

    config = read(arguments.config)
    print("\n".join(map(printable, [*translate(config), ""])))
    print("\n".join(config.ledger()))
    return UNKNOWN_KEYS if config.count(Fate.UNKNOWN) else 0
