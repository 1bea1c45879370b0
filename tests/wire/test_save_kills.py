"""A rank that is killed somewhere within ``dcp.save``: all others raise, and name it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_ranks import DIED, GROUP_TIMEOUT, WORLD_SIZE, Ranks
from torch import nn

from fusedonebit import Faults, OneBitAdam, dcp
from fusedonebit.comm.failure_diagnosis import PATIENCE

SLACK = 10.0  # of a busy machine
LONGEST = 0.5  # seconds within which the victim dies, which are several saves


def save_on_and_on(rank: int, folder: Path, victim: int, after: float) -> dict[str, Any]:
    """Saves until that fails; tells how."""
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 5))
    optimizer = OneBitAdam(model.parameters(), lr=1e-3, freeze_step=2, faults=Faults(guard="off"), process_group=group)
    for _ in range(4):
        model(torch.full((3, 40), 1.0 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(model, optimizer, folder / "first")
    dist.barrier()  # nobody dies within that
    if rank == victim:
        threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    for number in range(1000):
        start = time.monotonic()
        try:
            dcp.save(model, optimizer, folder / str(number))
        except BaseException as error:
            return {"kind": type(error).__name__, "text": str(error), "waited": time.monotonic() - start, "at": number}
    return {"kind": "", "text": "", "waited": 0.0, "at": 1000}


def kill_one(trial: int) -> tuple[int, list[Any]]:
    generator = random.Random(trial)
    victim, after = generator.randrange(WORLD_SIZE), generator.uniform(0.0, LONGEST)
    with TemporaryDirectory() as folder:
        ranks = Ranks(save_on_and_on, Path(folder), victim, after)
        results = ranks.results(GROUP_TIMEOUT + PATIENCE + SLACK + 60.0, victim)
    return victim, results


def count_kills(trials: range) -> None:
    """Prints how many of the survivors have named the victim, and fails with the first that has not."""
    named, survivors, longest, wrong = 0, 0, 0.0, []
    places: Counter[str] = Counter()
    for trial in trials:
        victim, results = kill_one(trial)
        assert results[victim] == DIED, (trial, victim, results)
        for rank, told in enumerate(results):
            if rank == victim:
                continue
            survivors += 1
            said = told is not None and told["kind"] == "CollectiveError" and f"Rank {victim} has died" in told["text"]
            said &= f" of rank {rank} of {WORLD_SIZE} failed" in (told or {}).get("text", "")
            named += said
            if said:
                longest = max(longest, told["waited"])
                places[told["text"].split(" of rank")[0]] += 1
            else:
                wrong.append((trial, victim, rank, told))
    print(
        f"{len(trials)} kills within dcp.save on {WORLD_SIZE} ranks: {named} of {survivors} survivors raised "
        f"CollectiveError naming the victim, after {longest:.1f} s at most; in {dict(places)}"
    )
    assert not wrong, wrong[0]
    assert longest < GROUP_TIMEOUT + PATIENCE + SLACK


@pytest.mark.long
def test_a_rank_killed_while_it_saves_is_named_by_all_others():
    count_kills(range(1))


@pytest.mark.full
@pytest.mark.alone  # a save that takes longer than a group's time-out is no dead rank
@pytest.mark.timeout(1800)
def test_30_ranks_killed_while_they_save_are_named_by_all_others():
    count_kills(range(30))
