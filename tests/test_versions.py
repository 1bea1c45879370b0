"""The benchmark of two versions of this repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.registry import Report
from benchmarks.versions import DELETED, KERNELS, LIMITS, RECORD, STEPS, compare, count

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


def test_every_call_is_judged_and_none_slower_in_median_and_best(capsys):
    """The record was made beside other work, which lengthens the median or the best of single calls.

    So one of the two beyond its limit is printed; both are a regression. Kernels without C are not judged.
    """
    _, table = json.loads(RECORD.read_text())["tables"]
    rows = table["rows"]
    assert [row["call"] for row in rows] == [*(f"step {s}" for s in STEPS), *(f"kernel {k}" for k in KERNELS)]
    slower = []
    for row in rows:
        kind, _, what = row["call"].partition(" ")
        if what.partition(",")[0] in DELETED:
            assert row["limit"] == "no C any more"
            continue
        limit = LIMITS[kind]
        assert row["limit"] == f"<= {limit}: {'PASS' if row['ratio'] <= limit else 'FAIL'}"
        assert row["ratio"] == pytest.approx(row["new ms"] / row["old ms"])
        assert row["of minima"] == pytest.approx(row["new min"] / row["old min"])
        if max(row["ratio"], row["of minima"]) > limit:
            with capsys.disabled():
                print(f"{row['call']}: {row['ratio']:.3f}, of minima {row['of minima']:.3f}; at most {limit}")
        if min(row["ratio"], row["of minima"]) > limit:
            slower.append(row["call"])
    assert not slower


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
