"""Runs commands and programs as a user does, but with ranks that are forked within milliseconds; see ``ranks``."""

from __future__ import annotations

import io
import os
import re
import runpy
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch.distributed as dist
from ranks import RankError, forked

from fusedonebit.apps import cli
from fusedonebit.apps.train import launch


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


def launched(program: Path, ranks: int = 0, timeout: float = 120.0) -> str:
    """Runs ``program`` in its folder, on so many ranks, or 0: alone; returns what it has written, rank by rank.

    Raises:
        RankError: if a rank fails, with what it has written; or if one does not end in time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
    processes, files = [], [program.with_name(f"{program.stem}-{rank}.txt") for rank in range(max(ranks, 1))]
    for rank, file in enumerate(files):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
        processes.append(forked().Process(target=_run, args=(program, own, file), daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(timeout)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    written = "\n".join(file.read_text() for file in files)
    if any(codes):
        raise RankError(f"{program.name} ended with {codes}:\n{written}")
    if None in codes:
        raise RankError(f"{program.name} did not end within {timeout:g} s:\n{written}")
    return written


def _run(program: Path, environment: dict[str, str], output: Path) -> None:
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    os.chdir(program.parent)
    sys.argv = [str(program)]
    runpy.run_path(str(program), run_name="__main__")


def check_bytes(printed: str, messages: int) -> None:
    """650 parameters, two messages to one peer (of an owner one): each a header, a scale, half of the padded bits."""
    (sent,) = [int(n) for n in re.findall(r"(\d+) bytes sent", printed)]
    assert messages * 650 / 16 < sent <= messages * (48 + 64)
