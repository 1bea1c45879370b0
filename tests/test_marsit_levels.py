"""Marsit in two levels: workers are nodes, and each rank of a node has a part of the flat state."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from optimizers import by_name
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from fusedonebit import MarsitAdam, MarsitSGD
from fusedonebit.comm import SimulatedGroup

SIZES = (1024, 512, 512)  # of blocks of 128: the first tensor is one part, the others are the second
STEPS, INSIDE = 9, 2
KINDS: dict[str, Any] = {
    "ring": (by_name(MarsitSGD), {"momentum": 0.9, "topology": "ring"}),
    "owner": (by_name(MarsitSGD), {"momentum": 0.9, "topology": "owner", "weight_decay": 0.1}),
    "adam": (by_name(MarsitAdam), {"topology": "ring"}),
}


def make(kind: str, sizes: tuple[int, ...], values: list[torch.Tensor], **more: Any) -> tuple[list, Any]:
    cls, options = KINDS[kind]
    params = [torch.nn.Parameter(v.clone()) for v in values]
    assert tuple(p.numel() for p in params) == sizes
    common = {"lr": 1e-2, "full_precision_every": 4, "block_size": 128}
    return params, cls(params, **common, **options, **more)


def values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, generator=generator) for n in SIZES]


def gradient(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(n, generator=generator) for n in SIZES]


def in_levels(rank: int, world_size: int, kind: str) -> list[list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", (world_size // INSIDE, INSIDE))
    params, optimizer = make(kind, SIZES, values(), hierarchy=mesh)
    seen = []
    for step in range(STEPS):
        for p, g in zip(params, gradient(rank, step), strict=True):
            p.grad = g
        optimizer.step()
        seen.append([p.detach().clone() for p in params])
    assert optimizer.stats()["bytes_inside"] > 0
    return seen


@pytest.mark.long(but=1)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_marsit_on_each_part_with_nodes_as_workers(kind):
    ranks = run_ranks(in_levels, 4, kind)

    def node(part: slice):
        def train(worker: int, transport: Any) -> list[list[torch.Tensor]]:
            params, optimizer = make(kind, SIZES[part], values()[part], process_group=transport)
            seen = []
            for step in range(STEPS):
                first, second = (gradient(INSIDE * worker + i, step)[part] for i in range(INSIDE))
                for p, a, b in zip(params, first, second, strict=True):
                    p.grad = 0.5 * a + 0.5 * b
                optimizer.step()
                seen.append([p.detach().clone() for p in params])
            return seen

        return train

    parts = [SimulatedGroup(2).run(node(part))[0] for part in (slice(0, 1), slice(1, 3))]
    for step in range(STEPS):
        expected = [*parts[0][step], *parts[1][step]]
        for seen in ranks:
            for here, there in zip(seen[step], expected, strict=True):
                assert torch.equal(here, there), f"{kind}, step {step}"


def with_faults(rank: int, world_size: int) -> list[Any]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world_size // INSIDE, INSIDE))
    params, optimizer = make("ring", SIZES, values(), hierarchy=mesh)
    told: list[Any] = []
    for step in range(8):
        for p, g in zip(params, gradient(rank, step), strict=True):
            p.grad = g
        if step in (2, 4) and rank == 3:  # a 1-bit round, and one of full precision
            params[0].grad[5] = float("nan")
        optimizer.step()
        told.append([p.detach().clone() for p in params])
    saved = optimizer.state_dict()
    again, resumed = make("ring", SIZES, told[-1], hierarchy=mesh)
    resumed.load_state_dict(saved)
    for p, q, g in zip(params, again, gradient(rank, 9), strict=True):
        p.grad, q.grad = g, g.clone()
    optimizer.step()
    resumed.step()
    assert all(torch.equal(p, q) for p, q in zip(params, again, strict=True))
    with pytest.raises(RuntimeError, match=r"add_param_group must be called without Wire\(hierarchy=\.\.\.\)"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})
    optimizer.param_groups[0]["lr"] = 1e-2 if rank != 2 else 2e-2
    before = [p.detach().clone() for p in params]
    try:
        optimizer.step()
        error = ""
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    still = all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    return [told, optimizer.stats()["skipped_steps"], error, still]


def test_one_ranks_fault_is_all_ranks_and_runs_can_be_resumed():
    runs = run_ranks(with_faults, 4)
    for told, skipped, error, still in runs:
        assert all(torch.equal(a, b) for x, y in zip(told, runs[0][0], strict=True) for a, b in zip(x, y, strict=True))
        assert all(torch.equal(a, b) for step in (2, 4) for a, b in zip(told[step], told[step - 1], strict=True))
        assert skipped == 3, "two NaNs, and the round in which learning rates differ"
        assert error.startswith("OutOfStepError: "), error
        assert "hyper-parameters" in error
        assert "damaged" not in error
        assert still
