"""The program of docs/start.md runs, and with the optimizers that the page offers instead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launched import check_bytes, launched

PAGE = Path(__file__).parent.parent / "docs" / "start.md"


def quick_start(optimizer: str) -> str:
    """The program, with the block that makes this optimizer in place of its own."""
    program, *others = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for instead in others:
        if optimizer in instead:
            program, replaced = re.subn(r"optimizer = OneBitAdam\(.*\n", instead, program)
            assert replaced == 1
    assert f"optimizer = {optimizer}(" in program
    return program


@pytest.mark.long(but=["MarsitSGD"])
@pytest.mark.parametrize("optimizer", ["OneBitLamb", "MarsitSGD"])
def test_quick_start_runs_with_another_optimizer(tmp_path: Path, optimizer: str):
    file = tmp_path / "quick_start.py"
    file.write_text(quick_start(optimizer))
    check_bytes(launched(file, 2), messages=1 if optimizer == "MarsitSGD" else 2)


@pytest.mark.long
def test_quick_start_runs_under_torchrun(tmp_path: Path):
    file = tmp_path / "quick_start.py"
    file.write_text(quick_start("OneBitAdam"))
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    check_bytes(result.stdout, messages=2)
