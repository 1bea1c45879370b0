"""The benchmark of two versions of this repository."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.registry import Report
from benchmarks.versions import KERNELS, STEPS, compare, count

ROOT = Path(__file__).parents[1]


@pytest.mark.full
@pytest.mark.needs_compiler
def test_versions_take_turns_in_every_step_and_kernel():
    report = Report(torch.device("cpu"), numel=20_000)
    compare([ROOT, ROOT], 20_000, 1, 2, report)
    rows = report.tables[0].rows
    assert [row["call"] for row in rows] == [*(f"step {s}" for s in STEPS), *(f"kernel {k}" for k in KERNELS)]
    assert all(row["old ms"] > 0 and row["new ms"] > 0 for row in rows)
    assert {row["limit"].split(", ")[-1] for row in rows} == {"not judged", "no C any more"}


def test_lines_count_each_file_once_and_applications_apart(tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, name, lines in [
        (old, "fusedonebit/adam.py", 5),
        (old, "fusedonebit/lab/tasks.py", 3),
        (old, "comm/wire.py", 2),
        (new, "fusedonebit/optim/adam.py", 4),
        (new, "fusedonebit/apps/lab/tasks.py", 3),
        (new, "triton_kernels/native/update.c", 1),
    ]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1\n" * lines)
    (old / "fusedonebit" / "comm").symlink_to(old / "comm")
    report = Report(torch.device("cpu"))
    count([old, new], report)
    assert {row["folder"]: (row["old"], row["new"]) for row in report.tables[0].rows} == {
        "comm": (2, 0),
        "fusedonebit": (5, 0),
        "fusedonebit/apps/lab": (0, 3),
        "fusedonebit/lab": (3, 0),
        "fusedonebit/optim": (0, 4),
        "triton_kernels/native": (0, 1),
        "all but applications": (7, 5),
    }
