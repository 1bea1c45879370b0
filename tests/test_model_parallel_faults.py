"""Parts of a model that is cut over ranks skip together, and find a replica that has parted; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_parallel_runs import (
    EACH,
    KINDS,
    LR,
    MOST,
    QUIET,
    alike,
    cut_optimizer,
    give,
    gradients,
    make_mesh,
    norm_of,
    plain,
)
from optimizers import by_name
from ranks import run_ranks
from sharded import caught
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from fusedonebit import AdamW, OneBitAdam, Wire, amp

# ---------------------------------------------------------------- all skip together


def skip(rank: int, world_size: int, name: str, clips: bool) -> tuple[int, list[float], str, str, str]:
    params, optimizer = cut_optimizer(name, rank, max_grad_norm=MOST if clips else None)
    scaler = amp.GradScaler("cpu", 2.0**8, growth_interval=1000)
    scales: list[float] = []
    while (step := len(scales)) < 24 or not optimizer.algorithm.synchronised:
        give(params, step, rank // 2, rank % 2)
        for p in params.values():
            p.grad = scaler.scale(p.grad)
        if step in (5, 13) and rank == 3:  # in one shard, of one replica
            params["up.weight"].grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return optimizer.stats()["skipped_steps"], scales, alike(params), optimizer.phase, str(optimizer.stats()["step"])


@pytest.mark.long(but=1, full=True)
@QUIET
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@EACH
def test_an_overflow_in_one_shard_holds_all_of_the_model_still(name, clips):
    ranks = run_ranks(skip, 4, name, clips)
    print(name, ranks[0][0], ranks[0][1][-1])
    assert all(each == ranks[0] for each in ranks)
    if "rounds" not in name and name != "ZeroOneAdam":  # between synchronisations it is one worker's own affair
        assert ranks[0][0] == 2


def spoil(rank: int, world_size: int, name: str) -> tuple[Any, ...]:
    (params, optimizer), step = cut_optimizer(name, rank), -1
    while step < 23 or not optimizer.algorithm.synchronised:
        step += 1
        give(params, step, rank // 2, rank % 2)
        if step in (5, 13) and rank == 2:
            params["down.weight"].grad[0, 0] = torch.nan
        optimizer.step()
    return optimizer.stats()["skipped_steps"], alike(params), optimizer.phase


@pytest.mark.long(but=1)
@QUIET
@EACH
def test_a_nan_in_one_shard_makes_all_of_the_model_skip(name):
    ranks = run_ranks(spoil, 4, name)
    assert all(each == ranks[0] for each in ranks)
    assert ranks[0][0] == 2


def explode(rank: int, world_size: int) -> tuple[Any, ...]:
    params, optimizer = plain(rank % 2), None
    mesh = make_mesh()
    how = {"freeze_step": 12, "rewarm_steps": 10, "model_parallel": mesh["tensor"], "process_group": mesh["data"]}
    optimizer = by_name(OneBitAdam)(list(params.values()), LR, **how)
    phases = []
    for step in range(50):
        give(params, 0, rank // 2, rank % 2)
        if step == 20 and rank % 2:
            params["up.weight"].grad *= 1e4
        optimizer.step()
        phases.append(optimizer.phase)
    return phases, optimizer.stats()["skipped_steps"], alike(params)


@QUIET
def test_what_the_guard_refuses_in_one_shard_all_parts_refuse():
    ranks = run_ranks(explode, 4)
    assert all(each == ranks[0] for each in ranks)
    phases, skipped, _ = ranks[0]
    assert skipped == 1
    assert phases.count("warmup") == 22


def break_one(rank: int, world_size: int, name: str) -> tuple[str, str]:
    params, optimizer = cut_optimizer(name, rank, max_grad_norm=MOST)
    for step in range(5):
        give(params, step, rank // 2, rank % 2)
        optimizer.step()
    before = alike(params)
    give(params, 5, rank // 2, rank % 2)
    if rank == 1:
        params["up.weight"].grad = params["up.weight"].grad.to_sparse()
    return caught(optimizer.step)[0], "" if alike(params) == before else "moved"


@pytest.mark.long(but=1)
@QUIET
@pytest.mark.parametrize("name", ["AdamW, ours", "OneBitAdam", "MarsitSGD"])
def test_a_rank_that_cant_take_its_step_is_heard_by_all(name):
    assert run_ranks(break_one, 4, name) == [("TypeError" if r == 1 else "AbortedStepError", "") for r in range(4)]


def skip_in_levels(rank: int, world_size: int) -> tuple[Any, ...]:
    """Two nodes of two ranks, each rank's model cut in two."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("node", "inside", "tensor"))
    levels, params = mesh["node", "inside"], plain(rank % 2)
    how = {"process_group": levels._flatten("data"), "hierarchy": levels, "model_parallel": mesh["tensor"]}
    optimizer = by_name(OneBitAdam)(list(params.values()), LR, freeze_step=3, guard="off", max_grad_norm=MOST, **how)
    for step in range(16):
        give(params, step, rank // 2, rank % 2)
        if step in (7, 11) and rank == 5:
            params["up.weight"].grad[0, 0] = torch.nan
        optimizer.step()
    return optimizer.stats()["skipped_steps"], alike(params)


@QUIET
def test_so_it_does_where_ranks_compress_in_two_levels():
    ranks = run_ranks(skip_in_levels, 8)
    assert all(each == ranks[0] for each in ranks)
    assert ranks[0][0] == 2


def drop_gradients(rank: int, world_size: int, name: str) -> tuple[str, str]:
    params, optimizer = cut_optimizer(name, rank, max_grad_norm=MOST)
    for step in range(6):
        if step == 4 and rank % 2:  # on all ranks with this part
            give(params, step, rank // 2, rank % 2)
            optimizer.zero_grad()
        give(params, step, rank // 2, rank % 2)
        if (found := caught(optimizer.step))[0]:
            return found
    return "", ""


@pytest.mark.long(but=1)
@QUIET
@pytest.mark.parametrize("name", ["AdamW, ours", "OneBitAdam", "MarsitSGD"])
def test_parts_that_are_out_of_step_are_told_so(name):
    for kind, said in run_ranks(drop_gradients, 4, name):
        assert kind == "OutOfStepError"
        assert "model-parallel ranks differ in the number of steps" in said


# ---------------------------------------------------------------- what parts is found


PLANTED = 12
"""The step before which a parameter is changed; there no round is under way."""


def plant(rank: int, world_size: int, name: str, on: tuple[int, ...]) -> tuple[int, str, str]:
    params, optimizer = cut_optimizer(name, rank)
    for step in range(PLANTED + 64 + 8):
        give(params, step % 5, rank // 2, rank % 2)
        if step == PLANTED and rank in on:
            with torch.no_grad():
                params["norm.weight"][3] += 1e-6
        if (found := caught(optimizer.step))[0]:
            return step, *found
    return -1, "", ""


@pytest.mark.long(but=1)
@QUIET
@pytest.mark.parametrize(
    "name", ["AdamW, ours", "OneBitAdam", "ZeroOneAdam, own, rounds of 3", "MarsitSGD", "OneBitLion"]
)
@pytest.mark.parametrize("on", [(3,), (1, 3)], ids=["one rank", "all replicas"])
def test_a_diverged_replica_is_found_on_all_within_64_steps(name, on):
    ranks = run_ranks(plant, 4, name, on)
    assert all(PLANTED <= step <= 64 + 2 for step, *_ in ranks)  # the second comparison, told where a round ends
    assert len({step for step, *_ in ranks}) == 1
    kinds = [kind for _, kind, _ in ranks]
    assert kinds == ["DisagreementError" if on == (1, 3) or rank > 1 else "AbortedStepError" for rank in range(4)]
    print(ranks[3][2])
    assert "norm.weight" in ranks[3][2] or "parameter 4" in ranks[3][2]


def begin(rank: int, world_size: int, mistake: str) -> tuple[str, str]:
    mesh = make_mesh()
    params = plain(rank % 2)
    group: Any = mesh["data"]
    if mistake == "unmarked":
        params["down.weight"].tensor_model_parallel = False
    if mistake == "of another seed":
        params["norm.weight"].data += rank % 2
    if mistake == "group":
        group = None
    how: dict[str, Any] = {"process_group": group, "wire": Wire(model_parallel=mesh["tensor"])}
    return caught(lambda: AdamW(list(params.values()), LR, **how))


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("unmarked", "set tensor_model_parallel = True on a plain tensor that is a shard"),
        ("of another seed", "model-parallel ranks differ: the checksum of parameter 4's values"),
        ("group", 'process_group=mesh["replicate"]'),
    ],
)
def test_what_cant_be_meant_is_one_clear_error_on_all_ranks(mistake, text):
    for kind, said in run_ranks(begin, 4, mistake):
        assert kind in ("DisagreementError", "ValueError")
        assert text in said


@pytest.mark.parametrize("given", ["tp", 2, (None, None)], ids=repr)
def test_what_is_no_group_is_refused(given):
    with pytest.raises(TypeError, match="model_parallel must be a group"):
        AdamW([Parameter(torch.zeros(2))], LR, wire=Wire(model_parallel=given))


def cut_in_buckets(rank: int, world_size: int) -> tuple[str, str]:
    mesh, params = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor")), plain(rank)
    how = {"process_group": mesh["data"], "model_parallel": mesh["tensor"]}
    return caught(lambda: by_name(OneBitAdam)(list(params.values()), LR, buckets=2 + 2 * rank, **how))


def test_buckets_are_refused():
    for kind, said in run_ranks(cut_in_buckets, 2):
        assert kind == "ValueError"
        assert "buckets must be None, and overlap False, with Wire(model_parallel=...)" in said


def alone(rank: int, world_size: int, name: str) -> tuple[float, str, int]:
    """One replica of the model, in two parts."""
    mesh, params = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor")), plain(rank)
    how = {"process_group": mesh["data"].get_group(), "model_parallel": mesh["tensor"].get_group()}
    optimizer, worst = KINDS[name](list(params.values()), LR, max_grad_norm=MOST, **how), 0.0
    for step in range(8):
        give(params, step, 0, rank)
        if step == 5 and rank == 1:
            params["up.weight"].grad[0, 0] = torch.nan
        optimizer.step()
        if step < 5:
            worst = max(worst, abs(optimizer.stats()["grad_norm"] / norm_of(gradients(step, 0)) - 1))
    return worst, alike(params), optimizer.stats()["skipped_steps"]


@QUIET
@pytest.mark.parametrize("name", ["AdamW, ours", "Lamb", "OneBitAdam", "ZeroOneAdam, own", "OneBitLion"])
def test_one_replica_alone_clips_and_skips_as_a_whole(name):
    (worst, shared, skipped), other = run_ranks(alone, 2, name)
    assert max(worst, other[0]) <= 1e-6
    assert (shared, skipped) == other[1:]
    assert skipped == 1
