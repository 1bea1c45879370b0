"""Sharded parameters: what can't be done as asked, and ranks that differ, raise on every rank and hang none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from observe import named
from optimizers import UNGUARDED, by_name
from ranks import run_ranks
from sharded import Bag, cut, like, make_mesh, sharded_parameters
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from fusedonebit import MarsitSGD, OneBitAdam, OneBitLamb
from fusedonebit.apps.train import baselines

SHAPES = ((8, 30), (5,), (1, 7))


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


# ---------------------------------------------------------------- construction


def construct_badly(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    """What each rank raises, case by case; all in one group of ranks, so that a case that hangs stops the rest."""
    mesh = make_mesh()
    replicas, column = mesh["replicate"], rank % 2
    params = sharded_parameters(tensors(), mesh)
    native = list(fully_shard(Bag(tensors()), mesh=mesh).parameters())
    masks = {params[0]: cut(torch.ones(8, 30, dtype=torch.bool), column)}
    whole_mask, other_mask = torch.ones(8, 30, dtype=torch.bool), masks[params[0]].clone()
    other_mask[0, 0] = rank != 3
    replicated = DTensor.from_local(whole_mask, mesh["shard"], [Replicate()])

    def of(params: Any, group: Any = replicas, kind: Any = OneBitAdam, **options: Any) -> Callable[[], Any]:
        given = options if kind in (MarsitSGD, baselines.BaselineSGD) else {"freeze_step": 3} | options
        return lambda: by_name(kind)(params, process_group=group, **given)

    cases: dict[str, Callable[[], Any]] = {
        "no mesh": of(params, None),
        "the mesh of the shards": of(params, mesh["shard"]),
        "a mesh of two dimensions": of(params, mesh),
        "no mesh at all": of(params, "replicate"),
        "some sharded": of([*params, nn.Parameter(torch.ones(3))]),
        "native": of(native),
        "marsit": of(params, kind=MarsitSGD, lr=0.1),
        "signsgd": of(params, kind=baselines.BaselineSGD, lr=0.1, aggregation="signsgd"),
        "lr of one rank": of(params, lr=0.1 + rank // 3),
        "lr of one column": of(params, lr=0.1 + column),
        "freeze_step of one column": of(params, freeze_step=3 + column),
        "a bad lr of one rank": of(params, lr=1 - 2.0 * (rank == 1)),
        "a bad lr of one column": of(params, lr=1 - 2.0 * column),
        "another class": of(params, kind=OneBitLamb if rank == 1 else OneBitAdam),
        "a whole mask": of(params, mask={params[0]: whole_mask}),
        "a replicated mask": of(params, mask={params[0]: replicated}),
        "a mask of one rank": of(params, mask={params[0]: other_mask}),
        "no mask of one column": of(params, mask=masks if column else {}),
        "fine": of(params, mask=masks),
        "fine with its group": of(params, replicas.get_group()),
        "one value of one rank": lambda: of(changed(params, rank))(),
    }
    return {name: named(call) for name, call in cases.items()}


def changed(params: list[nn.Parameter], rank: int) -> list[nn.Parameter]:
    with torch.no_grad():
        params[0].to_local()[1, 1] += rank == 2
    return params


TOLD = {
    "no mesh": "ranks [0, 1, 2, 3] were to average theirs; use fully_shard(",
    "the mesh of the shards": "hold different shards of the parameters, but ranks",
    "a mesh of two dimensions": "process_group must have one dimension where it is a DeviceMesh",
    "no mesh at all": "process_group must be a torch.distributed group or a Transport, got str",
    "some sharded": "params must be sharded all or none, but parameter 3",
    "native": "parameter 0 must be sharded over a mesh of one dimension, got (Replicate(), Shard(",
    "marsit": "parameters of MarsitSGD must be whole, but parameter 0 is a DTensor",
    "signsgd": "parameters of BaselineSGD must be whole, but parameter 0 is a DTensor",
    "lr of one rank": "ranks differ: lr of group 0 is 0.1 on rank 0 but 1.1 on rank 1",
    "lr of one column": "shards differ: lr of group 0 is 0.1 on shard 0 but 1.1 on shard 1",
    "freeze_step of one column": "shards differ: freeze_step is 3 on shard 0 but 4 on shard 1",
    "a bad lr of one rank": "lr must be",
    "a bad lr of one column": "lr must be",
    "another class": "ranks differ: the optimizer is OneBitLamb on rank 0 but OneBitAdam on rank 1",
    "a whole mask": "must be a bool tensor of its parameter's shard's, as this rank holds it, shape (4, 30)",
    "a replicated mask": "must be a bool tensor of its parameter's shard's, as this rank holds it, shape (4, 30)",
    "a mask of one rank": "ranks differ: the mask of parameter 0",
    "one value of one rank": "ranks differ: the checksum of parameter 0's values",
}
FINE = ("fine", "fine with its group", "no mask of one column")


def test_every_rank_says_at_construction_what_is_wrong():
    ranks = run_ranks(construct_badly, 4)
    for name in ranks[0]:
        for rank, found in enumerate(ranks):
            kind, text = found[name]
            if name in FINE:
                assert (kind, text) == ("", ""), name
            else:
                assert kind in ("ValueError", "TypeError", "DisagreementError"), (name, rank, kind, text)
                assert TOLD[name] in text, (name, rank, text)
    assert set(TOLD) | set(FINE) == set(ranks[0])


# ---------------------------------------------------------------- steps


def step_differently(rank: int, world_size: int, what: str, at: int) -> list[tuple[str, str]]:
    """Steps of which one goes wrong, then one more that does not."""
    mesh = make_mesh()
    params = sharded_parameters(tensors(), mesh)
    optimizer = by_name(OneBitAdam)(params, lr=1e-3, freeze_step=3, process_group=mesh["replicate"], **UNGUARDED)
    told = []
    for step in range(at + 2):
        generator = torch.Generator().manual_seed(10 * step + rank // 2)
        wholes = [torch.randn(shape, generator=generator) for shape in SHAPES]
        for p, g in zip(params, wholes, strict=True):
            p.grad = like(p, g)
        mine = {"lr of one rank": rank == 3, "lr of one column": rank % 2 == 1}.get(what, False)
        optimizer.param_groups[0]["lr"] = 2e-3 if mine and step == at else 1e-3
        told.append(named(optimizer.step))
        if step == at:
            assert optimizer.stats()["step"] == at
    return told


@pytest.mark.long(but=1)
@pytest.mark.parametrize("at", [1, 5], ids=["warmup", "compression"])
@pytest.mark.parametrize("what", ["lr of one rank", "lr of one column"])
def test_a_step_that_differs_on_one_rank_is_no_step_on_any(what, at):
    ranks = run_ranks(step_differently, 4, what, at)
    for told in ranks:
        assert [kind for kind, _ in told[:at]] + [told[-1][0]] == [""] * (at + 1), told
        kind, text = told[at]
        assert kind == "OutOfStepError"
        assert "hyper-parameters" in text
        assert "damaged" not in text or "ranks with another shard differ" in text


# ---------------------------------------------------------------- masks


def move_with_masks(rank: int, world_size: int, as_dtensors: bool) -> list[tuple[bool, bool]]:
    """Whether what a mask keeps still stood still, and all else moved."""
    mesh = make_mesh()
    params = sharded_parameters(tensors(), mesh)
    generator = torch.Generator().manual_seed(5)
    wholes = [torch.rand(shape, generator=generator) < 0.5 for shape in SHAPES]
    masks = [like(p, w) if as_dtensors else cut(w, rank % 2) for p, w in zip(params, wholes, strict=True)]
    given = {"mask": dict(zip(params, masks, strict=True)), "process_group": mesh["replicate"], **UNGUARDED}
    optimizer = by_name(OneBitAdam)(params, lr=1e-3, freeze_step=3, **given)
    before = [p.to_local().clone() for p in params]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + rank // 2)
            for p in params:
                p.grad = like(p, torch.randn(p.shape, generator=generator))
            optimizer.step()
    moved = [p.to_local() != b for p, b in zip(params, before, strict=True)]
    parts = [cut(w, rank % 2) for w in wholes]
    return [(bool(m[w].all()), bool(m[~w].any())) for m, w in zip(moved, parts, strict=True)]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("as_dtensors", [True, False])
def test_masks_are_dtensors_or_what_each_rank_holds(as_dtensors):
    for found in run_ranks(move_with_masks, 4, as_dtensors):
        assert found == [(True, False)] * len(SHAPES)
