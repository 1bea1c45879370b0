"""Whatever one rank passes, no other waits: construction and ``add_param_group`` raise on all ranks or on none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import objects
from torch.nn import Parameter

from fusedonebit import CollectiveError, FusedOneBitWarning, MarsitSGD, OneBitAdam, ZeroOneAdam
from fusedonebit.comm import SimulatedGroup
from fusedonebit.optim.policies import EveryStep

ODD = [None, "abc", -1, float("nan"), [], {}, object(), 1e308, True, torch.ones(3)]
ARGUMENTS: dict[Callable[..., Any], tuple[dict[str, Any], str]] = {
    OneBitAdam: (
        {"freeze_step": 3},
        "params lr freeze_step betas eps weight_decay mask hierarchy overlap buckets guard warm_start rewarm_steps "
        "ternary frozen_dtype max_grad_norm nonfinite block_size scale_norm scale_scope master_weights capturable",
    ),
    ZeroOneAdam: ({"sync_policy": EveryStep()}, "params lr sync_policy variance_policy"),
    MarsitSGD: ({}, "params lr momentum local_steps topology full_precision_every global_ratio"),
}


def parameters() -> list[Parameter]:
    return [Parameter(torch.ones(30)), Parameter(torch.ones(5))]


def raised(calls: list[Callable[[Any], object]]) -> list[type | None]:
    """What each of two ranks raises, of which each makes its own call."""

    def work(rank: int, transport: Any) -> type | None:
        try:
            calls[rank](transport)
        except Exception as error:
            return type(error)
        return None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedOneBitWarning)
        return SimulatedGroup(2, timeout=10.0).run(work)


@pytest.mark.parametrize("kind", [pytest.param(OneBitAdam, marks=pytest.mark.full), ZeroOneAdam, MarsitSGD])
def test_no_rank_waits_for_one_that_constructs_oddly(kind):
    needed, names = ARGUMENTS[kind]
    for name in names.split():
        for odd in ODD:

            def make(transport: Any, **more: Any) -> object:
                given = {"params": parameters(), "lr": 1e-3, "process_group": transport} | needed | more
                return kind(**objects(**given))

            found = raised([make, lambda transport, name=name, odd=odd: make(transport, **{name: odd})])
            assert CollectiveError not in found, (name, odd)
            assert (found[0] is None) == (found[1] is None), (name, odd, found)


GROUPS = [None, 3, {}, {"params": None}, {"params": [1]}, {"params": torch.ones(2, dtype=torch.float64)}, [1]]
GROUPS += [{"params": Parameter(torch.ones(3)), key: value} for key, value in (("lr", "x"), ("betas", 3), ("eps", -1))]


def test_no_rank_waits_for_one_that_adds_an_odd_group():
    for odd in GROUPS:

        def add(transport: Any, group: Any = odd) -> None:
            optimizer = OneBitAdam(parameters(), lr=1e-3, freeze_step=3, process_group=transport)
            optimizer.add_param_group(group)

        found = raised([lambda transport: add(transport, {"params": Parameter(torch.ones(3))}), add])
        assert CollectiveError not in found, odd
        assert None not in found, odd
