"""The README's program runs with the optimizers that it offers instead; ``test_documentation`` runs it as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("optimizer", [pytest.param("OneBitLamb", marks=pytest.mark.full), "MarsitSGD"])
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
    check_bytes(result.stdout, messages=1 if optimizer == "MarsitSGD" else 2)


def check_bytes(printed: str, messages: int) -> None:
    """650 parameters, two messages to one peer (of an owner one): each a header, a scale, half of the padded bits."""
    (sent,) = [int(n) for n in re.findall(r"(\d+) bytes sent", printed)]
    assert messages * 650 / 16 < sent <= messages * (48 + 64)
