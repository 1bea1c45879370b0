"""The sweep of blocks and warps: what is counted in compiled kernels, and that the chosen variant is sound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.pages import TABLES, tables_in

ROOT = Path(__file__).parent.parent
PROGRAM = """
import json
from dataclasses import asdict
from benchmarks import tuning
names = ("momentum_compress", "server_reduce, W=64", "server_reduce, W=8")
chosen = [(name, *tuning.chosen(name)) for name in names]
picked = [("momentum_compress", 1024, 2), *chosen]
variants = [tuning.variant(*each) for each in picked]
walks = {r["walk"]: r for r in tuning.walks()}
limits = [v.limits(tuning.H200) for v in variants]
tables = [tuning.table(variants), tuning.walk_table(list(walks.values()))]
record = json.loads((tuning.RESULTS / "sm_90.json").read_text())
recorded = [tuning.Variant(**each) for each in record["variants"] if each["block"] == tuning.BLOCK]
published = [tuning.table(recorded), tuning.walk_table(record["walks"])]
print(json.dumps([[asdict(v) for v in variants], limits, walks, tables, published]))
"""


@pytest.fixture(scope="module")
def counted() -> list:
    """A process of its own, since here kernels may be interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_chosen_variants_have_no_spills_and_few_instructions(counted):
    _, compress, many, few = counted[0]
    for v in (compress, many, few):
        assert v["spills"] == 0
        assert v["widths"]["16"] >= 4  # c is read and written by 128 bits a thread
    assert few["instructions"] * 32 / few["block"] <= 55
    assert few["barriers"] <= 8
    limits, of_server, _ = counted[1][1:]
    assert max(limits["issue"], limits["units"]) < limits["memory"]
    # Partial sums in float64 hide behind the memory.
    assert limits["units"] < 0.5 * limits["memory"]
    assert of_server["issue"] > of_server["memory"]  # as docs/tables/tuning.md says


@pytest.mark.long
def test_threads_with_more_elements_need_fewer_instructions_each(counted):
    two, four, *_ = counted[0]
    assert (two["num_warps"], four["num_warps"]) == (2, 4)
    assert two["instructions"] * 2 < four["instructions"] * 4
    assert two["bytes"] == four["bytes"]


@pytest.mark.long
def test_the_kept_walk_has_eight_ranks_and_fewer_instructions(counted):
    walks = counted[2]
    before, kept = walks["one by one"], walks["eight under way"]
    assert kept["spills"] == 0
    assert kept["instructions"] < 0.8 * before["instructions"]
    assert kept["barriers"] <= before["barriers"] / 4
    assert (before["ranks_under_way"], kept["ranks_under_way"]) == (1, 8)


@pytest.mark.long
def test_both_tables_are_markdown_with_the_chosen_row_in_bold(counted):
    table, walks = counted[3]
    assert [line.startswith("| **") for line in table.splitlines()[2:]] == [False, True, True, True]
    assert len(walks.splitlines()) == 2 + 5


@pytest.mark.long
def test_the_page_says_what_was_counted(counted):
    assert tables_in(TABLES / "tuning.md") == "\n\n".join(counted[4])


@pytest.mark.long
def test_a_measured_sweep_runs_as_a_dry_run_on_the_cpu():
    command = [sys.executable, "-m", "benchmarks.tuning", "--device", "cpu", "--numel", "20000", "--rounds", "1"]
    done = subprocess.run([*command, "--kernels", "momentum_compress"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of a copy") == 16
    assert "no result" in done.stdout
    assert not (ROOT / "benchmarks" / "results" / "tuning" / "cpu.json").exists()
