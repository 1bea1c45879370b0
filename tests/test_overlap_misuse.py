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

from fusedonebit import AbortedStepError, CollectiveError, FusedOneBitWarning, OneBitAdam, OutOfStepError


def act(what: str, params: list[Any], optimizer: OneBitAdam, rank: int) -> None:
    """Does one thing between two steps, or the step."""
    group = optimizer.param_groups[0]
    if what in ("backward", "again"):
        pulled(params, some_gradients(params, rank, 90 + (what == "again")))
    elif what == "sparse_backward":
        rows = nn.functional.embedding(torch.arange(350), params[2], sparse=True)
        pulled([*params[:2], rows, params[3]], some_gradients(params, rank, 90))
    elif what == "clip":
        nn.utils.clip_grad_norm_(params, 1e-3)
    elif what == "double_lr":
        group["lr"] *= 2
    elif what == "negative_lr":
        group["lr"] = -1.0
    elif what == "load":
        optimizer.load_state_dict(optimizer.saved)
    elif what == "scaled_step":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(sum((p * p).sum() for p in params)).backward()
        scaler.step(optimizer)
    else:
        getattr(optimizer, what)()


TWICE = (RuntimeError, "in a second backward pass before step.*no_sync")
CHANGED = (RuntimeError, "was changed or dropped between the backward pass and step")
SENT = (RuntimeError, "have been sent by the backward pass")
MISUSE: dict[str, tuple[type[Exception], str]] = {
    "backward again step": TWICE,
    "backward zero_grad again step": TWICE,
    "backward clip step": CHANGED,
    "backward zero_grad step": CHANGED,
    "sparse_backward step": (TypeError, "must be dense"),
    "negative_lr backward step": (ValueError, "lr must be a finite number >= 0, got -1.0"),
}
"""What one rank does; its error. The others' is ``AbortedStepError``."""
OTHER_LR = "double_lr backward step"
ON_ALL: dict[str, tuple[type[Exception], str]] = {
    "backward again step": TWICE,
    "backward state_dict": SENT,
    "backward load": SENT,
    "scaled_step": (RuntimeError, r"GradScaler can't be used with Wire\(overlap=True\)"),
}


def misuse(rank: int, world_size: int, everywhere: bool) -> dict[str, Any]:
    """Trains, does something wrong, and trains on; tells what was raised, and whether anything moved."""
    warnings.simplefilter("ignore", FusedOneBitWarning)
    found = {}
    for wrong in ON_ALL if everywhere else [*MISUSE, OTHER_LR]:
        params, optimizer = free(rank)
        for step in range(FREEZE + 2):
            step_on(params, optimizer, some_gradients(params, rank, step))
        before, lr = values(params), optimizer.param_groups[0]["lr"]
        optimizer.saved = copy.deepcopy(optimizer.state_dict())

        def do(what: str, params: list[Any] = params, optimizer: OneBitAdam = optimizer) -> None:
            for action in what.split():
                act(action, params, optimizer, rank)

        told = caught(lambda: do(wrong if everywhere or rank == 1 else "backward step"))  # noqa: B023
        if wrong in ("backward state_dict", "backward load"):  # those were refused, the step is not
            optimizer.step()
        still = bool((values(params) == before).all())
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        for step in range(FREEZE + 2, STEPS):
            step_on(params, optimizer, some_gradients(params, rank, step))
        found[wrong] = (*told, still, values(params).numpy())
    return found


def test_one_ranks_mistake_raises_on_all_and_training_goes_on():
    runs = run_ranks(misuse, 2, False)
    for wrong, (kind, text) in MISUSE.items():
        (others, *_), (own, said, *_) = (run[wrong] for run in runs)
        assert own is kind, (wrong, own, said)
        assert re.search(text, said), (wrong, said)
        assert others is AbortedStepError, wrong
    for run in runs:
        assert run[OTHER_LR][0] is OutOfStepError
        assert "hyper-parameters" in run[OTHER_LR][1]
    for wrong in (*MISUSE, OTHER_LR):
        stills, ends = zip(*(run[wrong][2:] for run in runs), strict=True)
        assert stills == (True, True), wrong
        assert np.array_equal(*ends), wrong


def test_what_all_ranks_do_wrong_raises_one_clear_error():
    runs = run_ranks(misuse, 2, True)
    for wrong, (expected, text) in ON_ALL.items():
        for run in runs:
            kind, said, still, end = run[wrong]
            assert kind is expected, (wrong, kind, said)
            assert re.search(text, said), (wrong, said)
            assert still != (text == SENT[1])
            assert np.array_equal(end, runs[0][wrong][3])


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
