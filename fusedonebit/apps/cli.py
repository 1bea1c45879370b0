"""The command line: ``fusedonebit train``, ``report``, ``lab``, ``plan`` and ``migrate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from .arguments import InputError, printable
from .lab import command as lab
from .migrate import command as migrate
from .plan import command as plan
from .report import command as report
from .train import command as train

USAGE_ERROR = 2
INTERRUPTED = 130  # as a shell reports SIGINT

COMMANDS = {"train": train, "report": report, "lab": lab, "plan": plan, "migrate": migrate}
"""Each module has ``HELP``, ``DESCRIPTION``, ``add_arguments(parser)`` and ``run(arguments)``, which may raise
``InputError``."""


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, [], False) else action.help


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 2 for bad input, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="fusedonebit", description="1-bit optimizers for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fusedonebit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(
            name, help=command.HELP, description=command.DESCRIPTION, formatter_class=_Defaults
        )
        command.add_arguments(of_command)
    arguments = parser.parse_args(argv)
    try:
        return COMMANDS[arguments.command].run(arguments)
    except InputError as error:
        print(f"fusedonebit: {printable(str(error))}", file=sys.stderr)  # a message may quote what a file holds
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
