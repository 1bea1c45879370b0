"""What ``ddp.attach`` refuses, and what is said where it is missing."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_runs import Net, loss_of, make
from optimizers import EACH_ONEBIT
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from fusedonebit import FusedOneBitWarning, OneBitAdam, OneBitLamb, ddp

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
    "twice": "RuntimeError: this OneBitAdam is attached already; call attach() once, before training, or first ",
    "another": "RuntimeError: OneBitLamb is attached to this model already: one optimizer must have all of its ",
    "mixed precision": "RuntimeError: mixed_precision must be None, got _MixedPrecision(param_dtype=torch.bfloat16",
    "a hook": "RuntimeError: DDP must have no communication hook, got allreduce_hook: it keeps one for good",
    "a built-in hook": "RuntimeError: DDP must have no communication hook, got BuiltinCommHookType.ALLREDUCE: it keeps",
    "steps in the backward pass": "RuntimeError: parameters must have no optimizers that step in the backward pass",
    "in a join": "RuntimeError: join() can't be used with a model to which an optimizer of fusedonebit is attached",
}
WRAPPED = {"mixed precision": {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)}}
NOTHING_IS_CHANGED = ("another", "mixed precision", "a hook", "a built-in hook", "in a join")
FROM_RANK_1 = "DisagreementError: failed on rank 1: model must be wrapped in DistributedDataParallel, got Net; "


def ill_matched(rank: int, world_size: int, what: str) -> str:
    """The error that attaching raises."""
    torch.manual_seed(0)
    net, alone = Net(), [dist.new_group([r]) for r in range(world_size)][rank]
    params = [*net.parameters(), *([nn.Parameter(torch.ones(3))] if what == "more" else [])][what == "fewer" :]
    optimizer: Any = OneBitAdam(params, freeze_step=9, process_group=alone if "optimizer is alone" in what else None)
    net.first.requires_grad_(what != "frozen between")
    if what == "steps in the backward pass":
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    wrap = WRAPPED.get(what, {})
    model: Any = DistributedDataParallel(net, process_group=alone if "model is alone" in what else None, **wrap)
    if what == "twice":
        ddp.attach(model, optimizer)
    if what == "another":
        ddp.attach(model, OneBitLamb(params, freeze_step=9))
    if what == "a hook":
        model.register_comm_hook(None, allreduce_hook)
    if what == "a built-in hook":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    hooks = len(model._comm_hooks) if what in NOTHING_IS_CHANGED else 0
    if what == "not wrapped" or (what == "not wrapped on rank 1" and rank == 1):
        model = net
    if what == "not ours":
        optimizer = torch.optim.AdamW(params)
    entered = model.join() if what == "in a join" else contextlib.nullcontext()
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught, entered:
        ddp.attach(model, optimizer)
    dist.barrier()  # nobody still waits for something else
    if what in NOTHING_IS_CHANGED:
        assert len(model._comm_hooks) == hooks
        ddp.attach(DistributedDataParallel(net), optimizer)
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("what", ERRORS)
def test_what_does_not_belong_together_is_refused_on_every_rank(what):
    for rank, text in enumerate(run_ranks(ill_matched, 2, what, timeout=30, group_timeout=20)):
        expected = FROM_RANK_1 if "on rank 1" in what and rank == 0 else ERRORS[what].replace("RANK", str(rank))
        print(f"{what}, rank {rank}: {text}")
        assert text.startswith(expected)


# ---------------------------------------------------------------- uneven data

BATCHES = {
    "all have batches": (2, 3),
    "one has none": (0, 2),
    "nobody has any": (0, 0),
    "one has none, all stop": (0, 1),
}


def joined(rank: int, world_size: int, how: str) -> str:
    """The error of a join; then one that is not enabled, and one after ``detach``, work."""
    model, optimizer = make("onebit-adam", None)
    model = DistributedDataParallel(model)
    handle = ddp.attach(model, optimizer)
    said = ""
    try:
        with Join([model], throw_on_early_termination="stop" in how):
            for step in range(BATCHES[how][rank]):
                loss_of(model, rank, step).backward()
    except RuntimeError as error:
        said = str(error)
    with Join([model], enable=False):  # as the sentence says
        pass
    loss_of(model, rank, 0).backward()
    optimizer.step()
    handle.detach()
    with model.join():
        for step in range(BATCHES[how][rank]):
            model.zero_grad()
            loss_of(model, rank, step).backward()
    return said


@pytest.mark.parametrize("how", BATCHES)
def test_join_is_refused_on_every_rank_and_nobody_waits(how):
    for rank, text in enumerate(run_ranks(joined, 2, how, timeout=30, group_timeout=20)):
        print(f"{how}, rank {rank}: {text}")
        if how == "nobody has any":
            assert text == ""
        elif "stop" in how and rank == 0:
            assert text == "Rank 0 exhausted all inputs."
        elif "stop" in how:
            assert text == "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        else:
            assert text.startswith("join() can't be used with a model to which an optimizer of fusedonebit is attached")


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
def test_ddp_averaged_gradients_are_noticed_at_the_first_step(name):
    told = {(True, True)}
    assert run_ranks(warned, 2, name, "averaged by DDP") == [([0] * SEEDS, told), ([], told)]


@pytest.mark.long(but=1, full=True)
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
