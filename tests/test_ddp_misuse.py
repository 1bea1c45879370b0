"""What ``ddp.attach`` refuses, and what is said where it is missing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizers import EACH_ONEBIT
from ranks import run_ranks
from test_ddp import Net, loss_of, make
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedonebit import FusedOneBitWarning, OneBitAdam, ddp

# ---------------------------------------------------------------- what does not belong together

NOT_WRAPPED = "TypeError: model must be wrapped in DistributedDataParallel, got Net"
OTHERS = "ValueError: optimizer and model must have the same parameters, but only one has"
RANKS = "ValueError: model and optimizer must average over the same ranks, got"
ERRORS = {
    "not wrapped": NOT_WRAPPED,
    "not wrapped on rank 1": NOT_WRAPPED,
    "not ours": "TypeError: optimizer must be one of fusedonebit's, got AdamW",
    "fewer": f"{OTHERS} first.weight of model; make the optimizer from model.parameters()",
    "more": f"{OTHERS} parameter 6; make the optimizer from model.parameters()",
    "the optimizer is alone": f"{RANKS} [0, 1] and [RANK]; pass the same process_group to both",
    "the model is alone": f"{RANKS} [RANK] and [0, 1]; pass the same process_group to both",
    "frozen between": "ValueError: parameters must be frozen after attach(), or before the optimizer is made, but "
    "first.weight was between",
    "twice": "RuntimeError: this OneBitAdam is attached already; call attach() once, before training",
}
FROM_RANK_1 = "DisagreementError: failed on rank 1: model must be wrapped in DistributedDataParallel, got Net; "


def ill_matched(rank: int, world_size: int, what: str) -> str:
    """The error that attaching raises."""
    torch.manual_seed(0)
    net, alone = Net(), [dist.new_group([r]) for r in range(world_size)][rank]
    params = [*net.parameters(), *([nn.Parameter(torch.ones(3))] if what == "more" else [])][what == "fewer" :]
    optimizer: Any = OneBitAdam(params, freeze_step=9, process_group=alone if "optimizer is alone" in what else None)
    net.first.requires_grad_(what != "frozen between")
    model: Any = DistributedDataParallel(net, process_group=alone if "model is alone" in what else None)
    if what == "twice":
        ddp.attach(model, optimizer)
    if what == "not wrapped" or (what == "not wrapped on rank 1" and rank == 1):
        model = net
    if what == "not ours":
        optimizer = torch.optim.AdamW(params)
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        ddp.attach(model, optimizer)
    dist.barrier()  # nobody still waits for something else
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("what", ERRORS)
def test_what_does_not_belong_together_is_refused_on_every_rank(what):
    for rank, text in enumerate(run_ranks(ill_matched, 2, what, timeout=30, group_timeout=20)):
        expected = FROM_RANK_1 if "on rank 1" in what and rank == 0 else ERRORS[what].replace("RANK", str(rank))
        print(f"{what}, rank {rank}: {text}")
        assert text.startswith(expected)


# ---------------------------------------------------------------- without attach

SEEDS = 5


def warned(rank: int, world_size: int, name: str, how: str) -> tuple[list[int], set[tuple[bool, bool]]]:
    """The steps, over some seeds, that warn of averaged gradients, and of what is told; all steps take other data."""
    steps, told = [], []
    for seed in range(SEEDS):
        model, optimizer = make(name, {} if how == "attached" else None, freeze_step=5)
        if how == "averaged by DDP":
            model = DistributedDataParallel(model)
        for step in range(8):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss_of(model, rank, step + 8 * seed).backward()
                optimizer.step()
            ours = [str(w.message) for w in caught if issubclass(w.category, FusedOneBitWarning)]
            steps += [step] * sum("fusedonebit.ddp.attach(model, optimizer)" in text for text in ours)
            optimizer.zero_grad()
        assert optimizer.phase == "compression"
        stats = optimizer.stats()
        told.append((stats["averaged_already"], stats["bytes_step"] >= stats["bytes_fp32"]))
    return steps, set(told)


@pytest.mark.long(but=1)
@EACH_ONEBIT
def test_gradients_that_ddp_has_averaged_are_noticed_at_the_first_step_and_no_savings_are_told(name):
    told = {(True, True)}
    assert run_ranks(warned, 2, name, "averaged by DDP") == [([0] * SEEDS, told), ([], told)]


@pytest.mark.long(but=1)
@EACH_ONEBIT
@pytest.mark.parametrize(("world_size", "how"), [(2, "local"), (2, "attached"), (1, "averaged by DDP")])
def test_nobody_warns_of_other_gradients(name, world_size, how):
    nothing_is_sent = world_size == 1
    assert run_ranks(warned, world_size, name, how) == [([], {(False, nothing_is_sent)})] * world_size


# ---------------------------------------------------------------- averages that are not what was averaged


def dropped_or_changed(rank: int, world_size: int, what: str) -> tuple[str, list[torch.Tensor]]:
    """The error of the third step, if something happens to the averages before it, and the parameters then."""
    model, optimizer = make("onebit-adam", wrap={})
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step == 2:
            if what == "another backward pass":
                with model.no_sync():
                    loss_of(model, rank, 9).backward()
            elif what == "dropped" and rank == 1:
                model.zero_grad()
            elif what == "changed" and rank == 1:
                next(model.parameters()).grad[0] += 1e-3
        try:
            optimizer.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}", [p.detach() for p in model.parameters()]
    return "", []


@pytest.mark.parametrize("what", ["another backward pass", "dropped", "changed"])
def test_averages_that_differ_between_ranks_stop_all_of_them(what):
    (error, ours), (other, theirs) = run_ranks(dropped_or_changed, 2, what)
    for text in (error, other):
        assert text.startswith("OutOfStepError: ")
        assert "or the gradients that DDP has averaged: change or drop them on all ranks alike" in text
    assert all(map(torch.equal, ours, theirs))
