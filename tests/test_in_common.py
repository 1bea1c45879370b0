"""What all ranks must have in common is compared while they train: counts in each step, the rest every 64 steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import MAKE
from torch.nn import Parameter

from fusedonebit import OutOfStepError
from fusedonebit.comm import SimulatedGroup
from fusedonebit.core.frame import COMPARED_EVERY
from fusedonebit.optim.policies import FixedRounds

SIZES = (300, 5, 700)
Change = Callable[[Any], None]


def steps_until_told(name: str, change: Change | None, at: int, count: int) -> list[int]:
    """Change something on rank 1 before a step; return, of each rank, the step that has told of it, -1 if none has."""

    told: list[str] = []

    def run(rank: int, transport: Any) -> int:
        generator = torch.Generator().manual_seed(7)
        params = [Parameter(torch.randn(n, generator=generator)) for n in SIZES]
        rounds = {"sync_policy": FixedRounds(2)} if name == "ZeroOneAdam" else {}
        optimizer = MAKE[name](params, lr=1e-3, block_size=128, process_group=transport, **rounds)
        for step in range(1, count + 1):
            generator.manual_seed(10 * step + rank)
            for i, p in enumerate(params):
                p.grad = None if step % 5 == i else torch.randn(len(p), generator=generator)
            if step == at and rank == 1 and change is not None:
                change(optimizer)
            try:
                optimizer.step()
            except OutOfStepError as error:
                told.append(str(error))
                return step
        assert all(torch.isfinite(p).all() for p in params)
        return -1

    steps = SimulatedGroup(2).run(run)
    assert all("digest of the last synchronisation" in text for text in told)
    return steps


def count_once_more(optimizer: Any) -> None:
    optimizer.frame.steps.updates += 1


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("name", MAKE)
def test_another_update_count_on_one_rank_raises_on_all_at_once(name):
    first, second = steps_until_told(name, count_once_more, 12, 20)
    assert first == second
    assert 12 <= first <= 12 + 3


def change_parameter(optimizer: Any) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["params"][2][17] *= 1 + 2**-22


def change_variance(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][2]]["exp_avg_sq"][17] *= 1.5


def change_steps(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][2]]["step"] += 1


CHANGES = {"a parameter": change_parameter, "its variance": change_variance, "its number of steps": change_steps}
NO_COMMON_VARIANCE = ("ZeroOneAdam, own", "MarsitSGD", "MarsitAdam", "OneBitLion")


@pytest.mark.long(but=4)
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("name", MAKE)
def test_a_change_on_one_rank_raises_on_all_within_64_steps(name, what):
    if what == "its variance" and name in NO_COMMON_VARIANCE:
        pytest.skip("each worker has a variance of its own, or none")
    at = COMPARED_EVERY - 5
    first, second = steps_until_told(name, CHANGES[what], at, COMPARED_EVERY + 6)
    assert first == second
    assert at <= first <= COMPARED_EVERY + 4


@pytest.mark.long(but=2)
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("name", MAKE)
def test_nothing_is_told_where_nothing_was_changed(name):
    assert steps_until_told(name, None, 0, COMPARED_EVERY + 6) == [-1, -1]


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("name", MAKE)
def test_new_and_stepped_ranks_load_one_checkpoint_and_go_on(name):
    def run(rank: int, transport: Any) -> None:
        params = [Parameter(torch.ones(n)) for n in SIZES]

        def make() -> Any:
            return MAKE[name](params, lr=1e-3, block_size=128, process_group=transport)

        def train(optimizer: Any, steps: int) -> None:
            for _ in range(steps):
                for p in params:
                    p.grad = torch.randn_like(p)
                optimizer.step()

        optimizer = make()
        train(optimizer, 2)
        saved, values = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
        train(optimizer, 1)
        with torch.no_grad():
            torch._foreach_copy_(params, values)
        another = make()  # which all ranks make together
        optimizer = another if rank == 0 else optimizer
        optimizer.load_state_dict(saved)
        train(optimizer, 3)

    torch.manual_seed(0)
    SimulatedGroup(2).run(run)
