"""A worker is killed in the middle of a run, and the run goes on from its checkpoint with one rank fewer."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
KILLED_AFTER = 130
Curve = dict[int, tuple[float, int]]


def start(ranks: int, folder: Path, log: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "ELASTIC_FOLDER": str(folder)}
    with log.open("w") as out:
        return subprocess.Popen([*command, str(EXAMPLE)], stdout=out, stderr=out, env=os.environ | environment)


def curve(log: Path) -> Curve:
    """Loss and number of ranks by step."""
    found = re.findall(r"^step +(\d+)  loss (\d+\.\d+)  (\d+) ranks", log.read_text(), re.MULTILINE)
    return {int(step): (float(loss), int(ranks)) for step, loss, ranks in found}


def workers(agent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]


def kill_one(agent: subprocess.Popen, log: Path) -> None:
    """Once the run is so far; the others must end as well."""
    deadline = time.monotonic() + 120
    while max(curve(log), default=0) < KILLED_AFTER:
        assert agent.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(workers(agent.pid)[-1], signal.SIGKILL)
    assert agent.wait(timeout=120) != 0


@pytest.mark.full
def test_the_loss_goes_on_with_one_rank_fewer_after_a_kill(tmp_path):
    logs = {name: tmp_path / f"{name}.log" for name in ("straight", "killed", "resumed")}
    assert start(4, tmp_path / "straight", logs["straight"]).wait(timeout=200) == 0, logs["straight"].read_text()
    kill_one(start(4, tmp_path / "saved", logs["killed"]), logs["killed"])
    # As a kill while it is written leaves one: all data, but no .metadata.
    complete = max((p.parent for p in (tmp_path / "saved").glob("*/.metadata")), key=lambda p: int(p.name))
    shutil.copytree(complete, complete.parent / "999", ignore=shutil.ignore_patterns(".metadata"))
    assert start(3, tmp_path / "saved", logs["resumed"]).wait(timeout=200) == 0, logs["resumed"].read_text()

    straight, killed, resumed = (curve(log) for log in logs.values())
    first = min(resumed)
    assert first == int(complete.name) >= KILLED_AFTER // 20 * 20
    assert {ranks for _, ranks in killed.values()} == {4}
    assert {ranks for _, ranks in resumed.values()} == {3}
    assert sorted(resumed) == list(range(first, 300))
    assert all(killed[step] == straight[step] for step in killed)

    def losses(of: Curve, steps: range) -> np.ndarray:
        return np.array([of[step][0] for step in steps])

    noise = float(np.std(np.diff(losses(straight, range(first, 300)))))
    for steps in (range(first, first + 10), range(first, first + 40), range(260, 300)):
        was, now = losses(straight, steps), losses(resumed, steps)
        off = float(np.abs(now - was).max())
        print(
            f"steps {steps.start} to {steps.stop - 1}: mean loss {was.mean():.4f} uninterrupted on 4 ranks, "
            f"{now.mean():.4f} on 3; largest difference {off:.4f}, from step to step the curve moves by {noise:.4f}"
        )
        assert off < noise
