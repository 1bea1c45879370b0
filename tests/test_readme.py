"""The README's program runs as it stands, and with the optimizers that the README offers instead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("optimizer", ["OneBitAdam", pytest.param("OneBitLamb", marks=pytest.mark.full), "MarsitSGD"])
def test_quick_start_runs_under_torchrun(tmp_path: Path, optimizer: str):
    program, *others = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for instead in others:
        if optimizer in instead:
            program, replaced = re.subn(r"optimizer = OneBitAdam\(.*\n", instead, program)
            assert replaced == 1
    assert f"optimizer = {optimizer}(" in program
    file = tmp_path / "quick_start.py"
    file.write_text(program)
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    (sent,) = [int(n) for n in re.findall(r"(\d+) bytes sent", result.stdout)]
    # 650 parameters: two messages to one peer (of an owner one), each a header, a scale and half of the padded bits.
    messages = 1 if optimizer == "MarsitSGD" else 2
    assert messages * 650 / 16 < sent <= messages * (48 + 64)
