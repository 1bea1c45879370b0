"""Whether it pays to send in the backward pass is tried in the first steps in bits, and changes nothing but time."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flat_state import whole_state
from ranks import run_ranks
from test_overlap import FREEZE, backward, make, train

from fusedonebit import FusedOneBitWarning
from fusedonebit.comm import LocalTransport
from fusedonebit.core import overlap_trial
from fusedonebit.core.overlap_trial import EACH, SETTLES, OverlapTrial, Timed

TRIED = SETTLES + 2 * EACH


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is."""
    now = [0.0]
    monkeypatch.setattr(overlap_trial.time, "perf_counter", lambda: now[0])
    return now


def steps(trial: OverlapTrial, clock: list[float], overlapped: float, after: float, first: float = 0.0) -> list[bool]:
    """Take all steps of a trial; tell which overlap. The first few take so much longer."""
    told = []
    for step in range(TRIED):
        told.append(trial.overlaps)
        clock[0] += 100.0  # between the end of a step and the next one's first gradient
        trial.begin_step()
        clock[0] += (overlapped if trial.overlaps else after) + (first if step < SETTLES else 0.0)
        assert trial.end_step(LocalTransport()) == (step == TRIED - 1)
    return told


@pytest.mark.parametrize(("overlapped", "after", "overlaps"), [(2.0, 3.0, True), (3.0, 2.0, False), (2.0, 2.0, True)])
def test_the_faster_way_is_taken_after_both_took_turns(clock, overlapped, after, overlaps):
    trial = OverlapTrial(torch.device("cpu"))
    assert steps(trial, clock, overlapped, after, first=50.0) == [True, False] * (TRIED // 2)
    assert trial.is_over
    assert trial.overlaps == overlaps
    assert trial.found == Timed(overlapped, after)
    assert not trial.end_step(LocalTransport())
    assert trial.overlaps == overlaps


def test_one_long_pause_decides_nothing(clock):
    trial = OverlapTrial(torch.device("cpu"))
    for step in range(TRIED):
        trial.begin_step()
        clock[0] += 60.0 if step == SETTLES else 1.0 + step % 2
        trial.end_step(LocalTransport())
    assert trial.found == Timed(1.0, 2.0)


def test_without_any_gradient_it_goes_on_overlapping():
    trial = OverlapTrial(torch.device("cpu"))
    for _ in range(TRIED):
        trial.end_step(LocalTransport())
    assert trial.is_over
    assert trial.found is None
    assert trial.overlaps


def tried(rank: int, world_size: int, slower: str, silent: int) -> dict[str, Any]:
    """Trains over the trial with one way slower by rank 0's clock; ``silent`` lacks gradients.

    No clock goes but by what is added here: what else the machine does decides nothing.
    """
    found: dict[str, Any] = {}
    real, now = OverlapTrial.begin_step, [0.0]

    def begin_step(self: OverlapTrial) -> None:
        if rank != silent:
            real(self)
        if rank == 0 and self.overlaps == (slower == "overlapped"):
            now[0] += 0.02

    OverlapTrial.begin_step = begin_step  # type: ignore[method-assign]
    overlap_trial.time = SimpleNamespace(perf_counter=lambda: now[0])  # type: ignore[assignment]
    try:
        for overlap in (True, "always", False):
            model, optimizer = make(overlap=overlap)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                train(model, optimizer, rank, range(FREEZE + TRIED + 4))
            backward(model, rank, 99)
            sent = set(optimizer.reducer.under_way) if overlap else set()
            said = [str(w.message) for w in caught if issubclass(w.category, FusedOneBitWarning)]
            optimizer.step()
            collectives = optimizer.stats()["collectives_step"]
            found[str(overlap)] = (
                whole_state(optimizer),
                sent,
                [text for text in said if "overlap" in text],
                collectives,
            )
    finally:
        OverlapTrial.begin_step = real  # type: ignore[method-assign]
        overlap_trial.time = time
    return found


@pytest.mark.long(but=2)
@pytest.mark.parametrize(("slower", "silent"), [("overlapped", -1), ("after", -1), ("overlapped", 1)])
def test_all_ranks_decide_alike_and_no_bit_changes(slower, silent):
    runs = run_ranks(tried, 2, slower, silent)
    kept = slower == "after"
    for rank, run in enumerate(runs):
        assert run["True"][1] == ({1, 2} if kept else set())
        assert run["always"][1] == {1, 2}
        assert len(run["True"][2]) == (rank == 0 and not kept)
        assert run["always"][2] == run["False"][2] == []
        # Buckets that nobody sends early travel together: switched off, it costs what it would without.
        assert [run[overlap][3] for overlap in ("always", "True", "False")] == [6, 6 if kept else 2, 2]
        states = [run[overlap][0] for overlap in ("True", "always", "False")]
        assert all(np.array_equal(np.ravel(states[0][k]), np.ravel(other[k])) for other in states for k in states[0])
    if not kept:
        assert "does not pay here, and was switched off" in runs[0]["True"][2][0]
        assert 'Wire(overlap="always") tries nothing' in runs[0]["True"][2][0]


def test_what_was_decided_outlives_a_loaded_state(clock):
    model, optimizer = make(overlap=True)
    train(model, optimizer, 0, range(FREEZE))
    steps(optimizer.reducer.trial, clock, 3.0, 2.0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.reducer.trial.found == Timed(3.0, 2.0)
    train(model, optimizer, 0, range(2))
    backward(model, 0, 3)
    assert optimizer.reducer.under_way == set()


def test_what_is_wrong_with_a_backward_pass_is_wrong_where_none_overlaps(clock):
    model, optimizer = make(overlap=True)
    train(model, optimizer, 0, range(FREEZE))
    steps(optimizer.reducer.trial, clock, 3.0, 2.0)
    train(model, optimizer, 0, range(1))
    for step in range(2):
        backward(model, 0, step)
    with pytest.raises(RuntimeError, match="in a second backward pass before step"):
        optimizer.step()
