"""An optimizer, its frame and its algorithm are three objects: what follows where somebody holds but one of them."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from optimizers import MAKE
from torch.nn import Parameter

from fusedonebit import AdamW, OneBitAdam, Wire


def parameters(count: int = 2) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(24, generator=generator)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn(24, generator=generator)
    return params


@pytest.mark.parametrize("name", ["OneBitAdam", "AdamW, ours", "MarsitSGD"])
def test_groups_that_somebody_has_assigned_count(name):
    params = parameters(3)
    optimizer = MAKE[name](params[:2], lr=1e-2)
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.add_param_group({"params": params[2:]})
    before = params[2].detach().clone()
    optimizer.step()
    assert not torch.equal(params[2], before)


def test_a_loss_scale_counts_where_it_is_set_and_not_afterwards():
    params = parameters()
    optimizer = OneBitAdam(params, lr=1e-2)
    wrapper = object.__new__(OneBitAdam)
    vars(wrapper).update(vars(optimizer))  # as libraries do that wrap optimizers
    wrapper.grad_scale, wrapper.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    before = [p.detach().clone() for p in params]
    wrapper.step()
    assert all(map(torch.equal, params, before)), "an inf was found"
    optimizer.step()
    assert not any(map(torch.equal, params, before))


@pytest.mark.parametrize("name", MAKE)
def test_before_a_step_each_says_whether_it_averages_gradients(name):
    averages = {"OneBitAdam", "OneBitLamb", "AdamW, ours", "Lamb", "ZeroOneAdam"}
    assert MAKE[name](parameters(), lr=1e-2).averages_gradients == (name in averages)


@pytest.mark.parametrize(
    ("kind", "wire"),
    [(OneBitAdam, Wire(overlap=True)), (AdamW, Wire(release_gradients=True))],
    ids=["sent", "released"],
)
def test_hooks_end_with_the_optimizer_though_its_algorithm_lives(kind: Any, wire: Wire):
    params = parameters()
    optimizer = kind(params, lr=1e-2, wire=wire)
    algorithm, gone = optimizer.algorithm, weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    before = [p.detach().clone() for p in params]
    sum((p * p).sum() for p in params).backward()
    assert all(map(torch.equal, params, before))
    assert not any(p._post_accumulate_grad_hooks for p in params)
    assert algorithm.frame.owner() is None


def test_a_load_gives_back_the_memory_of_the_algorithm_before():
    optimizer = AdamW(parameters(), lr=1e-2)
    optimizer.step()
    saved, earlier = copy.deepcopy(optimizer.state_dict()), optimizer.algorithm
    moments = weakref.ref(earlier.moments.exp_avg)
    optimizer.load_state_dict(saved)
    assert moments() is None
    assert optimizer.algorithm is not earlier
