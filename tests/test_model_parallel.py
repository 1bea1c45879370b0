"""A model that is cut over ranks, each part trained by its data-parallel group: one norm, its own checkpoints."""

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
    numbers,
    plain,
)
from observe import fingerprint
from ranks import run_ranks
from sharded import caught
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from fusedonebit import dcp


def clip(rank: int, world_size: int, name: str) -> tuple[float, str, str]:
    params, optimizer = cut_optimizer(name, rank, max_grad_norm=MOST)
    worst, step = 0.0, -1
    while step < 20 or not optimizer.algorithm.synchronised:
        step += 1
        give(params, step, rank // 2, rank % 2)
        optimizer.step()
        expected = expected_norm(optimizer, step, rank // 2)
        worst = max(worst, abs(optimizer.stats()["grad_norm"] - expected) / expected)
    return worst, alike(params), fingerprint([params[name] for name in CUT])


@pytest.mark.long(but=2)
@QUIET
@EACH
def test_parts_are_clipped_by_the_norm_of_the_whole_model(name):
    ranks = run_ranks(clip, 4, name)
    worst = max(each for each, *_ in ranks)
    print(
        f"{name}: norms off by {worst:.1e} (limit 1e-6); {len({shared for _, shared, _ in ranks})} kind(s) of replicas"
    )
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
    return worst, fingerprint([p.to_local() if isinstance(p, DTensor) else p for p in shared]), off


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

    def train(model: nn.Module, optimizer: Any, start: int) -> str:
        params = list(model.parameters())
        for step in range(start, start + 9):
            model.zero_grad()
            if is_plain:
                give(dict(zip(WHOLE, params, strict=True)), step, rank // 2, rank % 2)
            else:
                loss_of(model, step, rank // 2).backward()
            optimizer.step()
        return fingerprint([p.to_local() if isinstance(p, DTensor) else p for p in params])

    model, optimizer = make()
    train(model, optimizer, 0)
    (again, other), (third, last) = make(), make()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, f"{folder}/{rank}.pt")
    found = torch.load(f"{folder}/{rank}.pt", weights_only=False)
    again.load_state_dict(found["model"])
    other.load_state_dict(found["optimizer"])
    if is_plain:
        dcp.save(model, optimizer, f"{folder}/part{rank % 2}")
        dcp.load(third, last, f"{folder}/part{rank % 2}")
        return train(model, optimizer, 9), train(again, other, 9), train(third, last, 9)
    assert "torch.save() each rank" in caught(lambda: dcp.save(model, optimizer, f"{folder}/all"))[1]
    return train(model, optimizer, 9), train(again, other, 9)


@pytest.mark.long(but=1)
@QUIET
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "DTensors"])
@pytest.mark.parametrize("name", ["AdamW, ours", "OneBitAdam"])
def test_each_part_is_saved_by_itself_and_resumes_bit_for_bit(name, is_plain, tmp_path):
    for went_on, *resumed in run_ranks(resume, 4, name, str(tmp_path), is_plain):
        assert resumed == [went_on] * len(resumed)
