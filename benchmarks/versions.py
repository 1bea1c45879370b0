"""Two versions of this repository against each other on a CPU: ``python -m benchmarks.versions COMMIT [COMMIT]``.

Whole steps, and the kernels in C by themselves. Each version runs in processes of its own, from a folder of its own
with its own compiled C, and the two take turns call by call, so that what disturbs the machine disturbs both alike.
Memory lies elsewhere in each process, which makes a difference of per cents: hence several pairs of processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from .registry import Report

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("versions_worker.py")
NUMEL, PAIRS, ROUNDS = 1 << 23, 3, 31
LEAST, LONG = 5, 3000.0
"""So many turns are enough where they took so many milliseconds."""

STEPS = ("OneBitAdam", "OneBitLamb", "OneBitLion", "OneBitAdam, warm-up", "OneBitLamb, warm-up", "Lamb")
KERNELS = (
    *("flatten", "gradient_squares", "momentum_compress", "momentum_compress, preconditioned", "server_reduce"),
    *("apply_momentum", "apply_momentum, preconditioned", "adam_update", "lamb_update", "lamb_move"),
    *("lamb_ratio", "lamb_ratio, preconditioned", "lion_compress"),
)
"""Ops that either version has in C."""
LIMITS = {"step": 1.05, "kernel": 1.1}


class Version:
    """A process of one version, which times its calls.

    Args:
        folder: With its files.
        numel: Parameters, or elements of a kernel's tensors.
    """

    def __init__(self, folder: Path, numel: int) -> None:
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER.read_text(), str(numel)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )

    def milliseconds(self, name: str) -> float:
        """Of CPU time that one call of this name takes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        if not (answer := self.process.stdout.readline()):
            raise RuntimeError(f"a version failed at {name!r}: see above")
        return float(answer)

    def __enter__(self) -> Version:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()  # closes its input, which ends it


def extract(commit: str, folder: Path) -> None:
    """Puts the files of a commit into a new folder."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)


def compare(folders: Sequence[Path], numel: int, pairs: int, rounds: int, report: Report) -> None:
    """Adds a row for each step and kernel."""
    names = [*(f"step {name}" for name in STEPS), *(f"kernel {name}" for name in KERNELS)]
    samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for pair in range(pairs):
        with ExitStack() as stack:
            versions = [stack.enter_context(Version(folder, numel)) for folder in folders]
            for name in names:
                spent = 0.0
                for turn in range(rounds):
                    # Neither always comes first.
                    for which in (0, 1) if (pair + turn) % 2 else (1, 0):
                        samples[name][which].append(versions[which].milliseconds(name))
                        spent += samples[name][which][-1]
                    if turn + 1 >= LEAST and spent > LONG:
                        break
    columns = {"call": "<40", "old ms": ">8.2f", "new ms": ">8.2f", "ratio": ">6.3f"}
    columns |= {"old min": ">8.2f", "new min": ">8.2f", "of minima": ">9.3f", "limit": ">14"}
    table = report.table(f"{numel:,} fp32 elements in 64 tensors, one thread: medians and minima of CPU time", columns)
    for name, (old, new) in samples.items():
        before, after = statistics.median(old), statistics.median(new)
        ratio = after / before
        row = {
            "call": name,
            "old ms": before,
            "new ms": after,
            "ratio": ratio,
            "old min": min(old),
            "new min": min(new),
        }
        limit = report.limit(ratio, at_most=LIMITS[name.partition(" ")[0]])
        table.add(**row, **{"of minima": row["new min"] / row["old min"], "limit": limit})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=(__doc__ or "").split(":")[0])
    parser.add_argument("old", metavar="COMMIT")
    parser.add_argument("new", metavar="COMMIT", nargs="?", default="HEAD")
    parser.add_argument("--numel", type=int, help="parameters, and elements of a kernel's tensors")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of processes")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each call in each pair")
    given = parser.parse_args(arguments)
    report = Report(torch.device("cpu"), given.numel)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / name for name in ("old", "new")]
        for commit, folder in zip((given.old, given.new), folders, strict=True):
            extract(commit, folder)
        compare(folders, given.numel or NUMEL, given.pairs, given.rounds, report)


if __name__ == "__main__":
    main()
