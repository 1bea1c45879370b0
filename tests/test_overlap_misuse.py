"""``overlap=True``: what one rank or all ranks do wrong in a backward pass is an error, on every rank."""

from __future__ import annotations

import copy
import re
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from observe import caught
from overlap_runs import FREEZE, STEPS, free, pulled, some_gradients, step_on, values
from ranks import run_ranks
from torch import nn

from fusedonebit import AbortedStepError, CollectiveError, FusedOneBitWarning, OutOfStepError


def backward_twice(params, optimizer, rank):
    pulled(params, some_gradients(params, rank, 90))
    pulled(params, some_gradients(params, rank, 91))
    optimizer.step()


def zero_grad_and_another(params, optimizer, rank):
    pulled(params, some_gradients(params, rank, 90))
    optimizer.zero_grad()
    pulled(params, some_gradients(params, rank, 91))
    optimizer.step()


def clip(params, optimizer, rank):
    pulled(params, some_gradients(params, rank, 90))
    nn.utils.clip_grad_norm_(params, 1e-3)
    optimizer.step()


def drop(params, optimizer, rank):
    pulled(params, some_gradients(params, rank, 90))
    optimizer.zero_grad()
    optimizer.step()


def unusable(params, optimizer, rank):
    rows = nn.functional.embedding(torch.arange(350), params[2], sparse=True)
    pulled([*params[:2], rows, params[3]], some_gradients(params, rank, 90))
    optimizer.step()


def other_lr(params, optimizer, rank):
    optimizer.param_groups[0]["lr"] *= 2
    try:
        pulled(params, some_gradients(params, rank, 90))
        optimizer.step()
    finally:
        optimizer.param_groups[0]["lr"] /= 2


def bad_lr(params, optimizer, rank):
    good, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], -1.0
    try:
        pulled(params, some_gradients(params, rank, 90))
        optimizer.step()
    finally:
        optimizer.param_groups[0]["lr"] = good


def save(params, optimizer, rank):
    pulled(params, some_gradients(params, rank, 90))
    try:
        optimizer.state_dict()
    finally:
        optimizer.step()


def load(params, optimizer, rank):
    saved = copy.deepcopy(optimizer.state_dict())
    pulled(params, some_gradients(params, rank, 90))
    try:
        optimizer.load_state_dict(saved)
    finally:
        optimizer.step()


def scaler(params, optimizer, rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(sum((p * p).sum() for p in params)).backward()
    scaler.step(optimizer)


MISUSE = {
    backward_twice: (RuntimeError, "in a second backward pass before step.*no_sync"),
    zero_grad_and_another: (RuntimeError, "in a second backward pass before step"),
    clip: (RuntimeError, "was changed or dropped between the backward pass and step"),
    drop: (RuntimeError, "was changed or dropped between the backward pass and step"),
    unusable: (TypeError, "must be dense"),
    bad_lr: (ValueError, "lr must be a finite number >= 0, got -1.0"),
}
"""What one rank does; its error. The others' is ``AbortedStepError``."""
ON_ALL = {
    backward_twice: MISUSE[backward_twice],
    save: (RuntimeError, "have been sent by the backward pass"),
    load: (RuntimeError, "have been sent by the backward pass"),
    scaler: (RuntimeError, r"GradScaler can't be used with Wire\(overlap=True\)"),
}


def misuse(rank: int, world_size: int, everywhere: bool) -> dict[str, Any]:
    """Trains, does something wrong, and trains on; tells what was raised, and whether anything moved."""
    warnings.simplefilter("ignore", FusedOneBitWarning)
    found = {}
    for wrong in ON_ALL if everywhere else [*MISUSE, other_lr]:
        params, optimizer = free(rank)
        for step in range(FREEZE + 2):
            step_on(params, optimizer, some_gradients(params, rank, step))
        before = values(params)
        here = wrong if everywhere or rank == 1 else lambda p, o, r: step_on(p, o, some_gradients(p, r, 90))
        told = caught(lambda here=here, p=params, o=optimizer: here(p, o, rank))
        still = bool((values(params) == before).all())
        optimizer.zero_grad()
        for step in range(FREEZE + 2, STEPS):
            step_on(params, optimizer, some_gradients(params, rank, step))
        found[wrong.__name__] = (*told, still, values(params).numpy())
    return found


def test_one_ranks_mistake_raises_on_all_and_training_goes_on():
    runs = run_ranks(misuse, 2, False)
    for wrong, (kind, text) in MISUSE.items():
        (others, _, *_), (own, said, *_) = (run[wrong.__name__] for run in runs)
        assert own is kind, (wrong.__name__, own, said)
        assert re.search(text, said), (wrong.__name__, said)
        assert others is AbortedStepError, wrong.__name__
    for run in runs:
        kind, said, *_ = run["other_lr"]
        assert kind is OutOfStepError
        assert "hyper-parameters" in said
    for wrong in (*MISUSE, other_lr):
        stills, ends = zip(*(run[wrong.__name__][2:] for run in runs), strict=True)
        assert stills == (True, True), wrong.__name__
        assert np.array_equal(*ends), wrong.__name__


def test_what_all_ranks_do_wrong_raises_one_clear_error():
    runs = run_ranks(misuse, 2, True)
    for wrong, (expected, text) in ON_ALL.items():
        for run in runs:
            kind, said, still, end = run[wrong.__name__]
            assert kind is expected, (wrong.__name__, kind, said)
            assert re.search(text, said), (wrong.__name__, said)
            assert still or wrong in (save, load)  # those were refused, the step was not
            assert np.array_equal(end, runs[0][wrong.__name__][3])


def ends_early(rank: int, world_size: int, how: str) -> tuple[Any, ...]:
    params, optimizer = free(rank)
    for step in range(FREEZE + 2):
        step_on(params, optimizer, some_gradients(params, rank, step))
    before = values(params)
    began = time.monotonic()
    if rank == 1:
        params[0].register_hook(lambda g: 1 / 0)  # when some buckets have been sent
        told = caught(lambda: pulled(params, some_gradients(params, rank, 90)))
        time.sleep(8.0 if how == "hangs" else 0.0)
        return told
    told = caught(lambda: step_on(params, optimizer, some_gradients(params, rank, 90)))
    again = caught(optimizer.step)
    still = bool((values(params) == before).all())
    return *told, still, again[0], time.monotonic() - began


@pytest.mark.long(but=1)
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_ends_in_backward_raises_within_the_timeout(how):
    other, died = run_ranks(ends_early, 2, how, group_timeout=4.0)
    assert died[0] is ZeroDivisionError
    kind, text, still, again, seconds = other
    print(f"a rank {how} in its backward pass: CollectiveError after {seconds:.1f} s (timeout 4 s)")
    assert (kind, still, again) == (CollectiveError, True, CollectiveError)
    assert "Another rank has died, hangs" in text
    assert seconds < 25  # a loaded machine's; the library's own timeout is 30 minutes
