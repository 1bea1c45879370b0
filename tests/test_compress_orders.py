"""Compression where calls come in an order, or ranks and gradients are such, as nobody thinks of at first."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from compress_runs import conserves, left, summed, train, whole, wrapped
from ddp_runs import Net, loss_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fusedonebit
from fusedonebit.core.compression import Compression, Told

EXACT = 3e-7


def said(call: Any) -> str:
    """What an error says; or that there was none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Pair(nn.Module):
    def __init__(self, n: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(n, n), nn.Linear(n, n)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return self.first(x) + (self.second(x) if both else 0.0)


def own_inputs(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def same_everywhere(model: nn.Module) -> bool:
    found = True
    for p in model.parameters():
        own = whole(p).detach().contiguous()
        each = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(each, own)
        found &= all(torch.equal(x, own) for x in each)
    return found


# ---------------------------------------------------------------- DDP


def unfrozen(rank: int, world_size: int) -> float:
    """The largest gradient of a layer that was frozen when compression began."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    model.module.first.requires_grad_(False)
    fusedonebit.compress(model, 8)
    loss_of(model, rank, 0).backward()
    model.zero_grad()
    model.module.first.requires_grad_(True)
    loss_of(model, rank, 1).backward()
    return float(model.module.first.weight.grad.abs().max())


def test_what_was_frozen_before_trains_once_it_is_unfrozen():
    assert min(run_ranks(unfrozen, 2)) > 0


def accumulated(rank: int, world_size: int, view: bool, on: int | None) -> tuple[float, float]:
    """A layer's gradient after two passes that average, the second with it on rank ``on`` alone; and what DDP has."""
    found = []
    for compressed in (True, False):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net(), find_unused_parameters=True, gradient_as_bucket_view=view)
        if compressed:
            fusedonebit.compress(model, 8, feedback="fp32")
        for micro in range(2):
            loss_of(model, rank, 0, micro, side=micro == 0 or rank == on).backward()
        found.append(float(model.module.side.weight.grad.norm()))
    return found[0], found[1]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("on", [None, 0])
def test_passes_that_accumulate_averages_lose_no_layer(on, view):
    for own, ddps in run_ranks(accumulated, 2, view, on):
        assert own == pytest.approx(ddps, rel=0.02)


def named(rank: int, world_size: int) -> list[str]:
    """Names of what is left, of a model with wrappers inside and outside."""
    net = Net()
    net.side = torch.compile(net.side, backend="eager")
    model = DistributedDataParallel(torch.compile(net, backend="eager"))
    compression: Any = fusedonebit.compress(model, 8)
    return [name for name in left(compression) if "_" in name]


def test_names_are_those_of_the_model_without_wrappers():
    assert run_ranks(named, 2) == [[], []]


# ---------------------------------------------------------------- FSDP2 and replicas


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh) -> Pair:
    torch.manual_seed(0)
    model = Pair()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def replicated(rank: int, world_size: int, how: str) -> bool:
    """Whether all ranks have the same parameters after steps, of a group frozen at first, or after detaching."""
    mesh = grid()
    model = sharded(mesh["shard"])
    model.first.requires_grad_(how != "frozen")
    compression = fusedonebit.compress(model, 8, replicas=mesh["replicate"].get_group())
    if how != "frozen":
        compression.detach()
    if how == "again":
        lacking = said(lambda: fusedonebit.compress(model, 4))
        assert lacking.startswith("ValueError: replicas must be given as before detach(), got None")
        fusedonebit.compress(model, 4, replicas=mesh["replicate"].get_group())
    optimizer = SGD(model.parameters(), 0.1)
    for step in range(3):
        if step == 1:
            model.first.requires_grad_(True)
        optimizer.zero_grad()
        model(own_inputs(rank, step)).square().sum().backward()
        optimizer.step()
    return same_everywhere(model)


@pytest.mark.parametrize("how", ["frozen", "detached", "again"])
def test_replicas_stay_alike(how):
    assert all(run_ranks(replicated, 4, how))


def together(rank: int, world_size: int) -> tuple[str, int, str]:
    """Two modules in one group: what is printed, and how many groups; then compressed once more, whether it works."""
    torch.manual_seed(0)
    net, mesh = Net(), init_device_mesh("cpu", (world_size,))
    fully_shard([net.side, net.last], mesh=mesh)
    fully_shard(net, mesh=mesh)
    compression: Any = fusedonebit.compress(net, 8, feedback="fp32")
    printed, groups = repr(compression), len(compression.scatters)
    loss_of(net, rank, 0).backward()
    compression.detach()
    return printed, groups, said(lambda: [fusedonebit.compress(net, 8), loss_of(net, rank, 1).backward()])


def test_modules_that_are_sharded_together_are_one_group():
    for printed, groups, again in run_ranks(together, 2):
        assert groups == 2
        assert again == "no error"
        assert printed == run_ranks(alone, 2)[0]


def alone(rank: int, world_size: int) -> str:
    """What is printed where the same two groups are made of modules one inside the other."""
    net = Net()
    both = nn.Sequential(net.side, net.last)
    model, mesh = nn.Sequential(both, net.first), init_device_mesh("cpu", (world_size,))
    for module in (both, model):
        fully_shard(module, mesh=mesh)
    return repr(fusedonebit.compress(model, 8, feedback="fp32"))


def refused(rank: int, world_size: int) -> list[str]:
    """Wrong replicas, and then right ones."""
    mesh = grid()
    model = sharded(mesh["shard"])
    pairs = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    crossed = pairs[0] if rank in (0, 3) else pairs[1]
    right = mesh["replicate"].get_group()
    calls = [partial(fusedonebit.compress, model, 8, replicas=of) for of in (crossed, right)]
    return [said(call) for call in (*calls, lambda: model(own_inputs(rank)).sum().backward())]


def test_wrong_replicas_change_nothing():
    for wrong, *others in run_ranks(refused, 4):
        assert "replicas= are the ranks that have the same shard" in wrong
        assert others == ["no error"] * 2


def some(rank: int, world_size: int) -> str:
    if rank == 2:
        return "no error"
    model = sharded(DeviceMesh("cpu", [0, 1]))
    return said(lambda: [fusedonebit.compress(model, 8), model(own_inputs(rank)).sum().backward()])


def test_a_model_may_lie_on_some_of_the_ranks():
    assert run_ranks(some, 3) == ["no error"] * 3


def late(self: Compression, of: Any, exchanges: Any, error: Any = None) -> None:
    """Keep flags until they are asked for, as on CUDA."""
    self._told[of] = Told(exchanges[-1].flags.clone(), None, list(exchanges), error)


class Two(nn.Module):
    """Two groups, of the second of which a pass may leave out a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Pair(128), Pair(128)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return self.b(self.a(x), both)


def lacking(
    rank: int, world_size: int, feedback: Any, deferred: bool, replicas: bool = False, loads: bool = False
) -> tuple[str, float]:
    """What a rank hears, and after how long, where the last one alone lacks a gradient of a group.

    Where it ``loads`` it goes back to the pass before.
    """
    mesh = grid() if replicas else init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = Two()
    for pair in (model.a, model.b):
        fully_shard(pair, mesh=mesh["shard"])
    of = mesh["replicate"].get_group() if replicas else None
    compression = fusedonebit.compress(model, 8, feedback=feedback, replicas=of)
    x = torch.ones(2, 128)
    model(x).sum().backward()
    saved = compression.state_dict()

    def go_on() -> None:
        for both in (rank != world_size - 1, True):
            model(x, both).sum().backward()
            if loads:
                compression.load_state_dict(saved)

    began = time.monotonic()
    with patch.object(Compression, "note", late if deferred else Compression.note):
        heard = said(go_on)
    return heard, time.monotonic() - began


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("feedback", "ranks"), [(None, 2), ("fp32", 3), ("fp32", 4)])
def test_no_rank_waits_for_one_that_lacks_a_gradient(feedback, ranks, deferred):
    *others, (own, _) = found = run_ranks(lacking, ranks, feedback, deferred, ranks == 4, group_timeout=30)
    assert all(seconds < 20 for _, seconds in found)
    if feedback is None:
        start, way_out = "DisagreementError: gradients can't be averaged: ranks differ:", "set_reduce_scatter_unused"
        assert all(text.startswith(start) and way_out in text for text, _ in found)
    else:
        assert own.startswith("RuntimeError: the gradients of")
        assert all("could not go on, and its own error says why" in text for text, _ in others)


@pytest.mark.parametrize("feedback", [None, "fp32"])
def test_who_goes_back_hears_nothing_of_the_pass_that_failed(feedback):
    heard = run_ranks(lacking, 2, feedback, True, False, True)
    assert [text for text, _ in heard] == ["no error"] * 2


def not_finite(rank: int, world_size: int, kind: str) -> tuple[bool, float]:
    """Whether an infinite gradient of the last rank is NaN on all; and how much of what is left it changes."""
    model, compression = wrapped(kind, 4, "fp32")
    train(model, SGD(model.parameters(), 0.0), rank, range(3))
    before = {name: summed(x) for name, x in left(compression).items()}
    model.zero_grad()
    (loss_of(model, rank, 3) * (torch.inf if rank == world_size - 1 else 1.0)).backward()
    nan = all(bool(whole(p.grad).isnan().all()) for p in model.parameters())
    return nan, max(float((summed(x) - before[name]).abs().max()) for name, x in left(compression).items())


def test_an_infinite_gradient_is_nan_in_all_shards():
    for nan, changed in run_ranks(not_finite, 2, "fsdp"):
        assert nan
        assert changed < EXACT
    assert all(nan for nan, _ in run_ranks(not_finite, 4, "replicas"))


def test_a_changing_loss_scale_loses_nothing_under_fsdp2():
    for lost, _ in run_ranks(conserves, 2, "fsdp", 4, "fp32", "scaler", {}):
        assert lost < EXACT


def seeds(rank: int, world_size: int) -> list[int]:
    mesh = grid()
    model = sharded(mesh["shard"])
    compression: Any = fusedonebit.compress(model, 8, replicas=mesh["replicate"].get_group())
    model(own_inputs(rank)).sum().backward()
    step = compression.next_step()
    return [exchange._seed(step) for scatter in compression.scatters for exchange in scatter.sums.values()]


def test_no_two_groups_and_replicas_draw_alike():
    drawn = [seed for of_rank in run_ranks(seeds, 4) for seed in of_rank]
    assert len(set(drawn)) == len(drawn) == 8


# ---------------------------------------------------------------- checkpoints


def owed_by(rank: int, world_size: int, path: str, begins: bool, factor: float) -> dict[str, Tensor]:
    """What all ranks together owe to the gradient, of a model whose gradients are divided by ``factor``."""
    model, compression = wrapped("fsdp", 4, "fp32")
    for module in (model.side, model):
        module.set_gradient_divide_factor(factor)
    optimizer = SGD(model.parameters(), 0.0)
    if begins:
        train(model, optimizer, rank, range(3))
        fusedonebit.dcp.save(model, optimizer, path, compression=compression)
    else:
        fusedonebit.dcp.load(model, optimizer, path, compression=compression)
    return {name: summed(x) / factor for name, x in left(compression).items()}


@pytest.mark.parametrize("factors", [(1.0, 1.0), (2.0, 3.0)])
def test_what_is_owed_stays_whatever_gradients_are_divided_by(factors, tmp_path):
    before, after = (
        run_ranks(owed_by, ranks, str(tmp_path), ranks == 2, factor)[0]
        for ranks, factor in zip((2, 3), factors, strict=True)
    )
    for name, x in before.items():
        assert float((after[name] - x).abs().max()) <= 1e-6 * float(x.abs().max())


def loads(rank: int, world_size: int, path: str) -> list[str]:
    """What is said of residuals where none are kept, where the model is wrapped in another way, and by no state."""
    model, compression = wrapped("ddp", 4, "fp32")
    train(model, SGD(model.parameters(), 0.0), rank, range(2))
    fusedonebit.dcp.save(model, SGD(model.parameters(), 0.0), path, compression=compression)
    heard = []
    for kind, feedback in (("ddp", None), ("fsdp", "fp32")):
        other, into = wrapped(kind, 4, feedback)
        optimizer = SGD(other.parameters(), 0.0)
        heard.append(said(partial(fusedonebit.dcp.load, other, optimizer, path, compression=into)))
    return [*heard, said(partial(compression.load_state_dict, {}))]


def test_residuals_that_find_no_place_are_no_silent_loss(tmp_path):
    for nowhere, sharded_otherwise, nothing in run_ranks(loads, 2, str(tmp_path)):
        assert "feedback must keep residuals, got None, but the checkpoint has some, in fp32" in nowhere
        assert "the checkpoint's residuals must be of FsdpCompression, got DdpCompression's" in sharded_otherwise
        assert nothing.startswith("ValueError: state must be what state_dict() of compression has returned")


def after_a_failure(rank: int, world_size: int) -> str:
    """What ``state_dict`` says after a pass in which ranks differed, if nobody was told yet."""
    model, compression = wrapped("ddp", 4, "fp32")
    compression.number += rank
    with patch.object(Compression, "note", late):
        loss_of(model, rank, 0).backward()
    return said(compression.state_dict)


def test_gradients_that_are_none_are_not_saved():
    for heard in run_ranks(after_a_failure, 2):
        assert heard.startswith("DisagreementError: gradients can't be averaged: ranks differ: 1 steps on rank 0, 2")
        assert "a rank has run more backward passes than another" in heard
