"""The command line: ``fusedonebit train``, ``report``, ``plan`` and ``migrate``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from .parsing import InputError, installed, printable

USAGE_ERROR = 2
INTERRUPTED, UNREAD = 130, 141  # as a shell reports SIGINT and SIGPIPE

COMMANDS = {
    "train": "train a byte-level transformer",
    "report": "one page of what runs have recorded",
    "plan": "what a step's messages cost on your network, and whether to compress them",
    "migrate": "what a DeepSpeed config becomes, key by key",
}
"""Help by name. Each has a folder, which may be missing, whose module ``<name>_command`` has ``DESCRIPTION``,
``add_arguments(parser)`` and ``run(arguments)``; the last may raise ``InputError``."""

FOLDERS = {name: f"apps/{name}" for name in COMMANDS} | {"migrate": "deepspeed/migrate"}
"""Where they are in the package."""

FIRST = """
a first thing to try, 2 minutes on 2 cores: AdamW and 1-bit Adam on two processes, then a page of both

  fusedonebit train --nproc 2 --compare adamw,onebit-adam --out runs/first
  fusedonebit report runs/first
"""


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default in (None, []) or isinstance(action.default, bool)
        return action.help if silent else super()._get_help_string(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, the only one that is imported; return the exit code: 2 for bad input, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    chosen = next((argument for argument in argv if not argument.startswith("-")), "")
    if chosen in COMMANDS and not installed(FOLDERS[chosen]):
        print(f"fusedonebit {chosen} is not installed: fusedonebit/{FOLDERS[chosen]} is missing", file=sys.stderr)
        return USAGE_ERROR
    parser = argparse.ArgumentParser(prog="fusedonebit", description="1-bit optimizers for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fusedonebit {__version__}")
    commands = parser.add_subparsers(dest="command", required=bool(argv))
    there = [name for name in COMMANDS if installed(FOLDERS[name])]
    for name in there:
        of_command = commands.add_parser(name, help=COMMANDS[name], formatter_class=Defaults)
        if name == chosen:
            command = importlib.import_module(f"fusedonebit.{FOLDERS[name].replace('/', '.')}.{name}_command")
            of_command.description = command.DESCRIPTION
            command.add_arguments(of_command)
    if not argv:
        print(parser.format_help() + (FIRST if {"train", "report"} <= {*there} else ""), end="")
        return 0
    arguments = parser.parse_args(argv)
    return exit_code(lambda: command.run(arguments))


def exit_code(run: Callable[[], int]) -> int:
    """Run a command; return what a shell gets, and say in one line what can't be used."""
    try:
        code = int(run())
        sys.stdout.flush()
        return code
    except InputError as error:
        print(f"fusedonebit: {printable(str(error))}", file=sys.stderr)  # a message may quote what a file holds
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # "| head": Python's own flush at exit would fail as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
