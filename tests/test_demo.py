"""What the README promises of `make demo`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

MINUTES = 3


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_demo_trains_300_steps_in_3_minutes_and_ends_within_3_percent_of_adamw(tmp_path: Path):
    began = time.monotonic()
    train = [sys.executable, "-m", "fusedonebit.cli", "train", "--nproc", "2"]
    subprocess.run([*train, "--compare", "adamw,onebit-adam", "--out", str(tmp_path)], check=True)
    seconds = time.monotonic() - began
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    last = {r["optimizer"]: r for r in records}
    ratio = last["onebit-adam"]["held_out_loss"] / last["adamw"]["held_out_loss"]
    print(f"{last['onebit-adam']['step']} steps of both optimizers in {seconds:.0f} s (limit {60 * MINUTES} s)")
    print(f"held-out loss of 1-bit Adam against AdamW: {ratio - 1:+.1%} (limit +3 %)")
    assert last["onebit-adam"]["step"] >= 300
    assert ratio <= 1.03
    assert seconds <= 60 * MINUTES
