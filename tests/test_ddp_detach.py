"""``detach()``: whatever follows trains as if nobody had been attached; and nobody else steps before."""

from __future__ import annotations

import copy
import gc
import re
import warnings
import weakref
from typing import Any

import pytest
import torch
from ddp_runs import Net, loss_of
from observe import fingerprint, parameters
from optimizers import MAKE, WAYS, by_name
from ranks import run_ranks, warned
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fusedonebit import FusedOneBitWarning, OneBitAdam, ddp
from fusedonebit.comm import DisagreementError

AFTER = 4
"""Steps of what follows."""


def attached(make: Any, **wrap: Any) -> tuple[DistributedDataParallel, Any, ddp.Handle]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), **wrap)
    optimizer = make(model.parameters(), 1e-3)
    return model, optimizer, ddp.attach(model, optimizer)


def quietly(call: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call()


def train(model: Any, optimizer: Any, rank: int, steps: range, spoil: Any = ()) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        (loss * float("nan") if step in spoil and rank == 1 else loss).backward()
        optimizer.step()


def to_the_end_of_a_round(model: Any, optimizer: Any, rank: int, step: int) -> None:
    while optimizer.stats().get("local_steps"):
        train(model, optimizer, rank, range(step, step + 1))


def follow(model: DistributedDataParallel, rank: int, first: int) -> tuple[bool, str]:
    """Train on with AdamW, beside a copy in a DDP of its own; were all bits, gradients' included, those of the copy?"""
    torch.manual_seed(1)
    plain = DistributedDataParallel(copy.deepcopy(model.module))
    followers = [(each, torch.optim.AdamW(each.parameters(), lr=1e-2)) for each in (model, plain)]
    for each in (model, plain) * 2:  # DDP orders its buckets anew after one, and then rounds three ranks' sums anew
        loss_of(each, rank, first).backward()
    same = True
    for step in range(first, first + AFTER):
        for each, optimizer in followers:
            optimizer.zero_grad()
            loss_of(each, rank, step).backward()
        same &= all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        for _, optimizer in followers:
            optimizer.step()
    return same and fingerprint(model.parameters()) == fingerprint(plain.parameters()), fingerprint(model.parameters())


STAGES = {"before a step": 0, "in the warm-up": 1, "in compression": 6, "after a skipped step": 6}


def in_each_stage(rank: int, world_size: int, name: str) -> dict[str, tuple[bool, str, list[str], str]]:
    seen = {}
    for stage, steps in STAGES.items():
        model, optimizer, handle = attached(MAKE[name])
        spoil = (5,) if "skipped" in stage else ()
        quietly(lambda o=optimizer, m=model, n=steps, spoil=spoil: train(m, o, rank, range(n), spoil))
        quietly(lambda o=optimizer, m=model, n=steps: to_the_end_of_a_round(m, o, rank, n))
        with warned() as caught:
            handle.detach()
        said = [str(each.message) for each in caught if issubclass(each.category, FusedOneBitWarning)]
        seen[stage] = (*follow(model, rank, steps), said, optimizer.phase)
    return seen


OWES = r"^\w+ was detached from DistributedDataParallel with (.+) left out by compression so far; that stays in the"


@pytest.mark.long(but=3)
@pytest.mark.parametrize("name", [*MAKE, "three ranks"])
def test_after_detach_gradients_are_plain_ddps_and_ranks_equal(name):
    ranks = run_ranks(in_each_stage, 3, "OneBitAdam") if name == "three ranks" else run_ranks(in_each_stage, 2, name)
    for stage in STAGES:
        bits, said = {seen[stage][1] for seen in ranks}, [seen[stage][2] for seen in ranks]
        phase = ranks[0][stage][3]
        print(f"{name}, {stage} ({phase}): {said[0]}")
        assert all(seen[stage][0] for seen in ranks)
        assert len(bits) == 1
        assert not any(said[1:])
        compresses = phase in ("compression", "one-bit") and name != "OneBitLion"
        compresses &= (name, stage) != ("OneBitMuon", "before a step")  # whose bits begin with the first one
        assert len(said[0]) == compresses
        if compresses:
            how_much = re.match(OWES, said[0][0])[1]
            assert how_much == "all that its next step was to apply" or 0.01 < float(how_much.split()[0]) < 100


# ---------------------------------------------------------------- in the middle of something


def within_a_round(rank: int, world_size: int, kind: str) -> tuple[str, bool, str]:
    model, optimizer, handle = attached(WAYS[kind])
    train(model, optimizer, rank, range(4))
    with pytest.raises(RuntimeError) as caught:
        handle.detach()
    train(model, optimizer, rank, range(4, 6))
    quietly(handle.detach)
    return str(caught.value), *follow(model, rank, 6)


@pytest.mark.parametrize("kind", ["ZeroOneAdam, own, rounds of 3", "MarsitSGD, rounds of 3"])
def test_detach_within_a_round_is_refused_and_works_at_its_end(kind):
    (error, same, bits), other = run_ranks(within_a_round, 2, kind)
    assert error.startswith("detach() must come between two rounds, but 1 steps of this one are done")
    assert other == (error, True, bits)
    assert same


WHEN = ["in the warm-up", "in compression", "under no_sync", "without gradients on rank 1", "with overlap"]


def between_backward_and_step(rank: int, world_size: int, when: str) -> tuple[float, str, bool]:
    steps = 1 if when in ("in the warm-up", "with overlap") else 4
    model, optimizer, handle = attached(by_name(OneBitAdam, freeze_step=2, overlap=when == "with overlap"))
    train(model, optimizer, rank, range(steps))
    optimizer.zero_grad()
    mean = Net()
    mean.load_state_dict(model.module.state_dict())
    sum(loss_of(mean, each, steps) for each in range(world_size if "without" not in when else 1)).div(2).backward()
    if when != "without gradients on rank 1" or rank == 0:
        with model.no_sync() if "no_sync" in when else torch.enable_grad():
            loss_of(model, rank, steps).backward()
    quietly(handle.detach)
    pairs = zip(model.parameters(), mean.parameters(), strict=True)
    apart = max(float((p.grad - q.grad).abs().max() / q.grad.abs().max()) for p, q in pairs)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    same, bits = follow(model, rank, steps + 1)
    return apart, bits, same


@pytest.mark.parametrize("when", WHEN)
def test_gradients_that_wait_for_a_step_are_averaged_by_detach(when):
    (apart, bits, same), other = run_ranks(between_backward_and_step, 2, when)
    print(f"{when}: gradients differ from the mean of all ranks' by {apart:.1e} of the largest (limit 1e-6: rounding)")
    assert max(apart, other[0]) < 1e-6
    assert other[1:] == (bits, True)
    assert same


def with_buckets_under_way(rank: int, world_size: int) -> tuple[list[int], str, list[list[int]], bool, str]:
    model, optimizer, handle = attached(by_name(OneBitAdam, freeze_step=2, overlap=True, buckets=2))
    reducer = optimizer.algorithm.exchange.reducer
    train(model, optimizer, rank, range(5))
    optimizer.zero_grad()
    loss_of(model, rank, 5).backward()
    under_way = sorted(reducer.under_way)
    with pytest.raises(RuntimeError) as caught:
        handle.detach()
    optimizer.step()
    quietly(handle.detach)
    loss_of(model, rank, 6).backward()
    return under_way, str(caught.value), sorted(reducer.under_way), *follow(model, rank, 7)


def test_detach_is_refused_with_buckets_under_way_and_sends_none():
    for under_way, error, later, same, _ in run_ranks(with_buckets_under_way, 2):
        assert under_way
        assert error.startswith("1 of 2 buckets have been sent by the backward pass: between it and step()")
        assert later == []
        assert same


def on_one_rank_alone(rank: int, world_size: int) -> str:
    model, optimizer, handle = attached(OneBitAdam)
    train(model, optimizer, rank, range(1))
    optimizer.frame.steps.outcomes.attempts += rank  # as if this rank had called it a step later
    with pytest.raises(DisagreementError) as caught:
        handle.detach()
    return str(caught.value)


def test_ranks_that_detach_after_different_steps_are_told():
    for text in run_ranks(on_one_rank_alone, 2):
        assert text.startswith(
            "ranks differ: the number of updates before detach() is 1 on rank 0 but 2 on rank 1; call"
        )


# ---------------------------------------------------------------- attached again


def one_after_the_other(rank: int, world_size: int, names: list[str]) -> list[tuple[str, str, str, bool]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    made = {name: MAKE[name](model.parameters(), 1e-3) for name in names}
    seen = []
    for name in names:
        handle = ddp.attach(model, made[name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, made[name], rank, range(4))
            to_the_end_of_a_round(model, made[name], rank, 4)
            handle.detach()
            handle.detach()
        loaded = MAKE[name](model.parameters(), 1e-3)
        loaded.load_state_dict(made[name].state_dict())
        seen.append((name, fingerprint(model.parameters()), made[name].phase, loaded.phase == made[name].phase))
    return seen


@pytest.mark.long(but=1)
@pytest.mark.parametrize("names", [["OneBitAdam", "OneBitLamb", "OneBitAdam"], [*MAKE, "OneBitAdam", "ZeroOneAdam"]])
def test_each_of_ours_follows_others_on_one_model_and_comes_back(names):
    first, second = run_ranks(one_after_the_other, 2, names)
    assert first == second
    assert len({bits for _, bits, _, _ in first}) == len(names)
    assert all(loads for *_, loads in first)
    assert {phase for name, _, phase, _ in first if name.startswith("OneBitA")} == {"compression"}


def goes_on_by_itself(rank: int, world_size: int, steps: int) -> tuple[str, bool, int]:
    model, optimizer, handle = attached(MAKE["OneBitAdam"])
    with warned() as caught:
        train(model, optimizer, rank, range(steps))
        handle.detach()
        train(model, optimizer, rank, range(steps, steps + 5))
    told = sum("DistributedDataParallel averages the gradients already" in str(each.message) for each in caught)
    return fingerprint(parameters(optimizer)), optimizer.stats()["averaged_already"], told


@pytest.mark.parametrize("steps", [1, 5])
def test_own_steps_after_detach_are_equal_and_warn_of_no_savings(steps):
    first, second = run_ranks(goes_on_by_itself, 2, steps)
    assert first[0] == second[0]
    assert (first[1:], second[1:]) == ((True, 1), (True, 0))


# ---------------------------------------------------------------- who may step


def others_step(rank: int, world_size: int) -> dict[str, list[str]]:
    model, optimizer, handle = attached(MAKE["OneBitAdam"])
    elsewhere = torch.nn.Parameter(torch.zeros(3))
    grown = torch.optim.SGD([elsewhere], lr=0.1)
    grown.step()  # looked at once
    grown.add_param_group({"params": [next(model.parameters())]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others = {
            "AdamW": torch.optim.AdamW(model.parameters(), lr=1e-2),
            "one parameter": torch.optim.SGD([next(model.parameters())], lr=0.1),
            "ours": MAKE["OneBitLamb"](model.parameters(), 1e-3),
            "grown": grown,
        }
    seen: dict[str, list[str]] = {name: [] for name in others}
    for step in range(4):
        train(model, optimizer, rank, range(step, step + 1))
        loss_of(model, rank, 99).backward()
        before = fingerprint(model.parameters())
        for name, other in others.items():
            with pytest.raises(RuntimeError) as caught:
                other.step()
            seen[name].append(str(caught.value))
        assert fingerprint(model.parameters()) == before
        elsewhere.grad = torch.ones(3)
        torch.optim.SGD([elsewhere], lr=0.1).step()  # which nobody minds
        model.zero_grad()
        optimizer.zero_grad()
    assert elsewhere.tolist() == pytest.approx([-0.4] * 3)
    quietly(handle.detach)
    others["AdamW"].step()
    return seen


def test_another_optimizers_step_while_attached_always_raises():
    """Each time, and before anything moves."""
    first, second = run_ranks(others_step, 2)
    assert first == second
    for name, kind in {"AdamW": "AdamW", "one parameter": "SGD", "ours": "OneBitLamb", "grown": "SGD"}.items():
        assert len(first[name]) == 4
        for text in first[name]:
            assert text.startswith(f"{kind} can't step while OneBitAdam is attached to DistributedDataParallel")
            assert "call detach() of the handle" in text


def forgotten(rank: int, world_size: int, how: str) -> tuple[int, list[bool]]:
    gc.collect()  # what earlier tests have left
    hooks = len(_global_optimizer_pre_hooks)
    model, optimizer, handle = attached(MAKE["OneBitAdam"])
    train(model, optimizer, rank, range(4))
    while_attached = len(_global_optimizer_pre_hooks) - hooks
    if how == "detached":
        quietly(handle.detach)
        assert len(_global_optimizer_pre_hooks) == hooks
        del handle
    gone = [weakref.ref(each) for each in (model, optimizer, optimizer.algorithm.moments.exp_avg_sq)]
    if how == "the handle is kept":
        del model
        gc.collect()
        assert not optimizer.frame.under_ddp.attached
        torch.optim.SGD(parameters(optimizer), lr=0.1).step()
        del optimizer, handle
    else:
        handle = None
        del model, optimizer
    gc.collect()  # cycles of DDP's own
    assert len(_global_optimizer_pre_hooks) == hooks
    return while_attached, [ref() is None for ref in gone]


@pytest.mark.parametrize("how", ["detached", "never detached", "the handle is kept"])
def test_models_optimizers_and_hooks_nobody_holds_are_gone(how):
    assert run_ranks(forgotten, 2, how) == [(1, [True] * 3)] * 2


def compiled(rank: int, world_size: int) -> tuple[str, str]:
    another = attached(MAKE["OneBitLion"])  # to a model of its own, in the same process
    model, optimizer, _ = attached(MAKE["OneBitAdam"])
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    for number in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        step()
    alone = OneBitAdam(torch.nn.Linear(4, 2).parameters(), freeze_step=2)  # of no DDP, and with no parameter of it
    torch.compile(alone.step, fullgraph=True, backend="aot_eager")()
    for shares in (OneBitAdam(model.parameters(), freeze_step=2), torch.optim.AdamW(model.parameters())):
        with pytest.raises(RuntimeError) as caught:
            torch.compile(shares.step, backend="aot_eager")()
        assert f"{type(shares).__name__} can't step while OneBitAdam is attached" in str(caught.value)
    assert another[1].frame.under_ddp.attached
    return fingerprint(model.parameters()), str(caught.value)


@pytest.mark.long
def test_compiled_steps_are_told_apart_too():
    (bits, text), other = run_ranks(compiled, 2)
    assert other == (bits, text)
    assert text.startswith("AdamW can't step while OneBitAdam is attached")
