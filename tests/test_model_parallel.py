"""A model that is cut over ranks, each part trained by its data-parallel group: one norm, one verdict, own files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_parallel_runs import (
    CUT,
    EACH,
    KINDS,
    LR,
    MOST,
    QUIET,
    WHOLE,
    alike,
    cut_optimizer,
    expected_norm,
    give,
    gradients,
    make_mesh,
    norm_of,
    numbers,
    plain,
    train,
)
from observe import fingerprint, named
from optimizers import by_name
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from fusedonebit import AdamW, OneBitAdam, Wire, amp, dcp


def clip(rank: int, world_size: int, name: str) -> tuple[float, str, str]:
    params, optimizer = cut_optimizer(name, rank, max_grad_norm=MOST)
    worst, step = 0.0, -1
    while step < 20 or not optimizer.algorithm.synchronised:
        step += 1
        train(params, optimizer, rank, range(step, step + 1))
        expected = expected_norm(optimizer, step, rank // 2)
        worst = max(worst, abs(optimizer.stats()["grad_norm"] - expected) / expected)
    return worst, alike(params), fingerprint([params[name] for name in CUT])


@pytest.mark.long(but=2)
@QUIET
@EACH
def test_parts_are_clipped_by_the_norm_of_the_whole_model(name):
    ranks = run_ranks(clip, 4, name)
    worst = max(each for each, *_ in ranks)
    print(f"{name}: norms off by {worst:.1e} (limit 1e-6)")
    assert worst <= 1e-6
    assert len({shared for _, shared, _ in ranks}) == 1
    assert ranks[0][2] == ranks[2][2] != ranks[1][2] == ranks[3][2]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(10), nn.Linear(10, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def loss_of(model: nn.Module, step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    x, y = (torch.randn(6, 10, generator=generator) for _ in range(2))
    return 10.0 ** (replica + 1) * ((model(x) - y) ** 2).mean()


def clip_dtensors(rank: int, world_size: int, name: str, norm_too: bool) -> tuple[float, str, float]:
    mesh = make_mesh()
    torch.manual_seed(0)
    model, whole = Model(), Model()
    whole.load_state_dict(model.state_dict())
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    if norm_too:  # a DTensor that is replicated
        distribute_module(model.norm, mesh["tensor"])
        model.norm.forward = lambda x, norm=model.norm: torch.nn.functional.layer_norm(
            x, (10,), norm.weight.to_local(), norm.bias.to_local()
        )
    optimizer = KINDS[name](
        model.parameters(), LR, max_grad_norm=MOST, model_parallel=mesh["tensor"], process_group=mesh["data"]
    )
    theirs = torch.optim.AdamW(whole.parameters(), LR)
    worst = 0.0
    for step in range(20):
        model.zero_grad()
        loss_of(model, step, rank // 2).backward()
        optimizer.step()
        if name == "AdamW, ours":
            whole.zero_grad()
            ((loss_of(whole, step, 0) + loss_of(whole, step, 1)) / 2).backward()
            expected = float(clip_grad_norm_(whole.parameters(), MOST))
            theirs.step()
            worst = max(worst, abs(optimizer.stats()["grad_norm"] - expected) / expected)
    both = zip(model.parameters(), whole.parameters(), strict=True)
    off = max(float(((p.full_tensor() if isinstance(p, DTensor) else p) - q).detach().abs().max()) for p, q in both)
    shared = [model.norm.weight, model.norm.bias, model.down.bias]
    return worst, fingerprint(shared), off


@pytest.mark.long(but=1)
@QUIET
@pytest.mark.parametrize("norm_too", [False, True], ids=["plain norm", "norm as DTensor"])
@pytest.mark.parametrize("name", ["AdamW, ours", "OneBitAdam", "OneBitLion", "ZeroOneAdam, own", "MarsitSGD"])
def test_so_are_dtensors_whose_placements_say_which_are_shards(name, norm_too):
    ranks = run_ranks(clip_dtensors, 4, name, norm_too)
    assert len({shared for _, shared, _ in ranks}) == 1
    if name == "AdamW, ours":
        print(f"norms off by {max(r[0] for r in ranks):.1e}, parameters by {max(r[2] for r in ranks):.1e} (1e-5, 1e-4)")
        assert max(r[0] for r in ranks) <= 1e-5
        assert max(r[2] for r in ranks) <= 1e-4


def clip_stages(rank: int, world_size: int, name: str) -> tuple[float, float]:
    """Two stages of a pipeline: as many different tensors, none of which is anywhere else."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("data", "pipeline", "tensor"))
    replica, stage = divmod(rank, 2)
    mine = [name for i, name in enumerate(WHOLE) if (i < 2) == (stage == 0)]
    params = {name: Parameter(numbers(0)[name]) for name in mine}
    groups = mesh["pipeline", "tensor"] if replica == 0 else (mesh["pipeline"], mesh["tensor"])
    how = {"max_grad_norm": MOST, "process_group": mesh["data"], "model_parallel": groups}
    optimizer = KINDS[name](list(params.values()), LR, **how)
    worst = 0.0
    for step in range(6):
        for each, p in params.items():
            p.grad = gradients(step, replica)[each]
        optimizer.step()
        expected = expected_norm(optimizer, step, replica)
        worst = max(worst, abs(optimizer.stats()["grad_norm"] - expected) / expected)
    return worst, optimizer.stats()["step"]


@QUIET
@pytest.mark.parametrize("name", ["AdamW, ours", "OneBitAdam"])
def test_so_are_stages_of_a_pipeline(name):
    assert all(worst <= 1e-6 and steps == 6 for worst, steps in run_ranks(clip_stages, 4, name))


# ---------------------------------------------------------------- checkpoints


class Part(nn.Module):
    def __init__(self, t: int) -> None:
        super().__init__()
        for name, p in plain(t).items():
            setattr(self, name.replace(".", "_"), p)


def resume(rank: int, world_size: int, name: str, folder: str, is_plain: bool) -> tuple[str, ...]:
    """Save after 9 steps, each part of the model by itself; go on with that, and with what was saved."""
    mesh = make_mesh()
    how = {"max_grad_norm": MOST, "model_parallel": mesh["tensor"], "process_group": mesh["data"]}

    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model: nn.Module = Part(rank % 2) if is_plain else Model()
        if not is_plain:
            parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model, KINDS[name](model.parameters(), LR, **how)

    def go_on(model: nn.Module, optimizer: Any, start: int) -> str:
        params = list(model.parameters())
        for step in range(start, start + 9):
            model.zero_grad()
            if is_plain:
                give(dict(zip(WHOLE, params, strict=True)), step, rank // 2, rank % 2)
            else:
                loss_of(model, step, rank // 2).backward()
            optimizer.step()
        return fingerprint(params)

    model, optimizer = make()
    go_on(model, optimizer, 0)
    (again, other), (third, last) = make(), make()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, f"{folder}/{rank}.pt")
    found = torch.load(f"{folder}/{rank}.pt", weights_only=False)
    again.load_state_dict(found["model"])
    other.load_state_dict(found["optimizer"])
    if is_plain:
        dcp.save(model, optimizer, f"{folder}/part{rank % 2}")
        dcp.load(third, last, f"{folder}/part{rank % 2}")
        return go_on(model, optimizer, 9), go_on(again, other, 9), go_on(third, last, 9)
    assert "torch.save() each rank" in named(lambda: dcp.save(model, optimizer, f"{folder}/all"))[1]
    return go_on(model, optimizer, 9), go_on(again, other, 9)


@pytest.mark.long(but=1)
@QUIET
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "DTensors"])
@pytest.mark.parametrize("name", ["AdamW, ours", "OneBitAdam"])
def test_each_part_is_saved_by_itself_and_resumes_bit_for_bit(name, is_plain, tmp_path):
    for went_on, *resumed in run_ranks(resume, 4, name, str(tmp_path), is_plain):
        assert resumed == [went_on] * len(resumed)


# ---------------------------------------------------------------- all skip together


def spoil(rank: int, world_size: int, name: str, what: str) -> tuple[Any, ...]:
    """In two steps one shard of one replica has what is no number, without a GradScaler or with one."""
    scales = what != "nan"
    params, optimizer = cut_optimizer(name, rank, max_grad_norm=MOST if what == "clipped inf" else None)
    scaler, scale = amp.GradScaler("cpu", 2.0**8, growth_interval=1000, enabled=scales), []
    while (step := len(scale)) < 24 or not optimizer.algorithm.synchronised:
        give(params, step, rank // 2, rank % 2)
        for p in params.values():
            p.grad = scaler.scale(p.grad)
        if step in (5, 13) and rank == 2 + scales:
            params["up.weight" if scales else "down.weight"].grad[0, 0] = torch.inf if scales else torch.nan
        scaler.step(optimizer)
        scaler.update()
        scale.append(scaler.get_scale())
    stats = optimizer.stats()
    return stats["skipped_steps"], scale, alike(params), optimizer.phase, stats["step"]


@pytest.mark.long(but=1, full=True)
@QUIET
@pytest.mark.parametrize("what", ["inf", "clipped inf"])
@EACH
def test_an_overflow_in_one_shard_holds_all_of_the_model_still(name, what):
    ranks = run_ranks(spoil, 4, name, what)
    print(name, ranks[0][0], ranks[0][1][-1])
    assert all(each == ranks[0] for each in ranks)
    if "rounds" not in name and name != "ZeroOneAdam":  # between synchronisations it is one worker's own affair
        assert ranks[0][0] == 2


@pytest.mark.long(but=1)
@QUIET
@EACH
def test_a_nan_in_one_shard_makes_all_of_the_model_skip(name):
    ranks = run_ranks(spoil, 4, name, "nan")
    assert all(each == ranks[0] for each in ranks)
    assert ranks[0][0] == 2


def explode(rank: int, world_size: int) -> tuple[Any, ...]:
    mesh, params = make_mesh(), plain(rank % 2)
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
    train(params, optimizer, rank, range(5))
    before = alike(params)
    give(params, 5, rank // 2, rank % 2)
    if rank == 1:
        params["up.weight"].grad = params["up.weight"].grad.to_sparse()
    return named(optimizer.step)[0], "" if alike(params) == before else "moved"


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
        if (found := named(optimizer.step))[0]:
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
        if (found := named(optimizer.step))[0]:
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
    mesh, params = make_mesh(), plain(rank % 2)
    params["down.weight"].tensor_model_parallel = mistake != "unmarked"
    params["norm.weight"].data += rank % 2 * (mistake == "of another seed")
    how: dict[str, Any] = {"process_group": None if mistake == "group" else mesh["data"]}
    how |= {"model_parallel": mesh["tensor"]}
    if mistake == "buckets":
        return named(lambda: by_name(OneBitAdam)(list(params.values()), LR, buckets=2 + 2 * (rank % 2), **how))
    return named(lambda: by_name(AdamW)(list(params.values()), LR, **how))


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("unmarked", "set tensor_model_parallel = True on a plain tensor that is a shard"),
        ("of another seed", "model-parallel ranks differ: the checksum of parameter 4's values"),
        ("group", 'process_group=mesh["replicate"]'),
        ("buckets", "buckets must be None, and overlap False, with Wire(model_parallel=...)"),
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
