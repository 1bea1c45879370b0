"""``overlap=True``: the same bits as the same buckets without, whatever happens in a backward pass."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from flat_state import by_flat_index, conserved, imbalance, whole_state
from optimizers import EACH_ONEBIT, construct, objects, refuses
from overlap_runs import FREEZE, OPTIONS, STEPS, free, pulled, some_gradients, step_on, values
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusedonebit import Faults, FusedOneBitWarning, OneBitAdam, Wire, ddp
from fusedonebit.comm import allreduce


class Net(nn.Module):
    """Has a layer that is used twice, one tied to another, a frozen one, and one that a step can do without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.side = nn.Linear(12, 40), nn.Linear(40, 40), nn.Linear(40, 40)
        self.frozen, self.last = nn.Linear(40, 40).requires_grad_(False), nn.Linear(12, 40, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(torch.tanh(self.first(x))))))
        hidden = hidden + self.frozen(hidden)
        return (hidden + self.side(hidden) if side else hidden) @ self.last.weight


def make(name: str = "onebit-adam", wrap: str = "", groups: int = 1, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = Net()
    model: Any = net
    if wrap == "ddp":
        model = DistributedDataParallel(net, find_unused_parameters=True, gradient_as_bucket_view=False)
    elif wrap == "compile":
        model = torch.compile(net, backend="aot_eager")
    params: Any = list(net.parameters())
    if groups > 1:
        params = [{"params": params[:2], "lr": 3e-2, "weight_decay": 0.1}, {"params": params[2:], "betas": (0.8, 0.99)}]
    optimizer = construct(name, params, **OPTIONS | options)
    if wrap == "ddp":
        ddp.attach(model, optimizer)
    return model, optimizer


def backward(model: nn.Module, rank: int, step: int, micro: int = 0, side: bool = True, factor: float = 1.0) -> None:
    """Of data that no other rank, step or micro-batch has."""
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(rank + 10 * micro + 100 * step))
    ((model(x, side) - x.sin()).square().mean() * factor).backward()


def train(
    model: nn.Module,
    optimizer: Any,
    rank: int,
    steps: range,
    micros: int = 1,
    sometimes: bool = False,
    factors: dict[int, float] | None = None,
    between: bool = False,
) -> list[str]:
    """Trains; returns the stage of each step. In the steps of ``factors`` rank 0's loss is multiplied."""
    phases = []
    for step in steps:
        factor = (factors or {}).get(step, 1.0) if rank == 0 else 1.0
        for micro in range(micros):
            with contextlib.ExitStack() as stack:
                for each in (optimizer, model) if micro < micros - 1 else ():
                    if hasattr(each, "no_sync"):
                        stack.enter_context(each.no_sync())
                backward(model, rank, step, micro, not (sometimes and step % 3 == rank % 3), factor)
        if between:
            mine = torch.ones(()) * rank
            dist.all_reduce(mine)
            assert mine == sum(range(dist.get_world_size()))
            for group in optimizer.param_groups:  # a schedule that moves on before the step
                group["lr"] *= 0.9
        optimizer.step()
        optimizer.zero_grad()
        phases.append(optimizer.phase)
    return phases


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scope layer, several groups": {"scale_scope": "layer", "groups": 2},
    "scope bucket, ternary": {"scale_scope": "bucket", "ternary": True},
    "gradient accumulation": {"train": {"micros": 3}},
    "unused parameters": {"train": {"sometimes": True}},
    "unused parameters, accumulation": {"train": {"sometimes": True, "micros": 2}, "buckets": 7},
    "DDP": {"wrap": "ddp", "train": {"micros": 2}},
    "DDP, unused parameters": {"wrap": "ddp", "train": {"sometimes": True}},
    "compiled model": {"wrap": "compile"},
    "automatic freeze": {"freeze_step": "auto", "betas": (0.9, 0.6), "lr": 1e-4, "steps": 24},
    "a NaN on rank 0": {"train": {"factors": {7: float("nan")}}},
    "guard": {"guard": "rewarm", "rewarm_steps": 10, "train": {"factors": {9: 1e6}}, "steps": 22},
    "more buckets than blocks": {"buckets": 64},
    "one bucket": {"buckets": 1},
    "a collective and another lr before the step": {"train": {"between": True}},
    "paper": {"precondition": False, "scale_norm": "l2", "scale_scope": "layer"},
}
OF_LAMB = ("plain", "scope layer, several groups", "gradient accumulation", "unused parameters", "a NaN on rank 0")


def side_by_side(rank: int, world_size: int, name: str, cases: list[str]) -> dict[str, Any]:
    """Trains with overlap and without; returns where the states part.

    But for digests of what was received: messages say when they were sent, by their tags and earlier digests.
    """
    warnings.simplefilter("ignore", FusedOneBitWarning)
    found = {}
    for case in cases:
        given = dict(CASES[case])
        told, steps = given.pop("train", {}), range(given.pop("steps", STEPS))
        states, phases, sent = [], [], []
        for overlap in (True, False):
            model, optimizer = make(name, overlap=overlap, **given)
            phases.append(train(model, optimizer, rank, steps, **told))
            states.append(whole_state(optimizer))
            sent.append({k: optimizer.stats()[k] for k in ("bytes_total", "skipped_steps")})
        one, other = ({key: np.ravel(each[key]) for key in each.keys() - {"digests"}} for each in states)
        unequal = [key for key in one if not np.array_equal(one[key], other[key])]
        alike = [first == second for first, second in (phases, sent)]
        found[case] = (unequal, *alike, phases[0], states[0]["x"], sent[0])
    return found


def check_equal(name: str, world_size: int, cases: list[str]) -> list[dict]:
    runs = run_ranks(side_by_side, world_size, name, cases, timeout=60.0 + 20.0 * len(cases))
    for case in cases:
        for run in runs:
            unequal, *alike, phases, x, _ = run[case]
            assert unequal == [], f"{name}, {case}"
            assert alike == [True, True], f"{name}, {case}"
            assert "compression" in phases
            assert np.array_equal(x, runs[0][case][4]), f"{name}, {case}: ranks differ"
            assert np.isfinite(x).all()
    return runs


@pytest.mark.long
def test_overlap_changes_no_bit():
    runs = check_equal("onebit-adam", 2, list(CASES))
    phases = {case: runs[0][case][3] for case in CASES}
    assert phases["plain"] == ["warmup"] * FREEZE + ["compression"] * (STEPS - FREEZE)
    assert "warmup" in phases["guard"][FREEZE + 1 :]
    assert runs[0]["guard"][5]["skipped_steps"] == runs[0]["a NaN on rank 0"][5]["skipped_steps"] == 1
    check_equal("onebit-adam", 4, ["unused parameters", "a NaN on rank 0"])


@pytest.mark.long(but=1)
@EACH_ONEBIT
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_overlap_changes_no_bit_of_lamb_either(name, world_size):
    cases = list(CASES) if world_size == 4 else list(OF_LAMB)
    check_equal(name, world_size, [case for case in cases if not refuses(name, CASES[case])])


def test_overlap_sends_in_the_backward_pass_in_one_process_too():
    states = []
    for overlap in (True, False):
        model, optimizer = make(overlap=overlap)
        train(model, optimizer, 0, range(STEPS))
        states.append(whole_state(optimizer))
        backward(model, 0, STEPS)
        under_way = optimizer.algorithm.exchange.reducer.under_way
        assert under_way == ({1, 2} if overlap else set())
    assert all(np.array_equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.long
def test_a_gradients_reordered_copy_outlives_its_buckets_wait(monkeypatch):
    """On a GPU another stream reads it after the hook has returned; then its memory is free for whoever asks."""
    params = [nn.Parameter(torch.ones(40, 32)) for _ in range(3)]
    optimizer = OneBitAdam(params, freeze_step=1, faults=Faults(guard="off"), wire=Wire(buckets=3, overlap=True))
    copies: list[weakref.ref[Tensor]] = []
    compress = allreduce.momentum_compress

    def compressing(grads: list[Tensor], *more: Any) -> None:
        addresses = {p.grad.data_ptr() for p in params if p.grad is not None}
        copies.extend(weakref.ref(g) for g in grads if g.numel() and g.data_ptr() not in addresses)
        compress(grads, *more)

    monkeypatch.setattr(allreduce, "momentum_compress", compressing)
    for step in range(3):
        copies.clear()
        for p in params:
            p.grad = torch.zeros(32, 40).T  # which the backward pass adds to
        sum((p * (step + 1)).sum() for p in params).backward()
        gc.collect()
        assert len(copies) == 2 * (step > 0)  # of three buckets two start in the backward pass
        assert all(copy() is not None for copy in copies)
        optimizer.step()
        gc.collect()
        assert all(copy() is None for copy in copies)


# ---------------------------------------------------------------- nothing is lost


def follow(rank: int, world_size: int, nonfinite: dict[int, tuple[int, int]]) -> list[dict[str, Any]]:
    """Steps of which some have a NaN in one tensor of one rank; what conservation compares, after each."""
    warnings.simplefilter("ignore", FusedOneBitWarning)
    params, optimizer = free(rank)
    seen = []
    for step in range(STEPS):
        gradients = some_gradients(params, rank, step)
        bad_rank, bad_tensor = nonfinite.get(step, (-1, -1))
        counted = [g.clone() for g in gradients]
        if rank == bad_rank:
            gradients[bad_tensor].view(-1)[0] = float("nan")
            counted[bad_tensor].view(-1)[0] = 0.0
        before = values(params)
        step_on(params, optimizer, gradients)
        moved = bool((values(params) != before).any())
        told = {"moved": moved, "updates": optimizer.stats()["step"], "gradient": by_flat_index(optimizer, counted)}
        seen.append(told | (conserved(optimizer) if optimizer.phase == "compression" else {}))
    return seen


def test_a_nan_in_one_bucket_skips_all_and_nothing_is_lost():
    nonfinite = {6: (1, 3), 8: (0, 0), 9: (1, 2)}  # in the last bucket, in the first, in two
    runs = run_ranks(follow, 2, nonfinite)
    worst, updates = 0.0, FREEZE + 1
    for step in range(FREEZE + 1, STEPS):
        updates += step not in nonfinite
        before, after = ([run[k] for run in runs] for k in (step - 1, step))
        for told in after:
            assert told["moved"] == (step not in nonfinite)
            assert told["updates"] == updates
            assert np.array_equal(told["m"], after[0]["m"])
            assert step not in nonfinite or not told["m"].any()
        gradient = np.mean([told["gradient"] for told in after], 0)
        worst = max(worst, imbalance(before, after, gradient, 2, 0.9))
    print(f"imbalance, of the terms: {worst:.1e} (limit 3e-7)")
    assert worst <= 3e-7


# ---------------------------------------------------------------- its life


def in_the_warm_up_and_after(rank: int, world_size: int) -> None:
    """Loads, adds a group, and takes steps without a backward pass."""
    ends = []
    for overlap in (True, False):
        params = free(rank)[0]
        while any(p._post_accumulate_grad_hooks for p in params):  # the optimizer that comes with them goes
            gc.collect()  # as soon as its thread lets go of it
        first = OneBitAdam(params[:2], **objects(**OPTIONS | {"overlap": overlap}))
        step_on(params[:2], first, some_gradients(params[:2], rank, 50))
        first.add_param_group({"params": params[2:], "lr": 1e-3})
        for step in range(FREEZE + 2):
            step_on(params, first, some_gradients(params, rank, step))
        first.step()  # without gradients
        optimizer = OneBitAdam(
            [{"params": params[:2]}, {"params": params[2:], "lr": 1e-3}], **objects(**OPTIONS | {"overlap": overlap})
        )
        optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
        hooks = [len(p._post_accumulate_grad_hooks or {}) for p in params]
        assert hooks == [2 * bool(overlap)] * 4, f"those of two optimizers, got {hooks}"
        del first
        gc.collect()
        for step in range(FREEZE + 2, STEPS):
            step_on(params, optimizer, some_gradients(params, rank, step))
        ends.append(whole_state(optimizer))
    for key in ends[0]:
        assert np.array_equal(ends[0][key], ends[1][key]), key


@pytest.mark.long
def test_loading_and_adding_a_group_keep_the_overlap():
    run_ranks(in_the_warm_up_and_after, 2)


def deleted(rank: int, world_size: int) -> None:
    threads = set(threading.enumerate())
    params, optimizer = free(rank)
    for step in range(FREEZE + 2):
        step_on(params, optimizer, some_gradients(params, rank, step))
    assert {t.name for t in set(threading.enumerate()) - threads} == {"fusedonebit-overlap_0"}
    watched = weakref.ref(optimizer)
    pulled(params, some_gradients(params, rank, 90))  # some buckets are under way
    del optimizer
    gc.collect()
    assert watched() is None
    assert not any(p._post_accumulate_grad_hooks for p in params)
    for thread in set(threading.enumerate()) - threads:
        thread.join(20)
        assert not thread.is_alive()
    dist.barrier()


def test_a_deleted_optimizer_leaves_no_hook_and_no_thread():
    run_ranks(deleted, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scale_scope": "global"}, 'scale_scope must be "bucket", "layer" or "block" with 3 buckets, got "global"'),
        ({"max_grad_norm": 1.0}, "max_grad_norm must be None with Wire(overlap=True), got 1.0"),
        ({"capturable": True}, "capturable must be False with Wire(overlap=True)"),
        ({"buckets": 0}, "buckets must be an int from 1 to 65,536, or None, got 0"),
        ({"overlap": 1}, "overlap must be True or False, got 1"),
    ],
)
def test_what_overlap_can_not_do_is_refused(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        free(0, **options)
