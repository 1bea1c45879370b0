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
limits = [v.limits(tuning.H200) for v in variants]
record = json.loads((tuning.RESULTS / "sm_90.json").read_text())
recorded = [tuning.Variant(**each) for each in record["variants"] if each["block"] == tuning.BLOCK]
walks = tuning.walk_table(record["walks"])
print(json.dumps([[asdict(v) for v in variants], limits, tuning.table(variants), [tuning.table(recorded), walks]]))
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
def test_the_table_is_markdown_with_the_chosen_row_in_bold(counted):
    assert [line.startswith("| **") for line in counted[2].splitlines()[2:]] == [False, True, True, True]


@pytest.mark.long
def test_the_page_says_what_was_counted(counted):
    assert tables_in(TABLES / "tuning.md") == "\n\n".join(counted[3])
