"""The examples run as they say, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
UNDER_TORCHRUN = [e for e in EXAMPLES if e.stem not in ("elastic", "mpi")]  # test_elastic and test_mpi run these


def test_examples_are_short():
    assert {e.stem for e in EXAMPLES} == {"amp", "compiled", "ddp", "elastic", "hsdp", "mpi", "plain"}
    others = sorted((EXAMPLES[0].parent / "ecosystem").glob("*.py"))  # tests/ecosystem runs these
    assert {e.stem for e in others} == {"accelerate_loop", "lightning_module", "transformers_trainer"}
    for example in EXAMPLES + others:
        assert len(example.read_text().splitlines()) < 60


@pytest.mark.full
@pytest.mark.parametrize("example", UNDER_TORCHRUN, ids=lambda e: e.stem)
def test_example_runs_and_learns(example: Path):
    (command,) = re.findall(r"^torchrun (.*)$", example.read_text(), re.MULTILINE)
    ranks = 4 if example.stem == "hsdp" else 2
    assert command == f"--nproc-per-node {ranks} examples/{example.name}"
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split()],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=example.parent.parent,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    first, *_, last = (float(loss) for loss in re.findall(r"loss (\d+\.\d+)", result.stdout))
    print(f"{example.name}: loss {first} -> {last}")
    assert last < first / 3
    if example.stem == "compiled":
        assert "in 1 graph" in result.stdout
    elif example.stem != "amp":
        sent = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes sent", result.stdout)]
        assert sent[0] > 25 * sent[-1]
