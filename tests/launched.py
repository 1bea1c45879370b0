"""Runs commands and programs as a user does: ``fusedonebit`` with ranks that are forked within milliseconds (see
``ranks``), and torchrun."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from ranks import forked

from fusedonebit.apps import cli
from fusedonebit.apps.train import launch

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


class Ended(NamedTuple):
    """How a command has ended, and what it has printed."""

    returncode: int
    stdout: str
    stderr: str


def fusedonebit(*arguments: str) -> Ended:
    """Runs ``fusedonebit`` in this process."""
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as out, io.StringIO() as err:
        patch.setattr(launch, "mp", SimpleNamespace(get_context=lambda _: forked()))
        with redirect_stdout(out), redirect_stderr(err):
            try:
                code = cli.main(arguments)
            except SystemExit as ended:  # of argparse
                code = int(ended.code or 0)
            finally:
                signal.signal(signal.SIGTERM, handler)
        return Ended(code, out.getvalue(), err.getvalue())


def ran(command: list[str], cwd: Path | None = None) -> str:
    """Runs a program, and returns what it prints; AssertionError, with what it complains of, if it fails."""
    environment = os.environ | ENVIRONMENT
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def check_bytes(printed: str, messages: int) -> None:
    """650 parameters, two messages to one peer (of an owner one): each a header, a scale, half of the padded bits."""
    (sent,) = [int(n) for n in re.findall(r"(\d+) bytes sent", printed)]
    assert messages * 650 / 16 < sent <= messages * (48 + 64)
